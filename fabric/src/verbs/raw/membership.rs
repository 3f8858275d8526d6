//! Membership of a multicast group by librdmacm, which informs the kernel and the switches (on Ethernet by IGMP, on
//! InfiniBand through the subnet manager) and says how the group is addressed.

use std::ffi::CStr;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::Duration;

use rdma_sys::{
    ibv_ah_attr, ibv_gid, ibv_global_route, rdma_cm_event_type, rdma_cm_id, rdma_event_channel,
    rdma_port_space,
};

use super::device::check;
use super::library::{Cm, library, load_cm};
use crate::sys::net::wait;

/// How long the network may take to let us in.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How datagrams of a group are addressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) struct Route {
    /// The group's address.
    pub(in crate::verbs) gid: [u8; 16],
    /// The same where there is a subnet manager, which gives it; else 0.
    pub(in crate::verbs) lid: u16,
    pub(in crate::verbs) service_level: u8,
    pub(in crate::verbs) traffic_class: u8,
    pub(in crate::verbs) static_rate: u8,
    pub(in crate::verbs) hop_limit: u8,
    /// Index of our own address in the port's table.
    pub(in crate::verbs) gid_index: u8,
    pub(in crate::verbs) port: u8,
}

impl Route {
    pub(super) fn attributes(&self) -> ibv_ah_attr {
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: self.gid },
                flow_label: 0,
                sgid_index: self.gid_index,
                hop_limit: self.hop_limit,
                traffic_class: self.traffic_class,
            },
            dlid: self.lid,
            sl: self.service_level,
            src_path_bits: 0,
            static_rate: self.static_rate,
            is_global: 1,
            port_num: self.port,
        }
    }
}

/// Where events of an [`Id`] come.
#[derive(Debug)]
struct Channel {
    channel: NonNull<rdma_event_channel>,
    cm: &'static Cm,
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: rule 1; the only identifier made in it is gone.
        unsafe { (self.cm.destroy_event_channel)(self.channel.as_ptr()) };
    }
}

/// What librdmacm knows an address of ours by.
#[derive(Debug)]
struct Id {
    id: NonNull<rdma_cm_id>,
    /// Destroyed after the identifier.
    channel: Channel,
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: rule 1; every event was acknowledged when it was taken.
        unsafe { (self.channel.cm.destroy_id)(self.id.as_ptr()) };
    }
}

/// This host's membership. Its drop leaves the group.
#[derive(Debug)]
pub(in crate::verbs) struct Member {
    id: Id,
    group: Ipv4Addr,
    route: Route,
}

// SAFETY: rule 2: librdmacm's manual promises the same.
unsafe impl Send for Member {}

impl Member {
    /// Joins `group` through the network device with the address `interface`, which must be that of `port` of `device`.
    ///
    /// # Errors
    /// `NotFound`: there is no librdmacm, or the kernel has no part for it. Else what the network says.
    pub(in crate::verbs) fn join(
        device: &str,
        port: u8,
        interface: Ipv4Addr,
        group: Ipv4Addr,
    ) -> io::Result<Self> {
        let id = Id::bind(interface)?;
        let found = id.device();
        if found.as_ref().is_none_or(|(name, number)| name != device || *number != port) {
            let found =
                found.map_or("no RDMA device".to_owned(), |(name, port)| format!("{name} port {port}"));
            return Err(io::Error::other(format!(
                "{interface} is an address of {found}, not of {device} port {port}"
            )));
        }
        let mut address = socket_address(group);
        let joined =
            // SAFETY: rules 1 and 3.
            unsafe { (id.channel.cm.join_multicast)(id.id.as_ptr(), (&raw mut address).cast(), std::ptr::null_mut()) };
        if joined != 0 {
            return Err(io::Error::last_os_error());
        }
        let attributes = id.joined()?;
        // SAFETY: every bit pattern is a valid address.
        let gid = unsafe { attributes.grh.dgid.raw };
        let route = Route {
            gid,
            lid: attributes.dlid,
            service_level: attributes.sl,
            traffic_class: attributes.grh.traffic_class,
            static_rate: attributes.static_rate,
            hop_limit: attributes.grh.hop_limit.max(1),
            gid_index: attributes.grh.sgid_index,
            port,
        };
        Ok(Self { id, group, route })
    }

