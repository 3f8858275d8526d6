//! What the root does: which pieces it sends by multicast and when, and what becomes of those that were lost. No input or output of
//! its own, so that the simulator runs the same.
//!
//! Pieces go out at the pacer's rate. From time to time a **mark** tells every host over its control connection which pieces were
//! sent; the host answers, once it has taken in what its socket holds, with those that are missing. A host that has not answered
//! several marks holds the sender back, but not for long: after [`SLOW_TIMEOUT`] it counts as slow, and reads by itself what it misses.
//! Pieces that several hosts miss are sent again by multicast, since that costs the root's link one copy; others are read.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use vmove_bitset::BitSet;

use crate::host_id::HostId;
use crate::layout::Layout;
use crate::message::Message;
use crate::pace::{Pacer, Time};
use crate::span::{Span, spans};

/// Bytes of IP, UDP and the datagram's header, per piece.
pub(crate) const OVERHEAD: u32 = 60;
/// Marks that a host may leave without an answer before the sender waits for it.
const WINDOW: usize = 4;
/// A host that has not answered for so long is not waited for.
pub(crate) const SLOW_TIMEOUT: Duration = Duration::from_millis(300);
/// Answers of other hosts are waited for so long before it is decided how pieces are repaired.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(100);
/// As many hosts must miss a piece for it to be sent again.
const MANY: u32 = 2;
/// Chunks that are sent along with one that somebody waits for.
const AROUND: u32 = 16;
/// Number of marks in a row of which a host missed every piece, after which it counts as unreachable by multicast: repeats would never end.
const UNHEARD: u32 = 4;

/// Sizes that a model of a large template has otherwise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Bytes of headers, per piece.
    pub(crate) overhead: u32,
    /// Bytes between two marks; more for more than 64 hosts, since each mark costs the root's link a message to each host.
    pub(crate) mark: u64,
    /// Bytes of pieces sent in one go.
    pub(crate) step: u32,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { overhead: OVERHEAD, mark: 512 << 10, step: 48 << 10 }
    }
}

/// What the root is to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Send these pieces.
    Send(Vec<u32>),
    /// Nothing before this time, unless a message comes.
    At(Time),
    /// Nothing until a message comes.
    Idle,
}

/// What the root has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RootTotals {
    /// Pieces sent by multicast, repeats included.
    pub sent: u64,
    /// Those sent again because several hosts missed them.
    pub resent: u64,
    /// Losses, summed over hosts: pieces that a host which was there missed when they were sent.
    pub lost: u64,
    /// Pieces that only one host missed; the root told it to READ them.
    pub left_to_read: u64,
    /// How often a host was found to be slow.
    pub slow: u64,
}

/// What is known of a host.
#[derive(Debug, Default)]
struct Listener {
    /// Marks without an answer, and when they were sent.
    open: VecDeque<(u32, Time)>,
    slow: bool,
    complete: bool,
    /// No datagram can reach it.
    deaf: bool,
    /// Number of consecutive marks of which it received no piece.
    unheard: u32,
}

/// A mark whose answers are waited for.
#[derive(Debug)]
struct SentMark {
    pieces: u32,
    waiting: BTreeSet<HostId>,
    /// Not before this time.
    settles: Time,
    due: Time,
    /// For each piece how many miss it, and one of those.
    misses: HashMap<u32, (u32, HostId)>,
    losses: Vec<u32>,
    late: bool,
}

/// The state of the root.
#[derive(Debug)]
pub(crate) struct RootEngine {
    layout: Layout,
    sizes: Sizes,
    multicast: bool,
    pacer: Pacer,
    /// Pieces below it have been sent or were sent out of turn.
    next: u32,
    sent: BitSet,
    /// What somebody waits for: it goes before everything else, and is not held back.
    urgent: VecDeque<u32>,
    /// What lies around it.
    wanted: VecDeque<u32>,
    resend: VecDeque<u32>,
    unmarked: Vec<u32>,
    marks: BTreeMap<u32, SentMark>,
    next_mark: u32,
    hosts: BTreeMap<HostId, Listener>,
    out: Vec<(HostId, Message)>,
    pub(crate) totals: RootTotals,
}

impl RootEngine {
    pub(crate) fn new(layout: Layout, multicast: bool, pacer: Pacer, sizes: Sizes) -> Self {
        let sent = BitSet::empty(layout.pieces().into());
        Self {
            layout,
            sizes,
            multicast,
            pacer,
            next: 0,
            sent,
            urgent: VecDeque::new(),
            wanted: VecDeque::new(),
            resend: VecDeque::new(),
            unmarked: Vec::new(),
            marks: BTreeMap::new(),
            next_mark: 0,
            hosts: BTreeMap::new(),
            out: Vec::new(),
            totals: RootTotals::default(),
        }
    }

