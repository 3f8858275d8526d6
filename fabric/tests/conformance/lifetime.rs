//! Regions that go away while they are in use.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use vmove_fabric::{Access, Class, RemoteStatus, ThreadOptions, WrId};

use crate::support::{
    Kind, Memory, Side, fabrics, pair, pair_of, pattern, patterned, read_segment, wait_until, write_segment,
};

on_every_fabric! {
    after_deregistration_memory_may_vanish
    after_deregistration_no_write_arrives
    a_reply_that_cannot_be_finished_is_refused
    local_memory_may_vanish_during_a_read
    after_closing_no_write_arrives
}

const LEN: usize = 4 << 20;

/// Fails if anybody writes to the memory any more. Every write that passes by changes what it finds (the writers below
/// alternate), and the ends of blocks are where a write that is under way has yet to come.
fn assert_still(target: &Memory) {
    let sample = || (1..=LEN >> 16).map(|block| target.read((block << 16) - 1, 1)[0]).collect::<Vec<_>>();
    let before = sample();
    std::thread::sleep(Duration::from_millis(5));
    assert!(sample() == before, "bytes still arrived");
    target.write(0, &vec![0; LEN]);
    std::thread::sleep(Duration::from_millis(10));
    assert!(target.read(0, LEN) == vec![0; LEN], "bytes arrived later");
}

/// Posts READs of the whole region until one is refused, and counts those that came back good.
fn read_until_refused(
    side: &mut Side,
    from: vmove_fabric::RemoteRegion,
    to: &vmove_fabric::Region,
    target: &Memory,
    seed: u8,
    good: &AtomicUsize,
    refusal: RemoteStatus,
) {
    let mut posted = 0_u64;
    loop {
        while posted < 4 {
            let local = to.local(0, u32::try_from(LEN).unwrap()).unwrap();
            let segment = vmove_fabric::ReadSegment { remote: from.at(0).unwrap(), local };
            side.endpoint.post_read(WrId(posted), &[segment]).unwrap();
            posted += 1;
        }
        for completion in side.complete_some() {
            posted -= 1;
            match completion.status {
                Ok(()) => good.fetch_add(1, Ordering::Relaxed),
                Err(found) if found == refusal => return,
                Err(other) => panic!("{other}"),
            };
            // A completion that says yes means that all bytes were real. (Later READs bring the same, or zeros.)
            if posted == 0 {
                for at in [0, 1, LEN / 2, LEN - 4096, LEN - 1] {
                    assert_eq!(target.read(at, 1)[0], pattern(at, seed), "byte {at}");
                }
            }
        }
    }
}

fn after_deregistration_memory_may_vanish(kind: Kind) {
    for round in 0..u8::try_from(kind.times(5)).unwrap() {
        let pair = pair(kind, Class::Bulk);
        let source = Memory::filled(LEN, round);
        let target = Memory::new(LEN);
        let region = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
        let from = region.remote();
        let to = target.register(&*pair.asking.fabric, Access::LOCAL);
        let (mut asking, asked) = (pair.asking, pair.asked);
        let serving = asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
        let (good, refusal) = (AtomicUsize::new(0), kind.refusal(RemoteStatus::BadKey));
        std::thread::scope(|scope| {
            let reader =
                scope.spawn(|| read_until_refused(&mut asking, from, &to, &target, round, &good, refusal));
            wait_until("the region is being read", || good.load(Ordering::Relaxed) > 5);
            drop(region);
            // Nobody may touch it now, neither this process (which would crash) nor the kernel on behalf of the peer.
            drop(source);
            reader.join().unwrap();
        });
        // A queue pair ends with the request that is refused.
        assert!(!serving.is_finished() || kind == Kind::Verbs, "{:?}", serving.error());
    }
}

fn after_deregistration_no_write_arrives(kind: Kind) {
    let sources = [1, 2].map(|seed| Memory::filled(LEN, seed));
    for _ in 0..kind.times(20) {
        let pair = pair(kind, Class::Bulk);
        let target = Memory::new(LEN);
        let from = [0, 1].map(|half: usize| sources[half].register(&*pair.asking.fabric, Access::LOCAL));
        let region = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
        let remote = region.remote().at(0).unwrap();
        let mut asking = pair.asking;
        let serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
        let (stop, good) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut refused, mut turn) = (0, 0);
                while !stop.load(Ordering::Relaxed) || refused == 0 {
                    turn ^= 1;
                    let local = from[turn].local(0, u32::try_from(LEN).unwrap()).unwrap();
                    let segment = vmove_fabric::WriteSegment { local, remote };
                    asking.endpoint.post_write(WrId(1), &[segment]).unwrap();
                    match asking.complete(1)[0].status {
                        Ok(()) => drop(good.fetch_add(1, Ordering::Relaxed)),
                        Err(RemoteStatus::Refused) if kind == Kind::Verbs => return,
                        Err(RemoteStatus::BadKey) => refused += 1,
                        Err(other) => panic!("{other}"),
                    }
                }
            });
            wait_until("the region is being written", || good.load(Ordering::Relaxed) > 2);
            drop(region);
            assert_still(&target);
            stop.store(true, Ordering::Relaxed);
        });
        drop(serving);
    }
}

