//! A lot at once, from both sides.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vmove_fabric::{
    Access, Class, CompletionKind, PostError, ReadSegment, ThreadOptions, WrId, WriteSegment,
};

use crate::support::{
    Kind, Memory, Side, TIMEOUT, local, pair, patterned, read_segment, remote, wait_until, whole_read,
};

on_every_fabric! {
    both_sides_ask_for_a_lot_at_once
    both_sides_do_everything_from_threads_of_their_own
    polls_do_not_block_when_the_peer_does_nothing
    a_flood_of_messages_is_held_back_and_delivered
    a_gigabyte_in_one_request_is_refused_one_byte_beyond
}

fn both_sides_ask_for_a_lot_at_once(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let len = 2 << 20;
    let memories = [1, 2].map(|seed| Memory::filled(len, seed));
    let targets = [(); 2].map(|()| Memory::new(len));
    let ours = memories[0].register(&*pair.asking.fabric, Access::REMOTE_READ);
    let theirs = memories[1].register(&*pair.asked.fabric, Access::REMOTE_READ);
    let here = targets[0].register(&*pair.asking.fabric, Access::LOCAL);
    let there = targets[1].register(&*pair.asked.fabric, Access::LOCAL);
    // Far more than the socket buffers of both directions hold, before anybody receives a byte.
    let count = kind.times(60);
    for n in 0..count {
        pair.asking.endpoint.post_read(WrId(n), &[read_segment(&theirs, 0, &here, 0, len)]).unwrap();
        pair.asked.endpoint.post_read(WrId(n), &[read_segment(&ours, 0, &there, 0, len)]).unwrap();
    }
    let count = usize::try_from(count).unwrap();
    let (left, right) = pair.drive(count, count);
    for completion in left.iter().chain(&right) {
        whole_read(completion);
    }
    assert!(targets[0].read(0, len) == patterned(0, len, 2), "memory differs");
    assert!(targets[1].read(0, len) == patterned(0, len, 1), "memory differs");
}

/// READs, WRITEs and messages, as many as there are credits for, until `messages` of the peer came and all of ours are
/// done.
fn everything(side: &mut Side, mine: &vmove_fabric::Region, theirs: vmove_fabric::RemoteRegion, rounds: u64) {
    let half = usize::try_from(mine.len()).unwrap() / 2;
    let (mut posted, mut done, mut received) = (0, 0, 0);
    let begin = Instant::now();
    while done < 3 * rounds || received < rounds {
        assert!(begin.elapsed() < TIMEOUT, "{done} done and {received} received of {rounds}");
        while posted < 3 * rounds {
            let wr = WrId(posted);
            let place = local(mine, half + 4096, 200_000);
            let result = match posted % 3 {
                0 => side
                    .endpoint
                    .post_read(wr, &[ReadSegment { remote: theirs.at(0).unwrap(), local: place }]),
                1 => {
                    let remote = theirs.at(half as u64 / 2).unwrap();
                    side.endpoint.post_write(wr, &[WriteSegment { local: local(mine, 0, 200_000), remote }])
                }
                _ => side.endpoint.post_send(wr, &patterned(0, 10_000, 1)),
            };
            match result {
                Ok(()) => posted += 1,
                Err(PostError::Full { .. }) => break,
                Err(other) => panic!("{other}"),
            }
        }
        let found = side.poll().unwrap();
        if found.is_empty() {
            side.endpoint.wait(Some(Duration::from_millis(100))).unwrap();
        }
        for completion in found {
            completion.status.unwrap();
            match completion.kind {
                CompletionKind::Received(bytes) => {
                    assert!(bytes == patterned(0, 10_000, 1), "a message differs");
                    received += 1;
                }
                _ => done += 1,
            }
        }
    }
}