    pub(crate) fn is_complete(&self, id: HostId) -> bool {
        self.hosts.get(&id).is_some_and(|host| host.complete)
    }

    /// Bytes per second of datagrams now.
    pub(crate) fn rate(&self) -> f64 {
        self.pacer.rate()
    }

    /// Messages to hosts.
    pub(crate) fn take_out(&mut self) -> Vec<(HostId, Message)> {
        std::mem::take(&mut self.out)
    }

    /// A host has joined. A late host learns what it has missed. `hears`: datagrams can reach it.
    pub(crate) fn joined(&mut self, now: Time, id: HostId, hears: bool) {
        self.hosts.insert(id, Listener { deaf: !hears, ..Listener::default() });
        if !self.multicast || self.sent.is_empty() {
            return;
        }
        // What is not marked yet is marked for all, this host included; it misses that too, and says so.
        let unmarked: BTreeSet<u32> = self.unmarked.iter().copied().collect();
        let before = spans(
            (0..self.next)
                .chain(self.next..self.layout.pieces())
                .filter(|piece| self.sent.contains(*piece) && !unmarked.contains(piece)),
        );
        // Those that come late together are served together.
        let open =
            self.marks.iter().find(|(_, mark)| mark.late && now < mark.settles).map(|(number, _)| *number);
        let number = open.unwrap_or_else(|| {
            let mark = SentMark {
                pieces: 0,
                waiting: BTreeSet::new(),
                settles: now + SETTLE_TIMEOUT,
                due: now + SLOW_TIMEOUT,
                misses: HashMap::new(),
                losses: Vec::new(),
                late: true,
            };
            self.next_mark += 1;
            self.marks.insert(self.next_mark, mark);
            self.next_mark
        });
        if let Some(mark) = self.marks.get_mut(&number) {
            mark.waiting.insert(id);
        }
        if let Some(host) = self.hosts.get_mut(&id) {
            host.open.push_back((number, now));
        }
        self.out.push((id, Message::Mark { number, spans: before, last: None }));
    }

    /// A host has left.
    pub(crate) fn left(&mut self, now: Time, id: HostId) {
        self.hosts.remove(&id);
        for mark in self.marks.values_mut() {
            mark.waiting.remove(&id);
        }
        self.settle(now);
    }

    /// A message of a host.
    pub(crate) fn hear(&mut self, now: Time, from: HostId, message: Message) {
        match message {
            Message::Seen { number, missing } => self.seen(now, from, number, &missing),
            Message::Want { chunk } if chunk < self.layout.chunks() => self.wanted_by(from, chunk),
            Message::Complete => {
                if let Some(host) = self.hosts.get_mut(&from) {
                    host.complete = true;
                }
            }
            _ => {}
        }
    }

    fn wanted_by(&mut self, from: HostId, chunk: u32) {
        if !self.multicast {
            let blocks = vec![self.layout.block_of(chunk)];
            for id in self.hosts.keys().filter(|id| **id != from) {
                self.out.push((*id, Message::Hint { blocks: blocks.clone() }));
            }
            return;
        }
        for chunk in self.layout.table_chunk_of(chunk).into_iter().chain([chunk]) {
            self.urgent
                .extend(self.layout.pieces_of(chunk).numbers().filter(|piece| !self.sent.contains(*piece)));
        }
        let first = chunk / AROUND * AROUND;
        for chunk in first..(first + AROUND).min(self.layout.chunks()) {
            self.wanted
                .extend(self.layout.pieces_of(chunk).numbers().filter(|piece| !self.sent.contains(*piece)));
        }
    }

