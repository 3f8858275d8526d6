//! Multicast by unreliable datagrams (UD).
//!
//! A datagram is one packet: its payload is all of the MTU, sent by the device out of registered memory; the immediate
//! says what it is. The receiver's device puts it into a ring, from which it is copied to its place. The session is in the
//! Q_Key, so datagrams of others are dropped by the device and not seen; datagrams have no numbers, so what is lost is
//! not counted here.
//!
//! Groups are joined by librdmacm. Where a RoCE host lacks that, the kernel joins as for UDP, and the group's address is
//! made of the IPv4 one as librdmacm would.

mod receiver;
mod sender;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::device::Choice;
use super::events::Health;
use super::raw::{Domain, Limits, Member, Route};
use super::{LocalKeys, VerbsFabric};
use crate::multicast::{Group, GroupAddress, Multicast, MulticastReceiver, MulticastSender, Session};
use crate::table::RegionTable;
use crate::{FabricError, FabricKind};
use receiver::Receiver;
use sender::Sender;

/// Options of [`VerbsMulticast`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsMulticastOptions {
    /// Address of the port's network device (of IPoIB on InfiniBand). Default on RoCE: the port's own.
    pub interface: Option<Ipv4Addr>,
    /// Most bytes of payload, 256 to 4096; default: the port's MTU. All members need as much.
    pub mtu: Option<u16>,
    /// Routers that a datagram may pass, plus one. Default 8.
    pub hop_limit: u8,
    /// Bytes of the receive ring, which is pinned; at most what the device takes. Default 16 MiB.
    pub ring_bytes: usize,
    /// Traffic class of datagrams (on RoCE the DSCP is in its upper six bits). Default 0.
    pub traffic_class: u8,
}

impl Default for VerbsMulticastOptions {
    fn default() -> Self {
        Self { interface: None, mtu: None, hop_limit: 8, ring_bytes: 16 << 20, traffic_class: 0 }
    }
}

/// Groups of receivers over RDMA. Sends from and receives into the regions of a [`VerbsFabric`].
#[derive(Debug)]
pub struct VerbsMulticast {
    shared: Shared,
    options: VerbsMulticastOptions,
}

/// What senders and receivers have of their fabric.
#[derive(Debug, Clone)]
struct Shared {
    table: Arc<RegionTable>,
    keys: Arc<LocalKeys>,
    domain: Arc<Domain>,
    health: Arc<Health>,
    choice: Choice,
    limits: Limits,
}

impl Shared {
    fn check(&self) -> Result<(), FabricError> {
        if self.health.is_lost() {
            let why = format!("{} was removed or has failed", self.choice.device);
            return Err(FabricError::NoDevice { why });
        }
        Ok(())
    }
}

/// Being a member, by either way. Its drop leaves the group.
#[derive(Debug)]
enum Membership {
    Cm(Member),
    Kernel { route: Route, _socket: UdpSocket },
}

impl VerbsMulticast {
    /// Multicast beside the connections of `fabric`.
    #[must_use]
    pub fn new(fabric: &VerbsFabric, options: VerbsMulticastOptions) -> Self {
        let shared = Shared {
            table: Arc::clone(&fabric.table),
            keys: Arc::clone(&fabric.keys),
            domain: Arc::clone(&fabric.domain),
            health: Arc::clone(fabric.watch.health()),
            choice: fabric.choice.clone(),
            limits: fabric.limits,
        };
        Self { shared, options }
    }

    fn interface(&self) -> Result<Ipv4Addr, FabricError> {
        let of_port = || Ipv6Addr::from(self.shared.choice.gid).to_ipv4_mapped();
        self.options.interface.or_else(of_port).ok_or(FabricError::Unsupported {
            what: "RDMA multicast through a port whose address is not of IPv4 (name its network device's address)",
        })
    }

