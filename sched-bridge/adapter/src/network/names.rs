//! Names and addresses of a network, all derived from the names of cluster, network and member: the same at each run and on each node.

use std::net::Ipv4Addr;

use xxhash_rust::xxh3::xxh3_64;

/// Addresses of private networks. Each network is alone with them, so all may have the same.
pub const SUBNET: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 0);
/// Length of the prefix of [`SUBNET`].
pub const PREFIX: u8 = 16;
/// So many members fit; above them are the addresses of name servers.
pub const MOST_MEMBERS: usize = 0xfe00;

/// Names of what a network consists of on a node. Interfaces have at most 15 characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The Linux bridge.
    pub bridge: String,
    /// The VXLAN interface.
    pub vxlan: String,
    /// The end of the name server's cable on the bridge.
    pub cable: String,
    /// The beginning of the network namespace's name; that of the node follows.
    pub namespace: String,
    /// What the interfaces have as their alias, by which they are known as ours.
    pub alias: String,
    /// The VXLAN network identifier that is tried first.
    pub first_vni: u32,
}

impl Names {
    /// Of a network.
    #[must_use]
    pub fn new(cluster: &str, network: &str) -> Self {
        let hash = hash(&[cluster, network]);
        let id = hex(hash);
        Self {
            bridge: format!("vb{id}"),
            vxlan: format!("vx{id}"),
            cable: format!("vd{id}"),
            namespace: format!("vmove-{id}"),
            alias: format!("vmove {cluster}/{network}"),
            // 24 bits, not 0.
            first_vni: u32::try_from(hash & 0x00ff_ffff).unwrap_or(1).max(1),
        }
    }
}

/// The tap interface of a member.
#[must_use]
pub fn tap(cluster: &str, network: &str, member: &str) -> String {
    format!("vt{}", hex(hash(&[cluster, network, member])))
}

/// The MAC address of a member: locally administered.
#[must_use]
pub fn mac(cluster: &str, network: &str, member: &str) -> String {
    let bytes = hash(&[cluster, network, member]).to_be_bytes();
    let [a, b, c, d, e, ..] = bytes;
    format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}")
}

/// The network namespace of a container on its node. No name has a plus sign.
#[must_use]
pub fn namespace(cluster: &str, network: &str, node: &str, container: &str) -> String {
    format!("{}+{container}", of_node(&Names::new(cluster, network), node))
}

/// The network namespace of the name server of a network on a node; those of its containers begin so.
#[must_use]
pub fn of_node(names: &Names, node: &str) -> String {
    format!("{}-{node}", names.namespace)
}

/// The address of the member with this number, from 0; none if there are too many.
#[must_use]
pub fn address(number: usize) -> Option<Ipv4Addr> {
    let offset = u32::try_from(number).ok().filter(|_| number < MOST_MEMBERS)? + 1;
    Some(Ipv4Addr::from(u32::from(SUBNET) + offset))
}

/// The address of the name server on the node with this number, from 0; none if there are too many.
#[must_use]
pub fn server(number: usize) -> Option<Ipv4Addr> {
    let offset = u32::try_from(number).ok().filter(|number| *number < 0xff)? + 0xff00;
    Some(Ipv4Addr::from(u32::from(SUBNET) + offset))
}

fn hash(words: &[&str]) -> u64 {
    // No name has a slash.
    xxh3_64(words.join("/").as_bytes())
}

/// Ten digits: with two letters before them, an interface's name has room for them.
fn hex(hash: u64) -> String {
    format!("{:010x}", hash >> 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_and_differ() {
        let one = Names::new("app", "app-0-private");
        for name in [&one.bridge, &one.vxlan, &one.cable, &tap("app", "net", "vm-0")] {
            assert!(name.len() <= 15, "{name}");
        }
        assert_eq!(one, Names::new("app", "app-0-private"));
        assert_ne!(one.bridge, Names::new("app", "app-0-bridge").bridge);
        assert_ne!(mac("a", "b", "c"), mac("a", "b", "d"));
        assert_eq!(address(0).map(|own| own.to_string()).as_deref(), Some("10.213.0.1"));
        // The addresses of members end before those of servers.
        assert!(address(MOST_MEMBERS - 1) < server(0) && address(MOST_MEMBERS).is_none());
        assert_eq!(server(254).map(|own| own.to_string()).as_deref(), Some("10.213.255.254"));
    }
}
