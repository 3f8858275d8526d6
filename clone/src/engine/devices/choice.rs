//! Which child gets which device, and with which addresses.

use std::collections::{BTreeMap, BTreeSet};

use rand::Rng;
use vmove_node::guest_devices::fit::Owned;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::device::{ChildDevice, DeviceRequest, Guid, Identity, Mac, PciAddress, VmDevice};
use vmove_types::fork_devices::Parting;

/// Property by which a network device is the primary of a pair, and what it names.
pub const FAILOVER_PAIR: &str = "failover_pair_id";

/// What the children of a fork get, in their order: those here first, then those of each other node.
#[derive(Debug, Clone, Default)]
pub struct Dealt {
    /// Devices of each child.
    pub children: Vec<Vec<VmDevice>>,
    /// The model of each role, where it is known.
    pub models: BTreeMap<String, String>,
    /// What is run in them.
    pub parting: Parting,
}

/// Deals devices out to children, whose nodes are these. `owned`: what the parent has.
///
/// # Errors
/// Everything that is wrong with the request.
pub fn deal(
    owned: &[Owned],
    asked: &[ChildDevice],
    nodes: &[String],
    parting: Parting,
    as_it_was: bool,
) -> Result<Dealt, Vec<Blocker>> {
    let mut dealing = Dealing {
        owned,
        nodes,
        as_it_was,
        children: vec![Vec::new(); nodes.len()],
        wrong: Vec::new(),
        taken: BTreeSet::new(),
    };
    // Those that name their child first: the others go to whoever is left.
    for (child, device) in asked.iter().filter_map(|one| Some((one.child?, &one.device))) {
        dealing.give(child, device);
    }
    for device in asked.iter().filter(|one| one.child.is_none()).map(|one| &one.device) {
        let lacks = |child: &Vec<VmDevice>| child.iter().all(|has| has.request.role != device.role);
        match dealing.children.iter().position(lacks) {
            Some(place) => dealing.give(place + 1, device),
            None => dealing.refuse(
                &device.role,
                format!(
                    "All {} children have a device {} already, and {device} is one more",
                    nodes.len(),
                    device.role
                ),
            ),
        }
    }
    dealing.refuse_same_identities();
    if !dealing.wrong.is_empty() {
        return Err(dealing.wrong);
    }
    let model = |one: &Owned| (one.device.request.role.clone(), one.model.clone());
    Ok(Dealt { children: dealing.children, models: owned.iter().map(model).collect(), parting })
}

struct Dealing<'a> {
    owned: &'a [Owned],
    nodes: &'a [String],
    /// The child is the guest itself, and keeps the identities of its devices.
    as_it_was: bool,
    children: Vec<Vec<VmDevice>>,
    wrong: Vec<Blocker>,
    taken: BTreeSet<(&'a str, PciAddress)>,
}

