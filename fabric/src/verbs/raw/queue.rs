//! A reliable queue pair and its completion queue.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{
    ibv_access_flags, ibv_comp_channel, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask,
    ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_status,
    ibv_wr_opcode,
};

use super::device::{Domain, check};
use super::library::library;
use super::list::link;
use crate::table::Need;

/// Completions taken from the queue at a time.
pub(super) const BATCH: usize = 32;

/// A completion queue with a descriptor to wait for.
#[derive(Debug)]
pub(in crate::verbs) struct Cq {
    pub(super) cq: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
    /// Closed after the queue.
    pub(super) domain: Arc<Domain>,
}

// SAFETY: rule 2 of the folder.
unsafe impl Send for Cq {}

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) enum Outcome {
    Done,
    /// The peer's device refused: wrong key, range or permission. It does not say which.
    Refused,
    /// The peer's device could not do it.
    PeerFault,
    /// Our own memory is not registered (any more).
    LocalGone,
    /// Given up because an earlier request failed.
    Flushed,
    /// The peer did not answer, or the connection is broken for another reason; the library's number.
    Broken(u32),
}

/// The end of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) struct Ended {
    pub(in crate::verbs) id: u64,
    pub(in crate::verbs) outcome: Outcome,
}

impl Cq {
    /// Room for `entries` completions that were not taken yet.
    pub(in crate::verbs) fn new(domain: &Arc<Domain>, entries: u32) -> io::Result<Self> {
        let context = domain.device().as_ptr();
        // SAFETY: rule 1.
        let channel = unsafe { (library().create_comp_channel)(context) };
        let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
        let entries = i32::try_from(entries).map_err(io::Error::other)?;
        // SAFETY: rule 1.
        let cq =
            unsafe { (library().create_cq)(context, entries, std::ptr::null_mut(), channel.as_ptr(), 0) };
        let Some(cq) = NonNull::new(cq) else {
            let error = io::Error::last_os_error();
            // SAFETY: rule 1: nothing was made from it.
            unsafe { (library().destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = Self { cq, channel, domain: Arc::clone(domain) };
        rustix::io::ioctl_fionbio(queue.fd(), true)?;
        Ok(queue)
    }

    /// Readable after [`arm`](Self::arm) when a completion came.
    pub(in crate::verbs) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: rule 1: the channel's descriptor does not change.
        let fd = unsafe { (*self.channel.as_ptr()).fd };
        // SAFETY: the descriptor is open as long as the channel, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Asks for an event when the next completion comes. One that is there already gives none.
    pub(in crate::verbs) fn arm(&mut self) -> io::Result<()> {
        // SAFETY: rule 1.
        check(unsafe { rdma_sys::ibv_req_notify_cq(self.cq.as_ptr(), 0) })
    }

    /// Takes the event, if it came.
    pub(in crate::verbs) fn take_event(&mut self) -> io::Result<bool> {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: rules 1 and 3.
        let result =
            unsafe { (library().get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut context) };
        if result != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) };
        }
        // SAFETY: rule 1: the event is of the only queue of this channel. Destroying it waits for this.
        unsafe { (library().ack_cq_events)(self.cq.as_ptr(), 1) };
        Ok(true)
    }

