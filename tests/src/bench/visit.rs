//! When a visit pays: a guest reads data that is on another node, from afar over a link of a known speed, on a visit there, and after a
//! migration there.
//!
//! The data is a disk that a server (qemu-nbd) of the second node exports: the guest's command line is the same on both nodes.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vmove_guest::config::{Config, Rate};

use crate::daemon::Node;
use crate::fleet;
use crate::guest::{Guest, VIRTIO, failures};
use crate::networks::Networks;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

const VM: &str = "guest";
/// What the guest says after each part of its disk.
const PART: &str = "VMOVE-GUEST SCANNED";
const PART_MIB: f64 = 8.0;
const IMAGE_MIB: u32 = 256;
/// Of so many parts a rate is taken.
const RATE_PARTS: usize = 8;
/// As many are read on a visit whose cost is measured: what the first ones need at first is in it.
const STAY_PARTS: usize = 16;
const LONGEST: Duration = Duration::from_secs(120);

/// What is measured.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    /// Speed of the link in each direction, in Mbit/s.
    pub mbit: u32,
    /// What the guest works on beside its reading, in MiB.
    pub working_set_mib: u32,
    /// What it has used before and does not touch any more, in MiB.
    pub idle_mib: u32,
}

/// What it costs to go there and to come home.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Way {
    /// Time from the first request to the end of the second, less what the same reading takes there without, in seconds.
    pub extra_s: f64,
    /// What crossed the link meanwhile, both directions, in bytes. The reading is on none.
    pub link_bytes: u64,
}

/// What came of one case.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Rate of the reading from afar, in MiB/s.
    pub far: f64,
    /// The same beside the data.
    pub near: f64,
    /// By a visit.
    pub visit: Way,
    /// By a migration there, and one back.
    pub migration: Way,
}

impl Outcome {
    /// From how much data on it is faster to go there than to read from afar, in MiB; `None` if it never is.
    #[must_use]
    pub fn pays_from(&self, way: &Way) -> Option<f64> {
        let saved_s_per_mib = 1.0 / self.far - 1.0 / self.near;
        (saved_s_per_mib > 0.0).then(|| (way.extra_s / saved_s_per_mib).max(0.0))
    }
}

struct Stage {
    networks: Networks,
    nodes: Vec<Node>,
    _server: Guarded,
    _sandbox: Sandbox,
}

impl Stage {
    fn new(case: &Case) -> Result<Self> {
        let networks = Networks::new(2)?;
        let sandbox = Sandbox::new()?;
        let image = sandbox.path().join("data.raw");
        // Not zero, or the server would say only that.
        std::fs::write(&image, vec![0xa5; (IMAGE_MIB as usize) << 20])?;
        let server = networks.within(2, || {
            let mut server = Command::new("qemu-nbd");
            server
                .args(["--read-only", "--persistent", "--shared=8", "--format=raw", "--bind=10.77.0.2"])
                .arg(&image);
            Ok(server.stdin(Stdio::null()).spawn().context("qemu-nbd (package qemu-utils)")?.into())
        })?;
        // The data is another node's, which a guest that is brought must not reach by itself.
        let nodes =
            fleet::daemons(&sandbox, &networks, |_| "[peers]\noptions = [\"drive.remote\"]\n".to_owned())?;
        let config = Config {
            working_set_mib: case.working_set_mib,
            rate: Rate::PagesPerSecond(500),
            verify: 2_000,
            ..Config::default()
        };
        let mut guest = Guest::new(case.working_set_mib + 2 * case.idle_mib + 192, config)?;
        // It is filled in a file in memory, which may take half of that.
        guest.used_mib = case.idle_mib;
        guest.scan_mib = IMAGE_MIB;
        guest.modules = VIRTIO.into_iter().chain(["virtio_blk"]).collect();
        let drive = "file=nbd://10.77.0.2:10809,format=raw,if=virtio,readonly=on,cache=none";
        guest.extra = ["-drive", drive].map(str::to_owned).to_vec();
        nodes[0].run_guest(VM, "thp", &guest)?;
        for number in networks.numbers() {
            networks.limit_with_priorities(number, case.mbit)?;
        }
        Ok(Self { networks, nodes, _server: server, _sandbox: sandbox })
    }

