//! The sending side.

use std::io;
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::UdpOptions;
use crate::FabricError;
use crate::counters::MulticastCountersHandle;
use crate::multicast::{MulticastSender, Outgoing, Session, lost_memory};
use crate::sys::datagram::{BATCH, send};
use crate::sys::net::{get_option, set_option, wait};
use crate::table::{Participant, RegionTable};
use crate::wire::{DATAGRAM_HEADER, Envelope, MAX_BODY};

/// Datagrams that the kernel splits a run into, at most (`UDP_MAX_SEGMENTS` of older kernels).
const RUN: usize = 64;
/// Bytes of a run, at most: what fits an IP packet.
const RUN_BYTES: usize = 65_507;
/// Bytes of datagrams in one system call.
const STAGED: usize = 256 << 10;

/// Sends the datagrams of one session.
#[derive(Debug)]
pub(super) struct Sender {
    socket: UdpSocket,
    envelope: Envelope,
    participant: Participant,
    max_payload: usize,
    /// Number of the next datagram.
    next: u64,
    segmentation: bool,
    /// The length at which the kernel splits runs now.
    segment: usize,
    staged: Vec<u8>,
    /// Ends of runs in `staged`, and how many datagrams each has.
    runs: Vec<(usize, usize)>,
    counters: MulticastCountersHandle,
}

impl Sender {
    pub(super) fn open(
        group: SocketAddrV4,
        session: Session,
        table: &Arc<RegionTable>,
        options: &UdpOptions,
    ) -> Result<Self, FabricError> {
        let open = || -> io::Result<(UdpSocket, usize)> {
            let socket = super::socket()?;
            let fd = socket.as_fd();
            let interface = i32::from_ne_bytes(options.interface.octets());
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, interface)?;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, i32::from(options.ttl))?;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
            set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20)?;
            rustix::net::bind(&socket, &SocketAddrV4::new(options.interface, 0))?;
            socket.connect(group)?;
            let mtu = match options.mtu {
                Some(mtu) => usize::from(mtu.clamp(576, 9000)),
                None => usize::try_from(get_option(fd, libc::IPPROTO_IP, libc::IP_MTU)?).unwrap_or(576),
            };
            Ok((socket, (mtu.max(576) - 28 - DATAGRAM_HEADER).min(MAX_BODY)))
        };
        let envelope = Envelope::new(session);
        let (socket, body) = open().map_err(FabricError::io("open a socket to a multicast group"))?;
        Ok(Self {
            socket,
            max_payload: body - envelope.tail(),
            envelope,
            participant: table.join()?,
            next: 0,
            segmentation: options.segmentation,
            segment: 0,
            staged: Vec::with_capacity(STAGED),
            runs: Vec::with_capacity(BATCH),
            counters: MulticastCountersHandle::default(),
        })
    }

    /// Puts as many datagrams as go into one system call into `staged`. An error if the first cannot be sent.
    fn stage(&mut self, batch: &[Outgoing]) -> Result<(), FabricError> {
        self.staged.clear();
        self.runs.clear();
        let section = self.participant.enter();
        let (mut run_len, mut run_count) = (0, 0);
        for (outgoing, number) in batch.iter().zip(self.next..) {
            let len = outgoing.payload.len as usize;
            let piece = section.local(&outgoing.payload).filter(|_| len <= self.max_payload);
            let Some(piece) = piece else {
                if self.staged.is_empty() {
                    let why = format!(
                        "{len} bytes cannot be sent by multicast: not registered with this fabric, or more than {}",
                        self.max_payload
                    );
                    return Err(FabricError::protocol(why));
                }
                break; // told next time, when it is the first
            };
            let whole = DATAGRAM_HEADER + len + self.envelope.tail();
            let joins = self.segmentation
                && run_len == whole
                && run_count < RUN
                && (run_count + 1) * whole <= RUN_BYTES;
            let full = self.staged.len() + whole > STAGED || (!joins && self.runs.len() == BATCH);
            // One call splits all its runs at one length.
            if full || (self.segmentation && run_len != 0 && run_len != whole) {
                break;
            }
            let at = self.staged.len();
            self.staged.resize(at + whole, 0);
            let payload = at + DATAGRAM_HEADER;
            piece.copy_to(&mut self.staged[payload..payload + len]);
            if piece.is_broken() {
                return Err(lost_memory());
            }
            self.envelope.close(number, outgoing.immediate, &mut self.staged[at..]);
            let end = self.staged.len();
            match self.runs.last_mut().filter(|_| joins) {
                Some(run) => (*run, run_count) = ((end, run.1 + 1), run_count + 1),
                None => {
                    self.runs.push((end, 1));
                    (run_len, run_count) = (whole, 1);
                }
            }
        }
        drop(section);
        if self.segmentation && run_len != 0 && run_len != self.segment {
            let value = i32::try_from(run_len).unwrap_or(0);
            match set_option(self.socket.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value) {
                Ok(()) => self.segment = run_len,
                Err(error) => {
                    tracing::debug!(%error, "the kernel does not split runs of datagrams");
                    self.segmentation = false;
                    return self.stage(batch);
                }
            }
        }
        Ok(())
    }
}

impl MulticastSender for Sender {
    fn max_payload(&self) -> usize {
        self.max_payload
    }

    fn send(&mut self, batch: &[Outgoing]) -> Result<usize, FabricError> {
        let mut taken = 0;
        while taken < batch.len() {
            self.stage(&batch[taken..])?;
            let mut begin = 0;
            let mut messages: [&[u8]; BATCH] = [&[]; BATCH];
            for (message, (end, _)) in messages.iter_mut().zip(&self.runs) {
                *message = &self.staged[begin..*end];
                begin = *end;
            }
            let sent = match send(self.socket.as_fd(), &messages[..self.runs.len()]) {
                Ok(sent) => sent,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => 0,
                    // An interface that cannot split runs says so only when asked to.
                    Some(libc::EIO | libc::EINVAL) if self.segmentation => {
                        tracing::debug!(%error, "the interface does not split runs of datagrams");
                        set_option(self.socket.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, 0)
                            .map_err(FabricError::io("set the options of a socket"))?;
                        (self.segmentation, self.segment) = (false, 0);
                        continue;
                    }
                    _ => return Err(FabricError::io("send to a multicast group")(error)),
                },
            };
            let datagrams: usize = self.runs[..sent].iter().map(|(_, count)| count).sum();
            self.next += datagrams as u64;
            let totals = self.counters.totals();
            totals.sent.add(datagrams as u64);
            totals.bytes_sent.add(sent.checked_sub(1).map_or(0, |last| self.runs[last].0 as u64));
            taken += datagrams;
            if sent < self.runs.len() {
                break;
            }
        }
        Ok(taken)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), FabricError> {
        // `poll(2)` does not see that the interface's queue is full (`ENOBUFS`), so a little time passes in any case.
        std::thread::sleep(timeout.min(Duration::from_micros(50)));
        wait(self.socket.as_fd(), true, Some(timeout)).map_err(FabricError::io("wait for room in a socket"))
    }

    fn counters(&self) -> MulticastCountersHandle {
        self.counters.clone()
    }
}
