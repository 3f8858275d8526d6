//! Forks seen from outside: `vfork` run as a user does it, and guests whose memory is in no file.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vmove_guest::beacon::Beacon;

use crate::beacon::{self, BeaconPage};
use crate::daemon::{Node, Vm};
use crate::guest::{Guest, failures};
use crate::scene::{End, PATIENCE};

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
        let vm = node.run_guest(name, memory, &guest)?;
        ensure!(vm.ram.len() == 1, "expected one RAM file, found {:?}", vm.ram);
        let offset = vm.beacon()?.offset();
        Ok(Self { name: name.to_owned(), guest, offset })
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
        let config = &self.guest.config;
        let pages = u64::from(config.working_pages()) + u64::from(config.cold_pages());
        let vm = node.vm(name)?;
        ensure!(vm.status == "running", "expected {name} to run, found {}", vm.status);
        let page = self.page(&vm)?;
        let first = page.read().with_context(|| format!("no beacon in {name}"))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = page.read().with_context(|| format!("the beacon of {name} is gone"))?;
            ensure!(now.errors == 0, "{name} found wrong memory: {}", now.verdict());
            if now.verified > first.verified + pages && now.beats > first.beats + 50 {
                ensure!(failures(&vm.console()).is_empty(), "{name} told of {:?}", failures(&vm.console()));
                return Ok(now);
            }
            ensure!(Instant::now() < deadline, "{name} stands still: {first:?}, later {now:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Where a process has guest memory of this size mapped.
///
/// # Errors
/// When it has not.
pub fn ram_in(pid: i32, bytes: u64) -> Result<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let found = maps.lines().filter_map(addresses).find(|(start, end)| end - start == bytes);
    found
        .map(|(start, _)| start)
        .with_context(|| format!("no mapping of {bytes} bytes in process {pid}: {maps}"))
}

/// The range of addresses with which a line about a mapping begins, in `maps` and `smaps` of proc(5).
#[must_use]
pub fn addresses(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// Names of the children in an answer of `vfork create`.
#[must_use]
pub fn names(answer: &Value) -> Vec<String> {
    let children = answer["children"].as_array().map(Vec::as_slice).unwrap_or_default();
    children.iter().filter_map(|child| child["name"].as_str().map(str::to_owned)).collect()
}

/// RAM files of templates that are in memory at `node`.
#[must_use]
pub fn template_files(node: &Node) -> Vec<PathBuf> {
    let all = beacon::ram_files(&node.memory());
    all.into_iter().filter(|path| path.components().any(|part| part.as_os_str() == "templates")).collect()
}
