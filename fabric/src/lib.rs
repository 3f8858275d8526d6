//! One-sided memory access between two processes, and small messages beside it.
//!
//! A [`Fabric`] makes memory of this process reachable by a peer ([`Fabric::register`]) and opens connections
//! ([`Endpoint`]) on which either side may READ from and WRITE to the other side's registered memory without
//! the other side's program taking part. The shape is that of RDMA reliable connections; the back ends are
//!
//! | back end | transport | who moves the bytes |
//! |---|---|---|
//! | [`tcp`] | a TCP socket, plain or TLS | a responder thread at the peer answers; payload is received straight into place |
//! | `verbs` (with the feature of that name) | RDMA: RoCE or InfiniBand | the two devices alone |
//! | [`local`] | two processes of one host | the requester alone, by `process_vm_readv(2)` / `process_vm_writev(2)` |
//!
//! One sender reaches many hosts at once by [`Multicast`], datagrams that may be lost; the back end is [`udp`].
//!
//! This crate knows nothing of what the memory is used for.
//!
//! # How a connection is used
//!
//! 1. [`Endpoint::post_read`] and its siblings queue work; [`Endpoint::flush`] rings the doorbell.
//! 2. [`Endpoint::poll`] makes progress in both directions and yields completions. It never blocks.
//! 3. When it yields nothing, wait for [`Endpoint::wait_fd`] with `poll(2)`, beside whatever else the thread
//!    waits for, or call [`Endpoint::wait`].
//!
//! A side that only answers hands its endpoint to [`Endpoint::serve`].
//!
//! # What a completion promises
//!
//! A successful READ completion says that every byte of every segment is in local memory (but see
//! [`CompletionKind::Read::zero_mask`]). When a connection breaks, [`Endpoint::poll`] returns an error and no
//! further completion: what was outstanding has neither succeeded nor left its target memory untouched.

pub mod address;
pub mod counters;
pub mod endpoint;
pub mod error;
pub mod fabric;
pub mod local;
pub mod multicast;
pub mod region;
pub mod serve;
pub mod tcp;
pub mod thread;
pub mod trial;
pub mod udp;
#[cfg(feature = "verbs")]
pub mod verbs;

mod stream;
mod sys;
mod table;
mod wire;

pub use address::{Class, FabricKind, PeerAddress};
pub use counters::{Counters, CountersHandle};
pub use endpoint::{
    Completion, CompletionKind, Completions, Endpoint, MAX_MESSAGE, MAX_SEGMENTS, MAX_TRANSFER, ReadSegment,
    WrId, WriteSegment,
};
pub use error::{FabricError, PostError, Remedy, RemoteStatus};
pub use fabric::{Fabric, Incoming};
pub use multicast::{
    Group, GroupAddress, Multicast, MulticastCounters, MulticastCountersHandle, MulticastReceiver,
    MulticastSender, Outgoing, Session, Sink,
};
pub use region::{Access, LocalSlice, MemoryArea, Region, RemoteRegion, RemoteSlice};
pub use serve::ServeHandle;
pub use thread::{Sched, SchedOutcome, StayAwake, ThreadOptions};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("lengths of guest memory do not fit a 32-bit address space");
