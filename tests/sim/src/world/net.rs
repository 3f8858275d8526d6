//! The network: connections that take time, hold back, break, and end when one of their ends does. Bytes of one connection stay in order;
//! those of different ones overtake each other.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout};
use vmove_fabric::simulated::{Passage, SimulatedFabric, Way, pair};
use vmove_fabric::{Endpoint, Fabric, FabricKind};
use vmove_node::peer::hello::{MAGIC, answer, read_answer};
use vmove_node::peer::{
    BoxedStream, Caller, Dialer, FabricOffer, Hello, HelloError, Link, LinkError, LinkKind, PeerTarget,
    Status, Token,
};

use crate::life::Life;
use crate::plan::{NODES, NodeIndex};
use crate::world::running::Daemon;
use crate::world::{Fate, World};

/// As the daemon's.
const CONNECT: Duration = Duration::from_secs(5);

/// One connection.
pub struct Wire {
    world: World,
    kind: LinkKind,
    state: Mutex<WireState>,
}

struct WireState {
    broken: bool,
    /// What goes to the end of this number.
    to: [Direction; 2],
    /// When the oldest read of pages arrives.
    read_arrives: Option<Instant>,
}

#[derive(Default)]
struct Direction {
    under_way: VecDeque<(Instant, VecDeque<u8>)>,
    /// The sender has closed it.
    closed: bool,
    reader: Option<Waker>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Wire {
    fn new(world: &World, kind: LinkKind) -> Arc<Self> {
        let state = WireState { broken: false, to: Default::default(), read_arrives: None };
        let wire = Arc::new(Self { world: world.clone(), kind, state: Mutex::new(state) });
        world.state().wires.push(Arc::downgrade(&wire));
        wire
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether pages go over it.
    #[must_use]
    pub const fn carries_pages(&self) -> bool {
        matches!(self.kind, LinkKind::Urgent | LinkKind::Bulk)
    }

    /// Both ends find it broken; what was under way is lost.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.broken = true;
        for direction in &mut state.to {
            direction.under_way.clear();
            direction.reader.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Those who read look again.
    pub fn wake(&self) {
        for direction in &mut self.lock().to {
            direction.reader.take().into_iter().for_each(Waker::wake);
        }
    }
}

/// The way of page reads over a connection.
impl Way for Wire {
    fn passage(&self) -> Passage {
        if self.lock().broken {
            return Passage::Broken;
        }
        if self.world.partitioned_until().is_some() {
            return Passage::NotYet;
        }
        let latency = self.world.latency();
        let mut state = self.lock();
        let at = *state.read_arrives.get_or_insert_with(|| Instant::now() + latency);
        if Instant::now() < at {
            return Passage::NotYet;
        }
        state.read_arrives = None;
        Passage::Arrives
    }
}

/// One end of a connection, held by one life.
struct End {
    wire: Arc<Wire>,
    life: Arc<Life>,
    side: usize,
    arrives: Option<Pin<Box<Sleep>>>,
}

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.wire.lock();
        // The kernel resets a connection that is closed with bytes unread.
        if !state.to[self.side].under_way.is_empty() {
            drop(state);
            return self.wire.reset();
        }
        let other = &mut state.to[1 - self.side];
        other.closed = true;
        other.reader.take().into_iter().for_each(Waker::wake);
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.life.is_alive() {
            return Poll::Pending;
        }
        let held_back = this.wire.world.partitioned_until().is_some();
        let mut state = this.wire.lock();
        if state.broken {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let direction = &mut state.to[this.side];
        let arrives = match direction.under_way.front_mut() {
            _ if held_back => None,
            None if direction.closed => return Poll::Ready(Ok(())),
            None => None,
            Some((at, bytes)) if *at <= Instant::now() => {
                let (first, _) = bytes.as_slices();
                let taken = first.len().min(buf.remaining());
                buf.put_slice(&first[..taken]);
                bytes.drain(..taken);
                if bytes.is_empty() {
                    direction.under_way.pop_front();
                }
                return Poll::Ready(Ok(()));
            }
            Some((at, _)) => Some(*at),
        };
        direction.reader = Some(cx.waker().clone());
        drop(state);
        if let Some(at) = arrives {
            let sleeping = this.arrives.insert(Box::pin(tokio::time::sleep_until(at)));
            if sleeping.as_mut().poll(cx).is_ready() {
                cx.waker().wake_by_ref();
            }
        }
        Poll::Pending
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.life.is_alive() {
            return Poll::Pending;
        }
        // The first byte behind the length of a message says which it is.
        let what = bytes.get(4).copied().unwrap_or(0);
        let fate = self.wire.world.step(&self.life, format!("send {:?} {what}", self.wire.kind));
        let sent = match fate {
            Fate::Done => bytes,
            Fate::Dies(percent) => crate::world::disk::part(bytes, percent),
        };
        let latency = self.wire.world.latency();
        let mut state = self.wire.lock();
        if state.broken || state.to[self.side].closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let direction = &mut state.to[1 - self.side];
        let after = direction.under_way.back().map(|(at, _)| *at);
        let at = (Instant::now() + latency).max(after.unwrap_or_else(Instant::now));
        if !sent.is_empty() {
            direction.under_way.push_back((at, sent.iter().copied().collect()));
            direction.reader.take().into_iter().for_each(Waker::wake);
        }
        if fate == Fate::Done { Poll::Ready(Ok(bytes.len())) } else { Poll::Pending }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.wire.lock();
        let direction = &mut state.to[1 - self.side];
        direction.closed = true;
        direction.reader.take().into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }
}

/// Opens connections to the other node.
pub struct SimDialer {
    world: World,
    life: Arc<Life>,
    fabric: Arc<SimulatedFabric>,
}

impl SimDialer {
    /// For a life.
    #[must_use]
    pub fn new(world: &World, life: &Arc<Life>) -> Self {
        let fabric = Arc::new(SimulatedFabric::new(world.memories()));
        Self { world: world.clone(), life: Arc::clone(life), fabric }
    }

    /// Reaches the other node, and greets its daemon. `theirs`: its end of a page connection, over `wire` of its own.
    async fn greet(
        &self,
        to: &PeerTarget,
        hello: &Hello,
        (wire, theirs): (&Arc<Wire>, Option<Box<dyn Endpoint>>),
    ) -> Result<End, LinkError> {
        self.world.may(&self.life, format!("dial {:?}", hello.kind)).await;
        let unreachable = |why: &str| LinkError::Unreachable { peer: to.to_string(), why: why.to_owned() };
        let given_up = Instant::now() + CONNECT;
        while let Some(until) = self.world.partitioned_until() {
            if until >= given_up {
                tokio::time::sleep_until(given_up).await;
                return Err(unreachable("no answer"));
            }
            tokio::time::sleep_until(until).await;
        }
        sleep(self.world.latency()).await;
        let node = node_at(&to.address).ok_or_else(|| unreachable("no such host"))?;
        let daemon = self.world.state().nodes[node].daemon.clone();
        let daemon = daemon.ok_or_else(|| unreachable("connection refused"))?;
        let end = |side, life: &Arc<Life>| End {
            wire: Arc::clone(wire),
            life: Arc::clone(life),
            side,
            arrives: None,
        };
        let (mut ours, accepted) = (end(0, &self.life), end(1, &daemon.life));
        let their_life = Arc::clone(&daemon.life);
        drop(their_life.process().spawn(serve(daemon, accepted, theirs, self.life.version())));
        let exchange = async {
            ours.write_all(&hello.encode()).await?;
            read_answer(&mut ours).await
        };
        match timeout(CONNECT, exchange).await {
            Ok(Ok(())) => Ok(ours),
            Ok(Err(HelloError::Io(_))) => {
                Err(LinkError::Hello { peer: to.to_string(), source: HelloError::NotVmove })
            }
            Ok(Err(source)) => Err(LinkError::Hello { peer: to.to_string(), source }),
            Err(_) => Err(unreachable("it took the connection but sent no greeting")),
        }
    }
}

#[async_trait]
impl Dialer for SimDialer {
    async fn stream(&self, to: &PeerTarget, hello: &Hello) -> Result<BoxedStream, LinkError> {
        let wire = Wire::new(&self.world, hello.kind);
        Ok(Box::new(self.greet(to, hello, (&wire, None)).await?))
    }

    async fn endpoint(
        &self,
        to: &PeerTarget,
        _: FabricKind,
        hello: &Hello,
    ) -> Result<Box<dyn Endpoint>, LinkError> {
        let greeting = Wire::new(&self.world, hello.kind);
        let pages = Wire::new(&self.world, hello.kind);
        let way: Arc<dyn Way> = pages;
        let [ours, theirs] = pair(self.world.memories(), hello.kind.class(), &way);
        drop(self.greet(to, hello, (&greeting, Some(theirs))).await?);
        Ok(ours)
    }

    fn fabrics(&self) -> Vec<FabricOffer> {
        vec![FabricOffer::tcp()]
    }

    fn fabric(&self, kind: FabricKind, _session: Token) -> Option<Arc<dyn Fabric>> {
        (kind == FabricKind::Tcp).then(|| Arc::clone(&self.fabric) as Arc<dyn Fabric>)
    }
}

fn node_at(address: &str) -> Option<NodeIndex> {
    NODES.iter().position(|name| *name == address)
}

/// What the daemon's port does with a connection.
async fn serve(daemon: Daemon, mut end: End, endpoint: Option<Box<dyn Endpoint>>, their_version: u16) {
    let Ok(Ok(hello)) = timeout(CONNECT, Hello::read(&mut end)).await else { return };
    if their_version != daemon.life.version() {
        return refuse_version(end, daemon.life.version()).await;
    }
    let (status, text) = match daemon.engine.wants(&hello) {
        Ok(()) => (Status::Welcome, String::new()),
        Err(refused) => refused,
    };
    if answer(&mut end, status, &text).await.is_err() {
        return;
    }
    if status != Status::Welcome {
        return drain(end).await;
    }
    let link = match endpoint {
        Some(endpoint) => Link::Endpoint(endpoint),
        None => Link::Stream(Box::new(end)),
    };
    daemon.engine.accept(hello, link, Caller::default()).await;
}

/// As a daemon of another version answers.
async fn refuse_version(mut end: End, version: u16) {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([Status::OtherVersion as u8, 0]);
    if end.write_all(&bytes).await.is_ok() {
        drain(end).await;
    }
}

async fn drain(mut end: End) {
    let _ = end.shutdown().await;
    let mut sink = tokio::io::sink();
    let _ = timeout(Duration::from_secs(1), tokio::io::copy(&mut end, &mut sink)).await;
}
