//! What a host does with what reaches it: no input or output of its own, so that the simulator runs the same.
//!
//! A piece is in one of four states: missing, asked (a READ for it is under way), here, or given up to nobody. Only a missing piece
//! is taken from a datagram or asked for; so nothing is ever written over bytes that were verified, and a READ that fails cannot
//! spoil what is here. A chunk whose pieces are all here is verified; bytes that are not those of the root go back to missing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use vmove_bitset::BitSet;

use crate::host_id::HostId;
use crate::layout::Layout;
use crate::marks::Marks;
use crate::message::Message;
use crate::pace::Time;
use crate::route::Route;
use crate::span::{Span, spans};

/// How long a datagram with what something waits for may take from when it was asked for, before it is read.
pub(crate) const DATAGRAM_TIMEOUT: Duration = Duration::from_millis(4);
/// A source that announces nothing new for so long while something is expected of it is given up.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Wrong bytes that are asked for again, before it is an error.
const WRONG_LIMIT: u64 = 200;

/// What a host has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostTotals {
    /// Pieces that came by multicast and were wanted.
    pub by_multicast: u64,
    /// Pieces read from the root.
    pub from_root: u64,
    /// Pieces read from other hosts.
    pub from_peers: u64,
    /// Pieces read because datagrams were lost.
    pub repaired: u64,
    /// Chunks that something waited for.
    pub wanted: u64,
    /// Those of them that were read: all of them, where no datagrams come.
    pub wanted_read: u64,
    /// Chunks that arrived with wrong bytes, and were asked for again.
    pub wrong: u64,
    /// Sources given up.
    pub given_up: u64,
}

/// A source of READs other than multicast.
#[derive(Debug, Default)]
struct Source {
    /// Blocks that can be read from it now, by their turn.
    ready: BTreeSet<(u32, u32)>,
    /// When something new arrived last.
    heard: Time,
    dead: bool,
}

/// The state of one host.
#[derive(Debug)]
pub(crate) struct HostEngine {
    layout: Layout,
    route: Route,
    multicast: bool,
    /// Datagrams can reach it.
    hears: bool,
    here: BitSet,
    asked: BitSet,
    verified: BitSet,
    /// Blocks whose chunks are all verified.
    blocks: BitSet,
    /// Pieces of each chunk that are here, to know when all are.
    arrived: Vec<u8>,
    to_verify: VecDeque<u32>,
    /// Chunks that are here, of which the checksum is not.
    unlisted: BTreeMap<u32, Vec<u32>>,
    marks: Marks,
    sources: BTreeMap<HostId, Source>,
    /// Blocks that somebody waits for, first.
    hinted: BTreeSet<u32>,
    /// Pieces that the root told this host to READ.
    fetch: VecDeque<Span>,
    /// What somebody here waits for and is to be read.
    urgent: VecDeque<Span>,
    /// Chunks that somebody here waits for and a datagram is to bring, and when they were asked for.
    awaited: VecDeque<(Time, u32)>,
    out: Vec<Message>,
    finished: Vec<u32>,
    complete: bool,
    pub(crate) totals: HostTotals,
}

impl HostEngine {
    pub(crate) fn new(layout: Layout, route: Route, multicast: bool, now: Time) -> Self {
        let mut sources = BTreeMap::new();
        if !multicast {
            for source in route.sources() {
                sources.insert(source, Source { heard: now, ..Source::default() });
            }
        }
        let root = sources.entry(HostId::ROOT).or_default();
        root.heard = now;
        if !multicast {
            let from_root = (0..layout.blocks()).filter(|block| route.source(*block) == HostId::ROOT);
            root.ready.extend(from_root.map(|block| (route.turn(block), block)));
        }
        Self {
            here: BitSet::empty(layout.pieces().into()),
            asked: BitSet::empty(layout.pieces().into()),
            verified: BitSet::empty(layout.chunks().into()),
            blocks: BitSet::empty(layout.blocks().into()),
            arrived: vec![0; layout.chunks() as usize],
            layout,
            route,
            multicast,
            hears: multicast,
            to_verify: VecDeque::new(),
            unlisted: BTreeMap::new(),
            marks: Marks::default(),
            sources,
            hinted: BTreeSet::new(),
            fetch: VecDeque::new(),
            urgent: VecDeque::new(),
            awaited: VecDeque::new(),
            out: Vec::new(),
            finished: Vec::new(),
            complete: false,
            totals: HostTotals::default(),
        }
    }