    /// Adds what has completed to `out`, some of it if there is a lot. How many.
    pub(in crate::verbs) fn poll(&mut self, out: &mut Vec<Ended>) -> io::Result<usize> {
        let mut found = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        let room = i32::try_from(BATCH).map_err(io::Error::other)?;
        // SAFETY: rules 1 and 3.
        let count = unsafe { rdma_sys::ibv_poll_cq(self.cq.as_ptr(), room, found.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::other("the completion queue failed"))?;
        for entry in &found[..count] {
            // SAFETY: the library has filled in the first `count`.
            let entry = unsafe { entry.assume_init_ref() };
            out.push(Ended { id: entry.wr_id, outcome: outcome(entry.status) });
        }
        Ok(count)
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: rule 1; every event was acknowledged when it was taken.
        unsafe { (library().destroy_cq)(self.cq.as_ptr()) };
        // SAFETY: rule 1; its only queue is gone.
        unsafe { (library().destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

fn outcome(status: ibv_wc_status::Type) -> Outcome {
    match status {
        ibv_wc_status::IBV_WC_SUCCESS => Outcome::Done,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Outcome::Flushed,
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR | ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => Outcome::Refused,
        ibv_wc_status::IBV_WC_REM_OP_ERR => Outcome::PeerFault,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => Outcome::LocalGone,
        other => Outcome::Broken(other),
    }
}

/// One READ or WRITE of contiguous bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) struct Post {
    pub(in crate::verbs) id: u64,
    pub(in crate::verbs) need: Need,
    pub(in crate::verbs) local: u64,
    pub(in crate::verbs) lkey: u32,
    pub(in crate::verbs) len: u32,
    pub(in crate::verbs) remote: u64,
    pub(in crate::verbs) rkey: u32,
    /// Whether its success is reported; failure always is.
    pub(in crate::verbs) signalled: bool,
}

/// How a queue pair reaches its peer.
#[derive(Debug, Clone, Copy)]
pub(in crate::verbs) struct Path {
    pub(in crate::verbs) port: u8,
    /// Index of our own address in the port's table.
    pub(in crate::verbs) gid_index: u8,
    /// The peer's address.
    pub(in crate::verbs) gid: [u8; 16],
    /// The peer's local address where there is a subnet manager, 0 on Ethernet.
    pub(in crate::verbs) lid: u16,
    /// Whether packets carry global addresses: always on Ethernet.
    pub(in crate::verbs) global: bool,
    pub(in crate::verbs) mtu: u32,
    pub(in crate::verbs) service_level: u8,
    pub(in crate::verbs) traffic_class: u8,
    /// Number of the peer's queue pair.
    pub(in crate::verbs) number: u32,
    /// Number of the first packet in either direction.
    pub(in crate::verbs) their_first: u32,
    pub(in crate::verbs) our_first: u32,
    /// READs under way that we ask for, and that we answer.
    pub(in crate::verbs) asks: u8,
    pub(in crate::verbs) answers: u8,
    /// Time until a packet is sent again: 4.096 us times two to the power of this.
    pub(in crate::verbs) ack_timeout: u8,
    /// How often, before the connection counts as lost.
    pub(in crate::verbs) retries: u8,
}

/// A reliable queue pair. Its drop ends every access of the peer through it.
pub(in crate::verbs) struct Qp {
    qp: NonNull<ibv_qp>,
    /// Destroyed after the queue pair.
    pub(in crate::verbs) cq: Cq,
    entries: Vec<ibv_sge>,
    requests: Vec<ibv_send_wr>,
}

// SAFETY: rule 2; the pointers in `requests` mean something only during a call.
unsafe impl Send for Qp {}

impl std::fmt::Debug for Qp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qp").field("number", &self.number()).finish_non_exhaustive()
    }
}

impl Qp {
    /// A queue pair for `requests` work requests under way.
    pub(in crate::verbs) fn new(cq: Cq, requests: u32) -> io::Result<Self> {
        // SAFETY: rule 3.
        let mut how: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        how.send_cq = cq.cq.as_ptr();
        how.recv_cq = cq.cq.as_ptr();
        how.qp_type = ibv_qp_type::IBV_QPT_RC;
        how.cap.max_send_wr = requests;
        how.cap.max_send_sge = 1;
        // Nothing is received through the queue pair: messages have a connection of their own.
        how.cap.max_recv_wr = 1;
        how.cap.max_recv_sge = 1;
        // SAFETY: rules 1 and 3.
        let qp = unsafe { (library().create_qp)(cq.domain.as_ptr(), &raw mut how) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { qp, cq, entries: Vec::new(), requests: Vec::new() })
    }

    /// The number by which peers know it.
    pub(in crate::verbs) fn number(&self) -> u32 {
        // SAFETY: rule 1: set by the constructor and constant.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    /// Makes it ready to be connected.
    pub(in crate::verbs) fn prepare(&mut self, port: u8, pkey_index: u16) -> io::Result<()> {
        let mut to = attributes(ibv_qp_state::IBV_QPS_INIT);
        to.port_num = port;
        to.pkey_index = pkey_index;
        to.qp_access_flags =
            ibv_access_flags::IBV_ACCESS_REMOTE_READ.0 | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        let fields =
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut to, fields)
    }

    /// Connects it: first to answer the peer, then to ask.
    pub(in crate::verbs) fn connect(&mut self, path: &Path) -> io::Result<()> {
        let mut to = attributes(ibv_qp_state::IBV_QPS_RTR);
        to.path_mtu = path.mtu;
        to.dest_qp_num = path.number;
        to.rq_psn = path.their_first;
        to.max_dest_rd_atomic = path.answers;
        to.min_rnr_timer = 12; // 0.64 ms; never used, since nothing is received
        to.ah_attr.dlid = path.lid;
        to.ah_attr.sl = path.service_level;
        to.ah_attr.port_num = path.port;
        to.ah_attr.is_global = u8::from(path.global);
        to.ah_attr.grh.dgid.raw = path.gid;
        to.ah_attr.grh.sgid_index = path.gid_index;
        to.ah_attr.grh.hop_limit = 64;
        to.ah_attr.grh.traffic_class = path.traffic_class;
        let fields = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut to, fields)?;
        let mut to = attributes(ibv_qp_state::IBV_QPS_RTS);
        to.timeout = path.ack_timeout;
        to.retry_cnt = path.retries;
        to.rnr_retry = 7;
        to.sq_psn = path.our_first;
        to.max_rd_atomic = path.asks;
        let fields = mask::IBV_QP_STATE
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut to, fields)
    }