    /// Waits until the guest has read so many more parts on this node. Returns how long that took.
    fn read(&self, node: usize, parts: usize) -> Result<Duration> {
        let said = || -> Result<usize> {
            let console = self.nodes[node].vm(VM)?.console();
            let told = failures(&console);
            ensure!(told.is_empty(), "the guest told of {told:?}");
            Ok(console.matches(PART).count())
        };
        let (begun, first) = (Instant::now(), said()?);
        while said()? < first + parts {
            ensure!(
                begun.elapsed() < LONGEST,
                "expected {parts} parts read within {LONGEST:?}, found {}",
                said()? - first
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(begun.elapsed())
    }

    /// MiB/s on this node, from the end of a part to that of another.
    fn rate(&self, node: usize) -> Result<f64> {
        self.read(node, 1)?;
        let took = self.read(node, RATE_PARTS)?;
        #[expect(clippy::cast_precision_loss, reason = "a few parts")]
        let mib = RATE_PARTS as f64 * PART_MIB;
        Ok(mib / took.as_secs_f64())
    }

    fn sent(&self) -> Result<u64> {
        Ok(self.networks.sent_bytes(1)? + self.networks.sent_bytes(2)?)
    }

    /// What it costs to go by `go`, read there and come home by `back`.
    fn way(&self, near: f64, go: &[&str], back: &[&str]) -> Result<Way> {
        self.read(0, 1)?;
        let (begun, before) = (Instant::now(), self.sent()?);
        self.nodes[0].ask(go)?;
        self.read(1, STAY_PARTS)?;
        self.nodes[1].ask(back)?;
        let took = begun.elapsed();
        let link_bytes = self.sent()? - before;
        #[expect(clippy::cast_precision_loss, reason = "a few parts")]
        let reading = STAY_PARTS as f64 * PART_MIB / near;
        Ok(Way { extra_s: took.as_secs_f64() - reading, link_bytes })
    }
}

/// Measures one case.
///
/// # Errors
/// When a daemon or a guest does not start, or a move fails.
pub fn run(case: &Case) -> Result<Outcome> {
    let stage = Stage::new(case)?;
    let (a, b) = (stage.networks.address(1).to_string(), stage.networks.address(2).to_string());
    let far = stage.rate(0)?;
    // Its rate there is that of a guest whose pages are all there.
    stage.nodes[0].ask(&["migrate", VM, "--to", &b])?;
    let near = stage.rate(1)?;
    stage.nodes[1].ask(&["migrate", VM, "--to", &a])?;
    let visit = stage.way(near, &["visit", VM, "--to", &b], &["visit", VM, "--back"])?;
    let migration = stage.way(near, &["migrate", VM, "--to", &b], &["migrate", VM, "--to", &a])?;
    Ok(Outcome { far, near, visit, migration })
}

/// The head of the table.
pub const HEAD: &str = "| link | working set | idle memory | read from afar | read there | visit: extra time, on the link | pays from | migration to and fro: extra time, on the link | pays from |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|";

/// A line of it.
#[must_use]
pub fn line(case: &Case, outcome: &Outcome) -> String {
    #[expect(clippy::cast_precision_loss, reason = "bytes on a link are below 2^53")]
    let way =
        |way: &Way| format!("{:.2} s, {:.0} MiB", way.extra_s, way.link_bytes as f64 / f64::from(1 << 20));
    let from =
        |way: &Way| outcome.pays_from(way).map_or_else(|| "never".to_owned(), |mib| format!("{mib:.0} MiB"));
    format!(
        "| {} Mbit/s | {} MiB | {} MiB | {:.0} MiB/s | {:.0} MiB/s | {} | {} | {} | {} |",
        case.mbit,
        case.working_set_mib,
        case.idle_mib,
        outcome.far,
        outcome.near,
        way(&outcome.visit),
        from(&outcome.visit),
        way(&outcome.migration),
        from(&outcome.migration)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_pays_from_where_the_time_saved_is_what_the_way_costs() {
        let visit = Way { extra_s: 2.0, link_bytes: 30 << 20 };
        let migration = Way { extra_s: 20.0, link_bytes: 300 << 20 };
        let outcome = Outcome { far: 10.0, near: 100.0, visit, migration };
        let from = outcome.pays_from(&visit).expect("it pays");
        assert!((from - 2.0 / 0.09).abs() < 0.01, "{from}");
        assert_eq!(Outcome { near: 9.0, ..outcome.clone() }.pays_from(&visit), None);
        let case = Case { mbit: 100, working_set_mib: 8, idle_mib: 256 };
        let line = line(&case, &outcome);
        assert_eq!(line.matches('|').count(), HEAD.lines().next().expect("a head").matches('|').count());
        assert!(line.contains("| 2.00 s, 30 MiB | 22 MiB | 20.00 s, 300 MiB | 222 MiB |"), "{line}");
    }
}
