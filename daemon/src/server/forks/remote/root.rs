//! The parent's node spreads the template.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmove_clone::report::{Distribution, Multicast as MulticastReport, WayEstimate};
use vmove_clone::template::Template;
use vmove_fabric::udp::UdpMulticast;
use vmove_fabric::{Fabric, Group, GroupAddress, Multicast, PeerAddress, Session};
use vmove_migrate::clock::{Mono, ms};
use vmove_spread::plan::{Leaf, Network, Way};
use vmove_spread::{HostId, Root, RootOptions};

use super::fabric::ForkFabric;
use super::message::address_of;
use super::{Away, Remote, memory, udp};
use crate::api::forks::ForkWay;
use crate::api::problem::chain;

/// Hosts make room for the template first; one that takes longer comes late.
const GATHER: Duration = Duration::from_secs(5);
/// Bytes per second in a megabit per second.
const MBIT: f64 = 125_000.0;

/// A template under way.
pub struct Spreading {
    root: Root,
    pub distribution: Distribution,
    /// Bytes of one piece, by which hosts count.
    pub piece: u64,
    /// Hosts that others read from.
    pub listens: Vec<bool>,
    pub checksum: Option<u64>,
}

/// The hosts of one fork, as the choice of the way needs them.
pub struct Hosts {
    leaves: Vec<Option<String>>,
    hear: bool,
    way: Option<ForkWay>,
    verify: bool,
}

impl Hosts {
    pub fn of(remote: &Remote, away: &Away) -> Self {
        Self {
            leaves: away.hosts.iter().map(|h| remote.leaf(&h.target.name).map(str::to_owned)).collect(),
            hear: away.hosts.iter().all(|host| host.hears),
            way: away.way,
            verify: away.verify,
        }
    }

    fn network(&self, remote: &Remote, payload: Option<usize>) -> Network {
        let policy = &remote.policy;
        #[allow(clippy::cast_precision_loss)]
        let rate = |mbit: u64| mbit as f64 * MBIT;
        // A node whose leaf nobody knows is on that of the parent.
        let mut names: Vec<Option<&str>> = vec![policy.leaf.as_deref()];
        let mut hosts = vec![0];
        for leaf in &self.leaves {
            let leaf = leaf.as_deref().or(policy.leaf.as_deref());
            let known = names.iter().position(|name| *name == leaf);
            hosts.push(known.unwrap_or_else(|| {
                names.push(leaf);
                names.len() - 1
            }));
        }
        let uplink = policy.uplink_mbit.map_or(f64::MAX, rate);
        Network {
            leaves: vec![Leaf { uplink }; names.len()],
            hosts,
            link: rate(policy.link_mbit),
            multicast: payload.is_some() && (self.hear || self.way == Some(ForkWay::Multicast)),
            loss: 0.0,
            payload: payload.and_then(|p| u32::try_from(p).ok()).unwrap_or(1440),
        }
    }
}

/// Takes the checksums of a template, chooses the way and begins. Blocks; `begun` is when the fork was asked for.
pub fn begin(
    remote: &Remote,
    fabric: &Arc<ForkFabric>,
    template: &Template,
    hosts: &Hosts,
    begun: Mono,
) -> Result<Spreading, String> {
    let (regions, order) = memory::outgoing(&**fabric, template)?;
    let multicast = group(remote, fabric)?;
    let payload = multicast.as_ref().map(|(_, _, payload)| *payload);
    let network = hosts.network(remote, payload);
    let bytes = order.iter().map(|extent| u64::from(extent.count) * u64::from(vmove_spread::CHUNK)).sum();
    let choice = network.choose(bytes).map_err(|e| chain(&e))?;
    let way = hosts.way.map_or(choice.way, way);
    let multicast = multicast.filter(|_| way == Way::Multicast);
    let payload = multicast.as_ref().map(|(_, _, payload)| *payload);
    let spread = vmove_spread::Template::new(&**fabric, regions, order, payload).map_err(|e| chain(&e))?;
    let piece = u64::from(spread.layout().piece_bytes());
    let routes = network.routes(way);
    let ids = || (1..).take(hosts.leaves.len()).map(HostId);
    let listens = ids().map(|id| routes.values().any(|route| route.members.contains(&id))).collect();
    #[allow(clippy::cast_precision_loss)]
    let rate = remote.policy.multicast_mbit.map_or(network.link * 0.8, |mbit| mbit as f64 * MBIT);
    let options = RootOptions {
        rate,
        routes,
        addresses: ids().map(|id| (id, PeerAddress::Named(address_of(id.0)))).collect::<BTreeMap<_, _>>(),
        expected: hosts.leaves.len(),
        gather: GATHER,
    };
    let distribution = Distribution {
        way: way.to_string(),
        asked: hosts.way.is_some(),
        memory_bytes: bytes,
        root_bytes: 0,
        prepared_ms: ms(Mono::now().since(begun)),
        estimates: choice
            .estimates
            .into_iter()
            .map(|e| WayEstimate { way: e.way.to_string(), seconds: e.seconds, arithmetic: e.arithmetic })
            .collect(),
    };
    let checksum = hosts.verify.then(|| template.checksum()).transpose().map_err(|e| chain(&e))?;
    let shared: Arc<dyn Fabric> = fabric.clone();
    let group = multicast.as_ref().map(|(sender, group, _)| (sender as &dyn Multicast, *group));
    let root = Root::start(shared, group, spread, options).map_err(|e| chain(&e))?;
    Ok(Spreading { root, distribution, piece, listens, checksum })
}

/// Multicast as far as this node allows it: with the most bytes of a datagram.
fn group(remote: &Remote, fabric: &ForkFabric) -> Result<Option<(UdpMulticast, Group, usize)>, String> {
    let Ok((address, interface)) = remote.multicast() else { return Ok(None) };
    let session = Session::draw().map_err(|e| chain(&e))?;
    let group = Group { address: GroupAddress::Udp(address), session };
    let multicast = udp(&fabric.tcp, interface);
    let payload = multicast.sender(&group).map_err(|e| chain(&e))?.max_payload();
    Ok(Some((multicast, group, payload)))
}

const fn way(asked: ForkWay) -> Way {
    match asked {
        ForkWay::Unicast => Way::Unicast,
        ForkWay::Multicast => Way::Multicast,
        ForkWay::Pipeline => Way::Pipeline,
        ForkWay::TwoStage => Way::TwoStage,
    }
}

impl Spreading {
    /// Ends it. Blocks.
    pub fn end(self) -> (Distribution, MulticastReport) {
        let status = self.root.status();
        drop(self.root);
        let root_bytes = status.read_bytes + status.multicast.bytes_sent;
        let multicast = MulticastReport {
            sent_bytes: status.multicast.bytes_sent,
            lost_chunks: status.totals.lost,
            repaired_chunks: status.totals.resent + status.totals.left_to_read,
        };
        (Distribution { root_bytes, ..self.distribution }, multicast)
    }
}
