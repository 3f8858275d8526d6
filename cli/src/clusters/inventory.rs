//! `vmove inventory`.

use std::collections::BTreeMap;

use sched_bridge::glue2::{Described, Format, render};
use sched_bridge::inventory::{Part, glue2, read};
use sched_bridge::model::{Node, NodeName};
use serde::Serialize;

use super::input::bridge;
use super::show::word;
use crate::args::clusters::{Glue2Format, InventoryArgs};
use crate::failure::Failure;
use crate::output::{End, say, say_either, table};

/// A node, and what of it no lease can have.
#[derive(Serialize)]
struct Told<'a> {
    #[serde(flatten)]
    node: &'a Node,
    parts: &'a [Part],
    /// Why, by device.
    not_leased: BTreeMap<String, String>,
}

pub async fn run(args: InventoryArgs, json: bool) -> Result<(), End> {
    let name = match args.name {
        Some(name) => name,
        None => rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .split('.')
            .next()
            .unwrap_or_default()
            .to_owned(),
    };
    let name = NodeName::new(name).map_err(Failure::bad_request)?;
    let inventory = read(&args.root, name).map_err(Failure::bad_request)?;
    for note in &inventory.notes {
        tracing::debug!("{note}");
    }
    let node = &inventory.node;
    if args.publish {
        bridge(&args.at)?.publish_node(node).await?;
    }
    let described = Described { node, used: None };
    let rendered = |format| say(&render(&args.site, &[described], format));
    match args.glue2 {
        None => {}
        Some(Glue2Format::Text) => return say(&glue2(node)),
        Some(Glue2Format::Xml) => return rendered(Format::Xml),
        Some(Glue2Format::Json) => return rendered(Format::Json),
        Some(Glue2Format::Ldif) => return rendered(Format::Ldif),
    }
    let not_leased = node.devices.iter().filter_map(|device| Some((device.address, device.not_leased()?)));
    let not_leased: BTreeMap<String, String> =
        not_leased.map(|(address, why)| (address.to_string(), why)).collect();
    let told = Told { node, parts: &inventory.parts, not_leased };
    say_either(&told, json, |Told { node, parts, not_leased }| {
        let mut out = format!(
            "{}: {} {}, {} cores on {} NUMA nodes, {}\n",
            node.name,
            node.cpu.arch,
            node.cpu.model,
            node.cores(),
            node.numa.len(),
            node.memory()
        );
        let row = |d: &sched_bridge::model::Device| {
            let numa = d.numa.map_or_else(|| "-".to_owned(), |numa| numa.to_string());
            let driver = d.driver.as_deref().unwrap_or("-").to_owned();
            let leased = if not_leased.contains_key(&d.address.to_string()) { "no" } else { "yes" };
            let (kind, id, arch) = (word(&d.kind), d.id.to_string(), d.arch.to_string());
            let model = if d.model.is_empty() { "-".to_owned() } else { d.model.to_string() };
            vec![d.address.to_string(), kind, id, arch, model, numa, driver, leased.to_owned()]
        };
        let rows: Vec<Vec<String>> = node.devices.iter().map(row).collect();
        if !rows.is_empty() {
            out.push_str(&table(
                &["DEVICE", "KIND", "ID", "ARCH", "TYPE", "NUMA", "DRIVER", "LEASED"],
                &rows,
            ));
        }
        for (device, why) in not_leased {
            out.push_str(&format!("no lease has {device}: {why}\n"));
        }
        for part in *parts {
            let of = part.device.map(|device| format!(" of {device}")).unwrap_or_default();
            out.push_str(&format!("no lease has {} {}{of}: {}\n", part.kind, part.name, part.why));
        }
        for note in &inventory.notes {
            out.push_str(&format!("note: {note}\n"));
        }
        out
    })
}
