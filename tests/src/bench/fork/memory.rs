//! How much of their host's memory idle children take: one template, the pages that each has written, and QEMU itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::children;
use super::local::{at_work, end};
use crate::daemon::Node;
use crate::forks::{Parent, done};
use crate::guest::Guest;
use crate::process::resident_bytes;
use crate::process::{addresses, ram_in};

/// Wait before the measurement: just after a fork guests are not idle yet, and the kernel counts freed memory late.
const SETTLE_INTERVAL: Duration = Duration::from_secs(4);
const MIB: f64 = 1_048_576.0;

/// The memory of one QEMU, in MiB.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Share {
    /// Name of the VM.
    pub name: String,
    /// Proportional set size: its private memory, and its part of shared memory. It is the sum of the fields below.
    pub pss_mib: f64,
    /// Its part of the template's memory.
    pub template_mib: f64,
    /// Guest memory that it has written since the fork, which is private.
    pub written_mib: f64,
    /// All other memory: QEMU itself.
    pub qemu_mib: f64,
}

impl Share {
    /// Reads `smaps` of proc(5) of a QEMU whose guest has its memory at `ram`.
    fn read(name: &str, smaps: &str, ram: &Range<u64>) -> Self {
        let mut share = Self { name: name.to_owned(), ..Self::default() };
        let mut in_ram = false;
        for line in smaps.lines() {
            if let Some((start, _)) = addresses(line) {
                in_ram = ram.contains(&start);
                continue;
            }
            let mut words = line.split_ascii_whitespace();
            let (Some(key), Some(Ok(kib))) = (words.next(), words.next().map(str::parse::<f64>)) else {
                continue;
            };
            match (key, in_ram) {
                ("Pss:", true) => share.template_mib += kib / 1024.0,
                ("Pss:", false) => share.qemu_mib += kib / 1024.0,
                // Pages that it has written no longer belong to the file.
                ("Anonymous:", true) => share.written_mib += kib / 1024.0,
                _ => {}
            }
        }
        share.template_mib -= share.written_mib;
        share.pss_mib = share.template_mib + share.written_mib + share.qemu_mib;
        share
    }

    /// The memory that would be free without this QEMU.
    #[must_use]
    pub fn own_mib(&self) -> f64 {
        self.written_mib + self.qemu_mib
    }
}

/// A host with a guest and its idle children, in MiB.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// Size of the guest's memory.
    pub memory_mib: u32,
    /// Memory of its RAM file before the fork.
    pub guest_mib: f64,
    /// Number of files that children map as their template.
    pub templates: usize,
    /// Memory of these files.
    pub template_mib: f64,
    /// Children.
    pub children: Vec<Share>,
    /// The guest that was forked.
    pub parent: Share,
    /// Private memory of the daemon.
    pub daemon_mib: f64,
    /// Decrease of the host's available memory since before the guest was started.
    pub fell_mib: f64,
    /// Errors that children found in their memory.
    pub guest_errors: u64,
}

impl Memory {
    /// The memory that would be free without the children.
    #[must_use]
    pub fn own_mib(&self) -> f64 {
        self.children.iter().map(Share::own_mib).sum()
    }

    /// One template and the children.
    #[must_use]
    pub fn sum_mib(&self) -> f64 {
        self.template_mib + self.own_mib()
    }

    /// The same with the parent, whose memory is its own, and the daemon: the total for the host.
    #[must_use]
    pub fn all_mib(&self) -> f64 {
        self.sum_mib() + self.parent.pss_mib + self.daemon_mib
    }
}

/// Starts an idle guest, forks it, and measures the memory of its children.
///
/// # Errors
/// When it cannot be started, forked or measured.
pub fn idle(node: &Node, guest: Guest, count: usize) -> Result<Memory> {
    std::thread::sleep(SETTLE_INTERVAL);
    let (available, bytes, memory_mib) = (available_mib()?, guest.bytes(), guest.memory_mib);
    let parent = Parent::start(node, "idle", "thp", guest)?;
    let mut guest_mib = 0.0;
    for file in node.vm(&parent.name)?.ram_files() {
        guest_mib += in_memory_mib(&std::fs::metadata(&file)?);
    }
    let answer = done(node, &["create", &parent.name, "--count", &count.to_string()])?;
    let guest_errors = at_work(&parent, &answer)?;
    std::thread::sleep(SETTLE_INTERVAL);
    let mut templates = BTreeMap::new();
    let mut shares = Vec::new();
    for (name, pid) in children(&answer)? {
        let (share, file) = look(&name, pid, bytes)?;
        shares.push(share);
        templates.insert((file.dev(), file.ino()), in_memory_mib(&file));
    }
    let (parent_share, _) = look(&parent.name, node.vm(&parent.name)?.pid, bytes)?;
    let daemon = node.pid().and_then(resident_bytes).context("the daemon is gone")?;
    let memory = Memory {
        memory_mib,
        guest_mib,
        templates: templates.len(),
        template_mib: templates.values().sum(),
        children: shares,
        parent: parent_share,
        daemon_mib: daemon as f64 / MIB,
        fell_mib: available - available_mib()?,
        guest_errors,
    };
    eprintln!(
        "idle x {count}: template {:.0} MiB, children {:.0} MiB",
        memory.template_mib,
        memory.own_mib()
    );
    end(node, &answer)?;
    node.ask(&["stop", &parent.name, "--force"])?;
    Ok(memory)
}

/// The memory of a QEMU, and the file from which its guest's memory is mapped.
fn look(name: &str, pid: i32, guest_bytes: u64) -> Result<(Share, std::fs::Metadata)> {
    let start = ram_in(pid, guest_bytes)?;
    let ram = start..start + guest_bytes;
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    // Not by its name, because the template has no name any more.
    let mapped = format!("/proc/{pid}/map_files/{:x}-{:x}", ram.start, ram.end);
    let file = std::fs::metadata(&mapped).with_context(|| format!("could not look at {mapped}"))?;
    Ok((Share::read(name, &smaps, &ram), file))
}

fn in_memory_mib(file: &std::fs::Metadata) -> f64 {
    file.blocks() as f64 * 512.0 / MIB
}

/// Available memory of this host, in MiB.
///
/// # Errors
/// When the kernel does not report it.
pub fn available_mib() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<f64>().ok());
    Ok(kib.context("expected MemAvailable in /proc/meminfo, found none")? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-p 00000000 00:2b 17 /mem/template (deleted)
Rss:              20480 kB
Pss:               4096 kB
Anonymous:         1024 kB
VmFlags: rd wr mr
7f0040000000-7f0040200000 rw-p 00000000 00:00 0
Pss:               2048 kB
Anonymous:         2048 kB
";

    #[test]
    fn what_is_written_is_not_the_templates() {
        let share = Share::read("a", SMAPS, &(0x7f00_0000_0000..0x7f00_4000_0000));
        let expected =
            Share { name: "a".into(), pss_mib: 6.0, template_mib: 3.0, written_mib: 1.0, qemu_mib: 2.0 };
        assert_eq!(share, expected);
    }
}