    /// No datagram can reach it, although others get some.
    pub(crate) fn deaf(self) -> Self {
        Self { hears: false, ..self }
    }

    /// The root was joined anew, by a connection beside which no datagrams come: what was asked and answered on the old one is void.
    pub(crate) fn rejoined(&mut self) {
        self.hears = false;
        self.marks.clear();
        self.out.retain(|message| matches!(message, Message::Want { .. }));
        self.out.extend(self.complete.then_some(Message::Complete));
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.verified.is_full()
    }

    /// The host that a block is read from.
    pub(crate) fn source(&self, block: u32) -> HostId {
        self.route.source(block)
    }

    /// Whether the first chunks behind the table are verified.
    pub(crate) fn has_first(&self, chunks: u32) -> bool {
        let first = self.layout.table();
        self.verified.contains_all(Span { first, count: chunks.min(self.layout.chunks() - first) }.range())
    }

    /// Chunks that are not verified.
    pub(crate) fn missing_chunks(&self) -> u32 {
        u32::try_from(self.verified.limit() - self.verified.len()).unwrap_or(u32::MAX)
    }

    /// Whether wrong bytes came so often that asking again makes no sense.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.totals.wrong > WRONG_LIMIT
    }

    /// Whether a datagram with this piece is to be taken.
    pub(crate) fn accepts(&self, piece: u32) -> bool {
        piece < self.layout.pieces() && !self.here.contains(piece) && !self.asked.contains(piece)
    }

    /// A datagram's piece is in place.
    pub(crate) fn landed(&mut self, piece: u32) {
        self.marks.landed(piece);
        if self.accepts(piece) {
            self.totals.by_multicast += 1;
            self.arrive(piece);
        }
    }

    fn arrive(&mut self, piece: u32) {
        if !self.here.insert(piece) {
            return;
        }
        let chunk = self.layout.chunk_of(piece);
        let arrived = &mut self.arrived[chunk as usize];
        *arrived += 1;
        if u32::from(*arrived) == self.layout.pieces_of(chunk).count {
            match self.layout.table_chunk_of(chunk).filter(|table| !self.verified.contains(*table)) {
                Some(table) => self.unlisted.entry(table).or_default().push(chunk),
                None => self.to_verify.push_back(chunk),
            }
        }
    }

    /// The next chunk to compare with its checksum.
    pub(crate) fn next_to_verify(&mut self) -> Option<u32> {
        self.to_verify.pop_front()
    }

    /// What came of that.
    pub(crate) fn compared(&mut self, chunk: u32, right: bool) {
        let pieces = self.layout.pieces_of(chunk);
        if !right {
            self.totals.wrong += 1;
            self.arrived[chunk as usize] = 0;
            for piece in pieces.numbers() {
                self.here.remove(piece);
            }
            self.fetch.push_back(pieces);
            return;
        }
        self.verified.insert(chunk);
        if let Some(listed) = self.unlisted.remove(&chunk) {
            self.to_verify.extend(listed);
        }
        let block = self.layout.block_of(chunk);
        let all = self.layout.pieces_of_block(block);
        let chunks = Span {
            first: self.layout.chunk_of(all.first),
            count: all.count / self.layout.pieces_of(0).count,
        };
        if self.verified.contains_all(chunks.range()) && self.blocks.insert(block) {
            self.finished.push(block);
        }
        if self.verified.is_full() && !self.complete {
            self.complete = true;
            self.out.push(Message::Complete);
        }
    }

    /// Blocks that have become whole since the last call.
    pub(crate) fn take_finished(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.finished)
    }

    /// All blocks that are whole.
    pub(crate) fn whole_blocks(&self) -> Vec<u32> {
        (0..self.layout.blocks()).filter(|block| self.blocks.contains(*block)).collect()
    }

    /// Messages for the root.
    pub(crate) fn take_out(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.out)
    }

    /// Somebody here waits for a chunk. The root is asked to send it to all next: children of other hosts are about to touch it, too. What
    /// does not come that way is read.
    pub(crate) fn want(&mut self, now: Time, chunk: u32) {
        if chunk >= self.layout.chunks() || self.verified.contains(chunk) {
            return;
        }
        self.totals.wanted += 1;
        self.out.push(Message::Want { chunk });
        if self.hears {
            return self.awaited.push_back((now, chunk));
        }
        if !self.multicast {
            // What lies around it is likely to be wanted next.
            self.hinted.insert(self.layout.block_of(chunk));
        }
        self.read_at_once(chunk);
    }

    fn read_at_once(&mut self, chunk: u32) {
        self.totals.wanted_read += 1;
        for chunk in self.layout.table_chunk_of(chunk).into_iter().chain([chunk]) {
            if !self.verified.contains(chunk) {
                self.urgent.push_back(self.layout.pieces_of(chunk));
            }
        }
    }

    /// A message of the root; others are ignored.
    pub(crate) fn hear(&mut self, now: Time, message: Message) {
        match message {
            Message::Mark { number, spans, last } => {
                let spans = self.layout.possible(spans);
                self.marks.hear(now, number, spans, last.filter(|_| self.hears), &self.here);
            }
            Message::Fetch { spans } => self.fetch.extend(self.layout.possible(spans)),
            Message::Hint { blocks } => {
                self.hinted.extend(blocks.into_iter().filter(|b| *b < self.layout.blocks()));
            }
            _ => {}
        }
    }

    /// Another host has these blocks.
    pub(crate) fn peer_has(&mut self, now: Time, peer: HostId, blocks: &[u32]) {
        let Some(source) = self.sources.get_mut(&peer).filter(|source| !source.dead) else { return };
        source.heard = now;
        for block in blocks {
            if *block < self.layout.blocks()
                && !self.blocks.contains(*block)
                && self.route.source(*block) == peer
            {
                source.ready.insert((self.route.turn(*block), *block));
            }
        }
    }

    /// The receiver has nothing more at `now`: what has not come of marks that are old enough will not come.
    pub(crate) fn drained(&mut self, now: Time) {
        while let Some((number, sent)) = self.marks.due(now, &self.here) {
            let missing = sent.iter().flat_map(|span| span.numbers()).filter(|piece| self.accepts(*piece));
            let missing = spans(missing);
            self.out.push(Message::Seen { number, missing });
        }
        while let Some((asked, chunk)) = self.awaited.front().copied() {
            let there = self.verified.contains(chunk);
            if !there && now.saturating_sub(asked) < DATAGRAM_TIMEOUT {
                return;
            }
            self.awaited.pop_front();
            if !there {
                self.read_at_once(chunk);
            }
        }
    }

    /// When [`drained`](Self::drained) or [`check`](Self::check) has something to do next, if nothing comes.
    pub(crate) fn next_time(&self) -> Option<Time> {
        let waits = !self.is_complete() && !self.multicast && self.sources.len() > 1;
        let live = self.sources.iter().filter(|(id, source)| **id != HostId::ROOT && !source.dead);
        let stall = waits.then(|| live.map(|(_, source)| source.heard + STALL_TIMEOUT).min()).flatten();
        self.next_drain().into_iter().chain(stall).min()
    }

    /// When [`drained`](Self::drained) has something to do next, if nothing comes.
    pub(crate) fn next_drain(&self) -> Option<Time> {
        let mark = self.marks.next_due();
        let awaited = self.awaited.front().map(|(asked, _)| *asked + DATAGRAM_TIMEOUT);
        mark.into_iter().chain(awaited).min()
    }

    /// Gives up sources that have stood still for long although blocks are expected of them.
    pub(crate) fn check(&mut self, now: Time) {
        if self.is_complete() {
            return;
        }
        let stalled: Vec<HostId> = self
            .sources
            .iter()
            .filter(|(id, source)| {
                **id != HostId::ROOT && !source.dead && source.heard + STALL_TIMEOUT <= now
            })
            .map(|(id, _)| *id)
            .collect();
        for id in stalled {
            // One that waits for others itself is not to blame as long as some of its blocks have yet to be read.
            if self.sources[&id].ready.is_empty() && self.asked.is_empty() {
                self.gone(id);
            } else if let Some(source) = self.sources.get_mut(&id) {
                source.heard = now;
            }
        }
    }

    /// A source is lost: its blocks come from the root.
    pub(crate) fn gone(&mut self, id: HostId) {
        let Some(source) = self.sources.get_mut(&id).filter(|source| id != HostId::ROOT && !source.dead)
        else {
            return;
        };
        source.dead = true;
        source.ready.clear();
        self.totals.given_up += 1;
        let route = &self.route;
        let blocks =
            (0..self.layout.blocks()).filter(|b| !self.blocks.contains(*b) && route.source(*b) == id);
        let blocks: Vec<(u32, u32)> = blocks.map(|block| (route.turn(block), block)).collect();
        if let Some(root) = self.sources.get_mut(&HostId::ROOT) {
            root.ready.extend(blocks);
        }
    }

    /// Pieces for an urgent READ from the root.
    pub(crate) fn next_urgent(&mut self) -> Option<Vec<u32>> {
        while let Some(span) = self.urgent.pop_front() {
            let pieces: Vec<u32> = span.numbers().filter(|piece| self.accepts(*piece)).collect();
            if !pieces.is_empty() {
                return Some(self.ask(pieces));
            }
        }
        None
    }

    /// Pieces for a READ from `source`, those of a block or less, in at most `segments` ranges.
    pub(crate) fn next_read(&mut self, source: HostId, segments: usize) -> Option<Vec<u32>> {
        if source == HostId::ROOT {
            // Small gaps of many datagrams share a READ.
            let most = self.layout.pieces_of_block(0).count as usize;
            let mut pieces: Vec<u32> = Vec::new();
            while pieces.len() < most {
                let Some(span) = self.fetch.pop_front() else { break };
                let room = most - pieces.len();
                let mut rest = span.numbers().filter(|piece| self.accepts(*piece)).peekable();
                pieces.extend(rest.by_ref().take(room));
                if let Some(next) = rest.next() {
                    drop(rest);
                    self.fetch.push_front(Span { first: next, count: span.end() - next });
                }
            }
            pieces.sort_unstable();
            pieces.dedup();
            if !pieces.is_empty() {
                let left = pieces.split_off(fitting(&self.layout, &pieces, segments));
                for span in spans(left).into_iter().rev() {
                    self.fetch.push_front(span);
                }
                self.totals.repaired += pieces.len() as u64;
                return Some(self.ask(pieces));
            }
        }
        let ready = &mut self.sources.get_mut(&source)?.ready;
        loop {
            let hinted = self.hinted.iter().map(|block| (self.route.turn(*block), *block));
            let next =
                hinted.into_iter().find(|next| ready.contains(next)).or_else(|| ready.first().copied())?;
            let block = next.1;
            self.hinted.remove(&block);
            ready.remove(&next);
            let open = self.layout.pieces_of_block(block).numbers();
            let pieces: Vec<u32> =
                open.filter(|piece| !self.here.contains(*piece) && !self.asked.contains(*piece)).collect();
            if pieces.is_empty() {
                continue;
            }
            // What does not fit the READ is asked for next.
            let fit = fitting(&self.layout, &pieces, segments);
            if fit < pieces.len() {
                ready.insert(next);
            }
            return Some(self.ask(pieces[..fit].to_vec()));
        }
    }

    fn ask(&mut self, pieces: Vec<u32>) -> Vec<u32> {
        for piece in &pieces {
            self.asked.insert(*piece);
        }
        pieces
    }

    /// A READ has ended. What failed is asked for again, from the root.
    pub(crate) fn read_done(&mut self, now: Time, source: HostId, pieces: &[u32], done: bool) {
        for piece in pieces {
            self.asked.remove(*piece);
        }
        if done {
            if let Some(source) = self.sources.get_mut(&source) {
                source.heard = now;
            }
            let count = pieces.len() as u64;
            let total =
                if source == HostId::ROOT { &mut self.totals.from_root } else { &mut self.totals.from_peers };
            *total += count;
            for piece in pieces {
                self.arrive(*piece);
            }
        } else {
            self.fetch.extend(spans(pieces.iter().copied()));
        }
    }
}

