//! Bytes arrive where they should, and nowhere else.

use vmove_fabric::{Access, Class, CompletionKind, MAX_MESSAGE, WrId};

use crate::support::{
    Kind, Memory, local, pair, pattern, patterned, read_segment, remote, whole_read, write_segment,
};

on_every_fabric! {
    a_read_lands_in_place_and_nowhere_else
    lengths_and_places_need_no_alignment
    zero_segments_are_masked_or_delivered
    what_has_changed_is_delivered_whatever_else_is_left_out
    a_write_lands_and_is_confirmed
    messages_arrive_in_order_and_whole
    a_message_follows_the_writes_before_it
    a_read_sees_the_writes_before_it
    counters_tell_what_happened
}

fn a_read_lands_in_place_and_nowhere_else(kind: Kind) {
    let mut pair = pair(kind, Class::Urgent);
    let source = Memory::filled(1 << 20, 3);
    let target = Memory::filled(1 << 20, 90);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    // 64 pages from all over to all over.
    let place = |n: usize| (n * 37 % 256 * 4096, n * 101 % 256 * 4096);
    let segments: Vec<_> = (0..64).map(|n| read_segment(&from, place(n).0, &to, place(n).1, 4096)).collect();
    pair.asking.endpoint.post_read(WrId(77), &segments).unwrap();
    let (done, _) = pair.drive(1, 0);
    assert_eq!(whole_read(&done[0]), WrId(77));
    let mut expected = patterned(0, 1 << 20, 90);
    for n in 0..64 {
        let (from, to) = place(n);
        expected[to..to + 4096].copy_from_slice(&patterned(from, 4096, 3));
    }
    assert!(target.read(0, 1 << 20) == expected, "memory differs");
}

fn lengths_and_places_need_no_alignment(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 3);
    let target = Memory::filled(1 << 20, 90);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    let mut expected = patterned(0, 1 << 20, 90);
    let mut at = 5;
    for (n, len) in [1, 2, 63, 4095, 4097, 65_537, 300_001].into_iter().enumerate() {
        let from_at = 7 * n + 1;
        pair.asking
            .endpoint
            .post_read(WrId(n as u64), &[read_segment(&from, from_at, &to, at, len)])
            .unwrap();
        expected[at..at + len].copy_from_slice(&patterned(from_at, len, 3));
        at += len + 3;
    }
    // The last byte of both.
    pair.asking
        .endpoint
        .post_read(WrId(9), &[read_segment(&from, (1 << 20) - 1, &to, (1 << 20) - 1, 1)])
        .unwrap();
    expected[(1 << 20) - 1] = pattern((1 << 20) - 1, 3);
    let (done, _) = pair.drive(8, 0);
    for completion in &done {
        whole_read(completion);
    }
    assert!(target.read(0, 1 << 20) == expected, "memory differs");
}

fn zero_segments_are_masked_or_delivered(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::new(64 * 4096);
    let target = Memory::filled(64 * 4096, 1);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    // Every third page has one byte that is not zero, at a place that moves.
    let byte_at = |n: usize| (n * 131) % 4096;
    for n in (0..64).step_by(3) {
        source.write(n * 4096 + byte_at(n), &[9]);
    }
    let segments: Vec<_> = (0..64).map(|n| read_segment(&from, n * 4096, &to, n * 4096, 4096)).collect();
    pair.asking.endpoint.post_read(WrId(1), &segments).unwrap();
    let (done, _) = pair.drive(1, 0);
    done[0].status.unwrap();
    let CompletionKind::Read { zero_mask } = done[0].kind else { panic!("{:?}", done[0]) };
    if kind.answers_by_program() {
        assert_eq!(zero_mask.count_ones(), 42, "tcp looks for zeros: {zero_mask:#x}");
    }
    for n in 0..64 {
        let found = target.read(n * 4096, 4096);
        if zero_mask & (1 << n) != 0 {
            assert_ne!(n % 3, 0, "a page with data was called zero");
            assert!(found == patterned(n * 4096, 4096, 1), "a masked page was touched");
        } else {
            let mut expected = vec![0; 4096];
            if n % 3 == 0 {
                expected[byte_at(n)] = 9;
            }
            assert!(found == expected, "page {n} differs");
        }
    }
}

fn what_has_changed_is_delivered_whatever_else_is_left_out(kind: Kind) {
    const PART: usize = 32 << 10;
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(64 * PART, 3);
    let target = Memory::filled(64 * PART, 3);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    // One bit of every third part differs, at a place that moves to the very end; every fifth is zero at the source.
    let place = |n: usize| (n + 1) * PART - 1 - (n * 521) % PART;
    for n in 0..64 {
        if n % 5 == 0 {
            source.write(n * PART, &vec![0; PART]);
        } else if n % 3 == 0 {
            source.write(place(n), &[pattern(place(n), 3) ^ 0x10]);
        }
    }
    let segments: Vec<_> = (0..64).map(|n| read_segment(&from, n * PART, &to, n * PART, PART)).collect();
    pair.asking.endpoint.post_read_changed(WrId(1), &segments).unwrap();
    // A plain READ behind it is answered by its own kind of reply.
    pair.asking.endpoint.post_read(WrId(2), &segments[1..2]).unwrap();
    let (done, _) = pair.drive(2, 0);
    assert_eq!(done[1].kind, CompletionKind::Read { zero_mask: 0 });
    done[0].status.unwrap();
    let (zero, same) = match done[0].kind {
        CompletionKind::Read { zero_mask } => (zero_mask, 0),
        CompletionKind::ReadChanged { zero_mask, same_mask } => (zero_mask, same_mask),
        ref other => panic!("{other:?}"),
    };
    if kind.answers_by_program() {
        assert_eq!((zero.count_ones(), same.count_ones()), (13, 34), "{zero:#x} {same:#x}");
        let counters = pair.asking.endpoint.counters();
        assert_eq!(counters.read_bytes, (64 - 13 - 34 + 1) * PART as u64, "bytes that were the same came");
    }
    for n in 0..64 {
        if zero & (1 << n) == 0 {
            assert!(target.read(n * PART, PART) == source.read(n * PART, PART), "part {n} differs");
        } else {
            assert_eq!(n % 5, 0, "part {n} is not zero");
        }
    }
}

