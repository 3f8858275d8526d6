//! `./run bench pause`: how long a guest stands still in a move, by its size and by how much of its memory is in use.
//!
//! The guest is the [payload]: a few MiB of work in an address space of any size. Its RAM file is sparse, so a terabyte
//! that the guest does not use takes no memory; the rest is filled from outside, as far as there is memory for two copies.

mod filled;
mod report;

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use vmove_guest::config::{Config, Rate};

use crate::beacon;
use crate::daemon::{Node, NodeOptions, Phase};
use crate::guest::{Accel, Guest, failures};
use crate::payload::{self, KvmPages};
use crate::sandbox::Sandbox;

pub use filled::{Fill, available_mib};
pub use report::{Report, Row, picture, text};

const NAME: &str = "guest";
/// Nodes between which the guest moves to and fro.
const NODES: [&str; 2] = ["a", "b"];
/// Guests as large as this need more address bits than QEMU's `qemu64` has.
const MOST_OF_40_BITS_MIB: u32 = 900 << 10;

/// Memory of a guest, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory(pub u32);

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected a size such as 512M, 16G or 1T, found {text:?}");
        let (number, shift) = match text.strip_suffix(['M', 'G', 'T']) {
            Some(number) if text.ends_with('M') => (number, 0),
            Some(number) if text.ends_with('G') => (number, 10),
            Some(number) => (number, 20),
            None => return Err(wrong()),
        };
        let number: u32 = number.parse().map_err(|_| wrong())?;
        number
            .checked_shl(shift)
            .filter(|mib| *mib >> shift == number && *mib > 0)
            .map(Self)
            .ok_or_else(wrong)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            mib if mib.is_multiple_of(1 << 20) => write!(f, "{} TiB", mib >> 20),
            mib if mib.is_multiple_of(1 << 10) => write!(f, "{} GiB", mib >> 10),
            mib => write!(f, "{mib} MiB"),
        }
    }
}

/// How KVM tells QEMU of the pages that a guest writes. vmove needs neither, but QEMU follows all of the guest's memory while it sends device
/// state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Writes {
    /// In a bitmap of all of its memory, which is read while the guest stands still: QEMU's default.
    Bitmap,
    /// In a ring for each virtual CPU: `-accel kvm,dirty-ring-size=4096`.
    Ring,
}

impl Writes {
    const fn label(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap",
            Self::Ring => "ring",
        }
    }
}

/// What is measured.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    /// Memory of the guest.
    pub memory: Memory,
    /// How much of it is in use.
    pub fill: Fill,
    /// How KVM notes writes for QEMU.
    pub writes: Writes,
    /// How it is moved: a word for `vmove migrate --mode`.
    pub mode: String,
    /// Moves.
    pub runs: usize,
}

/// One move.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Move {
    /// From STOP to RESUME, in milliseconds.
    pub downtime_ms: f64,
    /// What that consisted of.
    pub pause: Vec<Step>,
    /// The whole move.
    pub total_ms: f64,
    /// Memory of the machine that was in use when the guest had just moved, beyond what was before, in MiB.
    pub used_mib: f64,
}

/// A step of a pause.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// Its name in the report of the migration.
    pub name: String,
    /// Milliseconds.
    pub ms: f64,
}

/// Moves the guest to and fro.
///
/// # Errors
/// When there is no memory for the case, a move fails, or the guest has found wrong memory.
pub fn run(case: &Case, accel: Accel) -> Result<Vec<Move>> {
    payload::ready(accel)?;
    case.fill.fits(case.memory)?;
    let sandbox = Sandbox::new()?;
    let before = available_mib()?;
    // Not without need: then the bench also measures a vmoved that does not know it.
    let sparse = f64::from(case.memory.0) > before;
    let config = if sparse { "overcommit-memory = true" } else { "" }.to_owned();
    let (a, b) = Node::pair(&sandbox, &NodeOptions { config, ..NodeOptions::default() })?;
    let guest = guest(&sandbox, case.memory, accel, case.writes)?;
    let vm = a.run_guest(NAME, "thp", &guest)?;
    case.fill.apply(&vm, case.memory)?;
    let mut moves = Vec::new();
    for number in 0..case.runs {
        let (from, to) = if number % 2 == 0 { (&a, NODES[1]) } else { (&b, NODES[0]) };
        let report = from.migrate(NAME, to, &["--mode", &case.mode])?;
        let step = |phase: &Phase| Step { name: phase.name.clone(), ms: phase.duration_ms };
        moves.push(Move {
            downtime_ms: report.downtime_ms,
            pause: report.pause.iter().map(step).collect(),
            total_ms: report.total_ms,
            used_mib: before - available_mib()?,
        });
        eprintln!("  {:7.2} ms", report.downtime_ms);
    }
    let at = if case.runs.is_multiple_of(2) { &a } else { &b };
    sound(at)?;
    Ok(moves)
}

/// The guest works, and has found no error.
fn sound(node: &Node) -> Result<()> {
    let vm = node.vm(NAME)?;
    let (_, page) = beacon::find(&vm.ram_files())?;
    let first = page.read().context("no beacon")?;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let now = page.read().context("no beacon")?;
        ensure!(now.errors == 0, "the guest found wrong memory: {}", now.verdict());
        if now.work > first.work && now.verified > first.verified {
            break;
        }
        ensure!(std::time::Instant::now() < deadline, "the guest stands still: {first:?}, {now:?}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    match failures(&vm.console()).as_slice() {
        [] => Ok(()),
        told => bail!("the guest told of {told:?}"),
    }
}

fn guest(sandbox: &Sandbox, memory: Memory, accel: Accel, writes: Writes) -> Result<Guest> {
    let config = Config {
        working_set_mib: 4,
        cold_mib: 4,
        rate: Rate::PagesPerSecond(300),
        verify: 1_000,
        ..payload::busy()
    };
    ensure!(memory.0 >= payload::memory_mib(&config), "the guest needs {} MiB", payload::memory_mib(&config));
    let mut guest = payload::guest(sandbox.path(), accel, &config, KvmPages::None)?;
    guest.memory_mib = memory.0;
    if accel == Accel::Kvm && writes == Writes::Ring {
        guest.accel_options = ",dirty-ring-size=4096";
    }
    if memory.0 > MOST_OF_40_BITS_MIB {
        ensure!(
            accel == Accel::Kvm,
            "an emulated guest has 40 address bits: at most 900 GiB; or use --accel kvm"
        );
        guest.extra.extend(["-cpu".to_owned(), "qemu64,kvm-asyncpf-int=on,phys-bits=46".to_owned()]);
    }
    guest.extra.extend(["-qmp".to_owned(), format!("unix:{{vmdir}}/{},server=on,wait=off", filled::SOCKET)]);
    Ok(guest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown() {
        let shown = |text: &str| text.parse::<Memory>().map(|memory| memory.to_string());
        assert_eq!(shown("512M").as_deref(), Ok("512 MiB"));
        assert_eq!(shown("16G").as_deref(), Ok("16 GiB"));
        assert_eq!(shown("1T").as_deref(), Ok("1 TiB"));
        for bad in ["", "G", "1", "0G", "-1G", "5000T", "1g"] {
            assert!(shown(bad).is_err(), "{bad}");
        }
    }
}
