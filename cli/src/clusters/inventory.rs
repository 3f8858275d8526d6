//! `vmove inventory`.

use sched_bridge::inventory::{glue2, read};
use sched_bridge::model::NodeName;

use super::input::bridge;
use super::show::word;
use crate::args::clusters::InventoryArgs;
use crate::failure::Failure;
use crate::output::{End, say, say_either, table};

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
    if args.glue2 {
        return say(&glue2(node));
    }
    say_either(node, json, |node| {
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
            vec![d.address.to_string(), word(&d.kind), d.id.to_string(), d.arch.to_string(), numa, driver]
        };
        let rows: Vec<Vec<String>> = node.devices.iter().map(row).collect();
        if !rows.is_empty() {
            out.push_str(&table(&["DEVICE", "KIND", "ID", "ARCH", "NUMA", "DRIVER"], &rows));
        }
        for note in &inventory.notes {
            out.push_str(&format!("note: {note}\n"));
        }
        out
    })
}
