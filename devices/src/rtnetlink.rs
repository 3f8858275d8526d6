//! Asks the kernel by rtnetlink what virtual functions have, and sets it.

use std::io;
use std::time::Duration;

use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkMessage, LinkVfInfo, VfInfo, VfInfoGuid, VfInfoMac, VfInfoTrust,
    VfInfoVlan,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use rustix::event::{PollFd, PollFlags};

use crate::vf::{Functions, Setting};
use crate::{Guid, Identity, Mac};

/// The kernel answers at once, but a card's firmware may think.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The kernel's virtual functions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtnetlink;

impl Functions for Rtnetlink {
    fn read(&self, netdev: &str, index: u32) -> io::Result<Identity> {
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(netdev.to_owned()));
        link.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::Vf]));
        let answer = ask(RouteNetlinkMessage::GetLink(link), 0)?;
        let Some(RouteNetlinkMessage::NewLink(link)) = answer else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the kernel's answer names no network device",
            ));
        };
        let functions = link.attributes.into_iter().find_map(|attribute| match attribute {
            LinkAttribute::VfInfoList(functions) => Some(functions),
            _ => None,
        });
        let mut functions = functions.unwrap_or_default().into_iter();
        let missing = || {
            let text = format!("{netdev} has no virtual function {index}");
            io::Error::new(io::ErrorKind::NotFound, text)
        };
        functions.find_map(|function| identity(&function, index)).ok_or_else(missing)
    }

    fn set(&self, netdev: &str, index: u32, setting: Setting) -> io::Result<()> {
        let info = match setting {
            Setting::Mac(mac) => VfInfo::Mac(VfInfoMac::new(index, &mac.0)),
            Setting::Vlan(vlan) => VfInfo::Vlan(VfInfoVlan::new(index, vlan.into(), 0)),
            Setting::Trust(trust) => VfInfo::Trust(VfInfoTrust::new(index, trust)),
            Setting::NodeGuid(guid) => VfInfo::IbNodeGuid(VfInfoGuid::new(index, guid.0)),
            Setting::PortGuid(guid) => VfInfo::IbPortGuid(VfInfoGuid::new(index, guid.0)),
        };
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(netdev.to_owned()));
        link.attributes.push(LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![info])]));
        ask(RouteNetlinkMessage::SetLink(link), NLM_F_ACK).map(drop)
    }
}

/// The addresses in the kernel's answer, if they belong to function `index`.
fn identity(function: &LinkVfInfo, index: u32) -> Option<Identity> {
    let mut found = Identity::default();
    let mut is_it = false;
    for info in &function.0 {
        match info {
            VfInfo::Mac(mac) => {
                is_it = mac.vf_id == index;
                // InfiniBand reports longer addresses here, which are not MAC addresses.
                let bytes: [u8; 6] = mac.mac[..6].try_into().unwrap_or_default();
                found.mac = Some(Mac(bytes)).filter(|mac| mac.0 != [0; 6]);
            }
            VfInfo::Vlan(vlan) => found.vlan = u16::try_from(vlan.vlan_id).ok().filter(|vlan| *vlan != 0),
            VfInfo::Trust(trust) => found.trust = Some(trust.enabled),
            VfInfo::IbNodeGuid(guid) => found.node_guid = Some(Guid(guid.guid)).filter(|guid| guid.0 != 0),
            VfInfo::IbPortGuid(guid) => found.port_guid = Some(Guid(guid.guid)).filter(|guid| guid.0 != 0),
            _ => {}
        }
    }
    is_it.then_some(found)
}

/// One request and its answer; `None` for an acknowledgement.
fn ask(request: RouteNetlinkMessage, flags: u16) -> io::Result<Option<RouteNetlinkMessage>> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = 1;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    let time = rustix::event::Timespec::try_from(ANSWER_TIMEOUT).map_err(io::Error::other)?;
    let ready = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&time))?;
    if ready == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {ANSWER_TIMEOUT:?}")));
    }
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
        NetlinkPayload::InnerMessage(inner) => Ok(Some(inner)),
        _ => Ok(None),
    }
}
