//! Events in the order of their times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{Outcome, Scenario};
use crate::host::HostEngine;
use crate::host_id::HostId;
use crate::layout::{BLOCK_CHUNKS, CHUNK, Extent, Layout};
use crate::message::Message;
use crate::pace::{Pacer, Time};
use crate::plan::Way;
use crate::root::{OVERHEAD, RootEngine, Sizes, Step};
use crate::route::Route;

/// Pieces times hosts, at most.
const MOST: u64 = 3_000_000;
/// Pieces, at least.
const FINEST: u64 = 64;
/// READs under way from one source.
const DEPTH: usize = 4;
/// Bytes on the links for each byte that is read: headers of TCP, IP and Ethernet.
const READ_OVERHEAD: f64 = 1.046;
/// Bytes on the links of a control message.
const MESSAGE: f64 = 120.0;

#[derive(Debug, Clone, Copy, Default)]
struct Link {
    /// Bytes per second.
    rate: f64,
    /// In seconds.
    free_at: f64,
    bytes: f64,
}

#[derive(Debug, Clone)]
enum ModelEvent {
    Root,
    Datagrams(usize, Rc<Vec<u32>>),
    ToHost(usize, Message),
    ToRoot(usize, Message),
    Have(usize, usize, Vec<u32>),
    Asked { host: usize, source: usize, pieces: Vec<u32> },
    Read { host: usize, source: usize, pieces: Vec<u32> },
    Tick(usize),
}

/// Events that have yet to happen, in the order of their times and then of when they were planned. What is sorted is small: the events
/// stay where they are.
#[derive(Debug, Default)]
struct Agenda {
    /// Times (which are not negative, so that their bits have their order), numbers, and where the event is.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<ModelEvent>>,
    free: Vec<usize>,
    planned: u64,
}

impl Agenda {
    fn plan(&mut self, at: f64, event: ModelEvent) {
        self.planned += 1;
        let place = self.free.pop().unwrap_or(self.events.len());
        if place == self.events.len() {
            self.events.push(None);
        }
        self.events[place] = Some(event);
        self.order.push(Reverse((at.to_bits(), self.planned, place)));
    }

    fn next(&mut self) -> Option<(f64, ModelEvent)> {
        let Reverse((at, _, place)) = self.order.pop()?;
        self.free.push(place);
        Some((f64::from_bits(at), self.events[place].take()?))
    }
}

struct ModelHost {
    engine: HostEngine,
    /// Whom it reads from, and how many READs are under way there.
    sources: Vec<(usize, usize)>,
    subscribers: Vec<usize>,
    runs: Option<f64>,
    complete: Option<f64>,
    ticks_at: f64,
}

pub(super) struct World<'a> {
    scenario: &'a Scenario,
    way: Way,
    /// Bytes of the template for each byte of the model.
    scale: f64,
    state_chunks: u32,
    root: RootEngine,
    /// The host with number n at n - 1.
    hosts: Vec<ModelHost>,
    up: Vec<Link>,
    down: Vec<Link>,
    leaf_up: Vec<Link>,
    leaf_down: Vec<Link>,
    /// Leaves with hosts.
    has_hosts: Vec<bool>,
    agenda: Agenda,
    now: f64,
    /// The earliest time at which the root is to act.
    root_at: f64,
    random: SmallRng,
    incomplete: usize,
}