/// How many of the pieces lie in at most `segments` ranges.
fn fitting(layout: &Layout, pieces: &[u32], segments: usize) -> usize {
    let (mut count, mut last) = (0, None);
    for (index, piece) in pieces.iter().enumerate() {
        let place = layout.place_of_piece(*piece);
        let joins = last.is_some_and(|(region, end)| region == place.region && place.offset <= end);
        count += usize::from(!joins);
        if count > segments {
            return index;
        }
        last = Some((place.region, place.offset + u64::from(place.len)));
    }
    pieces.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Extent;
    use crate::marks::REORDER_TIMEOUT;

    fn engine(multicast: bool) -> HostEngine {
        let extents = vec![Extent { region: 0, first: 0, count: 200 }];
        let layout = Layout::new(vec![200 * 4096], extents, Some(1440), 1).unwrap();
        HostEngine::new(layout, Route::from_root(HostId(1)), multicast, Time::ZERO)
    }

    #[test]
    fn a_piece_under_read_is_not_taken_from_a_datagram() {
        let mut engine = engine(true);
        assert!(engine.accepts(7));
        engine.hear(Time::ZERO, Message::Fetch { spans: vec![Span { first: 6, count: 3 }] });
        assert_eq!(engine.next_read(HostId::ROOT, 64), Some(vec![6, 7, 8]));
        assert!(!engine.accepts(7), "a READ that fails later would spoil it");
        engine.landed(7);
        assert_eq!((engine.next_to_verify(), engine.totals.by_multicast), (None, 0));
        // It fails: the pieces may hold anything, and are asked for again.
        engine.read_done(Time::ZERO, HostId::ROOT, &[6, 7, 8], false);
        assert!(engine.accepts(7));
        assert_eq!(engine.next_read(HostId::ROOT, 64), Some(vec![6, 7, 8]));
        engine.read_done(Time::ZERO, HostId::ROOT, &[6, 7, 8], true);
        assert!(!engine.accepts(7), "what is here stays as it is");
        // Its checksum is not here yet, so it is not verified.
        assert_eq!(engine.next_to_verify(), None);
        (0..3).for_each(|piece| engine.landed(piece));
        assert_eq!(engine.next_to_verify(), Some(0));
        engine.compared(0, true);
        assert_eq!(engine.next_to_verify(), Some(2));
    }

    #[test]
    fn wrong_bytes_go_back_to_missing() {
        let mut engine = engine(true);
        (0..6).for_each(|piece| engine.landed(piece));
        engine.compared(0, true);
        assert_eq!((engine.next_to_verify(), engine.next_to_verify()), (Some(0), Some(1)));
        engine.compared(1, false);
        assert!(engine.accepts(3) && engine.missing_chunks() == 200);
        assert_eq!(engine.next_read(HostId::ROOT, 64), Some(vec![3, 4, 5]));
    }

    #[test]
    fn what_is_waited_for_comes_with_its_part_of_the_table() {
        for mut engine in [engine(false), engine(true).deaf()] {
            let pieces = engine.layout().pieces_of(150);
            engine.want(Time::ZERO, 150);
            assert_eq!(engine.next_urgent(), Some(vec![0, 1, 2]));
            assert_eq!(engine.next_urgent(), Some(pieces.numbers().collect()));
            assert_eq!(engine.take_out(), [Message::Want { chunk: 150 }]);
            engine.want(Time::ZERO, 10_000);
            assert_eq!((engine.next_urgent(), engine.take_out()), (None, vec![]));
        }
    }

    #[test]
    fn what_is_waited_for_is_read_when_no_datagram_brings_it() {
        let mut engine = engine(true);
        (0..3).for_each(|piece| engine.landed(piece));
        engine.compared(0, true);
        engine.want(Time::ZERO, 150);
        engine.want(Time::ZERO, 160);
        assert_eq!(engine.take_out(), [Message::Want { chunk: 150 }, Message::Want { chunk: 160 }]);
        engine.drained(DATAGRAM_TIMEOUT / 2);
        assert_eq!((engine.next_urgent(), engine.next_time()), (None, Some(DATAGRAM_TIMEOUT)));
        // One comes, of the other one piece is lost: that piece is read.
        [450, 451, 452, 480, 482].into_iter().for_each(|piece| engine.landed(piece));
        engine.compared(150, true);
        engine.drained(DATAGRAM_TIMEOUT);
        assert_eq!(engine.next_urgent(), Some(vec![481]));
        assert_eq!((engine.next_urgent(), engine.next_time()), (None, None));
        assert_eq!((engine.totals.wanted, engine.totals.wanted_read), (2, 1));
    }

    #[test]
    fn a_mark_is_answered_with_what_is_missing() {
        for (mut engine, lost) in [(engine(true), [2]), (engine(true).deaf(), [3])] {
            let spans = vec![Span { first: 0, count: 4 }];
            engine.hear(Time::ZERO, Message::Mark { number: 5, spans, last: Some(3) });
            (0..4).filter(|piece| !lost.contains(piece)).for_each(|piece| engine.landed(piece));
            engine.drained(REORDER_TIMEOUT / 2);
            assert_eq!((engine.take_out(), engine.next_drain()), (vec![], Some(REORDER_TIMEOUT)));
            engine.drained(REORDER_TIMEOUT);
            assert_eq!(engine.take_out(), [Message::Seen { number: 5, missing: super::spans(lost) }]);
        }
    }
}
