//! The parent's node spreads the template.

use std::sync::Arc;
use std::time::Duration;

use crate::check::GuestRam;
use crate::template::Template;
use vmove_fabric::{Fabric, FabricKind, Group, GroupAddress, Multicast, PeerAddress, Region};
use vmove_spread::plan::{Leaf, Network, Way};
use vmove_spread::{HostId, Root, RootOptions};
use vmove_types::fork_report::{Distribution, Multicast as MulticastReport, WayEstimate};
use vmove_types::time::{Mono, ms};

use super::fabric::{Connections, ForkFabric};
use super::memory::Outgoing;
use crate::engine::error::DistributionError;
use crate::engine::message::{RamPart, Taken, address_of};
use crate::engine::peers::Peers;
use vmove_types::fork::ForkWay;
use vmove_types::problem::chain;

/// Hosts make room for the template first; one that takes longer comes late.
const GATHER_TIMEOUT: Duration = Duration::from_secs(5);
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
    /// What of the RAM blocks has memory.
    pub parts: Vec<RamPart>,
    /// Why it is not offered over RDMA; `None`: it is.
    pub no_verbs: Option<String>,
}

/// The hosts of one fork, as the choice of the way needs them.
pub struct Hosts {
    /// The leaf switch of each, where it is known.
    pub leaves: Vec<Option<String>>,
    /// How each would get the template.
    pub taken: Vec<Taken>,
    /// The way that was asked for.
    pub way: Option<ForkWay>,
    /// They compare a checksum over all memory.
    pub verify: bool,
}

impl Hosts {
    /// `kind`: the fabric that datagrams would go beside.
    fn network(&self, peers: &Peers, kind: FabricKind, payload: Option<usize>) -> Network {
        let hear = self.taken.iter().all(|taken| taken.hears && (kind == FabricKind::Tcp || taken.verbs));
        let policy = &peers.policy;
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
            multicast: payload.is_some() && (hear || self.way == Some(ForkWay::Multicast)),
            loss: 0.0,
            payload: payload.and_then(|p| u32::try_from(p).ok()).unwrap_or(1440),
        }
    }
}

/// Registers a template by the fabrics of its hosts, takes its checksums, chooses the way and begins. Blocks; `begun` is when the
/// fork was asked for, and `guest` the one whose memory it was, if that goes on with memory of its own.
pub fn begin(
    peers: &Peers,
    connections: &Arc<Connections>,
    template: &Template,
    guest: Option<&GuestRam>,
    hosts: &Hosts,
    begun: Mono,
) -> Result<Spreading, DistributionError> {
    let outgoing = Outgoing::open(template)?;
    let Offered { fabric, regions, second, no_verbs } = offer(connections, &outgoing, hosts)?;
    let (order, first) = outgoing.order(&regions, guest);
    let multicast = group(peers, &fabric, hosts.way)?;
    let payload = multicast.as_ref().map(|datagrams| datagrams.payload);
    let network = hosts.network(peers, fabric.kind(), payload);
    let bytes = order.iter().map(|extent| u64::from(extent.count) * u64::from(vmove_spread::CHUNK)).sum();
    let choice = network.choose(bytes)?;
    let way = hosts.way.map_or(choice.way, way);
    let multicast = multicast.filter(|_| way == Way::Multicast);
    let payload = multicast.as_ref().map(|datagrams| datagrams.payload);
    let spread = vmove_spread::Template::new(&*fabric, regions, order, payload);
    let mut spread = spread?;
    if let Some((second, regions)) = second {
        spread.also(&*second, regions)?;
    }
    let piece = u64::from(spread.layout().piece_bytes());
    let routes = network.routes(way);
    let ids = || (1..).take(hosts.leaves.len()).map(HostId);
    let listens = ids().map(|id| routes.values().any(|route| route.members.contains(&id))).collect();
    #[allow(clippy::cast_precision_loss)]
    let rate = peers.policy.multicast_mbit.map_or(network.link * 0.8, |mbit| mbit as f64 * MBIT);
    let options = RootOptions {
        rate,
        routes,
        addresses: ids().map(|id| (id, PeerAddress::Named(address_of(id.0)))).collect(),
        expected: hosts.leaves.len(),
        gather: GATHER_TIMEOUT,
    };
    let distribution = Distribution {
        way: way.to_string(),
        asked: hosts.way.is_some(),
        memory_bytes: bytes,
        first_bytes: first * u64::from(vmove_spread::CHUNK),
        root_bytes: 0,
        prepared_ms: ms(Mono::now().since(begun)),
        estimates: choice
            .estimates
            .into_iter()
            .map(|e| WayEstimate { way: e.way.to_string(), seconds: e.seconds, arithmetic: e.arithmetic })
            .collect(),
    };
    let checksum = hosts.verify.then(|| template.checksum()).transpose()?;
    let group = multicast.as_ref().map(|datagrams| (&*datagrams.multicast, datagrams.group));
    let root = Root::start(fabric, group, spread, options)?;
    Ok(Spreading { root, distribution, piece, listens, checksum, parts: outgoing.parts, no_verbs })
}

