//! The scripts that make and remove a network on a node.
//!
//! Names are checked before: nothing in them means anything to a shell.

use std::fmt::Write;
use std::net::IpAddr;

use vmove_bridge_types::adapter::Member;

use super::names::{self, Names, PREFIX};
use super::node::Found;

/// Where programs in a network namespace find their name server, as `ip netns` has it.
pub const RESOLVERS: &str = "/etc/netns";

/// A network on one node.
#[derive(Debug)]
pub struct Part<'a> {
    /// Its names.
    pub names: &'a Names,
    /// The node.
    pub node: &'a str,
    /// Who is on the network.
    pub members: &'a [Member],
    /// Size of the largest packet. Unit: byte.
    pub mtu: u16,
    /// The number of QEMU's user, as a script finds it.
    pub user: String,
    /// How it is connected.
    pub link: Link<'a>,
}

/// How a network is connected with what is outside of the node.
#[derive(Debug)]
pub enum Link<'a> {
    /// A network of its own, with a name server.
    Private {
        /// VXLAN network identifier.
        vni: u32,
        /// UDP port.
        port: u16,
        /// Own address; none if this is the only node.
        own: Option<IpAddr>,
        /// Those of the other nodes.
        others: Vec<IpAddr>,
        /// Number of the node, which has the name server of that number.
        number: usize,
    },
    /// The network of this interface.
    Public {
        /// The interface.
        interface: &'a str,
    },
}

impl Part<'_> {
    /// The bridge to which taps are attached.
    #[must_use]
    pub fn bridge<'b>(&'b self, found: &Found) -> &'b str {
        match &self.link {
            Link::Public { interface } if is_bridge(found, interface) => interface,
            _ => &self.names.bridge,
        }
    }

    /// Interfaces that it consists of, apart from taps.
    #[must_use]
    pub fn interfaces(&self, found: &Found) -> Vec<&str> {
        let names = self.names;
        let mut all = Vec::new();
        match &self.link {
            Link::Private { own, .. } => {
                all.extend([names.bridge.as_str(), &names.cable]);
                all.extend(own.map(|_| names.vxlan.as_str()));
            }
            Link::Public { .. } => {
                let own = self.bridge(found) == names.bridge;
                all.extend(own.then_some(names.bridge.as_str()));
            }
        }
        all.extend(self.members().map(|member| member.interface.as_str()));
        all
    }

    /// Who has an interface on this node: VMs, which may move here, and its containers.
    fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|own| own.namespace.is_empty() || own.node == self.node)
    }

    /// What the node lacks of it.
    #[must_use]
    pub fn missing(&self, found: &Found) -> Vec<String> {
        let lacks = self.interfaces(found).into_iter().filter(|name| found.named(name).is_none());
        let mut lacks: Vec<String> = lacks.map(|name| format!("interface {name}")).collect();
        if matches!(self.link, Link::Private { .. }) && !found.serves {
            lacks.push("its name server".to_owned());
        }
        lacks
    }

    /// Makes what is missing, and starts the name server anew.
    #[must_use]
    pub fn make(&self, found: &Found) -> String {
        let mut out = format!("set -eu\nuser={}\n", self.user);
        let (names, mtu, bridge) = (self.names, self.mtu, self.bridge(found));
        let is_new = |name: &str| found.named(name).is_none();
        if bridge == names.bridge && is_new(bridge) {
            line(&mut out, format_args!("ip link add {bridge} type bridge"));
            self.claim(&mut out, bridge, "up");
        }
        match &self.link {
            Link::Private { vni, port, own, others, number } => {
                if let Some(own) = own {
                    let vxlan = &names.vxlan;
                    if is_new(vxlan) {
                        line(
                            &mut out,
                            format_args!(
                                "ip link add {vxlan} type vxlan id {vni} dstport {port} local {own}"
                            ),
                        );
                        self.claim(&mut out, vxlan, &format!("mtu {mtu} master {bridge} up"));
                    }
                    for other in others {
                        // Fails if it is known already.
                        line(
                            &mut out,
                            format_args!(
                                "bridge fdb append 00:00:00:00:00:00 dev {vxlan} dst {other} 2>/dev/null || bridge fdb show dev {vxlan} | grep -q 'dst {other} '"
                            ),
                        );
                    }
                }
                self.serve(&mut out, found, *number);
            }
            Link::Public { interface } if bridge == names.bridge => {
                line(&mut out, format_args!("ip link set {interface} master {bridge} up"));
            }
            Link::Public { .. } => {}
        }
        for member in self.members() {
            let tap = &member.interface;
            if is_new(tap) && !member.namespace.is_empty() {
                self.connect_container(&mut out, member);
            } else if is_new(tap) {
                line(&mut out, format_args!("ip tuntap add dev {tap} mode tap user \"$user\""));
                let size = match self.link {
                    Link::Private { .. } => format!("mtu {mtu} "),
                    Link::Public { .. } => String::new(),
                };
                self.claim(&mut out, tap, &format!("{size}master {bridge} up"));
            }
        }
        out
    }

    /// A network namespace, in which a container is run, with a card of the network.
    fn connect_container(&self, out: &mut String, member: &Member) {
        let Member { interface, namespace, mac, address, .. } = member;
        let mtu = self.mtu;
        line(out, format_args!("ip netns add {namespace} 2>/dev/null || true"));
        line(out, format_args!("ip link add {interface} type veth peer name eth0 netns {namespace}"));
        self.claim(out, interface, &format!("mtu {mtu} master {} up", self.names.bridge));
        line(out, format_args!("ip -n {namespace} link set eth0 address {mac} mtu {mtu} up"));
        line(out, format_args!("ip -n {namespace} address add {address}/{PREFIX} dev eth0"));
        line(out, format_args!("ip -n {namespace} link set lo up"));
        if let Link::Private { number, .. } = self.link {
            let server = names::server(number).map(|own| own.to_string()).unwrap_or_default();
            let folder = format!("{RESOLVERS}/{namespace}");
            line(out, format_args!("mkdir -p {folder} && echo 'nameserver {server}' >{folder}/resolv.conf"));
        }
    }

    fn claim(&self, out: &mut String, interface: &str, more: &str) {
        line(out, format_args!("ip link set {interface} alias '{}' {more}", self.names.alias));
    }

    /// A name server of the network in a namespace of its own, so that the node itself is not on the network. It answers by DHCP those
    /// members that are on this node, and knows the names of all.
    fn serve(&self, out: &mut String, found: &Found, number: usize) {
        let (cable, mtu) = (&self.names.cable, self.mtu);
        let namespace = names::of_node(self.names, self.node);
        let server = names::server(number).map(|own| own.to_string()).unwrap_or_default();
        if found.named(cable).is_none() {
            line(out, format_args!("ip netns del {namespace} 2>/dev/null || true"));
            line(out, format_args!("ip netns add {namespace}"));
            line(out, format_args!("ip link add {cable} type veth peer name dns netns {namespace}"));
            self.claim(out, cable, &format!("mtu {mtu} master {} up", self.names.bridge));
            line(out, format_args!("ip -n {namespace} address add {server}/{PREFIX} dev dns"));
            line(out, format_args!("ip -n {namespace} link set lo up"));
            line(out, format_args!("ip -n {namespace} link set dns mtu {mtu} up"));
        }
        line(out, format_args!("{}", end_processes(&namespace)));
        let first = names::SUBNET;
        let mut words = format!(
            "ip netns exec {namespace} dnsmasq --conf-file=/dev/null --pid-file= --leasefile-ro --no-resolv --no-hosts --no-ping --interface=dns --bind-interfaces --user=nobody --group=nogroup --dhcp-range={first},static,1h --dhcp-option=option:router --dhcp-option=option:mtu,{mtu}"
        );
        for Member { name, aliases, node, mac, address, namespace, .. } in self.members {
            let all: Vec<&str> = std::iter::once(name).chain(aliases).map(String::as_str).collect();
            let _ = write!(words, " --host-record={},{address}", all.join(","));
            // A container has its address.
            if namespace.is_empty() {
                let answer =
                    if node == self.node { format!("{name},{address}") } else { "ignore".to_owned() };
                let _ = write!(words, " --dhcp-host={mac},{answer}");
            }
        }
        line(out, format_args!("{words} </dev/null"));
    }
}

