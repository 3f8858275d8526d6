//! What a client on the network sees of moves: the longest gap between two answers of a guest, over one TCP connection that lives through all of them.
//! Moves by vmove, and by QEMU's own pre-copy and post-copy between stock QEMUs, on the same network.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use vmove_guest::config::{Address, Config, Rate};

use super::spread::Spread;
use crate::daemon::Node;
use crate::fleet;
use crate::guest::{Guest, StockQemu, VIRTIO, failures};
use crate::lan::{self, Client};
use crate::monitor::Monitor;
use crate::networks::Networks;
use crate::sandbox::Sandbox;
use crate::scene::NAME;

/// The client is watched for so long after each move, and the guest warms up for so long before the first.
const REST: Duration = Duration::from_secs(1);
/// A migration of QEMU's own ends within this time.
const QEMU_TIMEOUT: Duration = Duration::from_secs(60);
/// Port on which a stock QEMU waits for a guest.
const QEMU_PORT: u16 = 7500;

/// Who moves the guest, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// vmove's hybrid migration.
    VmoveHybrid,
    /// vmove's post-copy.
    VmovePostcopy,
    /// QEMU's pre-copy, with its defaults but for the bandwidth.
    QemuPrecopy,
    /// QEMU's post-copy.
    QemuPostcopy,
}

impl Way {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 4] =
        [Self::VmoveHybrid, Self::VmovePostcopy, Self::QemuPrecopy, Self::QemuPostcopy];

    /// As tables call it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::VmoveHybrid => "vmove hybrid",
            Self::VmovePostcopy => "vmove post-copy",
            Self::QemuPrecopy => "QEMU pre-copy",
            Self::QemuPostcopy => "QEMU post-copy",
        }
    }
}

/// What was seen of one move.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Seen {
    /// The longest time without an answer, from the request to a second after the end. Unit: milliseconds.
    pub gap_ms: f64,
    /// From STOP at the source to RESUME at the destination. Unit: milliseconds.
    pub downtime_ms: f64,
    /// Frames that were passed on to the destination; 0 by QEMU itself.
    pub frames: u64,
}

/// Moves of one way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Which.
    pub way: Way,
    /// Each move.
    pub moves: Vec<Seen>,
}

impl Row {
    /// Of the gaps, in milliseconds.
    #[must_use]
    pub fn gaps(&self) -> Option<Spread> {
        Spread::of(&self.moves.iter().map(|seen| seen.gap_ms).collect::<Vec<_>>())
    }

    /// A line of a table.
    #[must_use]
    pub fn line(&self) -> String {
        let downtimes = Spread::of(&self.moves.iter().map(|seen| seen.downtime_ms).collect::<Vec<_>>());
        let text = |spread: Option<Spread>| spread.map_or_else(|| "-".to_owned(), |spread| spread.text(1));
        let frames: u64 = self.moves.iter().map(|seen| seen.frames).sum();
        format!(
            "| {} | {} | {} | {} | {frames} |",
            self.way.label(),
            self.moves.len(),
            text(self.gaps()),
            text(downtimes)
        )
    }
}

/// A guest with a network card, 256 MiB, of which it rewrites 32 with 2000 pages/s.
///
/// # Errors
/// There is no QEMU.
fn guest() -> Result<Guest> {
    let config = Config {
        working_set_mib: 32,
        rate: Rate::PagesPerSecond(2000),
        address: Some(Address::Fixed(lan::GUEST)),
        ..Config::default()
    };
    let mut guest = Guest::new(256, config)?;
    guest.modules = VIRTIO.into_iter().chain(lan::MODULES).collect();
    guest.extra = lan::card().to_vec();
    Ok(guest)
}

/// Moves a guest so many times, to and fro. The connection of the client is kept through all of them, and each answer is right: else it fails.
///
/// # Errors
/// What failed.
pub fn run(way: Way, moves: usize) -> Result<Row> {
    let networks = Networks::new(2)?;
    lan::make(&networks)?;
    let sandbox = Sandbox::new()?;
    let mut mover: Box<dyn Mover> = match way {
        Way::VmoveHybrid => Box::new(Vmove::boot(&sandbox, &networks, "hybrid")?),
        Way::VmovePostcopy => Box::new(Vmove::boot(&sandbox, &networks, "postcopy")?),
        Way::QemuPrecopy => Box::new(Stock::boot(&sandbox, &networks, false)?),
        Way::QemuPostcopy => Box::new(Stock::boot(&sandbox, &networks, true)?),
    };
    let client = Client::connect(&networks).with_context(|| mover.console())?;
    std::thread::sleep(REST);
    let mut done = Vec::new();
    for turn in 0..moves {
        let begun = Instant::now();
        let moved = mover.migrate(turn % 2 == 0).with_context(|| format!("move {turn}"))?;
        std::thread::sleep(REST);
        done.push((begun, Instant::now(), moved));
    }
    let seen = client.end().context("the client")?;
    let found = failures(&mover.console());
    ensure!(found.is_empty(), "the guest found: {found:?}");
    let of_move = |(begun, ended, (downtime_ms, frames)): (Instant, Instant, (f64, u64))| {
        let gap_ms = seen.longest_gap(begun, ended).as_secs_f64() * 1e3;
        Seen { gap_ms, downtime_ms, frames }
    };
    Ok(Row { way, moves: done.into_iter().map(of_move).collect() })
}