/// A template that peers can read.
struct Offered {
    /// Datagrams go beside this one.
    fabric: Arc<ForkFabric>,
    regions: Vec<Region>,
    /// For hosts that take no RDMA, or whose path dies.
    second: Option<(Arc<ForkFabric>, Vec<Region>)>,
    no_verbs: Option<String>,
}

/// Registers the template for RDMA if a host takes that, and for tcp in any case.
fn offer(
    connections: &Arc<Connections>,
    outgoing: &Outgoing,
    hosts: &Hosts,
) -> Result<Offered, DistributionError> {
    let by = |kind| {
        let fabric = connections.by(kind).ok_or(DistributionError::NoFabric(kind))?;
        let regions = outgoing.register(&*fabric)?;
        Ok::<_, DistributionError>((fabric, regions))
    };
    let verbs = match hosts.taken.iter().any(|taken| taken.verbs) {
        true => by(FabricKind::Verbs),
        false => Err(DistributionError::NotTaken),
    };
    match (verbs, by(FabricKind::Tcp)) {
        (Ok((fabric, regions)), tcp) => Ok(Offered { fabric, regions, second: tcp.ok(), no_verbs: None }),
        (Err(why), Ok((fabric, regions))) => {
            Ok(Offered { fabric, regions, second: None, no_verbs: Some(chain(&why)) })
        }
        (Err(verbs), Err(tcp)) => {
            Err(DistributionError::Neither { verbs: Box::new(verbs), tcp: Box::new(tcp) })
        }
    }
}

/// What sends datagrams, where to, and the most bytes of one.
struct Datagrams {
    multicast: Box<dyn Multicast>,
    group: Group,
    payload: usize,
}

/// Multicast as far as this node allows it.
fn group(
    peers: &Peers,
    fabric: &ForkFabric,
    way: Option<ForkWay>,
) -> Result<Option<Datagrams>, DistributionError> {
    let kind = fabric.kind();
    let (Ok(address), Ok(multicast)) = (peers.group(), peers.multicast(kind, fabric.secret())) else {
        return Ok(None);
    };
    let session = peers.draw_session()?;
    let address = match kind {
        FabricKind::Verbs => GroupAddress::Rdma(*address.ip()),
        _ => GroupAddress::Udp(address),
    };
    let group = Group { address, session };
    match multicast.sender(&group) {
        Ok(sender) => {
            let payload = sender.max_payload();
            Ok(Some(Datagrams { multicast, group, payload }))
        }
        Err(error) if way == Some(ForkWay::Multicast) => Err(error.into()),
        Err(error) => {
            tracing::warn!(why = chain(&error), "no multicast in this fork");
            Ok(None)
        }
    }
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