    fn seen(&mut self, now: Time, from: HostId, number: u32, missing: &[Span]) {
        let Some(host) = self.hosts.get_mut(&from) else { return };
        host.open.retain(|(open, _)| *open != number);
        if host.open.is_empty() {
            host.slow = false;
        }
        let missing = self.layout.possible(missing.iter().copied());
        let count: u32 = missing.iter().map(|span| span.count).sum();
        let mark = self.marks.get_mut(&number);
        if let Some(mark) = mark.as_ref().filter(|mark| !mark.late && mark.pieces > 0) {
            host.unheard = if count == mark.pieces { host.unheard + 1 } else { 0 };
        }
        let deaf = host.deaf || host.unheard >= UNHEARD;
        let in_time = mark.is_some_and(|mark| mark.waiting.remove(&from));
        match self.marks.get_mut(&number).filter(|_| in_time && !deaf) {
            Some(mark) => {
                mark.losses.push(count);
                if !mark.late {
                    self.totals.lost += u64::from(count);
                }
                for piece in missing.iter().flat_map(|span| span.numbers()) {
                    mark.misses.entry(piece).or_insert((0, from)).0 += 1;
                }
            }
            // Too late to share a repair with others, or nothing that is sent reaches it.
            None if !missing.is_empty() => {
                self.totals.left_to_read += u64::from(count);
                self.out.push((from, Message::Fetch { spans: missing }));
            }
            None => {}
        }
        self.settle(now);
    }

    /// Decides how pieces are repaired of which all that can be waited for have answered.
    fn settle(&mut self, now: Time) {
        let ready: Vec<u32> = self
            .marks
            .iter()
            .filter(|(_, mark)| now >= mark.due || (mark.waiting.is_empty() && now >= mark.settles))
            .map(|(number, _)| *number)
            .collect();
        for number in ready {
            let Some(mut mark) = self.marks.remove(&number) else { continue };
            if !mark.losses.is_empty() && mark.pieces > 0 {
                mark.losses.sort_unstable();
                let median = mark.losses[(mark.losses.len() - 1) / 2];
                self.pacer.lost(now, f64::from(median) / f64::from(mark.pieces));
            }
            let mut alone: BTreeMap<HostId, Vec<u32>> = BTreeMap::new();
            let mut again = Vec::new();
            for (piece, (count, host)) in mark.misses {
                if count >= MANY {
                    again.push(piece);
                } else {
                    alone.entry(host).or_default().push(piece);
                }
            }
            again.sort_unstable();
            self.totals.resent += again.len() as u64;
            self.resend.extend(again);
            for (host, mut pieces) in alone {
                pieces.sort_unstable();
                self.totals.left_to_read += pieces.len() as u64;
                self.out.push((host, Message::Fetch { spans: spans(pieces) }));
            }
        }
    }

    /// Finds out which hosts are slow; whether another one has too many marks to answer.
    fn hold_back(&mut self, now: Time) -> bool {
        let mut held = false;
        // Who hears nothing loses nothing by what is sent meanwhile.
        let hears = |host: &&mut Listener| !host.slow && !host.complete && host.unheard < UNHEARD;
        for host in self.hosts.values_mut().filter(hears) {
            if host.open.front().is_some_and(|(_, sent)| *sent + SLOW_TIMEOUT <= now) {
                host.slow = true;
                self.totals.slow += 1;
            }
            held |= !host.slow && host.open.len() > WINDOW;
        }
        held
    }

    /// What to do at `now`. Pieces that are returned count as sent.
    pub(crate) fn step(&mut self, now: Time) -> Step {
        self.settle(now);
        if !self.multicast || self.hosts.is_empty() {
            return Step::Idle;
        }
        let size = self.layout.piece_bytes();
        let room = (self.sizes.step / size).max(1) as usize;
        let mut urgent = Vec::new();
        while urgent.len() < room {
            let Some(piece) = self.urgent.pop_front() else { break };
            if self.sent.insert(piece) {
                urgent.push(piece);
            }
        }
        if !urgent.is_empty() {
            // The pacer makes the rest wait for it.
            return self.sending(now, urgent);
        }
        let next = self.pacer.next(now);
        if next > now {
            return Step::At(next);
        }
        if self.hold_back(now) {
            return Step::At(now + Duration::from_millis(5));
        }
        let mut pieces = Vec::with_capacity(room);
        while pieces.len() < room {
            if let Some(piece) = self.wanted.pop_front() {
                if self.sent.insert(piece) {
                    pieces.push(piece);
                }
            } else if let Some(piece) = self.resend.pop_front() {
                pieces.push(piece);
            } else if self.next < self.layout.pieces() {
                if self.sent.insert(self.next) {
                    pieces.push(self.next);
                }
                self.next += 1;
            } else {
                break;
            }
        }
        if pieces.is_empty() {
            if !self.unmarked.is_empty() {
                self.mark(now);
            }
            let due =
                self.marks.values().map(|mark| if mark.waiting.is_empty() { mark.settles } else { mark.due });
            return due.min().map_or(Step::Idle, |due| Step::At(due.max(now + Duration::from_millis(1))));
        }
        self.sending(now, pieces)
    }

