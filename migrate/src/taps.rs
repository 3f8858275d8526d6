//! The taps of a QEMU.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_qmp::inspect::{self, NetdevFact};
use vmove_qmp::{Client, QmpError};

/// A tap by which a guest reaches the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tap {
    /// QEMU's id of the network back end.
    pub netdev: String,
    /// The network interface.
    pub interface: String,
}

/// Whether a process is in our network namespace.
fn in_our_network(process: &Path) -> bool {
    let network = |process: &Path| std::fs::read_link(process.join("ns/net")).ok();
    let ours = network(Path::new("/proc/self"));
    ours.is_some() && network(process) == ours
}

/// Interfaces of the taps that a process has open, by the numbers of their descriptors, in ascending order.
pub(crate) fn open_in(process: &Path) -> Vec<(i32, String)> {
    let Ok(entries) = std::fs::read_dir(process.join("fdinfo")) else { return Vec::new() };
    let mut found: Vec<(i32, String)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.parse().ok()?;
            let text = std::fs::read_to_string(entry.path()).ok()?;
            // Only taps have it.
            let interface = text.lines().find_map(|line| line.strip_prefix("iff:"))?.trim();
            Some((number, interface.to_owned()))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Why the taps of a QEMU are not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapsError {
    /// QEMU does not say.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Interfaces there are not ours, whatever their names.
    #[error("QEMU is in another network namespace than vmoved")]
    OtherNetwork,
}

impl Tap {
    /// The taps of the QEMU with this monitor and this process id.
    pub(crate) async fn all(client: &Client, pid: u32) -> Result<Vec<Self>, TapsError> {
        Self::of(&inspect::netdevs(client).await?, pid)
    }

    /// The taps of the QEMU of this process, which says so of its network back ends.
    pub(crate) fn of(netdevs: &[NetdevFact], pid: u32) -> Result<Vec<Self>, TapsError> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let taps = Self::among(netdevs, &process);
        if taps.is_empty() || in_our_network(&process) { Ok(taps) } else { Err(TapsError::OtherNetwork) }
    }

    /// The taps among QEMU's network back ends. `process`: its folder in `/proc`, by which taps are known that others have opened for it.
    fn among(netdevs: &[NetdevFact], process: &Path) -> Vec<Self> {
        let taps: Vec<&NetdevFact> = netdevs.iter().filter(|netdev| netdev.kind == "tap").collect();
        let opened = open_in(process);
        let of = |netdev: &NetdevFact| {
            if let Some(name) = netdev.option("ifname") {
                return Some(name.to_owned());
            }
            if let Some(number) = netdev.option("fd").and_then(|number| number.parse::<i32>().ok()) {
                return opened.iter().find(|(fd, _)| *fd == number).map(|(_, name)| name.clone());
            }
            // Opened by a helper, which QEMU does not number.
            match (&taps[..], &opened[..]) {
                ([_], [(_, name)]) => Some(name.clone()),
                _ => None,
            }
        };
        taps.iter()
            .filter_map(|netdev| Some(Self { netdev: netdev.id.clone(), interface: of(netdev)? }))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn netdev(id: &str, said: &str) -> NetdevFact {
        let kind = said.split(',').find_map(|part| part.strip_prefix("type="));
        serde_json::from_value(json!({ "id": id, "kind": kind, "said": said })).unwrap()
    }

    #[test]
    fn taps_are_known_by_name_by_descriptor_and_as_the_only_one() {
        let process = tempfile::tempdir().unwrap();
        let info = process.path().join("fdinfo");
        std::fs::create_dir(&info).unwrap();
        std::fs::write(info.join("7"), "pos:\t0\nflags:\t0100002\niff:\tvnet3\n").unwrap();
        std::fs::write(info.join("8"), "pos:\t0\nflags:\t02\n").unwrap();
        let tap = |netdev: &str, interface: &str| Tap { netdev: netdev.into(), interface: interface.into() };
        let of = |netdevs: &[NetdevFact]| Tap::among(netdevs, process.path());
        let named = netdev("n0", "index=0,type=tap,ifname=guest0,script=no,downscript=no");
        let passed = netdev("n1", "index=0,type=tap,fd=7");
        let user = netdev("n2", "index=0,type=user,net=10.0.2.0,restrict=off");
        assert_eq!(
            of(&[named.clone(), passed.clone(), user.clone()]),
            [tap("n0", "guest0"), tap("n1", "vnet3")]
        );
        let helped = netdev("n3", "index=0,type=tap,helper=/usr/lib/qemu/qemu-bridge-helper,br=br0");
        assert_eq!(of(&[helped.clone(), user]), [tap("n3", "vnet3")]);
        // Which of two it is nobody can tell.
        assert_eq!(of(&[named, helped]), [tap("n0", "guest0")]);
        assert_eq!(of(&[netdev("n4", "index=0,type=tap,fd=9")]), []);
    }
}
