//! RDMA by libibverbs: reliable queue pairs over RoCE v2 or InfiniBand.
//!
//! READ and WRITE are done by the two devices; no program of the peer runs. Two sides introduce their queue pairs to
//! each other over a TCP connection (TLS if it is [`adopt_tls`](VerbsFabric::adopt_tls)ed), which stays open beside
//! them: it carries messages, and its end shows at once that the peer has gone; a queue pair would retry for seconds.
//! So whoever may use the TCP connection may use the queue pair; what goes through the queue pair is not encrypted.
//!
//! A device refuses an access without saying why ([`RemoteStatus::Refused`](crate::RemoteStatus::Refused)), and a queue
//! pair does not outlive a refusal: the connection ends with it, others live on.
//!
//! Registering memory pins it. A region's key is one of the device's (32 bits, of which few are random), and its
//! addresses are those of this process: a peer that has a connection can guess both. So each session has a protection domain of
//! its own ([`for_session`](VerbsFabric::for_session)): its keys are of no use on connections of others.

mod budget;
mod device;
mod endpoint;
mod events;
mod hello;
mod multicast;
mod options;
mod queue;
mod raw;
mod sessions;

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub use device::ports;
pub use multicast::{VerbsMulticast, VerbsMulticastOptions};
pub use options::{OnDemand, VerbsOptions};

use crate::region::{LocalSlice, Registration, RemoteRegion};
use crate::socket::Socket;
use crate::stream::{StreamEndpoint, Transport, Urgency};
use crate::sys::net::random;
use crate::table::{Entry, RegionTable, SLOTS, slot};
use crate::tcp::Listening;
use crate::{
    Access, Class, Endpoint, Fabric, FabricError, FabricKind, Incoming, MemoryArea, PeerAddress, Region,
};
use budget::{Budget, Share};
use device::Choice;
use endpoint::{Parts, VerbsEndpoint};
use events::Watch;
use hello::{Hello, LEN, READY, WORKS, Wire};
#[cfg(feature = "fuzzing")]
pub(crate) use hello::{any_hello, some_hello};
use queue::SendQueue;
use raw::{Cq, Device, Domain, Held, Limits, Mr, Path, Probe, Qp};
use sessions::Sessions;

/// Work requests that one queue pair has under way, if the device can.
const DEPTH: u32 = 512;
/// Said instead of [`WORKS`].
const FAILS: [u8; WORKS.len()] = *b"vmvf";
/// How long a peer may take to introduce its queue pair.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(5);

/// READ and WRITE by RDMA devices.
#[derive(Debug)]
pub struct VerbsFabric {
    table: Arc<RegionTable>,
    keys: Arc<LocalKeys>,
    watch: Arc<Watch>,
    domain: Arc<Domain>,
    choice: Choice,
    limits: Limits,
    /// The device can do without pinning.
    on_demand: bool,
    urgency: Arc<Urgency>,
    budget: Arc<Budget>,
    options: VerbsOptions,
    listening: Option<Listening>,
    sessions: Arc<Sessions>,
}

/// The device's key for the region in each slot of the table.
#[derive(Debug)]
struct LocalKeys(Box<[AtomicU32]>);

impl LocalKeys {
    /// The key of a slice that was found to be registered in the current section.
    fn of(&self, slice: &LocalSlice) -> u32 {
        // Written before the region, and with it any slice, was given out.
        self.0[slot(slice.key)].load(Ordering::Relaxed)
    }
}

/// A region's registration. In this order: first the slot, whose drop waits until nobody is about to hand the key to
/// the device; then the device's own, whose drop waits until the device is done.
#[derive(Debug)]
struct Registered {
    _entry: Entry,
    _mr: Mr,
    /// Of what may be pinned.
    _share: Option<Share>,
}

impl Registration for Registered {}