    pub(in crate::verbs) fn route(&self) -> Route {
        self.route
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut address = socket_address(self.group);
        let cm = self.id.channel.cm;
        // SAFETY: rules 1 and 3. That it fails matters to nobody: the identifier's end leaves the group too.
        unsafe { (cm.leave_multicast)(self.id.id.as_ptr(), (&raw mut address).cast()) };
    }
}

impl Id {
    fn bind(interface: Ipv4Addr) -> io::Result<Self> {
        let cm = load_cm()?;
        // SAFETY: rule 5.
        let channel = unsafe { (cm.create_event_channel)() };
        let channel = NonNull::new(channel).ok_or_else(|| {
            let error = io::Error::last_os_error();
            let why =
                format!("librdmacm has nothing to talk to ({error}); load the kernel's module rdma_ucm");
            io::Error::new(io::ErrorKind::NotFound, why)
        })?;
        let channel = Channel { channel, cm };
        rustix::io::ioctl_fionbio(channel.fd(), true)?;
        let mut id = std::ptr::null_mut();
        let (space, ours) = (rdma_port_space::RDMA_PS_UDP, std::ptr::null_mut());
        // SAFETY: rules 1 and 3.
        if unsafe { (cm.create_id)(channel.channel.as_ptr(), &raw mut id, ours, space) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let id = NonNull::new(id).ok_or_else(|| io::Error::other("librdmacm gave no identifier"))?;
        let id = Self { id, channel };
        let mut address = socket_address(interface);
        // SAFETY: rules 1 and 3.
        if unsafe { (cm.bind_addr)(id.id.as_ptr(), (&raw mut address).cast()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(id)
    }

    /// Name and port of the device that the address belongs to.
    fn device(&self) -> Option<(String, u8)> {
        // SAFETY: rule 1: filled in when the address was bound, and constant since.
        let context = NonNull::new(unsafe { (*self.id.as_ptr()).verbs })?;
        // SAFETY: as above.
        let port = unsafe { (*self.id.as_ptr()).port_num };
        // SAFETY: rule 1: librdmacm's own context, which lives as long as the identifier.
        let device = unsafe { (*context.as_ptr()).device };
        // SAFETY: rule 1.
        let name = unsafe { (library().get_device_name)(device) };
        // SAFETY: the name is a terminated string inside the device.
        let name = unsafe { CStr::from_ptr(name) };
        Some((name.to_str().ok()?.to_owned(), port))
    }

    /// Waits for the answer to a request to join.
    fn joined(&self) -> io::Result<ibv_ah_attr> {
        wait(self.channel.fd(), false, Some(JOIN_TIMEOUT))?;
        let mut event = std::ptr::null_mut();
        // SAFETY: rules 1 and 3.
        if unsafe { (self.channel.cm.get_cm_event)(self.channel.channel.as_ptr(), &raw mut event) } != 0 {
            let error = io::Error::last_os_error();
            let nothing = error.kind() == io::ErrorKind::WouldBlock;
            return Err(if nothing { io::ErrorKind::TimedOut.into() } else { error });
        }
        // SAFETY: rule 1: got just now, and not yet acknowledged.
        let kind = unsafe { (*event).event };
        // SAFETY: as above.
        let status = unsafe { (*event).status };
        // SAFETY: as above.
        let found = unsafe { &raw const (*event).param.ud };
        // SAFETY: as above; of identifiers for datagrams this is the part that is filled in, and it is made of numbers.
        let attributes = unsafe { (*found).ah_attr };
        // SAFETY: rule 1: acknowledged once, not used after this.
        check(unsafe { (self.channel.cm.ack_cm_event)(event) })?;
        match kind {
            rdma_cm_event_type::RDMA_CM_EVENT_MULTICAST_JOIN if status == 0 => Ok(attributes),
            _ if status != 0 => Err(io::Error::from_raw_os_error(status.abs())),
            other => {
                Err(io::Error::other(format!("librdmacm event {other} in place of the group's address")))
            }
        }
    }
}

impl Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: rule 1: the channel's descriptor does not change.
        let fd = unsafe { (*self.channel.as_ptr()).fd };
        // SAFETY: the descriptor is open as long as the channel, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

fn socket_address(ip: Ipv4Addr) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default(),
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
        sin_zero: [0; 8],
    }
}
