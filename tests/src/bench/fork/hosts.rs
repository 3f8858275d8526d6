//! Forks to other hosts: how much crosses the parent's link, and when children run. Each host is a daemon in its own network namespace.

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::number;
use crate::fleet::{self, Fleet, Setup, light};
use crate::forks::done;
use crate::scene::NAME;
use vmove_guest::config::Config;

/// Parts of the datagrams that each host loses in the last forks. The children of these forks are verified.
const LOSSES: [f64; 2] = [0.01, 0.10];

/// A fork with one child on each of several other hosts.
#[derive(Debug, Clone, Serialize)]
pub struct Spreading {
    /// Number of other hosts.
    pub hosts: u8,
    /// `multicast`, `pipeline` or `unicast`.
    pub way: String,
    /// Whether children ran only when all memory had arrived.
    pub whole: bool,
    /// Part of the datagrams that each host lost.
    pub loss: f64,
    /// Number of children whose memory was compared with the parent's, byte by byte, before they ran.
    pub verified: usize,
    /// From the request until the last child executed guest code.
    pub all_running_ms: f64,
    /// From the request until all hosts had all memory.
    pub complete_ms: f64,
    /// Bytes of guest memory that are not zero.
    pub memory_bytes: f64,
    /// Bytes that the parent's node sent meanwhile, including all headers.
    pub link_bytes: f64,
}

impl Spreading {
    /// The name in tables and promises.
    #[must_use]
    pub fn label(&self) -> String {
        let whole = if self.whole { ", all memory first" } else { "" };
        let loss = if self.loss > 0.0 { format!(", {:.0} % lost", self.loss * 100.0) } else { String::new() };
        format!("{}{whole}{loss}", self.way)
    }

    /// How often the guest's memory crossed the parent's link.
    #[must_use]
    pub fn copies(&self) -> f64 {
        self.link_bytes / self.memory_bytes
    }
}

/// Forks a guest with one child on each of several other hosts: by each way, with and without waiting for all memory; and by
/// multicast with lost datagrams.
///
/// # Errors
/// When a fork fails, or this machine has no network namespaces.
pub fn spread(count: u8, mbit: u32) -> Result<Vec<Spreading>> {
    let config = Config { working_set_mib: 64, cold_mib: 64, ..light() };
    let setup = Setup { config: Some(config), ..Setup::default() };
    let paced = mbit / 10 * 8;
    let fork =
        |_| format!("multicast-group = \"239.78.0.1:7421\"\nmulticast-mbit = {paced}\nlink-mbit = {mbit}\n");
    let fleet = fleet::start(count + 1, &setup, fork)?;
    fleet.networks.limit(1, mbit)?;
    let mut all = Vec::new();
    for way in ["multicast", "pipeline", "unicast"] {
        for whole in [false, true] {
            all.push(one(&fleet, count, way, whole, 0.0)?);
        }
    }
    for loss in LOSSES {
        (2..=count + 1).try_for_each(|number| fleet.networks.lose(number, loss))?;
        all.push(one(&fleet, count, "multicast", true, loss)?);
    }
    Ok(all)
}

fn one(fleet: &Fleet, hosts: u8, way: &str, whole: bool, loss: f64) -> Result<Spreading> {
    let (names, number_of): (Vec<_>, _) =
        ((2..=hosts + 1).map(|n| format!("n{n}")).collect(), hosts.to_string());
    let mut words = vec!["create", NAME, "--count", &number_of, "--way", way];
    words.extend(names.iter().flat_map(|name| ["--node", name]));
    words.extend(whole.then_some("--whole"));
    words.extend((loss > 0.0).then_some("--verify"));
    let before = fleet.networks.sent_bytes(1)?;
    let answer = done(&fleet.nodes[0], &words)?;
    let sent = fleet.networks.sent_bytes(1)? - before;
    fleet.sound(&answer);
    let children = answer["children"].as_array().context("children")?;
    let spreading = Spreading {
        hosts,
        way: way.to_owned(),
        whole,
        loss,
        verified: children.iter().filter(|child| child["verified"] == true).count(),
        all_running_ms: number(&answer, "all_running_ms")?,
        complete_ms: number(&answer, "complete_ms")?,
        memory_bytes: number(&answer["distribution"], "memory_bytes")?,
        link_bytes: sent as f64,
    };
    eprintln!(
        "{}: all running after {:.0} ms, complete after {:.0} ms, {:.3} copies on the parent's link",
        spreading.label(),
        spreading.all_running_ms,
        spreading.complete_ms,
        spreading.copies()
    );
    end(fleet, &answer)?;
    Ok(spreading)
}

fn end(fleet: &Fleet, answer: &Value) -> Result<()> {
    for child in answer["children"].as_array().context("children")? {
        let (node, name) = (child["node"].as_str(), child["name"].as_str());
        fleet.node(node.context("a node")?).ask(&["stop", name.context("a name")?, "--force"])?;
    }
    Ok(())
}
