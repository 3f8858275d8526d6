//! Unreliable datagram queue pairs: one that sends to a group, one that receives what is sent to it.

use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{
    ibv_ah, ibv_gid, ibv_qp, ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_flags, ibv_wc_status, ibv_wr_opcode,
};

use super::device::{Domain, check};
use super::library::library;
use super::list::link;
use super::membership::Route;
use super::queue::{BATCH, Cq, attributes, modify};
use super::registered::{Held, Mr};
use crate::region::{Access, MemoryArea};

/// Bytes in front of a received payload: the global routing header, or what a device puts there for IPv4.
const GRH: usize = 40;
/// Number of the queue pair that stands for all members of a group.
const ALL: u32 = 0xff_ffff;

/// A queue pair for datagrams.
#[derive(Debug)]
struct Ud {
    qp: NonNull<ibv_qp>,
    /// Destroyed after the queue pair.
    cq: Cq,
}

// SAFETY: rule 2.
unsafe impl Send for Ud {}

/// What a queue pair is to be like.
#[derive(Debug, Clone, Copy)]
pub(in crate::verbs) struct Shape {
    pub(in crate::verbs) port: u8,
    /// Place of the partition key in the port's table.
    pub(in crate::verbs) pkey_index: u16,
    /// Datagrams under way, or slots of the ring.
    pub(in crate::verbs) depth: u32,
    /// What a datagram must carry to be received. Its highest bit is clear: the others are for privileged users.
    pub(in crate::verbs) queue_key: u32,
}

impl Ud {
    fn new(domain: &Arc<Domain>, shape: Shape, receives: bool) -> io::Result<Self> {
        let cq = Cq::new(domain, shape.depth + 1)?;
        // SAFETY: rule 3.
        let mut how: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        how.send_cq = cq.cq.as_ptr();
        how.recv_cq = cq.cq.as_ptr();
        how.qp_type = ibv_qp_type::IBV_QPT_UD;
        how.cap.max_send_wr = if receives { 1 } else { shape.depth };
        how.cap.max_recv_wr = if receives { shape.depth } else { 1 };
        how.cap.max_send_sge = 1;
        how.cap.max_recv_sge = 1;
        // SAFETY: rules 1 and 3.
        let qp = unsafe { (library().create_qp)(domain.as_ptr(), &raw mut how) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        let mut ud = Self { qp, cq };
        let mut to = attributes(ibv_qp_state::IBV_QPS_INIT);
        to.port_num = shape.port;
        to.pkey_index = shape.pkey_index;
        to.qkey = shape.queue_key;
        let fields = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_QKEY;
        modify(&mut ud.qp, &mut to, fields)?;
        modify(&mut ud.qp, &mut attributes(ibv_qp_state::IBV_QPS_RTR), mask::IBV_QP_STATE)?;
        let ready = mask::IBV_QP_STATE | mask::IBV_QP_SQ_PSN;
        modify(&mut ud.qp, &mut attributes(ibv_qp_state::IBV_QPS_RTS), ready)?;
        Ok(ud)
    }
}

impl Drop for Ud {
    fn drop(&mut self) {
        // SAFETY: rule 1; the completion queue is a field and destroyed after this.
        unsafe { (library().destroy_qp)(self.qp.as_ptr()) };
    }
}

/// Where datagrams go, as the device knows it.
#[derive(Debug)]
struct Address {
    ah: NonNull<ibv_ah>,
    /// It was made in this.
    _domain: Arc<Domain>,
}

// SAFETY: rule 2.
unsafe impl Send for Address {}

impl Address {
    fn new(domain: &Arc<Domain>, route: &Route) -> io::Result<Self> {
        let mut how = route.attributes();
        // SAFETY: rules 1 and 3.
        let ah = unsafe { (library().create_ah)(domain.as_ptr(), &raw mut how) };
        let ah = NonNull::new(ah).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { ah, _domain: Arc::clone(domain) })
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        // SAFETY: rule 1; the queue pair that used it is gone.
        unsafe { (library().destroy_ah)(self.ah.as_ptr()) };
    }
}

