//! RDMA devices: InfiniBand and RoCE.

use std::collections::BTreeMap;

use super::files::Files;
use crate::model::{LinkLayer, PciAddress, Port};

const DIR: &str = "sys/class/infiniband";

/// An RDMA device.
#[derive(Debug)]
pub(super) struct Adapter {
    pub name: String,
    pub guid: Option<String>,
    pub ports: Vec<Port>,
}

/// RDMA devices by the address of their PCI function. Software devices (rxe, siw) have none and are left out.
pub(super) fn adapters(files: &mut Files) -> BTreeMap<PciAddress, Adapter> {
    let mut adapters = BTreeMap::new();
    for name in files.list(DIR) {
        let Some(address) =
            files.link_name(&format!("{DIR}/{name}/device")).and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let guid = files.read(&format!("{DIR}/{name}/node_guid"));
        let mut ports = Vec::new();
        for number in files.list(&format!("{DIR}/{name}/ports")) {
            ports.extend(port(files, &format!("{DIR}/{name}/ports/{number}"), &number));
        }
        ports.sort_by_key(|port: &Port| port.number);
        adapters.insert(address, Adapter { name, guid, ports });
    }
    adapters
}

fn port(files: &mut Files, dir: &str, number: &str) -> Option<Port> {
    let number = number.parse().ok()?;
    // "4: ACTIVE"
    let state = files.expect(&format!("{dir}/state"));
    let state = state.rsplit(':').next().unwrap_or("").trim().to_owned();
    let link_layer = match files.read(&format!("{dir}/link_layer")).as_deref() {
        Some("Ethernet") => LinkLayer::Ethernet,
        Some("InfiniBand") => LinkLayer::InfiniBand,
        other => {
            files.note(
                &format!("{dir}/link_layer"),
                &format!("{other:?}, expected InfiniBand or Ethernet; taken for InfiniBand"),
            );
            LinkLayer::InfiniBand
        }
    };
    let lid = files.read(&format!("{dir}/lid"));
    let lid = lid.and_then(|lid| u32::from_str_radix(lid.trim_start_matches("0x"), 16).ok()).unwrap_or(0);
    // The last four groups of the first GID are the port's GUID.
    let guid =
        files.read(&format!("{dir}/gids/0")).map(|gid| gid.split(':').skip(4).collect::<Vec<_>>().join(":"));
    Some(Port {
        number,
        active: state == "ACTIVE",
        state,
        rate_gbps: rate(files, dir),
        link_layer,
        lid,
        guid: guid.filter(|guid| !guid.is_empty()),
    })
}

/// "100 Gb/sec (4X EDR)", "2.5 Gb/sec (1X SDR)"; rounded up.
fn rate(files: &mut Files, dir: &str) -> u32 {
    let path = format!("{dir}/rate");
    let Some(text) = files.read(&path) else { return 0 };
    let number = text.split_whitespace().next().unwrap_or("");
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    match whole.parse::<u32>() {
        Ok(whole) => whole.saturating_add(u32::from(part.bytes().any(|digit| digit != b'0'))),
        Err(_) => {
            files.note(&path, &format!("{text:?}, expected a rate like \"100 Gb/sec (4X EDR)\""));
            0
        }
    }
}