impl Dealing<'_> {
    fn refuse(&mut self, role: &str, message: String) {
        self.wrong.push(Blocker::new(BlockerCode::Device, message).about(role));
    }

    fn give(&mut self, child: usize, device: &DeviceRequest) {
        let (role, count) = (&device.role, self.nodes.len());
        let Some(owned) = self.owned.iter().find(|one| one.device.request.role == *role) else {
            let has: Vec<&str> = self.owned.iter().map(|one| one.device.request.role.as_str()).collect();
            let has = if has.is_empty() { "none".to_owned() } else { has.join(", ") };
            return self.refuse(
                role,
                format!("The parent owns no device {role}, so a child cannot have one; it owns: {has}"),
            );
        };
        let Some(node) = self.nodes.get(child - 1) else {
            return self
                .refuse(role, format!("{device} is for child {child}, and there are {count} children"));
        };
        if self.children[child - 1].iter().any(|has| has.request.role == *role) {
            return self.refuse(role, format!("Child {child} was given a device {role} before {device}"));
        }
        if !self.taken.insert((node, device.address)) {
            let message =
                format!("Device {} of {node} was given to two children: each needs its own", device.address);
            return self.refuse(role, message);
        }
        let paired = owned.device.properties.contains_key(FAILOVER_PAIR);
        let parent = owned.device.request.identity;
        let identity = match self.as_it_was {
            true => device.identity.or(parent),
            false => of_child(parent, device.identity, paired),
        };
        let request = DeviceRequest { identity, ..device.clone() };
        self.children[child - 1].push(VmDevice { request, ..owned.device.clone() });
    }

    /// No two guests may have the same address on a network.
    fn refuse_same_identities(&mut self) {
        let mut known: BTreeMap<String, String> = BTreeMap::new();
        for one in self.owned.iter().filter(|_| !self.as_it_was) {
            let Identity { mac, node_guid, port_guid, .. } = one.device.request.identity;
            for name in names(mac, node_guid, port_guid) {
                known.insert(name, format!("the parent's device {}", one.device.request.role));
            }
        }
        let mut wrong = Vec::new();
        for (place, devices) in self.children.iter().enumerate() {
            for VmDevice { request, .. } in devices {
                let Identity { mac, node_guid, port_guid, .. } = request.identity;
                for name in names(mac, node_guid, port_guid) {
                    let holder = format!("device {} of child {}", request.role, place + 1);
                    if let Some(other) = known.get(&name) {
                        wrong.push((
                            request.role.clone(),
                            format!("The {name} would be that of {holder} and of {other}: give each its own, or leave it out"),
                        ));
                    } else {
                        known.insert(name, holder);
                    }
                }
            }
        }
        wrong.into_iter().for_each(|(role, message)| self.refuse(&role, message));
    }
}

fn names(mac: Option<Mac>, node_guid: Option<Guid>, port_guid: Option<Guid>) -> impl Iterator<Item = String> {
    let mac = mac.map(|mac| format!("MAC address {mac}"));
    let node = node_guid.map(|guid| format!("node GUID {guid}"));
    let port = port_guid.map(|guid| format!("port GUID {guid}"));
    [mac, node, port].into_iter().flatten()
}

/// The addresses of a child's device: those that name one station are its own, made up where the parent's has one and none was asked for;
/// the networks that it is on (VLAN, P_Key) are the parent's, unless others were asked for. `paired`: its MAC address is that of the NIC that
/// it makes a pair with.
fn of_child(parent: Identity, asked: Identity, paired: bool) -> Identity {
    let fresh_mac = || parent.mac.filter(|_| !paired).map(|_| fresh_mac());
    Identity {
        mac: asked.mac.or_else(fresh_mac),
        node_guid: asked.node_guid.or_else(|| parent.node_guid.map(|_| fresh_guid())),
        port_guid: asked.port_guid.or_else(|| parent.port_guid.map(|_| fresh_guid())),
        ..asked.or(parent)
    }
}

/// An address of one station that no vendor owns, as children's other NICs get.
fn fresh_mac() -> Mac {
    let [a, b, c, d, e] = rand::rng().random::<[u8; 5]>();
    Mac([0x52, a, b, c, d, e])
}

