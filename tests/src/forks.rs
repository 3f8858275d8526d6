//! Forks seen from outside: `vfork` run as a user does it, and guests whose memory is in no file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmove_guest::beacon::Beacon;

use crate::beacon::{self, BeaconPage};
use crate::booted;
use crate::daemon::{Node, Vm};
use crate::guest::{Guest, failures};
use crate::process::ram_in;
use crate::scene::{End, NAME, STEP_TIMEOUT};

/// QEMU's arguments for the port over which a guest forks itself.
pub const PORT: [&str; 6] = [
    "-device",
    "virtio-serial-pci",
    "-chardev",
    "socket,id=fork,path={vmdir}/fork.sock,server=on,wait=off",
    "-device",
    "virtserialport,chardev=fork,name=org.vmove.fork",
];

/// A guest that is to be forked, and where its beacon is.
#[derive(Debug)]
pub struct Parent {
    /// Its name.
    pub name: String,
    /// What it is.
    pub guest: Guest,
    offset: u64,
}

/// Runs `vfork --json`.
///
/// # Errors
/// When it cannot be started.
pub fn vfork(node: &Node, arguments: &[&str]) -> Result<End> {
    let output = node.vfork(&[&["--json"], arguments].concat())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    Ok(End {
        code: output.status.code().unwrap_or(-1),
        answer: answer.unwrap_or(Value::Null),
        said: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// As [`vfork`], which must succeed.
///
/// # Errors
/// When it does not, with the end of the daemon's log.
pub fn done(node: &Node, arguments: &[&str]) -> Result<Value> {
    let end = vfork(node, arguments)?;
    if end.code != 0 {
        let log = node.log();
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        bail!(
            "vfork {arguments:?} ended with {}: {} {}; log, newest first: {tail:#?}",
            end.code,
            end.answer,
            end.said
        );
    }
    Ok(end.answer)
}

impl Parent {
    /// Starts a guest as VM `name` of `node`, and waits until it is at work.
    ///
    /// # Errors
    /// When it is not.
    pub fn start(node: &Node, name: &str, memory: &str, guest: Guest) -> Result<Self> {
        let vm = booted::run(node, name, memory, &guest)?;
        Self::at_work(name, guest, &vm)
    }

    /// As [`Parent::start`], with the folder of guests that have booted; its memory is `thp`.
    ///
    /// # Errors
    /// As [`Parent::start`].
    pub fn start_from(folder: &Path, node: &Node, name: &str, guest: Guest) -> Result<Self> {
        let vm = booted::run_from(Some(folder), node, name, "thp", &guest)?;
        Self::at_work(name, guest, &vm)
    }

    /// A guest that somebody else has started.
    ///
    /// # Errors
    /// When it is not at work yet.
    pub fn at_work(name: &str, guest: Guest, vm: &Vm) -> Result<Self> {
        ensure!(vm.ram.len() == 1, "expected one RAM file, found {:?}", vm.ram);
        let offset = vm.beacon()?.offset();
        Ok(Self { name: name.to_owned(), guest, offset })
    }

    /// A guest that runs without a daemon, and whose beacon is so many bytes from the start of its RAM.
    #[must_use]
    pub fn known(name: &str, guest: Guest, offset: u64) -> Self {
        Self { name: name.to_owned(), guest, offset }
    }

    /// Bytes from the start of its RAM to its beacon.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// The beacon in the memory of a VM that came from this guest, or of the guest itself, wherever that memory is.
    ///
    /// # Errors
    /// When it cannot be found.
    pub fn page(&self, vm: &Vm) -> Result<BeaconPage> {
        self.page_in(vm.pid)
    }

    /// As [`Parent::page`], by the process id of the VM's QEMU.
    ///
    /// # Errors
    /// When it cannot be found.
    pub fn page_in(&self, pid: i32) -> Result<BeaconPage> {
        let start = ram_in(pid, self.guest.bytes())?;
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        Ok(BeaconPage::at(memory, start + self.offset))
    }

    /// What the VM says of itself now.
    ///
    /// # Errors
    /// When there is no beacon.
    pub fn beacon(&self, node: &Node, name: &str) -> Result<Beacon> {
        let vm = node.vm(name)?;
        self.page(&vm)?.read().with_context(|| format!("no beacon in {name}"))
    }

    /// Waits until the VM has checked every page it has once more, and has found no error.
    ///
    /// # Errors
    /// When it does not, or found one.
    pub fn sound(&self, node: &Node, name: &str) -> Result<Beacon> {
        // It may be stopped for the moments in which it gets memory of its own.
        let until = Instant::now() + STEP_TIMEOUT;
        let vm = loop {
            let vm = node.vm(name)?;
            if vm.status == "running" {
                break vm;
            }
            ensure!(Instant::now() < until, "expected {name} to run, found {}", vm.status);
            std::thread::sleep(Duration::from_millis(10));
        };
        let now = self.sound_in(vm.pid).with_context(|| name.to_owned())?;
        ensure!(failures(&vm.console()).is_empty(), "{name} told of {:?}", failures(&vm.console()));
        Ok(now)
    }

    /// As [`Parent::sound`], by the process id of the VM's QEMU: what its console shows is not looked at.
    ///
    /// # Errors
    /// As [`Parent::sound`].
    pub fn sound_in(&self, pid: i32) -> Result<Beacon> {
        let config = &self.guest.config;
        let pages = u64::from(config.working_pages()) + u64::from(config.cold_pages());
        let page = self.page_in(pid)?;
        let first = page.read().context("no beacon")?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let now = page.read().context("its beacon is gone")?;
            ensure!(now.errors == 0, "it found wrong memory: {}", now.verdict());
            if now.verified > first.verified + pages && now.beats > first.beats + 50 {
                return Ok(now);
            }
            ensure!(Instant::now() < deadline, "it stands still: {first:?}, later {now:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// As [`Parent::sound`], of several at once: each checks its pages while the others do.
    ///
    /// # Errors
    /// Of the first that is not.
    pub fn all_sound(&self, vms: &[(&Node, &str)]) -> Result<()> {
        at_once(vms, |node, name| self.sound(node, name).map(drop))
    }
}

/// VMs of one node, and another one if it is named.
#[must_use]
pub fn on<'a>(node: &'a Node, names: &'a [String], and: Option<&'a str>) -> Vec<(&'a Node, &'a str)> {
    names.iter().map(String::as_str).chain(and).map(|name| (node, name)).collect()
}

/// Asks the same of several VMs, each on a thread of its own: guests that are waited for one after the other work for nothing meanwhile.
///
/// # Errors
/// Of the first of which it is not so.
pub fn at_once(vms: &[(&Node, &str)], ask: impl Fn(&Node, &str) -> Result<()> + Sync) -> Result<()> {
    let ask = &ask;
    std::thread::scope(|scope| {
        let asked: Vec<_> = vms.iter().map(|(node, name)| scope.spawn(move || ask(node, name))).collect();
        vms.iter().zip(asked).try_for_each(|((node, name), answer)| match answer.join() {
            Ok(answer) => answer.with_context(|| format!("{name} on {}", node.name())),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// Names of the children in an answer of `vfork create`.
#[must_use]
pub fn names(answer: &Value) -> Vec<String> {
    let children = answer["children"].as_array().map(Vec::as_slice).unwrap_or_default();
    children.iter().filter_map(|child| child["name"].as_str().map(str::to_owned)).collect()
}

/// Journals of forks at `node` that have not been tidied up.
#[must_use]
pub fn journals(node: &Node) -> Vec<PathBuf> {
    journals_in(&node.folder().join("state/forks"))
}

/// Those in a folder.
#[must_use]
pub fn journals_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "jsonl")).collect()
}

/// How far a fork came, as its journal tells. The order is that of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ForkPhase {
    /// There is no journal: it has not begun, or all has been tidied up.
    None,
    /// The guest has not noticed.
    Begun,
    /// The guest is being stopped.
    Stopping,
    /// Memory is being copied.
    Keeping,
    /// The template is whole.
    Frozen,
    /// All children run.
    Complete,
}

/// What the journals of `node`, on which at most one fork is under way, tell.
///
/// # Panics
/// If a journal tells of an unknown phase.
#[must_use]
pub fn fork_phase(node: &Node) -> ForkPhase {
    phase_in(&node.folder().join("state/forks"))
}

/// What those in a folder tell.
///
/// # Panics
/// As [`fork_phase`].
#[must_use]
pub fn phase_in(folder: &Path) -> ForkPhase {
    let text =
        journals_in(folder).first().map(|journal| std::fs::read_to_string(journal).unwrap_or_default());
    let text = text.unwrap_or_default();
    // A line that is being written has no end yet.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let Some(last) = whole.lines().last() else { return ForkPhase::None };
    let record: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last}"));
    match record["phase"].as_str() {
        Some("begun") => ForkPhase::Begun,
        Some("stopping") => ForkPhase::Stopping,
        Some("keeping") => ForkPhase::Keeping,
        Some("frozen") => ForkPhase::Frozen,
        Some("complete") => ForkPhase::Complete,
        other => panic!("unknown phase {other:?} in {last}"),
    }
}

/// Forks the guest of `node` into `count` children and kills the daemon `after` the journal tells of `phase`; gives the phase that the
/// journal tells of then. [`ForkPhase::None`]: so long after the command was started.
///
/// # Panics
/// If the fork does not get there.
pub fn kill_in_fork(node: &mut Node, count: u32, phase: ForkPhase, after: Duration) -> ForkPhase {
    kill_in_fork_after(node, count, phase, || std::thread::sleep(after))
}

/// As [`kill_in_fork`], after what is `then` to be done or waited for.
///
/// # Panics
/// If the fork does not get there.
pub fn kill_in_fork_after(node: &mut Node, count: u32, phase: ForkPhase, then: impl FnOnce()) -> ForkPhase {
    std::thread::scope(|scope| {
        let (node, count) = (&*node, count.to_string());
        let forking = scope.spawn(move || vfork(node, &["create", NAME, "--count", &count]));
        let deadline = Instant::now() + STEP_TIMEOUT;
        while fork_phase(node) < phase {
            assert!(!forking.is_finished() && Instant::now() < deadline, "the fork is never {phase:?}");
            std::thread::sleep(Duration::from_micros(100));
        }
        then();
        let pid = Pid::from_raw(node.pid().expect("the daemon runs"));
        kill(pid, Signal::SIGKILL).expect("it is killed");
        // The answer, or that there is none any more.
        let answer = forking.join().expect("vfork was waited for").expect("vfork was run");
        eprintln!("vfork ended with {}: {}", answer.code, answer.said.trim());
    });
    node.crash();
    let found = fork_phase(node);
    eprintln!("killed after {phase:?}: in {found:?}");
    found
}

/// RAM files of templates that are in memory at `node`.
#[must_use]
pub fn template_files(node: &Node) -> Vec<PathBuf> {
    let all = beacon::ram_files(&node.memory());
    all.into_iter().filter(|path| path.components().any(|part| part.as_os_str() == "templates")).collect()
}
