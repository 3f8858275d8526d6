//! The receiving side.

use std::io;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::UdpOptions;
use crate::FabricError;
use crate::counters::MulticastCountersHandle;
use crate::multicast::{MulticastReceiver, Session, Sink, lost_memory};
use crate::sys::datagram::Messages;
use crate::sys::net::{get_option, set_option};
use crate::table::{Participant, RegionTable};
use crate::wire::{Envelope, Numbers};

/// Receives the datagrams of one session.
#[derive(Debug)]
pub(super) struct Receiver {
    socket: UdpSocket,
    envelope: Envelope,
    participant: Participant,
    messages: Messages,
    numbers: Numbers,
    ring_bytes: usize,
    counters: MulticastCountersHandle,
}

impl Receiver {
    pub(super) fn join(
        group: SocketAddrV4,
        session: Session,
        table: &Arc<RegionTable>,
        options: &UdpOptions,
    ) -> Result<Self, FabricError> {
        let open = || -> io::Result<(UdpSocket, usize)> {
            let socket = super::socket()?;
            let fd = socket.as_fd();
            let bytes = i32::try_from(options.ring_bytes / 2).unwrap_or(i32::MAX / 2); // the kernel doubles it
            if set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes).is_err() {
                set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
            }
            let ring = get_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF)?;
            // Only what this socket joined, not what others on the host did.
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
            set_option(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
            let _ = set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1); // without it each comes alone
            rustix::net::bind(&socket, &group)?;
            socket.join_multicast_v4(group.ip(), &options.interface)?;
            Ok((socket, usize::try_from(ring).unwrap_or(0)))
        };
        let (socket, ring_bytes) = open().map_err(FabricError::io("join a multicast group"))?;
        Ok(Self {
            socket,
            envelope: Envelope::new(session),
            participant: table.join()?,
            messages: Messages::new(),
            numbers: Numbers::new(),
            ring_bytes,
            counters: MulticastCountersHandle::default(),
        })
    }
}

impl MulticastReceiver for Receiver {
    fn poll(&mut self, sink: &mut dyn Sink) -> Result<usize, FabricError> {
        let found = self.messages.receive(self.socket.as_fd());
        if found.map_err(FabricError::io("receive from a multicast group"))? == 0 {
            return Ok(0);
        }
        let totals = self.counters.totals();
        let section = self.participant.enter();
        let mut count = 0;
        for (message, bytes) in self.messages.iter_mut() {
            totals.refused.add(u64::from(bytes.is_empty()));
            let segment = message.segment.unwrap_or(bytes.len()).max(1);
            for bytes in bytes.chunks_mut(segment) {
                count += 1;
                let whole = bytes.len() as u64;
                let Some(datagram) = self.envelope.open(bytes).filter(|_| !message.cut) else {
                    totals.refused.add(1);
                    continue;
                };
                if !self.numbers.note(datagram.number) {
                    totals.duplicate.add(1);
                    continue;
                }
                totals.received.add(1);
                totals.bytes_received.add(whole);
                let Some(place) = sink.place(datagram.immediate, datagram.payload.len()) else {
                    totals.unwanted.add(1);
                    continue;
                };
                let piece = section.local(&place).filter(|piece| piece.len() == datagram.payload.len());
                let Some(piece) = piece else {
                    return Err(FabricError::protocol(format!(
                        "a place of {} bytes for a datagram of {}, or one that is not registered with this fabric",
                        place.len(),
                        datagram.payload.len()
                    )));
                };
                piece.copy_from(datagram.payload);
                if piece.is_broken() {
                    return Err(lost_memory());
                }
                sink.landed(datagram.immediate);
            }
        }
        drop(section);
        totals.lost.set(self.numbers.lost());
        totals.ring_full.set(u64::from(self.messages.overflow()));
        Ok(count.max(1))
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    fn counters(&self) -> MulticastCountersHandle {
        self.counters.clone()
    }
}
