//! The number of a VM.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use vmove_types::proxmox::{MONITORS, vm_name};

/// What was given is no number of a VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Expected the number of a VM, 100 to 999999999, found {0:?}: `qm list` shows them")]
pub struct NoVmid(String);

/// The number by which Proxmox VE knows a VM, unique in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vmid(u32);

impl Vmid {
    /// The number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The socket of the monitor for vmove.
    #[must_use]
    pub fn monitor(self) -> PathBuf {
        PathBuf::from(format!("{MONITORS}/{self}.qmp"))
    }

    /// The name by which `vmoved` tells of it.
    #[must_use]
    pub fn name(self) -> String {
        vm_name(self)
    }

    /// The VM whose guest memory is in this file. None of names that vmove itself gives for a time.
    #[must_use]
    pub fn of_memory(file: &Path) -> Option<Self> {
        file.file_name()?.to_str()?.split_once('-')?.0.parse().ok()
    }
}

impl FromStr for Vmid {
    type Err = NoVmid;

    fn from_str(text: &str) -> Result<Self, NoVmid> {
        let wrong = || NoVmid(text.to_owned());
        // `+100` and `0100` are numbers for Rust, and no VMs.
        let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
        let number = text.parse().ok().filter(|_| plain).ok_or_else(wrong)?;
        if (100..=999_999_999).contains(&number) { Ok(Self(number)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Vmid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_of_vms_are_taken() {
        assert_eq!("100".parse::<Vmid>().unwrap().number(), 100);
        for wrong in ["", "99", "1000000000", "+100", "0100", "100 ", "web", "-100", "100/../x"] {
            assert!(wrong.parse::<Vmid>().is_err(), "{wrong:?}");
        }
    }
}