/// One datagram to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) struct Payload {
    pub(in crate::verbs) immediate: u32,
    pub(in crate::verbs) local: u64,
    pub(in crate::verbs) lkey: u32,
    pub(in crate::verbs) len: u32,
}

/// Sends to a group.
pub(in crate::verbs) struct Outbox {
    ud: Ud,
    /// Destroyed after the queue pair.
    to: Address,
    queue_key: u32,
    entries: Vec<ibv_sge>,
    requests: Vec<ibv_send_wr>,
}

// SAFETY: rule 2; the pointers in `requests` mean something only during a call.
unsafe impl Send for Outbox {}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("to", &self.to).finish_non_exhaustive()
    }
}

impl Outbox {
    pub(in crate::verbs) fn new(domain: &Arc<Domain>, shape: Shape, route: &Route) -> io::Result<Self> {
        let ud = Ud::new(domain, shape, false)?;
        let to = Address::new(domain, route)?;
        Ok(Self { ud, to, queue_key: shape.queue_key, entries: Vec::new(), requests: Vec::new() })
    }

    /// Tells what was sent.
    pub(in crate::verbs) fn cq(&mut self) -> &mut Cq {
        &mut self.ud.cq
    }

    /// Hands datagrams to the device, all with one doorbell. Only the last one reports its completion, with `id`.
    ///
    /// # Errors
    /// The device did not take all of them: the queue pair is of no use any more.
    pub(in crate::verbs) fn post(&mut self, id: u64, batch: &[Payload]) -> io::Result<()> {
        self.entries.clear();
        self.requests.clear();
        for payload in batch {
            self.entries.push(ibv_sge { addr: payload.local, length: payload.len, lkey: payload.lkey });
            self.requests.push(request(id, payload, self.to.ah, self.queue_key));
        }
        let Some(last) = self.requests.last_mut() else { return Ok(()) };
        last.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        let mut bad = std::ptr::null_mut();
        let first = link(&mut self.requests, &mut self.entries);
        // SAFETY: rules 1, 3 and 4: the list ends with a null pointer and names registered memory by its key.
        check(unsafe { rdma_sys::ibv_post_send(self.ud.qp.as_ptr(), first, &raw mut bad) })
    }
}

fn request(id: u64, payload: &Payload, to: NonNull<ibv_ah>, queue_key: u32) -> ibv_send_wr {
    // SAFETY: rule 3.
    let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = id;
    request.num_sge = 1;
    request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
    request.imm_data_invalidated_rkey_union.imm_data = payload.immediate.to_be();
    request.wr.ud = rdma_sys::ud_t { ah: to.as_ptr(), remote_qpn: ALL, remote_qkey: queue_key };
    request
}

/// Anonymous memory of our own.
#[derive(Debug)]
struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Self { at, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: rule 4: the mapping is ours, and was deregistered before this.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// A datagram that has arrived.
#[derive(Debug, Clone, Copy)]
pub(in crate::verbs) struct Arrived<'a> {
    /// `None`: it carries no immediate data.
    pub(in crate::verbs) immediate: Option<u32>,
    pub(in crate::verbs) payload: &'a [u8],
}

/// Receives what is sent to a group, into buffers that stay posted. Its drop leaves the group's datagrams to others.
pub(in crate::verbs) struct Ring {
    // In this order: nothing arrives any more, the memory is not the device's any more, it is gone.
    ud: Ud,
    mr: Mr,
    memory: Mapping,
    /// Bytes from one slot to the next.
    stride: usize,
    group: (ibv_gid, u16),
    entries: Vec<ibv_sge>,
    requests: Vec<ibv_recv_wr>,
}

