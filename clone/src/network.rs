//! The network of a child: cut off until the child has MAC addresses of its own.
//!
//! A NIC keeps its address in the device state, and the guest's driver knows it by heart; so a child would speak with its
//! parent's. Its back ends are therefore switched off before it runs (a back end's switch is not part of the device
//! state), each NIC is unplugged and one like it, with a fresh address, is plugged into the same slot. The guest sees a new
//! network card. Only then is the back end switched on.

use std::time::Duration;

use serde_json::{Value, json};
use vmove_qmp::cmdline::Nic;
use vmove_qmp::switchover::{Announce, Destination};
use vmove_qmp::{Client, QmpError, inspect};
use vmove_types::problem::chain;

/// A question to QEMU.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a guest gets to let go of a NIC.
pub const UNPLUG_TIMEOUT: Duration = Duration::from_secs(15);

/// Switches all network back ends off; returns their ids. QEMU does not list every kind of them (not a `hubport`), so those of
/// `nics`, which the command line names, are added.
///
/// # Errors
/// Those of QEMU's monitor.
pub async fn isolate(client: &Client, nics: &[Nic]) -> Result<Vec<String>, QmpError> {
    let netdevs = inspect::netdevs(client).await?;
    let mut ids: Vec<String> = netdevs.into_iter().map(|netdev| netdev.id).collect();
    for nic in nics {
        if !ids.contains(&nic.netdev) {
            ids.push(nic.netdev.clone());
        }
    }
    for id in &ids {
        set_link(client, id, false).await?;
    }
    Ok(ids)
}

async fn set_link(client: &Client, id: &str, up: bool) -> Result<(), QmpError> {
    client.execute_raw("set_link", json!({ "name": id, "up": up }), ANSWER_TIMEOUT).await.map(drop)
}

/// Replaces each NIC and switches its back end on. `nics` are those of the child's own command line: with ids and fresh
/// addresses. A guest gets `patience` to let go of each ([`UNPLUG_TIMEOUT`], more for one that waits for its memory). Returns what to say of
/// the network: `none`, `up`, or what is down and why.
pub async fn bring_up(client: &Client, netdevs: &[String], nics: &[Nic], patience: Duration) -> String {
    if netdevs.is_empty() {
        return "none".to_owned();
    }
    let mut down = Vec::new();
    for id in netdevs {
        let nic = nics.iter().find(|nic| nic.netdev == *id);
        let done = match nic {
            Some(nic) => replace(client, nic, patience).await,
            None => Err(NicError::NotByDevice),
        };
        let done = match done {
            Ok(()) => set_link(client, id, true).await.map_err(NicError::from),
            Err(why) => Err(why),
        };
        if let Err(why) = done {
            down.push(format!("{id} is down: {why}"));
        }
    }
    if down.is_empty() { "up".to_owned() } else { down.join("; ") }
}

/// Switches all back ends on, of a guest that keeps its NICs, and has the guest's addresses announced, since switches may know them elsewhere. Returns
/// what to say of the network, as [`bring_up`].
pub async fn switch_on(client: &Client, destination: &Destination, netdevs: &[String]) -> String {
    if netdevs.is_empty() {
        return "none".to_owned();
    }
    for id in netdevs {
        if let Err(why) = set_link(client, id, true).await {
            return format!("{id} is down: {why}");
        }
    }
    match destination.announce(Announce::default()).await {
        Ok(()) => "up".to_owned(),
        Err(why) => format!("up; its addresses are not announced: {}", chain(&why)),
    }
}

/// Why a child's NIC is not as it should be.
#[derive(Debug, thiserror::Error)]
enum NicError {
    #[error("its NIC was not given by -device and cannot be replaced")]
    NotByDevice,
    #[error("its NIC has no id")]
    NoId,
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("the guest did not let go of {id} within {} s (does it know PCI hotplug?)", .timeout.as_secs())]
    NotUnplugged { id: String, timeout: Duration },
    #[error("{id} could not be plugged: {said}")]
    NotPlugged { id: String, said: String },
}

async fn replace(client: &Client, nic: &Nic, timeout: Duration) -> Result<(), NicError> {
    let id = nic.id.as_deref().ok_or(NicError::NoId)?;
    let slot = if nic.has_address { String::new() } else { slot(client, id).await? };
    let wanted = id.to_owned();
    let gone = client.expect("DEVICE_DELETED", move |event| event.text("device") == Some(wanted.as_str()));
    client.execute_raw("device_del", json!({ "id": id }), ANSWER_TIMEOUT).await?;
    gone.wait(timeout).await.map_err(|_| NicError::NotUnplugged { id: id.to_owned(), timeout })?;
    let command = format!("device_add {}{slot}", nic.options);
    let said = client
        .execute_raw("human-monitor-command", json!({ "command-line": command }), ANSWER_TIMEOUT)
        .await?;
    match said.as_str().map(str::trim).filter(|text| !text.is_empty()) {
        None => Ok(()),
        Some(text) => Err(NicError::NotPlugged { id: id.to_owned(), said: text.to_owned() }),
    }
}

/// Where the NIC is plugged, as options: a NIC in another slot would not be found again when the child is moved.
async fn slot(client: &Client, id: &str) -> Result<String, QmpError> {
    let object = format!("/machine/peripheral/{id}");
    let get = |property: &'static str| {
        client.execute_raw("qom-get", json!({ "path": object, "property": property }), ANSWER_TIMEOUT)
    };
    let address = get("addr").await?;
    let bus = get("parent_bus").await?;
    let mut options = String::new();
    if let Some(bus) = bus.as_str().and_then(|path| path.rsplit('/').next()) {
        options.push_str(&format!(",bus={bus}"));
    }
    match address {
        Value::String(text) => options.push_str(&format!(",addr={text}")),
        Value::Number(number) => {
            // Device and function in one number.
            let number = number.as_u64().unwrap_or(0);
            options.push_str(&format!(",addr={:02x}.{:x}", number >> 3, number & 7));
        }
        _ => {}
    }
    Ok(options)
}