/// A GUID that no vendor owns.
fn fresh_guid() -> Guid {
    let random = rand::rng().random::<u64>() >> 8;
    Guid(0x02 << 56 | random)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(texts: &[&str]) -> Vec<Owned> {
        let one = |text: &&str| {
            let request: DeviceRequest = text.parse().unwrap();
            let (id, bus) = (VmDevice::id_of(&request.role), "rp1".to_owned());
            let device = VmDevice { request, id, bus, properties: BTreeMap::new() };
            Owned { device, model: "8086:10ca".to_owned() }
        };
        texts.iter().map(one).collect()
    }

    fn dealt(parent: &[&str], asked: &[&str], nodes: &[&str]) -> Result<Dealt, String> {
        let asked: Vec<ChildDevice> = asked.iter().map(|text| text.parse().unwrap()).collect();
        let nodes: Vec<String> = nodes.iter().map(|node| (*node).to_owned()).collect();
        deal(&owned(parent), &asked, &nodes, Parting::default(), false)
            .map_err(|wrong| wrong.into_iter().map(|blocker| blocker.message).collect::<Vec<_>>().join("; "))
    }

    const PARENT: &[&str] = &[
        "nic=1:0.0,mac=52:54:00:00:00:01,vlan=7",
        "ib=2:0.0,node-guid=00:11:22:33:44:55:66:77,port-guid=00:11:22:33:44:55:66:78,pkey=0x8001",
    ];

    #[test]
    fn devices_go_to_the_children_that_are_named_and_then_in_turn() {
        let done =
            dealt(PARENT, &["nic=1:0.1", "1:nic=1:0.2", "nic=1:0.3", "2:ib=2:0.1"], &["a", "a", "a", "a"])
                .unwrap();
        let of = |place: usize| -> Vec<String> {
            done.children[place].iter().map(|d| format!("{}={}", d.request.role, d.request.address)).collect()
        };
        assert_eq!(of(0), ["nic=0000:01:00.2"]);
        assert_eq!(of(1), ["ib=0000:02:00.1", "nic=0000:01:00.1"]);
        assert_eq!(of(2), ["nic=0000:01:00.3"]);
        assert!(of(3).is_empty(), "a child without a device goes on without");
        assert_eq!(done.children[0][0].id, "vmove-nic", "QEMU knows it by the same id as the parent's");
    }

    #[test]
    fn addresses_of_stations_are_fresh_and_networks_stay() {
        let done = dealt(PARENT, &["nic=1:0.1", "nic=1:0.2", "1:ib=2:0.1"], &["a", "a"]).unwrap();
        let identity = |place: usize, role: &str| {
            done.children[place].iter().find(|d| d.request.role == role).unwrap().request.identity
        };
        let (first, second, ib) = (identity(0, "nic"), identity(1, "nic"), identity(0, "ib"));
        assert!(first.mac.is_some() && second.mac.is_some() && first.mac != second.mac);
        assert_ne!(first.mac.unwrap().to_string(), "52:54:00:00:00:01");
        assert_eq!((first.vlan, second.vlan, ib.pkey), (Some(7), Some(7), Some(0x8001)));
        assert!(ib.node_guid.is_some() && ib.node_guid != ib.port_guid);
        let parent: DeviceRequest = PARENT[1].parse().unwrap();
        assert_ne!(ib.node_guid, parent.identity.node_guid);
        // What the parent's does not have, and nobody asked for, the card decides.
        let plain = dealt(&["nic=1:0.0"], &["nic=1:0.1,vlan=9"], &["a"]).unwrap();
        assert_eq!(
            plain.children[0][0].request.identity,
            "nic=1:0.1,vlan=9".parse::<DeviceRequest>().unwrap().identity
        );
    }

    #[test]
    fn what_cannot_be_dealt_is_refused_by_name() {
        for (asked, words) in [
            (&["gpu=1:0.1"][..], "owns no device gpu, so a child cannot have one; it owns: nic, ib"),
            (&["3:nic=1:0.1"], "is for child 3, and there are 2 children"),
            (&["1:nic=1:0.1", "1:nic=1:0.2"], "Child 1 was given a device nic before"),
            (&["nic=1:0.1", "nic=1:0.2", "nic=1:0.3"], "All 2 children have a device nic already"),
            (&["nic=1:0.1", "nic=1:0.1"], "Device 0000:01:00.1 of a was given to two children"),
            (
                &["nic=1:0.1,mac=52:54:00:00:00:01"],
                "MAC address 52:54:00:00:00:01 would be that of device nic of child 1 and of the parent's",
            ),
            (
                &["nic=1:0.1,mac=52:54:00:00:00:02", "nic=1:0.2,mac=52:54:00:00:00:02"],
                "would be that of device nic of child 2 and of device nic of child 1",
            ),
            (&["ib=2:0.1,node-guid=00:11:22:33:44:55:66:77"], "node GUID 00:11:22:33:44:55:66:77 would be"),
        ] {
            let message = dealt(PARENT, asked, &["a", "a"]).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
        // The same address of two nodes is two devices.
        dealt(PARENT, &["nic=1:0.1", "nic=1:0.1"], &["a", "b"]).unwrap();
        let none = dealt(&[], &["nic=1:0.1"], &["a"]).unwrap_err();
        assert!(none.contains("it owns: none"), "{none}");
    }
}
