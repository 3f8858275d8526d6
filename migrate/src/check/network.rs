//! The guest's taps here and there: a guest whose tap has no bridge at the destination runs there without a network.

use std::path::Path;

use vmove_qmp::inspect::VmFacts;

use crate::proto::message::TapPlace;
use crate::taps::Tap;

/// Where the kernel tells of network interfaces, in the namespace in which it was mounted.
const INTERFACES: &str = "/sys/class/net";

/// The guest's taps at the source, and the bridges that they are in.
pub(crate) fn places(facts: &VmFacts, pid: u32) -> Vec<TapPlace> {
    // Of those in another network nothing is known here.
    let taps = Tap::of(&facts.netdevs, pid).unwrap_or_default();
    taps.into_iter().map(|tap| TapPlace { bridge: bridge(Path::new(INTERFACES), &tap), tap }).collect()
}

fn bridge(interfaces: &Path, tap: &Tap) -> Option<String> {
    let master = std::fs::read_link(interfaces.join(&tap.interface).join("master")).ok()?;
    Some(master.file_name()?.to_str()?.to_owned())
}

/// What is not ready at the destination, which is called `node`.
pub(crate) fn warnings(taps: &[TapPlace], node: &str, source: &str) -> Vec<String> {
    taps.iter().filter_map(|place| warning(Path::new(INTERFACES), place, node, source)).collect()
}

fn warning(interfaces: &Path, place: &TapPlace, node: &str, source: &str) -> Option<String> {
    // One that is in no bridge has a network by other means, which are not ours to look at.
    let (name, there) = (&place.tap.interface, place.bridge.as_ref()?);
    let folder = interfaces.join(name);
    let expected =
        format!("expected tap {name} in a bridge of {node}, as in {there} of {source}, and up; found");
    let make =
        format!("ip tuntap add dev {name} mode tap user QEMU-USER && ip link set {name} master {there} up");
    if !folder.exists() {
        return Some(format!("{expected} no such interface, so the guest may be without a network: {make}"));
    }
    if bridge(interfaces, &place.tap).is_none() {
        return Some(format!(
            "{expected} it in none, so the guest would be without a network: ip link set {name} master {there} up"
        ));
    }
    let flags = std::fs::read_to_string(folder.join("flags")).ok()?;
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).ok()?;
    // IFF_UP.
    (flags & 1 == 0).then(|| format!("{expected} it down: ip link set {name} up"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_that_is_not_ready_is_told_with_the_command_that_mends_it() {
        let root = tempfile::tempdir().unwrap();
        let place = |bridge: Option<&str>| TapPlace {
            tap: Tap { netdev: "net0".into(), interface: "guest0".into() },
            bridge: bridge.map(str::to_owned),
        };
        let said = |bridge| warning(root.path(), &place(bridge), "b", "a");
        assert!(said(Some("lan")).unwrap().contains("no such interface"));
        let folder = root.path().join("guest0");
        std::fs::create_dir(&folder).unwrap();
        assert!(said(Some("lan")).unwrap().ends_with("ip link set guest0 master lan up"));
        assert_eq!(said(None), None, "at the source it is in no bridge either");
        std::os::unix::fs::symlink("../../devices/virtual/net/lan", folder.join("master")).unwrap();
        std::fs::write(folder.join("flags"), "0x1002\n").unwrap();
        assert!(said(Some("lan")).unwrap().ends_with("found it down: ip link set guest0 up"));
        std::fs::write(folder.join("flags"), "0x1003\n").unwrap();
        assert_eq!(said(Some("lan")), None);
        assert_eq!(bridge(root.path(), &place(None).tap).as_deref(), Some("lan"));
    }
}