/// Moves the guest from the first node to the second (`there`), or back. Its downtime in milliseconds, and frames that were passed on.
trait Mover {
    fn migrate(&mut self, there: bool) -> Result<(f64, u64)>;

    fn console(&self) -> String;
}

struct Vmove {
    nodes: Vec<Node>,
    addresses: [String; 2],
    mode: &'static str,
}

impl Vmove {
    fn boot(sandbox: &Sandbox, networks: &Networks, mode: &'static str) -> Result<Self> {
        let nodes = fleet::daemons(sandbox, networks, |_| "[qemu]\nuser = \"root\"\n".to_owned())?;
        nodes[0].run_guest(NAME, "thp", &guest()?)?;
        Ok(Self { nodes, addresses: [1, 2].map(|number| networks.address(number).to_string()), mode })
    }
}

impl Mover for Vmove {
    fn migrate(&mut self, there: bool) -> Result<(f64, u64)> {
        let (from, to) = (&self.nodes[usize::from(!there)], &self.addresses[usize::from(there)]);
        let report = from.ask(&["migrate", NAME, "--to", to, "--mode", self.mode])?;
        let network = &report["network"];
        ensure!(network["problem"].is_null() && network["frames_lost"] == 0, "{report}");
        ensure!(network["announced_ms"].is_f64(), "when the guest was announced is not told: {report}");
        let downtime = report["downtime_ms"].as_f64().context("no downtime")?;
        Ok((downtime, network["frames_passed_on"].as_u64().context("no frames")?))
    }

    fn console(&self) -> String {
        self.nodes.iter().filter_map(|node| Some(node.vm(NAME).ok()?.console())).collect()
    }
}

struct Stock {
    /// For QEMUs of the two nodes.
    guests: [Guest; 2],
    folders: PathBuf,
    memory: PathBuf,
    postcopy: bool,
    started: usize,
    now: (StockQemu, Monitor),
}

impl Stock {
    fn boot(sandbox: &Sandbox, networks: &Networks, postcopy: bool) -> Result<Self> {
        let plain = guest()?;
        let in_node = |number| -> Result<Guest> {
            let folder = sandbox.folder(&format!("q{number}"))?;
            Ok(Guest { qemu: networks.wrapper(&folder, number, &plain.qemu, None)?, ..plain.clone() })
        };
        let guests: [Guest; 2] = [in_node(1)?, in_node(2)?];
        let memory = super::mover::Backing::Thp.mount(sandbox, "mem", 2 * plain.bytes())?;
        let folders = sandbox.folder("stock")?;
        let mut qemu = StockQemu::start(&guests[0], &folders.join("0"), &memory.join("0"), &[])?;
        qemu.wait_monitor()?;
        let monitor = Monitor::connect(qemu.qmp())?;
        qemu.wait_running()?;
        Ok(Self { guests, folders, memory, postcopy, started: 1, now: (qemu, monitor) })
    }

    fn prepare(&self, monitor: &Monitor) -> Result<()> {
        monitor.enable(if self.postcopy { &["events", "postcopy-ram"] } else { &["events"] })?;
        monitor
            .run("migrate-set-parameters", json!({ "max-bandwidth": super::qemu::MAX_BANDWIDTH }))
            .map(drop)
    }
}

impl Mover for Stock {
    fn migrate(&mut self, there: bool) -> Result<(f64, u64)> {
        let (name, number) = (self.started.to_string(), if there { 2 } else { 1 });
        self.started += 1;
        let (guest, ram) = (&self.guests[usize::from(there)], self.memory.join(&name));
        let mut qemu = StockQemu::start(guest, &self.folders.join(&name), &ram, &["-incoming", "defer"])?;
        qemu.wait_monitor()?;
        let monitor = Monitor::connect(qemu.qmp())?;
        self.prepare(&monitor)?;
        self.prepare(&self.now.1)?;
        monitor.run("migrate-incoming", json!({ "uri": format!("tcp:0.0.0.0:{QEMU_PORT}") }))?;
        let source = &self.now.1;
        source.run("migrate", json!({ "uri": format!("tcp:10.77.0.{number}:{QEMU_PORT}") }))?;
        if self.postcopy {
            source.wait("MIGRATION", QEMU_TIMEOUT, |event| event.text("status") == Some("active"))?;
            source.run("migrate-start-postcopy", Value::Null)?;
        }
        source.wait("MIGRATION", QEMU_TIMEOUT, |event| event.text("status") == Some("completed"))?;
        let resumed = monitor.wait("RESUME", QEMU_TIMEOUT, |_| true)?;
        let stopped = source.wait("STOP", QEMU_TIMEOUT, |_| true)?;
        // The last pages of a post-copy are still to be mapped.
        monitor.wait("MIGRATION", QEMU_TIMEOUT, |event| event.text("status") == Some("completed"))?;
        let downtime = resumed.qemu_time.since(stopped.qemu_time).as_secs_f64() * 1e3;
        // The source's QEMU ends, and its memory with it.
        let left = std::mem::replace(&mut self.now, (qemu, monitor)).0.ram().to_owned();
        std::fs::remove_file(left)?;
        Ok((downtime, 0))
    }

    fn console(&self) -> String {
        self.now.0.console()
    }
}
