//! UDP multicast, the companion of [`tcp`](crate::tcp).
//!
//! A datagram is never larger than the MTU of the interface (it is not fragmented). Many are sent and received in one system
//! call, and the kernel joins and splits runs of equal ones (`UDP_SEGMENT`, `UDP_GRO`) where it can. Payload is copied once on
//! each side: with datagrams that come in any order, or not at all, nobody knows the next one's place before it is looked at.
//! IPv4 only.

mod receiver;
mod sender;

use std::net::Ipv4Addr;
use std::net::SocketAddrV4;
use std::os::fd::AsFd;
use std::sync::Arc;

use crate::multicast::{Group, GroupAddress, Multicast, MulticastReceiver, MulticastSender};
use crate::sys::net::set_option;
use crate::table::RegionTable;
use crate::tcp::TcpFabric;
use crate::{FabricError, FabricKind};
use receiver::Receiver;
use sender::Sender;

/// Options of [`UdpMulticast`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UdpOptions {
    /// Address of the interface that groups are joined on and sent through.
    pub interface: Ipv4Addr,
    /// Most bytes of an IP packet, 576 to 9000; default: the interface's MTU.
    pub mtu: Option<u16>,
    /// Routers that a datagram may pass, plus one. Default 8.
    pub ttl: u8,
    /// Whether the kernel splits runs of datagrams that were sent as one. Cheaper; but what loses packets on the way may then lose
    /// whole runs. Default on.
    pub segmentation: bool,
    /// Bytes that arrived datagrams may take up in the kernel until they are polled. More than `net.core.rmem_max` needs
    /// `CAP_NET_ADMIN`; without it, as much as is permitted is taken. Default 32 MiB.
    pub ring_bytes: usize,
}

impl UdpOptions {
    /// The defaults on the interface with this address.
    #[must_use]
    pub fn on(interface: Ipv4Addr) -> Self {
        Self { interface, mtu: None, ttl: 8, segmentation: true, ring_bytes: 32 << 20 }
    }
}

/// Groups of receivers over UDP. Sends from and receives into the regions of a [`TcpFabric`].
#[derive(Debug)]
pub struct UdpMulticast {
    table: Arc<RegionTable>,
    options: UdpOptions,
}

impl UdpMulticast {
    /// Multicast beside the connections of `fabric`.
    #[must_use]
    pub fn new(fabric: &TcpFabric, options: UdpOptions) -> Self {
        Self { table: fabric.table(), options }
    }
}

impl Multicast for UdpMulticast {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn sender(&self, group: &Group) -> Result<Box<dyn MulticastSender>, FabricError> {
        Ok(Box::new(Sender::open(udp(group)?, group.session, &self.table, &self.options)?))
    }

    fn join(&self, group: &Group) -> Result<Box<dyn MulticastReceiver>, FabricError> {
        Ok(Box::new(Receiver::join(udp(group)?, group.session, &self.table, &self.options)?))
    }
}

fn udp(group: &Group) -> Result<SocketAddrV4, FabricError> {
    let GroupAddress::Udp(address) = group.address else {
        return Err(FabricError::Unsupported { what: "UDP multicast to an address that is not for UDP," });
    };
    if address.ip().is_multicast() && address.port() != 0 {
        return Ok(address);
    }
    Err(FabricError::Unsupported {
        what: "multicast to an address that is not of a group (224.0.0.0/4), or to port 0,",
    })
}

/// A socket for a group.
fn socket() -> std::io::Result<std::net::UdpSocket> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    // Several receivers of one group on one host each get a copy.
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    Ok(socket.into())
}
