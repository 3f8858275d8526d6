//! `vmove inventory`.

use hyper::Method;
use sched_bridge::inventory::{glue2, read};
use sched_bridge::model::NodeName;
use serde_json::json;

use super::args::InventoryArgs;
use super::client::{Client, segment};
use super::{Said, say, show};
use crate::api::problem::Problem;

pub async fn run(args: InventoryArgs, as_json: bool) -> Said {
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
    let name = NodeName::new(name).map_err(Problem::bad)?;
    let inventory = read(&args.root, name).map_err(Problem::bad)?;
    for note in &inventory.notes {
        tracing::debug!("{note}");
    }
    let node = &inventory.node;
    if args.publish {
        let client = Client::new(&args.at)?;
        client.ask(Method::PUT, &format!("/v1/nodes/{}", segment(node.name.as_str())), Some(node)).await?;
    }
    if args.glue2 {
        return say(&glue2(node));
    }
    show(&json!(node), as_json, |_| {
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
            vec![
                d.address.to_string(),
                format!("{:?}", d.kind).to_lowercase(),
                d.id.to_string(),
                d.arch.to_string(),
                numa,
                driver,
            ]
        };
        let rows: Vec<Vec<String>> = node.devices.iter().map(row).collect();
        if !rows.is_empty() {
            out.push_str(&super::show::table(&["DEVICE", "KIND", "ID", "ARCH", "NUMA", "DRIVER"], &rows));
        }
        for note in &inventory.notes {
            out.push_str(&format!("note: {note}\n"));
        }
        out
    })
}