fn time(seconds: f64) -> Time {
    Duration::from_secs_f64(seconds.max(0.0))
}

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario, way: Way) -> Self {
        let network = &scenario.network;
        let count = network.hosts.len() - 1;
        let finest = scenario.bytes.div_ceil(u64::from(CHUNK)).max(1);
        let chunks = finest.min((MOST / count as u64).max(FINEST)).min(1 << 20);
        let chunks = u32::try_from(chunks).unwrap_or(1 << 20);
        let chunk_bytes = f64::from(chunks) * f64::from(CHUNK);
        #[allow(clippy::cast_precision_loss)]
        let scale = (scenario.bytes as f64 / chunk_bytes).max(1e-9);
        // Blocks of 256 KiB, or of one piece if that is more.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let block = (f64::from(BLOCK_CHUNKS) / scale).round().clamp(1.0, 64.0) as u32;
        let extents = vec![Extent { region: 0, first: 0, count: chunks }];
        let len = u64::from(chunks) * u64::from(CHUNK);
        let layout = Layout::new(vec![len], extents, None, 0)
            .expect("one extent of 1 to 2^20 chunks")
            .with_blocks(block);
        let multicast = way == Way::Multicast;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let sizes = Sizes {
            overhead: (f64::from(OVERHEAD) / f64::from(network.payload) * f64::from(CHUNK)) as u32,
            mark: (f64::from(512 << 10) / scale).max(1.0) as u64,
            step: (f64::from(48 << 10) / scale).max(1.0) as u32,
        };
        let leaf_rates = network.leaves.iter().map(|leaf| leaf.uplink);
        let slowest = leaf_rates.clone().fold(network.link, f64::min);
        let rate = scenario.rate.unwrap_or(slowest * 0.95);
        let root = RootEngine::new(layout.clone(), multicast, Pacer::new(rate / scale), sizes);
        let link = |rate: f64| Link { rate: rate / scale, ..Link::default() };
        let routes = network.routes(way);
        let number = |id: HostId| id.0 as usize;
        let mut hosts: Vec<ModelHost> = (1..=u32::try_from(count).unwrap_or(u32::MAX))
            .map(|id| {
                let route = routes.get(&HostId(id)).cloned().unwrap_or_else(|| Route::from_root(HostId(id)));
                let sources = if multicast { vec![HostId::ROOT] } else { route.sources() };
                let sources = sources.into_iter().map(|source| (number(source), 0)).collect();
                let engine = HostEngine::new(layout.clone(), route, multicast, Time::ZERO);
                ModelHost {
                    engine,
                    sources,
                    subscribers: Vec::new(),
                    runs: None,
                    complete: None,
                    ticks_at: f64::MAX,
                }
            })
            .collect();
        for index in 0..count {
            for (source, _) in hosts[index].sources.clone() {
                if source > 0 {
                    hosts[source - 1].subscribers.push(index + 1);
                }
            }
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let state_chunks =
            ((scenario.state as f64 / scale / f64::from(CHUNK)).ceil() as u32).clamp(1, chunks);
        Self {
            scenario,
            way,
            scale,
            state_chunks,
            root,
            hosts,
            up: vec![link(network.link); count + 1],
            down: vec![link(network.link); count + 1],
            leaf_up: leaf_rates.clone().map(link).collect(),
            leaf_down: leaf_rates.map(link).collect(),
            has_hosts: (0..network.leaves.len()).map(|leaf| network.hosts.contains(&leaf)).collect(),
            agenda: Agenda::default(),
            now: 0.0,
            root_at: f64::MAX,
            random: SmallRng::seed_from_u64(scenario.seed),
            incomplete: count,
        }
    }

    fn plan(&mut self, at: f64, event: ModelEvent) {
        self.agenda.plan(at.max(self.now), event);
    }

    /// Bytes of the model from one host to another: when the last is there.
    fn carry(&mut self, from: usize, to: usize, bytes: f64) -> f64 {
        let leaf = |host: usize| self.scenario.network.hosts[host];
        let (source, target) = (leaf(from), leaf(to));
        let (up, down) = (&mut self.up[from], &mut self.down[to]);
        let end = if source == target {
            pass([up, down], self.now, bytes)
        } else {
            pass([up, &mut self.leaf_up[source], &mut self.leaf_down[target], down], self.now, bytes)
        };
        end + self.scenario.latency
    }

    /// A control message: it takes the latency, and counts on the sender's link.
    fn say(&mut self, from: usize) -> f64 {
        self.up[from].bytes += MESSAGE / self.scale;
        self.now + self.scenario.latency
    }

    pub(super) fn run(mut self) -> Outcome {
        for host in 1..=self.hosts.len() {
            self.root.joined(Time::ZERO, HostId(u32::try_from(host).unwrap_or(u32::MAX)), true);
        }
        self.wake_root(0.0);
        for host in 1..=self.hosts.len() {
            self.pump(host);
        }
        while self.incomplete > 0 {
            let Some((at, event)) = self.agenda.next() else {
                unreachable!("nothing happens any more and {} hosts miss something", self.incomplete)
            };
            self.now = at;
            self.happen(event);
        }
        self.outcome()
    }

    fn happen(&mut self, event: ModelEvent) {
        let now = time(self.now);
        match event {
            ModelEvent::Root => {
                if self.now >= self.root_at {
                    self.root_at = f64::MAX;
                    self.step();
                }
            }
            ModelEvent::Datagrams(host, pieces) => {
                for piece in pieces.iter() {
                    if self.scenario.network.loss == 0.0
                        || self.random.random::<f64>() >= self.scenario.network.loss
                    {
                        self.hosts[host - 1].engine.landed(*piece);
                    }
                }
                self.pump(host);
            }
            ModelEvent::ToHost(host, message) => {
                self.hosts[host - 1].engine.hear(now, message);
                self.pump(host);
            }
            ModelEvent::ToRoot(host, message) => {
                self.root.hear(now, HostId(u32::try_from(host).unwrap_or(u32::MAX)), message);
                self.tell();
                self.wake_root(self.now);
            }
            ModelEvent::Have(host, peer, blocks) => {
                let peer = HostId(u32::try_from(peer).unwrap_or(u32::MAX));
                self.hosts[host - 1].engine.peer_has(now, peer, &blocks);
                self.pump(host);
            }
            ModelEvent::Asked { host, source, pieces } => {
                #[allow(clippy::cast_precision_loss)]
                let bytes = pieces.len() as f64 * f64::from(CHUNK) * READ_OVERHEAD;
                let at = self.carry(source, host, bytes);
                self.plan(at, ModelEvent::Read { host, source, pieces });
            }
            ModelEvent::Read { host, source, pieces } => {
                let id = HostId(u32::try_from(source).unwrap_or(u32::MAX));
                let state = &mut self.hosts[host - 1];
                state.engine.read_done(now, id, &pieces, true);
                if let Some((_, under_way)) = state.sources.iter_mut().find(|(from, _)| *from == source) {
                    *under_way -= 1;
                }
                self.pump(host);
            }
            ModelEvent::Tick(host) => {
                self.hosts[host - 1].ticks_at = f64::MAX;
                self.pump(host);
            }
        }
    }

    fn wake_root(&mut self, at: f64) {
        if at < self.root_at {
            self.root_at = at;
            self.plan(at, ModelEvent::Root);
        }
    }

    fn step(&mut self) {
        match self.root.step(time(self.now)) {
            Step::Send(pieces) => {
                self.send(pieces);
                self.wake_root(self.now);
            }
            Step::At(at) => self.wake_root(at.as_secs_f64().max(self.now + 1e-9)),
            Step::Idle => {}
        }
        self.tell();
    }

    /// Messages of the root.
    fn tell(&mut self) {
        for (id, message) in self.root.take_out() {
            let at = self.say(0);
            self.plan(at, ModelEvent::ToHost(id.0 as usize, message));
        }
    }

    /// Datagrams go once over each link on their way.
    fn send(&mut self, pieces: Vec<u32>) {
        #[allow(clippy::cast_precision_loss)]
        let size =
            f64::from(CHUNK) * (1.0 + f64::from(OVERHEAD + 14) / f64::from(self.scenario.network.payload));
        #[allow(clippy::cast_precision_loss)]
        let bytes = pieces.len() as f64 * size;
        let own = self.scenario.network.hosts[0];
        let out = pass([&mut self.up[0]], self.now, bytes);
        let others = self.scenario.network.hosts.iter().any(|leaf| *leaf != own);
        let above = if others { pass([&mut self.leaf_up[own]], self.now, bytes).max(out) } else { out };
        let mut at_leaf = vec![out; self.leaf_down.len()];
        for (leaf, at) in at_leaf.iter_mut().enumerate() {
            if leaf != own && self.has_hosts[leaf] {
                *at = pass([&mut self.leaf_down[leaf]], self.now, bytes).max(above);
            }
        }
        let pieces = Rc::new(pieces);
        for host in 1..=self.hosts.len() {
            let leaf = self.scenario.network.hosts[host];
            let at = pass([&mut self.down[host]], self.now, bytes).max(at_leaf[leaf]) + self.scenario.latency;
            if self.hosts[host - 1].complete.is_none() {
                self.plan(at, ModelEvent::Datagrams(host, Rc::clone(&pieces)));
            }
        }
    }

    /// What a host does after something has reached it.
    fn pump(&mut self, host: usize) {
        let now = time(self.now);
        let state = &mut self.hosts[host - 1];
        while let Some(chunk) = state.engine.next_to_verify() {
            state.engine.compared(chunk, true);
        }
        state.engine.drained(now);
        if state.runs.is_none() && state.engine.has_first(self.state_chunks) {
            // The page that the child touches first is one READ away.
            state.runs =
                Some(self.now + 2.0 * self.scenario.latency + f64::from(CHUNK) / self.scenario.network.link);
        }
        if state.complete.is_none() && state.engine.is_complete() {
            state.complete = Some(self.now);
            self.incomplete -= 1;
        }
        let blocks = state.engine.take_finished();
        let mut asks = Vec::new();
        for (source, under_way) in &mut state.sources {
            let id = HostId(u32::try_from(*source).unwrap_or(u32::MAX));
            while *under_way < DEPTH {
                let Some(pieces) = state.engine.next_read(id, 64) else { break };
                *under_way += 1;
                asks.push((*source, pieces));
            }
        }
        let out = state.engine.take_out();
        // Not when a source counts as stalled: none of a model is given up, and one that has nothing more to tell stays so.
        let next = state.engine.next_drain().map(|at| at.as_secs_f64());
        let tick = next.filter(|at| *at < state.ticks_at && state.complete.is_none());
        if let Some(at) = tick {
            state.ticks_at = at.max(self.now + 1e-9);
            let at = state.ticks_at;
            self.plan(at, ModelEvent::Tick(host));
        }
        if !blocks.is_empty() {
            // Each of them hears of all blocks; what it does not read from here changes nothing, and is left out.
            let id = HostId(u32::try_from(host).unwrap_or(u32::MAX));
            for index in 0..self.hosts[host - 1].subscribers.len() {
                let to = self.hosts[host - 1].subscribers[index];
                let at = self.say(host);
                let reads = |block: &u32| self.hosts[to - 1].engine.source(*block) == id;
                let blocks: Vec<u32> = blocks.iter().copied().filter(reads).collect();
                if !blocks.is_empty() {
                    self.plan(at, ModelEvent::Have(to, host, blocks));
                }
            }
        }
        for (source, pieces) in asks {
            let at = self.say(host);
            self.plan(at, ModelEvent::Asked { host, source, pieces });
        }
        for message in out {
            let at = self.say(host);
            self.plan(at, ModelEvent::ToRoot(host, message));
        }
    }

    fn outcome(self) -> Outcome {
        let range =
            |times: Vec<f64>| times.into_iter().fold((f64::MAX, 0.0_f64), |(a, b), t| (a.min(t), b.max(t)));
        let mut complete: Vec<f64> = self.hosts.iter().filter_map(|host| host.complete).collect();
        complete.sort_by(f64::total_cmp);
        let (first, last) = range(complete.clone());
        #[allow(clippy::cast_precision_loss)]
        let at = |part: u32| {
            let time = if part == 20 { last } else { last * f64::from(part) / 20.0 };
            (time, complete.partition_point(|host| *host <= time) as f64 / complete.len() as f64)
        };
        let most = |links: &[Link]| links.iter().map(|link| link.bytes).fold(0.0, f64::max) * self.scale;
        #[allow(clippy::cast_precision_loss)]
        let bytes = |pieces: u64| pieces as f64 * f64::from(CHUNK) * self.scale;
        Outcome {
            way: self.way,
            first_instruction: range(self.hosts.iter().filter_map(|host| host.runs).collect()),
            complete: (first, last),
            root_bytes: self.up[0].bytes * self.scale,
            host_bytes: most(&self.up[1..]),
            uplink_bytes: most(&self.leaf_up).max(most(&self.leaf_down)),
            total_bytes: self.up.iter().map(|link| link.bytes).sum::<f64>() * self.scale,
            repaired_bytes: bytes(self.hosts.iter().map(|host| host.engine.totals.repaired).sum()),
            resent_bytes: bytes(self.root.totals.resent),
            progress: (0..=20).map(at).collect(),
        }
    }
}

/// Sends bytes over links of which each begins as soon as the one before has: when the last byte is through.
fn pass<const LINKS: usize>(path: [&mut Link; LINKS], now: f64, bytes: f64) -> f64 {
    let (mut begin, mut end) = (now, now);
    for link in path {
        begin = begin.max(link.free_at);
        link.free_at = begin + bytes / link.rate;
        link.bytes += bytes;
        end = end.max(link.free_at);
    }
    end
}
