//! What hosts of a distribution say to each other, on any bytes: for `tests/fuzz` alone. A wrong result is a panic.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmove_fabric::PeerAddress;

use crate::host::HostEngine;
use crate::host_id::HostId;
use crate::layout::{CHUNK, Extent, Layout};
use crate::message::{Assembly, Greeting, Message, Welcome, frames};
use crate::pace::{Pacer, Time};
use crate::root::{RootEngine, Sizes, Step};
use crate::route::{Route, Scheme};
use crate::span::Span;

/// Memory of a host, in bytes: what a layout must fit.
const MEMORY: u64 = 16 << 20;
/// The second host of the fuzzed distribution.
const ONE: HostId = HostId(1);
/// The third.
const TWO: HostId = HostId(2);

/// Frames of a control connection: each has its length in a byte before it.
pub fn messages(bytes: &[u8]) {
    let (mut assembly, mut rest) = (Assembly::default(), bytes);
    while let Some((len, after)) = rest.split_first() {
        let (frame, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        match assembly.push::<Message>(frame) {
            Ok(Some(message)) => check(&message),
            Ok(None) => {}
            Err(_) => return,
        }
    }
    if let Ok(greeting) = postcard::from_bytes::<Greeting>(bytes) {
        let again = postcard::to_stdvec(&greeting).expect("plain data");
        assert_eq!(postcard::from_bytes(&again), Ok(greeting));
    }
}

fn check(message: &Message) {
    let (mut assembly, mut frames) = (Assembly::default(), frames(message));
    let last = frames.pop().expect("at least one");
    for frame in frames {
        assert_eq!(assembly.push::<Message>(&frame), Ok(None));
    }
    assert_eq!(assembly.push(&last).as_ref(), Ok(&Some(message.clone())));
    if let Message::Welcome(welcome) = message {
        numbers(&welcome.layout);
        if welcome.route.is_sound() {
            let _ = (welcome.route.sources(), welcome.route.source(u32::MAX));
        }
    }
}

/// The numbers of a layout agree with each other, at both ends and where regions begin.
fn numbers(layout: &Layout) {
    let _ = (layout.table_bytes(), layout.bytes());
    let last = layout.chunks() - 1;
    let seen = [0, last, last / 2, layout.table().min(last)];
    for chunk in seen.into_iter().chain((0..16).map(|step| last / 16 * step)) {
        let place = layout.place_of_chunk(chunk);
        if let Some(region) = place.region {
            assert!(place.offset + u64::from(place.len) <= layout.regions[usize::from(region)]);
            assert_eq!(layout.chunk_at(region, place.offset), Some(chunk));
            assert!(layout.table_chunk_of(chunk).is_some_and(|table| table < layout.table()));
        }
        let pieces = layout.pieces_of(chunk);
        assert!(pieces.end() <= layout.pieces());
        assert_eq!(layout.places(pieces.numbers()), [place]);
        assert!(layout.pieces_of_block(layout.block_of(chunk)).end() <= layout.pieces());
    }
    for (region, len) in (0..=u16::MAX).zip(&layout.regions) {
        let _ =
            (layout.chunk_at(region, 0), layout.chunk_at(region, *len), layout.chunk_at(region, u64::MAX));
    }
}

/// What happens to a host and to the root.
#[derive(Debug, Serialize, Deserialize)]
enum Event {
    /// The host hears this of the root.
    OfRoot(Message),
    /// Another host has these blocks.
    PeerHas(Vec<u32>),
    /// A datagram has landed.
    Datagram(u32),
    /// A child waits for a chunk.
    Want(u32),
    /// READs are asked for and done, or fail.
    Reads(bool),
    /// Chunks are verified; whether they are right.
    Verify(bool),
    /// Milliseconds pass.
    Pass(u16),
    /// A source is lost.
    Gone(u32),
    /// The root hears this of a host.
    OfHost(u32, Message),
    /// A host joins the root, and can hear datagrams.
    Joins(u32, bool),
    /// A host leaves the root.
    Leaves(u32),
    /// The root does its next step.
    Step,
}

/// A distribution as others may make it be: layout, route, and what happens.
#[derive(Debug, Serialize, Deserialize)]
struct Story {
    layout: Layout,
    route: Route,
    multicast: bool,
    events: Vec<Event>,
}

/// A host and a root that hear messages in any order.
pub fn engines(bytes: &[u8]) {
    let Ok(story) = postcard::from_bytes::<Story>(bytes) else { return };
    let total = story.layout.regions.iter().try_fold(0_u64, |sum, len| sum.checked_add(*len));
    // As a host looks at its welcome: regions must be those that it has.
    if total.is_none_or(|total| total > MEMORY) || !story.route.is_sound() {
        return;
    }
    let Story { layout, route, multicast, events } = story;
    let mut host = HostEngine::new(layout.clone(), route, multicast, Time::ZERO);
    let sizes = Sizes::default();
    let mut root = RootEngine::new(layout, multicast, Pacer::new(1e9), sizes);
    let mut now = Time::ZERO;
    for event in events.into_iter().take(64) {
        step(&mut host, &mut root, &mut now, event);
        host.check(now);
        host.drained(now);
        let _ = (host.next_time(), host.take_finished(), host.is_hopeless(), host.missing_chunks());
        for message in host.take_out() {
            root.hear(now, ONE, message);
        }
        for (_, message) in root.take_out() {
            host.hear(now, message);
        }
    }
}

fn step(host: &mut HostEngine, root: &mut RootEngine, now: &mut Time, event: Event) {
    match event {
        Event::OfRoot(message) => host.hear(*now, message),
        Event::PeerHas(blocks) => host.peer_has(*now, TWO, &blocks),
        Event::Datagram(piece) => host.landed(piece),
        Event::Want(chunk) => host.want(*now, chunk),
        Event::Reads(done) => {
            for source in [HostId::ROOT, ONE, TWO] {
                if let Some(pieces) = host.next_read(source, 16) {
                    host.read_done(*now, source, &pieces, done);
                }
            }
            if let Some(pieces) = host.next_urgent() {
                host.read_done(*now, HostId::ROOT, &pieces, done);
            }
        }
        Event::Verify(right) => {
            for _ in 0..64 {
                let Some(chunk) = host.next_to_verify() else { return };
                host.compared(chunk, right);
            }
        }
        Event::Pass(ms) => *now += Duration::from_millis(ms.into()),
        Event::Gone(id) => host.gone(HostId(id)),
        Event::OfHost(id, message) => root.hear(*now, HostId(id), message),
        Event::Joins(id, hears) => root.joined(*now, HostId(id), hears),
        Event::Leaves(id) => root.left(*now, HostId(id)),
        Event::Step => {
            if let Step::Send(pieces) = root.step(*now) {
                pieces.into_iter().for_each(|piece| host.landed(piece));
            }
        }
    }
}

fn layout() -> Layout {
    let extents = [(0, 600), (700, 40)].map(|(first, count)| Extent { region: 0, first, count });
    let layout = Layout::new(vec![1024 * u64::from(CHUNK)], extents.to_vec(), Some(1400), 5);
    let mut layout = layout.expect("it is one");
    layout.table_sums = vec![7; layout.table() as usize];
    layout
}

/// Valid input of [`messages`].
#[must_use]
pub fn messages_seeds() -> Vec<Vec<u8>> {
    let span = Span { first: 3, count: 9 };
    let region = vmove_fabric::RemoteRegion { addr: 4096, len: 1 << 22, rkey: 99 };
    let welcome = Welcome {
        layout: layout(),
        regions: vec![region],
        route: Route::from_root(ONE),
        peers: vec![(TWO, PeerAddress::Tcp(([10, 0, 0, 1], 7420).into()))],
        group: None,
    };
    let all = [
        Message::Welcome(Box::new(welcome)),
        Message::Ready { hears: true },
        Message::Mark { number: 1, spans: vec![span], last: Some(11) },
        Message::Fetch { spans: vec![span] },
        Message::Hint { blocks: vec![0, 5] },
        Message::Seen { number: 1, missing: vec![span] },
        Message::Want { chunk: 7 },
        Message::Complete,
        Message::Regions(vec![region]),
        Message::Have { blocks: vec![1, 2] },
    ];
    let cut = |message: &Message| {
        let bytes = postcard::to_stdvec(message).expect("plain data");
        let mut parts = bytes.chunks(200).peekable();
        let mut out = Vec::new();
        while let Some(part) = parts.next() {
            out.push(u8::try_from(part.len() + 1).expect("it is short"));
            out.push(u8::from(parts.peek().is_some()));
            out.extend(part);
        }
        out
    };
    let greeting = postcard::to_stdvec(&Greeting::Reads { from: TWO }).expect("plain data");
    all.iter().map(cut).chain([greeting]).collect()
}

/// Valid input of [`engines`].
#[must_use]
pub fn engines_seeds() -> Vec<Vec<u8>> {
    let span = Span { first: 3, count: 9 };
    let events = || {
        vec![
            Event::Joins(1, true),
            Event::Step,
            Event::Datagram(0),
            Event::Want(9),
            Event::OfRoot(Message::Mark { number: 1, spans: vec![span], last: Some(11) }),
            Event::Pass(60),
            Event::OfRoot(Message::Fetch { spans: vec![span] }),
            Event::OfRoot(Message::Hint { blocks: vec![1, 3] }),
            Event::PeerHas(vec![0, 1, 2]),
            Event::Reads(true),
            Event::Verify(true),
            Event::OfHost(1, Message::Seen { number: 1, missing: vec![span] }),
            Event::OfHost(2, Message::Want { chunk: 600 }),
            Event::Gone(2),
            Event::Reads(false),
            Event::Verify(false),
            Event::Leaves(1),
        ]
    };
    let pipeline = Route { scheme: Scheme::Pipeline, members: [0, 1, 2, 3].map(HostId).into(), me: 1 };
    let routes = [(Route::from_root(ONE), true), (pipeline, false)];
    let story = |(route, multicast)| Story { layout: layout(), route, multicast, events: events() };
    routes.map(|route| postcard::to_stdvec(&story(route)).expect("plain data")).to_vec()
}