/// Whether an interface is a Linux bridge.
#[must_use]
pub fn is_bridge(found: &Found, interface: &str) -> bool {
    found.named(interface).is_some_and(|own| own.linkinfo.info_kind == "bridge")
}

/// Removes all interfaces of a network and its name server.
#[must_use]
pub fn remove(names: &Names, node: &str, found: &Found) -> String {
    let namespace = names::of_node(names, node);
    let mut out = String::new();
    line(&mut out, format_args!("{}", end_processes(&namespace)));
    // With it, the cable goes; and with those of containers, theirs.
    line(&mut out, format_args!("ip netns del {namespace} 2>/dev/null"));
    line(
        &mut out,
        format_args!(
            "for space in $(ip netns list | cut -d' ' -f1); do case $space in {namespace}+*) ip netns del $space; rm -rf {RESOLVERS}/$space;; esac; done"
        ),
    );
    // Ours have such names; what else has the alias is not for a shell.
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric());
    for own in found.interfaces.iter().filter(|own| own.ifalias == names.alias && is_name(&own.ifname)) {
        line(&mut out, format_args!("ip link del {} 2>/dev/null", own.ifname));
    }
    out.push_str("exit 0\n");
    out
}

/// Ends the processes of a namespace, and waits until they have ended.
fn end_processes(namespace: &str) -> String {
    format!(
        "for try in 1 2 3 4 5 6 7 8 9 10; do pids=$(ip netns pids {namespace} 2>/dev/null) || pids=; [ -n \"$pids\" ] || break; kill $pids 2>/dev/null || true; sleep 0.1; done"
    )
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{text}");
}
