//! Deals a blow and undoes it: what is killed is started again, what is frozen goes on, what is full has room.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::deck::{Blow, Card, Victim};
use super::field::Field;
use super::moment::states;
use crate::daemon::Node;
use crate::fleet::qemu_pids;
use crate::proxy::{Direction, Fault, Rule};

/// For a killed QEMU to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Name of the file that fills a state folder.
const BALLAST: &str = "ballast";

/// How long what has its own length lasts.
#[derive(Debug, Clone, Copy)]
pub struct Lengths {
    /// Frozen processes and black holes. A daemon waits 15 s for the other side.
    pub silence: Duration,
    /// A full disk.
    pub full: Duration,
}

/// A blow that was dealt and undone.
#[derive(Debug, Clone, Copy)]
pub struct Struck {
    /// When it was undone.
    pub undone: Instant,
    /// The guest's own QEMU was killed: the guest has ended, and that is right.
    pub owner_killed: bool,
}

/// Deals the card's blow and undoes it. Then the proxy holds nothing back any more. None if the victim is not there.
///
/// # Errors
/// When the blow cannot be dealt, or a daemon does not start again.
pub fn strike(field: &mut Field, card: &Card, id: Option<&str>, lengths: &Lengths) -> Result<Option<Struck>> {
    let (home, away) = (field.home, 1 - field.home);
    let struck = |owner_killed| Ok(Some(Struck { undone: Instant::now(), owner_killed }));
    match (card.victim, card.blow) {
        (Victim::Link, blow) => {
            on_the_link(field, blow, card, lengths);
            struck(false)
        }
        (Victim::SourceQemu | Victim::DestinationQemu | Victim::Child, Blow::Kill) => {
            let Some(pid) = qemu(field, card.victim) else { return Ok(None) };
            let before = owner(field, id);
            kill_qemu(pid)?;
            let after = owner(field, id);
            let node = if card.victim == Victim::DestinationQemu { away } else { home };
            field.link().heal();
            struck(card.victim != Victim::Child && (before == Some(node) || after == Some(node)))
        }
        (Victim::SourceQemu | Victim::DestinationQemu | Victim::Child, _) => {
            let Some(pid) = qemu(field, card.victim) else { return Ok(None) };
            freeze(field, pid, lengths.silence)?;
            struck(false)
        }
        (victim, blow) => {
            let nodes: &[usize] = match victim {
                Victim::Source => &[home],
                Victim::Destination => &[away],
                _ => &[home, away],
            };
            let undone = on_daemons(field, nodes, blow, card.outage, lengths)?;
            Ok(Some(Struck { undone, owner_killed: false }))
        }
    }
}

/// The number of the node whose QEMU is the guest's; none between the source's commit and the word of the destination.
fn owner(field: &Field, id: Option<&str>) -> Option<usize> {
    let Some(id) = id else { return Some(field.home) };
    let (source, destination) = states(field, id);
    match (source.as_str(), destination.as_str()) {
        (_, "owner" | "complete") => Some(1 - field.home),
        ("committed" | "released", _) => None,
        _ => Some(field.home),
    }
}

/// The process that is the victim.
fn qemu(field: &Field, victim: Victim) -> Option<i32> {
    match victim {
        Victim::DestinationQemu => qemu_pids(field.destination()).into_iter().next(),
        // The guest's QEMU was started first.
        Victim::SourceQemu => qemu_pids(field.source()).into_iter().next(),
        _ => qemu_pids(field.source()).into_iter().nth(1),
    }
}

fn kill_qemu(pid: i32) -> Result<()> {
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("could not kill QEMU")?;
    let deadline = Instant::now() + END_TIMEOUT;
    while !is_dead(pid) {
        if Instant::now() > deadline {
            bail!("QEMU {pid} does not end on SIGKILL");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Whether nothing of the process runs any more. One that is dying has lost its memory long before others are told of its end.
fn is_dead(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    matches!(state, Some('Z' | 'X')) && threads <= 1
}

/// Stops a process and lets it go on. What the proxy held back passes meanwhile. A daemon may have ended it by then, since it did not answer:
/// whether that was right shows when the guest is looked at.
fn freeze(field: &Field, pid: i32, length: Duration) -> Result<()> {
    let pid = Pid::from_raw(pid);
    kill(pid, Signal::SIGSTOP).context("could not stop the process")?;
    field.link().heal();
    std::thread::sleep(length);
    match kill(pid, Signal::SIGCONT) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).context("could not let the process go on"),
    }
}

fn on_the_link(field: &Field, blow: Blow, card: &Card, lengths: &Lengths) {
    let link = field.link();
    match blow {
        Blow::BlackHole => {
            let stall = |direction| Rule { connection: None, direction, after: 0, fault: Fault::Stall };
            link.replace(vec![stall(Direction::Forth), stall(Direction::Back)]);
            std::thread::sleep(lengths.silence);
        }
        Blow::Refuse => {
            link.refuse();
            link.cut_all();
            std::thread::sleep(card.outage + Duration::from_secs(1));
        }
        _ => link.cut_all(),
    }
    link.heal();
}

/// Returns when the blow was undone: for killed daemons, when they were started again, since until then nobody is served.
fn on_daemons(
    field: &mut Field,
    numbers: &[usize],
    blow: Blow,
    outage: Duration,
    lengths: &Lengths,
) -> Result<Instant> {
    match blow {
        Blow::Kill => {
            numbers.iter().for_each(|number| field.nodes[*number].crash());
            // A stalled connection would not notice that its end is gone.
            field.links.iter().for_each(|link| link.cut_all());
            field.link().heal();
            std::thread::sleep(outage);
            let undone = Instant::now();
            numbers.iter().try_for_each(|number| field.nodes[*number].run())?;
            Ok(undone)
        }
        Blow::Freeze => {
            for number in numbers {
                let pid = field.nodes[*number].pid().context("the daemon runs")?;
                freeze(field, pid, lengths.silence)?;
            }
            Ok(Instant::now())
        }
        _ => {
            numbers.iter().try_for_each(|number| fill(&field.nodes[*number]))?;
            field.link().heal();
            std::thread::sleep(lengths.full);
            for number in numbers {
                let ballast = field.nodes[*number].folder().join("state").join(BALLAST);
                std::fs::remove_file(ballast).context("could not empty the state folder")?;
            }
            Ok(Instant::now())
        }
    }
}

/// Fills a state folder to the last byte.
fn fill(node: &Node) -> Result<()> {
    let path = node.folder().join("state").join(BALLAST);
    let mut file = File::create(&path).context("could not make the ballast")?;
    for size in [64 << 10, 4096, 1] {
        let piece = vec![0xbb; size];
        loop {
            match file.write_all(&piece) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => return Err(error).context("could not fill the state folder"),
            }
        }
    }
    Ok(())
}
