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
//! ```
//! use std::ptr::NonNull;
//! use std::time::Duration;
//!
//! use vmove_fabric::tcp::{TcpFabric, TcpOptions};
//! use vmove_fabric::{
//!     Access, Class, Completions, Endpoint, Fabric, MemoryArea, PeerAddress, ReadSegment, ThreadOptions, WrId,
//! };
//!
//! // A page of each side. Two fabrics of one process stand for two hosts.
//! let area = |byte: u8| {
//!     let page: &'static mut [u8] = vec![byte; 4096].leak();
//!     // SAFETY: the page is never freed, and only the fabrics touch it.
//!     unsafe { MemoryArea::new(NonNull::from(page).cast(), 4096) }
//! };
//! let theirs = TcpFabric::bind("127.0.0.1:0".parse()?, TcpOptions::default())?;
//! let ours = TcpFabric::new(TcpOptions::default())?;
//! let source = theirs.register(area(7), Access::REMOTE_READ)?;
//! let target = ours.register(area(0), Access::LOCAL)?;
//!
//! // The peer accepts and answers; we dial.
//! let address = PeerAddress::Tcp(theirs.local_addr().expect("it listens"));
//! let answering = std::thread::spawn(move || theirs.accept(Duration::from_secs(5)));
//! let mut endpoint = ours.connect(&address, Class::Bulk, b"for the example")?;
//! let incoming = answering.join().expect("no panic")?;
//! let serving = incoming.endpoint.serve(ThreadOptions::normal("example"))?;
//!
//! // READ the peer's page into ours.
//! let remote = source.remote().at(0).expect("inside");
//! let local = target.local(0, 4096).expect("inside");
//! endpoint.post_read(WrId(1), &[ReadSegment { remote, local }])?;
//! endpoint.flush()?;
//! let mut found = Completions::default();
//! while endpoint.poll(&mut found)? == 0 {
//!     endpoint.wait(None)?;
//! }
//! let completion = found.drain().next().expect("one was posted");
//! assert_eq!((completion.wr, completion.status), (WrId(1), Ok(())));
//! let mut bytes = [0; 4096];
//! assert!(target.read_at(0, &mut bytes) && bytes == [7; 4096]);
//! # drop(serving);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod local;
pub mod multicast;
pub mod region;
pub mod serve;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulated;
pub mod tcp;
pub mod thread;
pub mod trial;
pub mod udp;
#[cfg(feature = "verbs")]
pub mod verbs;

mod accept;
mod connection;
mod socket;
mod stream;
mod sys;
mod table;
mod wire;

pub use address::{Class, FabricKind, PeerAddress};
pub use counters::{Counters, CountersHandle, MulticastCounters, MulticastCountersHandle};
pub use endpoint::{
    Completion, CompletionKind, Completions, Endpoint, MAX_MESSAGE, MAX_SEGMENTS, MAX_TRANSFER, ReadSegment,
    WrId, WriteSegment,
};
pub use error::{FabricError, PostError, Remedy, RemoteStatus};
pub use fabric::{Fabric, Incoming};
pub use multicast::{
    Group, GroupAddress, Multicast, MulticastReceiver, MulticastSender, Outgoing, Session, Sink,
};
pub use region::{Access, LocalSlice, MemoryArea, Region, RemoteRegion, RemoteSlice};
pub use serve::ServeHandle;
pub use thread::{Sched, SchedOutcome, StayAwake, ThreadClock, ThreadOptions};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("lengths of guest memory do not fit a 32-bit address space");