/// Holds for tcp: the length is announced, part of the payload is on its way, and the region goes away.
fn a_reply_that_cannot_be_finished_is_refused(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let len = 64 << 20; // more than socket buffers take
    let source = Memory::filled(len, 1);
    let target = Memory::new(len);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, len)]).unwrap();
    pair.asking.endpoint.flush().unwrap();
    for _ in 0..50 {
        assert!(pair.asked.poll().unwrap().is_empty());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(from);
    drop(source);
    let (done, _) = pair.drive(1, 0);
    if kind == Kind::Verbs && done[0].status.is_ok() {
        // The device did not stop: deregistration waited for it, and everything is real.
        assert!(target.read(0, len) == patterned(0, len, 1), "memory differs");
        return;
    }
    assert_eq!(done[0].status, Err(kind.refusal(RemoteStatus::BadKey)));
    assert_eq!(pair.asking.endpoint.outstanding(), 0);
}

fn local_memory_may_vanish_during_a_read(kind: Kind) {
    let (left, right) = fabrics(kind);
    let mut pair = pair_of(kind, Class::Bulk, left.clone(), right.clone());
    let len = 64 << 20;
    let source = Memory::filled(len, 1);
    let target = Memory::new(len);
    let from = source.register(&*pair.asked.fabric, Access { remote_read: true, remote_write: true });
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, len)]).unwrap();
    pair.asking.endpoint.flush().unwrap();
    pair.asked.poll().unwrap();
    drop(to);
    drop(target);
    let (done, _) = pair.drive(1, 0);
    assert_eq!(done[0].status, Err(RemoteStatus::LocalGone));
    if kind == Kind::Verbs {
        // A queue pair ends with the request that fails.
        pair = pair_of(kind, Class::Bulk, left, right);
    }
    // The same for the source of a WRITE.
    let lost = Memory::filled(len, 9);
    let region = lost.register(&*pair.asking.fabric, Access::LOCAL);
    pair.asking.endpoint.post_write(WrId(2), &[write_segment(&region, 0, &from, 0, len)]).unwrap();
    if kind != Kind::Local {
        pair.asking.endpoint.flush().unwrap();
    }
    drop(region);
    drop(lost);
    let (done, _) = pair.drive(1, 0);
    assert_eq!(done[0].status, Err(RemoteStatus::LocalGone));
}

fn after_closing_no_write_arrives(kind: Kind) {
    let sources = [1, 2].map(|seed| Memory::filled(LEN, seed));
    for _ in 0..kind.times(20) {
        after_closing_once(kind, &sources);
    }
}

fn after_closing_once(kind: Kind, sources: &[Memory; 2]) {
    let pair = pair(kind, Class::Bulk);
    let target = Memory::new(LEN);
    let from = [0, 1].map(|half: usize| sources[half].register(&*pair.asking.fabric, Access::LOCAL));
    let region = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
    let remote = region.remote().at(0).unwrap();
    let mut asking = pair.asking;
    let serving = pair.asked.endpoint.serve(ThreadOptions::normal("answers")).unwrap();
    let good = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            loop {
                turn ^= 1;
                let local = from[turn].local(0, u32::try_from(LEN).unwrap()).unwrap();
                let segment = vmove_fabric::WriteSegment { local, remote };
                if asking.endpoint.outstanding() < 4
                    && asking.endpoint.post_write(WrId(1), &[segment]).is_err()
                {
                    return;
                }
                match asking.poll() {
                    Ok(found) if found.is_empty() => {
                        asking.endpoint.wait(Some(Duration::from_millis(10))).unwrap();
                    }
                    Ok(found) => {
                        for completion in &found {
                            completion.status.unwrap();
                        }
                        good.fetch_add(found.len(), Ordering::Relaxed);
                    }
                    Err(_) => return,
                }
            }
        });
        wait_until("the region is being written", || good.load(Ordering::Relaxed) > 2);
        drop(serving);
        // The region is still registered; the connection is not there any more.
        assert_still(&target);
    });
}