impl VerbsFabric {
    /// A fabric on a device of this host that does not listen: its connections are dialled or adopted.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`] if there is none that can be used.
    pub fn new(options: VerbsOptions) -> Result<Self, FabricError> {
        let choice = Choice::find(&options)?;
        let unusable =
            |error| FabricError::NoDevice { why: format!("{} port {}: {error}", choice.device, choice.port) };
        let device = Device::open(&choice.device).map_err(unusable)?;
        let limits = device.limits(choice.port).map_err(unusable)?;
        let on_demand = device.reads_on_demand();
        let domain = Arc::new(Domain::new(Arc::new(device)).map_err(unusable)?);
        tracing::info!(device = %choice.device, port = choice.port, gid_index = choice.gid_index, ?limits, on_demand, "RDMA");
        Ok(Self {
            table: RegionTable::private()?,
            keys: Arc::new(LocalKeys((0..SLOTS).map(|_| AtomicU32::new(0)).collect())),
            watch: Arc::new(
                Watch::start(&domain, &choice.device).map_err(FabricError::io("watch the RDMA device"))?,
            ),
            domain,
            choice,
            limits,
            on_demand,
            urgency: Arc::default(),
            budget: Arc::default(),
            options,
            listening: None,
            sessions: Arc::default(),
        })
    }

    /// A fabric whose peers introduce themselves at `address` (port 0: any free port, see
    /// [`local_addr`](Self::local_addr)), in the clear: as with [`TcpFabric::bind`](crate::tcp::TcpFabric::bind).
    ///
    /// # Errors
    /// As [`new`](Self::new); the address cannot be bound.
    pub fn bind(address: SocketAddr, options: VerbsOptions) -> Result<Self, FabricError> {
        let listening = Listening::bind(address)?;
        Ok(Self { listening: Some(listening), ..Self::new(options)? })
    }