    /// Most bytes of payload in one datagram that this host sends and receives.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        let most = 128 << self.shared.limits.mtu.min(5);
        self.options.mtu.map_or(most, |mtu| usize::from(mtu).clamp(256, most))
    }

    fn join_group(&self, group: &Group) -> Result<Membership, FabricError> {
        let GroupAddress::Rdma(address) = group.address else {
            return Err(FabricError::Unsupported {
                what: "RDMA multicast to an address that is not for RDMA,",
            });
        };
        if !address.is_multicast() {
            return Err(FabricError::Unsupported {
                what: "multicast to an address that is not of a group (224.0.0.0/4),",
            });
        }
        if group.session.is_sealed() {
            return Err(FabricError::Unsupported { what: "RDMA multicast of encrypted datagrams" });
        }
        let interface = self.interface()?;
        let choice = &self.shared.choice;
        let joined = match Member::join(&choice.device, choice.port, interface, address) {
            Ok(member) => Ok(Membership::Cm(member)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && choice.ethernet => {
                tracing::info!(%error, "joins a multicast group without librdmacm");
                self.join_by_kernel(interface, address)
            }
            Err(error) => Err(error),
        };
        joined.map_err(FabricError::io("join a multicast group"))
    }

    /// As for UDP. On Ethernet the group's RDMA address is its IPv4 one, mapped into IPv6.
    fn join_by_kernel(&self, interface: Ipv4Addr, group: Ipv4Addr) -> io::Result<Membership> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.join_multicast_v4(&group, &interface)?;
        let route = Route {
            gid: group.to_ipv6_mapped().octets(),
            lid: 0,
            service_level: 0,
            traffic_class: 0,
            static_rate: 0,
            hop_limit: 1,
            gid_index: 0,
            port: 0,
        };
        Ok(Membership::Kernel { route, _socket: socket })
    }

    /// How the group is addressed, from our own port.
    fn route(&self, membership: &Membership) -> Route {
        let found = match membership {
            Membership::Cm(member) => member.route(),
            Membership::Kernel { route, .. } => *route,
        };
        let choice = &self.shared.choice;
        let (gid_index, port) = (choice.gid_index, choice.port);
        let (hop_limit, traffic_class) = (self.options.hop_limit.max(1), self.options.traffic_class);
        Route { gid_index, port, hop_limit, traffic_class, ..found }
    }
}

/// The Q_Key of a session. The highest bit would mean another key than the one in the request.
fn queue_key(session: &Session) -> u32 {
    let mixed = xxh3_64_with_seed(&session.tag.to_le_bytes(), session.seed);
    u32::try_from(mixed >> 33).unwrap_or(0)
}

impl Multicast for VerbsMulticast {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn sender(&self, group: &Group) -> Result<Box<dyn MulticastSender>, FabricError> {
        let membership = self.join_group(group)?;
        let route = self.route(&membership);
        Ok(Box::new(Sender::open(
            self.shared.clone(),
            membership,
            route,
            queue_key(&group.session),
            self.max_payload(),
        )?))
    }

    fn join(&self, group: &Group) -> Result<Box<dyn MulticastReceiver>, FabricError> {
        let membership = self.join_group(group)?;
        let route = self.route(&membership);
        let (key, payload) = (queue_key(&group.session), self.max_payload());
        let receiver =
            Receiver::join(self.shared.clone(), membership, route, key, payload, self.options.ring_bytes)?;
        Ok(Box::new(receiver))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn sessions_have_keys_of_their_own_that_anybody_may_use() {
        let keys: HashSet<u32> =
            (0..1000).map(|tag| queue_key(&Session { tag, seed: 7, key: None })).collect();
        assert!(keys.len() > 995, "{} of 1000 differ", keys.len());
        assert!(
            keys.iter().all(|key| key >> 31 == 0),
            "the highest bit would ask for the queue pair's own key"
        );
        let session = |seed| Session { tag: 5, seed, key: None };
        assert_ne!(
            queue_key(&session(1)),
            queue_key(&session(2)),
            "the tag is sent in clear by UDP, the seed never"
        );
        assert_eq!(queue_key(&session(1)), queue_key(&session(1)));
    }
}