    fn sending(&mut self, now: Time, pieces: Vec<u32>) -> Step {
        let size = self.layout.piece_bytes();
        self.pacer.sent(now, pieces.len() as u64 * u64::from(size + self.sizes.overhead));
        self.totals.sent += pieces.len() as u64;
        self.unmarked.extend(&pieces);
        let enough = self.sizes.mark.max(self.sizes.mark / 64 * self.hosts.len() as u64);
        if self.unmarked.len() as u64 * u64::from(size) >= enough {
            self.mark(now);
        }
        Step::Send(pieces)
    }

    /// Tells all what was sent.
    fn mark(&mut self, now: Time) {
        let mut pieces = std::mem::take(&mut self.unmarked);
        let last = pieces.last().copied();
        pieces.sort_unstable();
        pieces.dedup();
        self.next_mark += 1;
        let number = self.next_mark;
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let spans = spans(pieces);
        let waiting: BTreeSet<HostId> =
            self.hosts.iter().filter(|(_, host)| !host.complete).map(|(id, _)| *id).collect();
        for id in &waiting {
            if let Some(host) = self.hosts.get_mut(id) {
                host.open.push_back((number, now));
            }
            self.out.push((*id, Message::Mark { number, spans: spans.clone(), last }));
        }
        if !waiting.is_empty() {
            let (misses, losses) = (HashMap::new(), Vec::new());
            let mark = SentMark {
                pieces: count,
                waiting,
                settles: now,
                due: now + SETTLE_TIMEOUT,
                misses,
                losses,
                late: false,
            };
            self.marks.insert(number, mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Extent;

    #[test]
    fn what_somebody_waits_for_goes_at_once_and_once() {
        let extents = vec![Extent { region: 0, first: 0, count: 2000 }];
        let layout = Layout::new(vec![2000 * 4096], extents, Some(1440), 1).unwrap();
        let mut root = RootEngine::new(layout, true, Pacer::new(1e6), Sizes::default());
        let (one, other) = (HostId(1), HostId(2));
        root.joined(Time::ZERO, one, true);
        root.joined(Time::ZERO, other, true);
        while matches!(root.step(Time::ZERO), Step::Send(_)) {}
        assert!(matches!(root.step(Time::ZERO), Step::At(_)), "the pacer holds it back");
        root.hear(Time::ZERO, one, Message::Want { chunk: 1900 });
        root.hear(Time::ZERO, other, Message::Want { chunk: 1900 });
        // Its part of the table has gone with what was sent first.
        assert_eq!(root.step(Time::ZERO), Step::Send(vec![5700, 5701, 5702]));
        let Step::At(next) = root.step(Time::ZERO) else { panic!("it is sent twice") };
        // Then what lies around it.
        let Step::Send(pieces) = root.step(next) else { panic!("nothing follows") };
        assert_eq!(pieces[..3], [1888 * 3, 1888 * 3 + 1, 1888 * 3 + 2]);
        assert!(!pieces.contains(&5700));
    }

    /// Two hosts that miss every piece; what was sent, and what they were told to read, within a minute.
    fn unheard(hears: bool) -> (u64, u64) {
        let extents = vec![Extent { region: 0, first: 0, count: 4000 }];
        let layout = Layout::new(vec![4000 * 4096], extents, None, 1).unwrap();
        let mut root = RootEngine::new(layout, true, Pacer::new(50e6), Sizes::default());
        let mut now = Time::ZERO;
        [1, 2].into_iter().for_each(|host| root.joined(now, HostId(host), hears));
        let mut told = 0;
        while now < Duration::from_secs(60) {
            match root.step(now) {
                Step::At(time) => now = time.max(now + Duration::from_micros(100)),
                Step::Idle => now += Duration::from_millis(100),
                Step::Send(_) => {}
            }
            for (host, message) in root.take_out() {
                match message {
                    Message::Mark { number, spans, .. } => {
                        root.hear(now, host, Message::Seen { number, missing: spans });
                    }
                    Message::Fetch { spans } => told += spans.iter().map(|s| u64::from(s.count)).sum::<u64>(),
                    _ => {}
                }
            }
        }
        (root.totals.sent, told)
    }

    #[test]
    fn what_nobody_hears_is_read_instead_of_sent_for_ever() {
        let pieces = 4000 + 8; // with the table
        assert_eq!(unheard(false), (pieces, 2 * pieces));
        let (sent, told) = unheard(true);
        assert!(sent < 2 * pieces && told >= 2 * pieces, "{sent} sent, {told} read, of {pieces} pieces");
    }
}