    /// Where peers introduce themselves, if the fabric listens.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listening.as_ref().map(Listening::address)
    }

    /// Device, port and index of the address in use, for reports.
    #[must_use]
    pub fn device(&self) -> String {
        format!("{} port {} GID index {}", self.choice.device, self.choice.port, self.choice.gid_index)
    }

    /// What peers must have too to be reached: `RoCE v2`, or `InfiniBand` and the number of the subnet.
    #[must_use]
    pub fn network(&self) -> String {
        if self.choice.ethernet {
            return "RoCE v2".to_owned();
        }
        let prefix: String = self.choice.gid[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("InfiniBand {prefix}")
    }

    /// Whether the device reads memory that is not pinned (on-demand paging).
    #[must_use]
    pub const fn reads_on_demand(&self) -> bool {
        self.on_demand
    }

    /// Whether the device is still there and its port active: whether new connections can be expected to work.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`] says what is wrong.
    pub fn usable(&self) -> Result<(), FabricError> {
        if self.watch.health().is_lost() {
            let why = format!("{} was removed or has failed", self.choice.device);
            return Err(FabricError::NoDevice { why });
        }
        let now = Choice::find(&VerbsOptions {
            device: Some(self.choice.device.clone()),
            port: Some(self.choice.port),
            gid_index: Some(self.choice.gid_index),
            ..self.options.clone()
        })?;
        if now == self.choice {
            Ok(())
        } else {
            Err(FabricError::NoDevice { why: format!("the address of {} has changed", self.device()) })
        }
    }

    /// Bytes that are registered now and pinned by that.
    #[must_use]
    pub fn registered(&self) -> u64 {
        self.budget.taken()
    }

    /// Makes an endpoint of a connected socket. Both sides must do so at the same time, since their queue pairs are
    /// introduced here, and neither may have read bytes beyond what they exchanged before.
    ///
    /// # Errors
    /// [`FabricError::NoPath`] if the devices do not reach each other; [`FabricError::Protocol`],
    /// [`FabricError::PeerGone`], [`FabricError::Timeout`].
    pub fn adopt(&self, stream: TcpStream, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        self.options.stream.configure(&stream, class)?;
        let qp = self.introduce(&stream, &mut Wire::Plain(&stream), class)?;
        self.endpoint(qp, Transport::plain(Socket::Tcp(stream)), class)
    }

    /// The same over TLS: `tls` has finished its handshake on `stream`, and may hold bytes already received. Introduction
    /// and messages are encrypted; what the devices move is not.
    ///
    /// # Errors
    /// As [`adopt`](Self::adopt).
    pub fn adopt_tls(
        &self,
        stream: TcpStream,
        mut tls: rustls::Connection,
        class: Class,
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        self.options.stream.configure(&stream, class)?;
        let qp = self.introduce(&stream, &mut Wire::Tls(&stream, &mut tls), class)?;
        self.endpoint(qp, Transport::tls(Socket::Tcp(stream), tls), class)
    }

    /// Makes a queue pair and connects it with the peer's.
    fn introduce(&self, stream: &TcpStream, wire: &mut Wire<'_>, class: Class) -> Result<Qp, FabricError> {
        let making = FabricError::io("make a queue pair");
        let mut qp = self.queue_pair().map_err(making)?;
        let probe = Probe::new(&self.domain, qp.number())
            .map_err(|error| FabricError::Register { len: 8192, why: why_not_registered(&error) })?;
        let ours = Hello {
            class,
            ethernet: self.choice.ethernet,
            number: qp.number(),
            first_packet: u32::try_from(random().map_err(FabricError::io("draw a random number"))? >> 40)
                .unwrap_or(0),
            asks: self.limits.asks.min(self.options.read_depth.max(1)),
            answers: self.limits.answers,
            mtu: u8::try_from(self.limits.mtu).unwrap_or(1),
            lid: self.limits.lid,
            gid: self.choice.gid,
            page: probe.address(),
            page_key: probe.key(),
        };
        let deadline = |time| {
            stream
                .set_read_timeout(time)
                .and_then(|()| stream.set_write_timeout(time))
                .map_err(FabricError::io("set how long to wait for the peer"))
        };
        deadline(Some(INTRODUCTION_TIMEOUT))?;
        let mut bytes = [0; LEN];
        wire.exchange(&ours.encode(), &mut bytes).map_err(unanswered)?;
        let theirs = Hello::decode(&bytes)?;
        let path = self.path(&ours, &theirs)?;
        qp.connect(&path).map_err(|error| FabricError::NoPath {
            why: format!("{} could not be connected to {}: {error}", self.device(), address(&theirs)),
        })?;
        let mut said = [0; READY.len()];
        wire.exchange(&READY, &mut said).map_err(unanswered)?;
        if said != READY {
            return Err(FabricError::protocol("something else where the peer should be ready"));
        }
        // The time until a device gives up a path on which nothing passes.
        deadline(Some(INTRODUCTION_TIMEOUT + self.options.silence))?;
        let tried = probe.read(&mut qp, (theirs.page, theirs.page_key), theirs.number, self.options.silence);
        // The peer's trial may still be under way: our page stays until it has told.
        let mut said = [0; WORKS.len()];
        wire.exchange(if tried.is_ok() { &WORKS } else { &FAILS }, &mut said).map_err(unanswered)?;
        let (here, there) = (self.device(), address(&theirs));
        if let Err(why) = tried {
            return Err(FabricError::NoPath { why: format!("from {here} to {there}: {why}") });
        }
        if said != WORKS {
            return Err(FabricError::NoPath { why: format!("{there} cannot READ from {here}") });
        }
        deadline(None)?;
        Ok(qp)
    }

    fn queue_pair(&self) -> std::io::Result<Qp> {
        let depth = self.depth();
        // After a failure every request that was posted is told, not only those that asked for it.
        let mut qp = Qp::new(Cq::new(&self.domain, depth + 1)?, depth)?;
        qp.prepare(self.choice.port, self.choice.pkey_index)?;
        Ok(qp)
    }

    /// The device's region, and its share of what may be pinned if it pins.
    fn registration(&self, area: MemoryArea, access: Access) -> Result<(Mr, Option<Share>), FabricError> {
        let by = |held| {
            Mr::register(&self.domain, area, access, held)
                .map_err(|error| FabricError::Register { len: area.len(), why: why_not_registered(&error) })
        };
        let pinned = || {
            let share = self.budget.take(area.len(), self.options.max_registered)?;
            Ok((by(Held::Pinned)?, Some(share)))
        };
        match self.options.on_demand {
            OnDemand::Always if self.on_demand => Ok((by(Held::OnDemand)?, None)),
            OnDemand::IfNeeded if self.on_demand => pinned().or_else(|why: FabricError| {
                tracing::debug!(%why, "registers for on-demand paging instead");
                // Why it was not pinned says more.
                by(Held::OnDemand).map(|mr| (mr, None)).map_err(|_| why)
            }),
            OnDemand::Never | OnDemand::IfNeeded | OnDemand::Always => pinned(),
        }
    }

    fn depth(&self) -> u32 {
        self.limits.queue.min(DEPTH)
    }

    fn path(&self, ours: &Hello, theirs: &Hello) -> Result<Path, FabricError> {
        if ours.class != theirs.class {
            return Err(FabricError::protocol(format!(
                "a {:?} connection where this side expects {:?}",
                theirs.class, ours.class
            )));
        }
        if ours.ethernet != theirs.ethernet {
            let kind = |hello: &Hello| if hello.ethernet { "RoCE" } else { "InfiniBand" };
            let why = format!("this side has {}, the other {}", kind(ours), kind(theirs));
            return Err(FabricError::NoPath { why });
        }
        let urgent = ours.class == Class::Urgent;
        let options = &self.options;
        Ok(Path {
            port: self.choice.port,
            gid_index: self.choice.gid_index,
            gid: theirs.gid,
            lid: theirs.lid,
            global: ours.ethernet,
            mtu: u32::from(ours.mtu.min(theirs.mtu)),
            service_level: if urgent { options.urgent_service_level } else { options.bulk_service_level }
                & 15,
            traffic_class: if urgent { options.urgent_traffic_class } else { options.bulk_traffic_class },
            number: theirs.number,
            their_first: theirs.first_packet,
            our_first: ours.first_packet,
            asks: ours.asks.min(theirs.answers),
            answers: ours.answers.min(theirs.asks),
            ack_timeout: options.ack_timeout & 31,
            retries: options.retries & 7,
        })
    }

    fn endpoint(&self, qp: Qp, transport: Transport, class: Class) -> Result<Box<dyn Endpoint>, FabricError> {
        let tuning = self.options.stream.tuning(class);
        let messages =
            StreamEndpoint::over(FabricKind::Verbs, class, transport, &self.table, tuning, &self.urgency)?;
        let depth = usize::try_from(self.depth()).unwrap_or(1);
        let parts = Parts {
            qp,
            messages,
            participant: self.table.join()?,
            keys: Arc::clone(&self.keys),
            health: Arc::clone(self.watch.health()),
            queue: SendQueue::new(depth, self.limits.message),
            silence: self.options.silence,
            spin: if class == Class::Urgent { self.options.urgent_spin } else { Duration::ZERO },
        };
        let endpoint = VerbsEndpoint::introduced(parts)
            .map_err(FabricError::io("prepare to wait for the RDMA device"))?;
        Ok(Box::new(endpoint))
    }
}

