//! How much of the guest's memory is in use: pages with content, which QEMU maps.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::json;

use super::Memory;
use crate::daemon::Vm;
use crate::monitor::Monitor;

/// QEMU's second monitor, in the VM's folder: the first is the daemon's.
pub(super) const SOCKET: &str = "bench.sock";
/// What the guest itself uses, at the start of its memory.
const USED_MIB: u32 = 64;
/// A guest of this size or more has its memory from here on behind a hole of the address space, up to 4 GiB.
const WITH_HOLE_MIB: u32 = 3584;
const BELOW_HOLE_MIB: u32 = 3 << 10;
const BEHIND_HOLE_MIB: u32 = 4 << 10;
/// Memory that others keep.
const SPARE_MIB: f64 = 2048.0;

/// How much of a guest's memory is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Fill {
    /// What the guest needs for its work: some MiB.
    Empty,
    /// Half of it.
    Half,
    /// All of it.
    Full,
}

impl Fill {
    /// The name in tables.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Half => "half full",
            Self::Full => "full",
        }
    }

    /// Whether there is memory for it, at both nodes.
    ///
    /// # Errors
    /// How much is missing.
    pub fn fits(self, memory: Memory) -> Result<()> {
        let needed = 2.0 * f64::from(self.mib(memory)) + SPARE_MIB;
        let available = available_mib()?;
        ensure!(
            needed <= available,
            "needs {needed:.0} MiB of memory for two copies, found {available:.0} MiB: measured where there is more"
        );
        Ok(())
    }

    const fn mib(self, memory: Memory) -> u32 {
        match self {
            Self::Empty => 0,
            Self::Half => (memory.0 / 2).saturating_sub(USED_MIB),
            Self::Full => memory.0.saturating_sub(USED_MIB),
        }
    }

    /// Writes to the RAM file, and has QEMU touch it.
    pub(super) fn apply(self, vm: &Vm, memory: Memory) -> Result<()> {
        let (start, end) = (USED_MIB, USED_MIB + self.mib(memory));
        if start == end {
            return Ok(());
        }
        let files = vm.ram_files();
        let path = files.first().context("a RAM file")?;
        let file = File::options().write(true).open(path).context("could not open the RAM file")?;
        let mut content = vec![0; 1 << 20];
        for (page, bytes) in content.chunks_mut(4096).enumerate() {
            bytes[page % 4096] = 1;
        }
        for mib in start..end {
            file.write_all_at(&content, u64::from(mib) << 20)?;
        }
        let monitor = Monitor::connect(&vm.dir.join(SOCKET))?;
        // The monitor's deadline is for short commands.
        for mib in (start..end).step_by(256) {
            let last = end.min(mib + 256);
            for (from, to) in [(mib, last.min(BELOW_HOLE_MIB)), (mib.max(BELOW_HOLE_MIB), last)] {
                if from < to {
                    touch(&monitor, memory, from, to)?;
                }
            }
        }
        Ok(())
    }
}

fn touch(monitor: &Monitor, memory: Memory, from: u32, to: u32) -> Result<()> {
    let behind = memory.0 >= WITH_HOLE_MIB && from >= BELOW_HOLE_MIB;
    let address = if behind { from - BELOW_HOLE_MIB + BEHIND_HOLE_MIB } else { from };
    let (val, size) = (u64::from(address) << 20, u64::from(to - from) << 20);
    monitor.run("pmemsave", json!({"val": val, "size": size, "filename": "/dev/null"})).map(drop)
}

/// Memory that the machine can give without swapping, in MiB.
///
/// # Errors
/// When the kernel does not say.
pub fn available_mib() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: f64 = line.and_then(|l| l.split_whitespace().next()).context("MemAvailable")?.parse()?;
    Ok(kib / 1024.0)
}