fn both_sides_do_everything_from_threads_of_their_own(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let memories = [1, 2].map(|seed| Memory::filled(2 << 20, seed));
    let access = Access { remote_read: true, remote_write: true };
    let ours = memories[0].register(&*pair.asking.fabric, access);
    let theirs = memories[1].register(&*pair.asked.fabric, access);
    let finished = AtomicUsize::new(0);
    let one_side = |side: &mut Side, mine, theirs| {
        everything(side, mine, theirs, kind.times(300));
        finished.fetch_add(1, Ordering::Relaxed);
        // The other side may still need answers.
        wait_until("both sides are done", || {
            assert!(side.poll().unwrap().is_empty());
            finished.load(Ordering::Relaxed) == 2
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(|| one_side(&mut pair.asking, &ours, theirs.remote()));
        scope.spawn(|| one_side(&mut pair.asked, &theirs, ours.remote()));
    });
    assert!(memories[0].read(0, 200_000) == patterned(0, 200_000, 1), "what was only read has changed");
    let landed = memories[0].read((1 << 20) + 4096, 200_000);
    assert!(landed == patterned(0, 200_000, 2), "a READ brought something else");
    assert!(memories[0].read(1 << 19, 200_000) == patterned(0, 200_000, 2), "a WRITE brought something else");
}

fn polls_do_not_block_when_the_peer_does_nothing(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 1);
    let from = source.register(&*pair.asking.fabric, Access::LOCAL);
    let to = source.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
    for n in 0..60 {
        let segment = WriteSegment { local: local(&from, 0, 1 << 20), remote: remote(&to, 0) };
        pair.asking.endpoint.post_write(WrId(n), &[segment]).unwrap();
        pair.asking.endpoint.post_send(WrId(n), &[1; 60_000]).unwrap();
    }
    let begin = Instant::now();
    let (mut polls, mut longest) = (0, Duration::ZERO);
    while begin.elapsed() < Duration::from_millis(300) {
        let one = Instant::now();
        pair.asking.poll().unwrap();
        longest = longest.max(one.elapsed());
        polls += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(polls > 20, "{polls} polls, the longest took {longest:?}");
    assert!(pair.asking.endpoint.wants_write(), "the peer took all of 60 MB without reading");
    let (left, right) = pair.drive(120 - (120 - pair.asking.endpoint.outstanding()), 60);
    assert!(!left.is_empty() && right.len() == 60);
}

fn a_flood_of_messages_is_held_back_and_delivered(kind: Kind) {
    let pair = pair(kind, Class::Message);
    let (mut asking, mut asked) = (pair.asking, pair.asked);
    let count = 20_000_u64;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut posted, mut done) = (0, 0);
            while done < count {
                while posted < count && asking.endpoint.post_send(WrId(posted), &posted.to_le_bytes()).is_ok()
                {
                    posted += 1;
                }
                let found = asking.poll().unwrap().len() as u64;
                if found == 0 {
                    asking.endpoint.wait(Some(Duration::from_millis(100))).unwrap();
                }
                done += found;
            }
            let (_, error) = asking.fail();
            assert!(matches!(error, vmove_fabric::FabricError::PeerClosed { outstanding: 0 }), "{error}");
        });
        let mut expected = 0;
        while expected < count {
            for completion in asked.complete_some() {
                let CompletionKind::Received(bytes) = completion.kind else { panic!("{completion:?}") };
                assert_eq!(bytes, expected.to_le_bytes().as_slice());
                expected += 1;
            }
        }
        drop(asked);
    });
}

fn a_gigabyte_in_one_request_is_refused_one_byte_beyond(kind: Kind) {
    let pair = pair(kind, Class::Bulk);
    if kind == Kind::Verbs {
        return a_gigabyte_and_one_byte_beyond(pair);
    }
    // Untouched memory costs nothing: source and target are one and the same zero page until something is written.
    let len = (1 << 30) + 1;
    let memory = Memory::new(len);
    let from = memory.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = memory.register(&*pair.asking.fabric, Access::LOCAL);
    let mut asking = pair.asking;
    let segments = [read_segment(&from, 0, &to, 0, 1 << 30), read_segment(&from, 0, &to, 0, 1)];
    let found = (1 << 30) + 1;
    let max = vmove_fabric::MAX_TRANSFER;
    assert_eq!(asking.endpoint.post_read(WrId(1), &segments), Err(PostError::Length { found, max }));
    // 64 segments of 2 MiB, all zero: 128 MiB in one request.
    let _serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
    let segments: Vec<_> = (0..64).map(|n| read_segment(&from, n << 21, &to, n << 21, 2 << 20)).collect();
    asking.endpoint.post_read(WrId(2), &segments).unwrap();
    let done = asking.complete(1);
    assert_eq!((done[0].wr, done[0].status), (WrId(2), Ok(())));
}

/// The same with memory that is registered for real: every segment is the same.
fn a_gigabyte_and_one_byte_beyond(mut pair: crate::support::Pair) {
    let len = 32 << 20;
    let memory = Memory::new(len);
    let from = memory.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = memory.register(&*pair.asking.fabric, Access::LOCAL);
    let mut segments = vec![read_segment(&from, 0, &to, 0, len); 32];
    segments.push(read_segment(&from, 0, &to, 0, 1));
    let found = (1 << 30) + 1;
    let max = vmove_fabric::MAX_TRANSFER;
    assert_eq!(pair.asking.endpoint.post_read(WrId(1), &segments), Err(PostError::Length { found, max }));
    // Emulated devices take a minute for a gigabyte.
    pair.asking.endpoint.post_read(WrId(2), &segments[..32]).unwrap();
    let done = pair.asking.complete_within(1, Duration::from_secs(240));
    assert_eq!((done[0].wr, done[0].status), (WrId(2), Ok(())));
}