/// What it means that the peer did not introduce its queue pair.
fn unanswered(source: std::io::Error) -> FabricError {
    match source.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            FabricError::timeout("the peer's queue pair", INTRODUCTION_TIMEOUT)
        }
        _ => FabricError::PeerGone { outstanding: 0, source },
    }
}

fn address(hello: &Hello) -> String {
    let gid = std::net::Ipv6Addr::from(hello.gid);
    if hello.ethernet { gid.to_canonical().to_string() } else { format!("LID {}", hello.lid) }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Verbs
    }

    fn register(&self, area: MemoryArea, access: Access) -> Result<Region, FabricError> {
        let (mr, share) = self.registration(area, access)?;
        let (entry, in_table) = self.table.insert(area, access)?;
        self.keys.0[entry.index()].store(mr.lkey(), Ordering::Relaxed);
        let addr = area.ptr().as_ptr().expose_provenance() as u64;
        let remote = RemoteRegion { addr, len: area.len(), rkey: u64::from(mr.rkey()) };
        let pins = share.is_some();
        let registered = Registered { _entry: entry, _mr: mr, _share: share };
        Ok(Region::new(area, access, remote, in_table.rkey, pins, Box::new(registered)))
    }

    fn connect(
        &self,
        peer: &PeerAddress,
        class: Class,
        greeting: &[u8],
    ) -> Result<Box<dyn Endpoint>, FabricError> {
        let stream = crate::tcp::dial(FabricKind::Verbs, peer, class, greeting, &self.options.stream)?;
        self.adopt(stream, class)
    }

    fn accept(&self, timeout: Duration) -> Result<Incoming, FabricError> {
        let Some(listening) = &self.listening else {
            return Err(FabricError::Unsupported { what: "accepting without a listening address" });
        };
        let (stream, class, greeting) = listening.accept(timeout)?;
        Ok(Incoming { class, greeting, endpoint: self.adopt(stream, class)? })
    }
}

fn why_not_registered(error: &std::io::Error) -> String {
    if error.raw_os_error() != Some(libc::ENOMEM) {
        return format!("{error}");
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    format!(
        "{error}: registered memory is pinned, and this process may lock {limit} (RLIMIT_MEMLOCK; \
         LimitMEMLOCK= of a systemd unit); raise that, or register less at a time"
    )
}