// SAFETY: rule 2; the pointers in `requests` mean something only during a call, and the memory is owned.
unsafe impl Send for Ring {}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("stride", &self.stride)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring of `shape.depth` slots for payloads of up to `payload` bytes, all of them posted.
    pub(in crate::verbs) fn new(
        domain: &Arc<Domain>,
        shape: Shape,
        payload: usize,
        route: &Route,
    ) -> io::Result<Self> {
        let stride = (GRH + payload).next_multiple_of(64);
        let slots = usize::try_from(shape.depth).map_err(io::Error::other)?;
        let memory = Mapping::new(stride * slots)?;
        // SAFETY: rule 4: the mapping is part of the value made below, which drops the registration first.
        let area = unsafe { MemoryArea::new(memory.at, memory.len as u64) };
        let mr = Mr::register(domain, area, Access::LOCAL, Held::Pinned)?;
        let ud = Ud::new(domain, shape, true)?;
        let group = (ibv_gid { raw: route.gid }, route.lid);
        let mut ring = Self { ud, mr, memory, stride, group, entries: Vec::new(), requests: Vec::new() };
        ring.post((0..slots).map(|slot| slot as u64))?;
        // SAFETY: rules 1 and 3.
        check(unsafe { (library().attach_mcast)(ring.ud.qp.as_ptr(), &raw const ring.group.0, route.lid) })?;
        Ok(ring)
    }

    /// Tells that something has arrived.
    pub(in crate::verbs) fn cq(&mut self) -> &mut Cq {
        &mut self.ud.cq
    }

    pub(in crate::verbs) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.ud.cq.fd()
    }

    /// Gives slots to the device, all with one doorbell.
    fn post(&mut self, slots: impl Iterator<Item = u64>) -> io::Result<()> {
        let len = u32::try_from(self.stride).map_err(io::Error::other)?;
        let start = self.memory.at.as_ptr().expose_provenance() as u64;
        self.entries.clear();
        self.requests.clear();
        for slot in slots {
            let addr = start + slot * u64::from(len);
            self.entries.push(ibv_sge { addr, length: len, lkey: self.mr.lkey() });
            let (next, sg_list) = (std::ptr::null_mut(), std::ptr::null_mut());
            self.requests.push(ibv_recv_wr { wr_id: slot, next, sg_list, num_sge: 1 });
        }
        if self.requests.is_empty() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        let first = link(&mut self.requests, &mut self.entries);
        // SAFETY: rules 1, 3 and 6: the list ends with a null pointer and names slots that are not the device's.
        check(unsafe { rdma_sys::ibv_post_recv(self.ud.qp.as_ptr(), first, &raw mut bad) })
    }

    /// Gives what has arrived to `each`, some of it if there is a lot, and posts the slots again. How many.
    ///
    /// # Errors
    /// The device failed: the ring is of no use any more.
    pub(in crate::verbs) fn poll(&mut self, mut each: impl FnMut(Arrived<'_>)) -> io::Result<usize> {
        let mut found = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        let room = i32::try_from(BATCH).map_err(io::Error::other)?;
        // SAFETY: rules 1 and 3.
        let count = unsafe { rdma_sys::ibv_poll_cq(self.ud.cq.cq.as_ptr(), room, found.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue failed"))?;
        let mut slots = [0; BATCH];
        for (entry, slot) in found[..count].iter().zip(&mut slots) {
            // SAFETY: the library has filled in the first `count`.
            let entry = unsafe { entry.assume_init_ref() };
            *slot = entry.wr_id;
            if entry.status != ibv_wc_status::IBV_WC_SUCCESS {
                let status = entry.status;
                return Err(io::Error::other(format!(
                    "the device gave up a receive buffer with status {status}"
                )));
            }
            let len = usize::try_from(entry.byte_len).unwrap_or(0).clamp(GRH, self.stride);
            let at = usize::try_from(entry.wr_id).unwrap_or(0) * self.stride;
            let begin = self.memory.at.as_ptr().wrapping_add(at + GRH);
            // SAFETY: rule 6: a completed slot, which is posted again after `each`; `len` is inside it.
            let payload = unsafe { std::slice::from_raw_parts(begin, len - GRH) };
            let with_immediate = entry.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
            // SAFETY: both fields of the union are numbers of the same size.
            let immediate = unsafe { entry.imm_data_invalidated_rkey_union.imm_data };
            each(Arrived { immediate: with_immediate.then_some(u32::from_be(immediate)), payload });
        }
        self.post(slots[..count].iter().copied())?;
        Ok(count)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: rules 1 and 3: as it was attached. If it was not, nothing happens.
        unsafe { (library().detach_mcast)(self.ud.qp.as_ptr(), &raw const self.group.0, self.group.1) };
    }
}