fn a_write_lands_and_is_confirmed(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 5);
    let target = Memory::filled(1 << 20, 50);
    let from = source.register(&*pair.asking.fabric, Access::LOCAL);
    let to = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
    let segments: Vec<_> = (0..64).map(|n| write_segment(&from, n * 8192, &to, n * 9001, 7777)).collect();
    pair.asking.endpoint.post_write(WrId(1), &segments).unwrap();
    pair.asking.endpoint.post_write(WrId(2), &[write_segment(&from, 0, &to, 600_000, 400_000)]).unwrap();
    let (done, _) = pair.drive(2, 0);
    for completion in &done {
        assert_eq!((&completion.kind, completion.status), (&CompletionKind::Write, Ok(())));
    }
    let mut expected = patterned(0, 1 << 20, 50);
    for n in 0..64 {
        expected[n * 9001..n * 9001 + 7777].copy_from_slice(&patterned(n * 8192, 7777, 5));
    }
    expected[600_000..1_000_000].copy_from_slice(&patterned(0, 400_000, 5));
    assert!(target.read(0, 1 << 20) == expected, "memory differs");
}

fn messages_arrive_in_order_and_whole(kind: Kind) {
    let mut pair = pair(kind, Class::Message);
    let lengths = [0, 1, 100, 4096, MAX_MESSAGE - 1, MAX_MESSAGE];
    for (n, len) in lengths.into_iter().enumerate() {
        pair.asking.endpoint.post_send(WrId(n as u64), &patterned(n, len, 1)).unwrap();
    }
    let (sent, received) = pair.drive(lengths.len(), lengths.len());
    for (n, len) in lengths.into_iter().enumerate() {
        assert_eq!((sent[n].wr, &sent[n].kind), (WrId(n as u64), &CompletionKind::Send));
        sent[n].status.unwrap();
        let CompletionKind::Received(bytes) = &received[n].kind else { panic!("{:?}", received[n]) };
        assert!(*bytes == patterned(n, len, 1), "message {n} differs");
    }
}

fn a_message_follows_the_writes_before_it(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(4 << 20, 5);
    let target = Memory::new(4 << 20);
    let from = source.register(&*pair.asking.fabric, Access::LOCAL);
    let to = target.register(&*pair.asked.fabric, Access::REMOTE_WRITE);
    for n in 0..4 {
        let at = n << 20;
        pair.asking.endpoint.post_write(WrId(1), &[write_segment(&from, at, &to, at, 1 << 20)]).unwrap();
    }
    pair.asking.endpoint.post_send(WrId(2), b"look").unwrap();
    let begin = std::time::Instant::now();
    loop {
        assert!(begin.elapsed() < crate::support::TIMEOUT);
        pair.asking.poll().unwrap();
        if !pair.asked.poll().unwrap().is_empty() {
            break;
        }
    }
    assert!(target.read(0, 4 << 20) == patterned(0, 4 << 20, 5), "the message was faster than the bytes");
}

fn a_read_sees_the_writes_before_it(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 5);
    let middle = Memory::new(1 << 20);
    let target = Memory::new(1 << 20);
    let from = source.register(&*pair.asking.fabric, Access::LOCAL);
    let via = middle.register(&*pair.asked.fabric, Access { remote_read: true, remote_write: true });
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    pair.asking.endpoint.post_write(WrId(1), &[write_segment(&from, 0, &via, 0, 1 << 20)]).unwrap();
    pair.asking.endpoint.post_read(WrId(2), &[read_segment(&via, 0, &to, 0, 1 << 20)]).unwrap();
    pair.drive(2, 0);
    assert!(target.read(0, 1 << 20) == patterned(0, 1 << 20, 5), "memory differs");
}

fn counters_tell_what_happened(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 5);
    let target = Memory::new(1 << 20);
    let from = source.register(&*pair.asked.fabric, Access { remote_read: true, remote_write: true });
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    let counters = pair.asking.endpoint.counters_handle();
    pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, 100_000)]).unwrap();
    pair.asking
        .endpoint
        .post_write(
            WrId(2),
            &[vmove_fabric::WriteSegment { local: local(&to, 0, 50_000), remote: remote(&from, 0) }],
        )
        .unwrap();
    pair.asking.endpoint.post_send(WrId(3), b"hello").unwrap();
    pair.drive(3, 1);
    let found = std::thread::spawn(move || counters.read()).join().unwrap();
    assert_eq!((found.reads, found.writes, found.sends, found.messages), (1, 1, 1, 0));
    assert_eq!((found.read_bytes, found.written_bytes), (100_000, 50_000));
    assert!((100_000..110_000).contains(&found.bytes_received), "{found:?}");
    assert!((50_000..60_000).contains(&found.bytes_sent), "{found:?}");
    let other = pair.asked.endpoint.counters();
    assert_eq!(other.messages, 1);
    let served = u64::from(kind.answers_by_program());
    assert_eq!((other.reads_served, other.writes_served), (served, served));
}