    fn modify(&mut self, to: &mut ibv_qp_attr, fields: mask) -> io::Result<()> {
        modify(&mut self.qp, to, fields)
    }

    /// Hands requests to the device, all with one doorbell.
    ///
    /// # Errors
    /// The device did not take all of them: the connection is of no use any more.
    pub(in crate::verbs) fn post(&mut self, posts: &[Post]) -> io::Result<()> {
        self.entries.clear();
        self.entries.extend(posts.iter().map(|post| ibv_sge {
            addr: post.local,
            length: post.len,
            lkey: post.lkey,
        }));
        self.requests.clear();
        for post in posts {
            self.requests.push(request(post));
        }
        if self.requests.is_empty() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        let first = link(&mut self.requests, &mut self.entries);
        // SAFETY: rules 1, 3 and 4: the list ends with a null pointer and names registered memory by its key.
        check(unsafe { rdma_sys::ibv_post_send(self.qp.as_ptr(), first, &raw mut bad) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: rule 1; the completion queue is a field and destroyed after this.
        unsafe { (library().destroy_qp)(self.qp.as_ptr()) };
    }
}

/// Changes the state of a queue pair of ours.
pub(super) fn modify(qp: &mut NonNull<ibv_qp>, to: &mut ibv_qp_attr, fields: mask) -> io::Result<()> {
    let fields = i32::try_from(fields.0).map_err(io::Error::other)?;
    // SAFETY: rules 1 and 3.
    check(unsafe { (library().modify_qp)(qp.as_ptr(), to, fields) })
}

pub(super) fn attributes(state: ibv_qp_state::Type) -> ibv_qp_attr {
    // SAFETY: rule 3.
    let mut all: ibv_qp_attr = unsafe { std::mem::zeroed() };
    all.qp_state = state;
    all
}

fn request(post: &Post) -> ibv_send_wr {
    // SAFETY: rule 3.
    let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = post.id;
    request.num_sge = 1;
    request.opcode = match post.need {
        Need::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
        Need::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
    };
    if post.signalled {
        request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    request.wr.rdma = rdma_sys::rdma_t { remote_addr: post.remote, rkey: post.rkey };
    request
}
