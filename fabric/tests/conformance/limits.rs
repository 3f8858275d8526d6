//! What is refused, and that a refusal harms nothing.

use vmove_fabric::{
    Access, Class, CompletionKind, FabricError, MAX_MESSAGE, PostError, ReadSegment, Remedy, RemoteRegion,
    RemoteSlice, RemoteStatus, WrId, WriteSegment,
};

use crate::support::{
    Kind, Memory, Pair, Side2, fabrics, local, pair, pair_of, patterned, read_segment, remote, whole_read,
};

on_every_fabric! {
    wrong_posts_are_refused_at_once
    credits_run_out_and_come_back
    memory_of_another_fabric_is_refused
    wrong_remote_memory_is_refused_and_harms_nothing
    empty_regions_are_refused
    as_many_regions_as_promised
    memory_that_is_not_there_fails_cleanly
}

fn wrong_posts_are_refused_at_once(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let memory = Memory::new(1 << 20);
    let region = memory.register(&*pair.asking.fabric, Access::LOCAL);
    let endpoint = &mut pair.asking.endpoint;
    let segment = read_segment(&region, 0, &region, 0, 4096);
    assert_eq!(endpoint.post_read(WrId(0), &[]), Err(PostError::Segments { found: 0, max: 64 }));
    assert_eq!(endpoint.post_read(WrId(0), &[segment; 65]), Err(PostError::Segments { found: 65, max: 64 }));
    let write = WriteSegment { local: segment.local, remote: segment.remote };
    assert_eq!(endpoint.post_write(WrId(0), &[]), Err(PostError::Segments { found: 0, max: 64 }));
    assert_eq!(endpoint.post_write(WrId(0), &[write; 65]), Err(PostError::Segments { found: 65, max: 64 }));
    let found = MAX_MESSAGE as u64 + 1;
    assert_eq!(
        endpoint.post_send(WrId(0), &vec![0; MAX_MESSAGE + 1]),
        Err(PostError::Length { found, max: MAX_MESSAGE as u64 })
    );
    assert_eq!(endpoint.outstanding(), 0);
    assert_eq!((region.local(0, 0), region.local(1, 1 << 20), region.local(u64::MAX, 1)), (None, None, None));
    assert_eq!(region.remote().at(1 << 20), None);
}

fn credits_run_out_and_come_back(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let source = Memory::filled(1 << 20, 1);
    let target = Memory::new(1 << 20);
    let from = source.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    let capacity = pair.asking.endpoint.capacity();
    let page = |n: usize| read_segment(&from, n % 256 * 4096, &to, n % 256 * 4096, 4096);
    for _ in 0..3 {
        for n in 0..capacity {
            pair.asking.endpoint.post_read(WrId(n as u64), &[page(n)]).unwrap();
        }
        assert_eq!(pair.asking.endpoint.post_read(WrId(0), &[page(0)]), Err(PostError::Full { capacity }));
        assert_eq!(pair.asking.endpoint.post_send(WrId(0), b"x"), Err(PostError::Full { capacity }));
        assert_eq!(pair.asking.endpoint.outstanding(), capacity);
        let (done, _) = pair.drive(capacity, 0);
        let mut wrs: Vec<u64> = done.iter().map(|completion| whole_read(completion).0).collect();
        wrs.sort_unstable();
        assert_eq!(wrs, (0..capacity as u64).collect::<Vec<_>>(), "each request completes once");
        assert_eq!(pair.asking.endpoint.outstanding(), 0);
    }
    assert!(target.read(0, capacity * 4096) == patterned(0, capacity * 4096, 1), "memory differs");
}

fn memory_of_another_fabric_is_refused(kind: Kind) {
    let mut pair = pair(kind, Class::Bulk);
    let memory = Memory::new(8192);
    let ours = memory.register(&*pair.asking.fabric, Access::LOCAL);
    let theirs = memory.register(&*pair.asked.fabric, Access::REMOTE_READ);
    let mixed = [read_segment(&theirs, 0, &ours, 0, 4096), read_segment(&theirs, 0, &theirs, 0, 4096)];
    assert_eq!(pair.asking.endpoint.post_read(WrId(0), &mixed), Err(PostError::NotRegistered { segment: 1 }));
    let dropped = local(&ours, 0, 4096);
    drop(ours);
    let segment = ReadSegment { remote: remote(&theirs, 0), local: dropped };
    assert_eq!(
        pair.asking.endpoint.post_read(WrId(0), &[segment]),
        Err(PostError::NotRegistered { segment: 0 })
    );
}

/// One READ or WRITE of a page between `to` and a remote place.
fn try_page(
    pair: &mut Pair,
    write: bool,
    remote: RemoteSlice,
    to: &vmove_fabric::Region,
) -> Result<(), RemoteStatus> {
    let local = local(to, 0, 4096);
    if write {
        pair.asking.endpoint.post_write(WrId(5), &[WriteSegment { local, remote }]).unwrap();
    } else {
        pair.asking.endpoint.post_read(WrId(5), &[ReadSegment { remote, local }]).unwrap();
    }
    let (done, _) = pair.drive(1, 0);
    assert_eq!(done[0].wr, WrId(5));
    done[0].status
}

/// The connection lives on, but for a queue pair: then there is a new one between the same two.
fn wrong_remote_memory_is_refused_and_harms_nothing(kind: Kind) {
    let sides = fabrics(kind);
    let new_pair = |sides: &(Side2, Side2)| pair_of(kind, Class::Bulk, sides.0.clone(), sides.1.clone());
    let mut pair = new_pair(&sides);
    let again = |pair: &mut Pair| {
        if kind == Kind::Verbs {
            *pair = new_pair(&sides);
        }
    };
    let memory = Memory::filled(3 * 4096, 1);
    let landing = Memory::new(4096);
    let to = landing.register(&*pair.asking.fabric, Access::LOCAL);
    let none = memory.register(&*pair.asked.fabric, Access::LOCAL).remote();
    let regions = [Access::LOCAL, Access::REMOTE_READ, Access::REMOTE_WRITE]
        .map(|access| memory.register(&*pair.asked.fabric, access));
    let [closed, readable, writable] = [0, 1, 2].map(|index: usize| regions[index].remote());
    let place = |region: RemoteRegion, offset: u64| RemoteSlice {
        addr: region.addr.wrapping_add(offset),
        rkey: region.rkey,
    };
    let forged = |key: u64| RemoteSlice { addr: readable.addr, rkey: key };
    use RemoteStatus::{AccessDenied, BadKey, OutOfRange};
    let cases = [
        ("a dropped region", place(none, 0), BadKey, BadKey),
        ("a key of zero", forged(0), BadKey, BadKey),
        ("a key that is one off", forged(readable.rkey ^ (1 << 40)), BadKey, BadKey),
        ("no access", place(closed, 0), AccessDenied, AccessDenied),
        ("write only", place(writable, 2 * 4096 + 1), AccessDenied, OutOfRange),
        ("read only", place(readable, 2 * 4096 + 1), OutOfRange, AccessDenied),
        (
            "far beyond the end",
            place(RemoteRegion { rkey: readable.rkey, ..readable }, 1 << 40),
            OutOfRange,
            AccessDenied,
        ),
        ("an end that wraps around", place(writable, u64::MAX - 100), AccessDenied, OutOfRange),
        ("before the start", place(readable, u64::MAX), OutOfRange, AccessDenied),
    ];
    for (what, slice, read, write) in cases {
        assert_eq!(try_page(&mut pair, false, slice, &to), Err(kind.refusal(read)), "read: {what}");
        again(&mut pair);
        assert_eq!(try_page(&mut pair, true, slice, &to), Err(kind.refusal(write)), "write: {what}");
        again(&mut pair);
    }
    assert!(memory.read(0, 3 * 4096) == patterned(0, 3 * 4096, 1), "a refused WRITE changed memory");
    assert!(landing.read(0, 4096) == [0; 4096], "a refused READ brought bytes");
    // One wrong segment among good ones refuses the whole request.
    let good = ReadSegment { remote: place(readable, 0), local: local(&to, 0, 64) };
    let bad = ReadSegment { remote: forged(12_345_678), local: local(&to, 64, 64) };
    pair.asking.endpoint.post_read(WrId(6), &[good, bad, good]).unwrap();
    let (done, _) = pair.drive(1, 0);
    assert_eq!(done[0].status, Err(kind.refusal(BadKey)));
    again(&mut pair);
    assert_eq!(try_page(&mut pair, false, place(readable, 2 * 4096), &to), Ok(()));
    assert!(landing.read(0, 4096) == patterned(2 * 4096, 4096, 1), "memory differs");
}

fn empty_regions_are_refused(kind: Kind) {
    let pair = pair(kind, Class::Bulk);
    // SAFETY: no byte of it is promised.
    #[allow(unsafe_code)]
    let area = unsafe { vmove_fabric::MemoryArea::new(std::ptr::NonNull::dangling(), 0) };
    let error = pair.asking.fabric.register(area, Access::LOCAL).unwrap_err();
    assert!(matches!(error, FabricError::Register { len: 0, .. }), "{error}");
    // Another may have other limits.
    assert_eq!(error.remedy(), Remedy::OtherFabric);
}

fn as_many_regions_as_promised(kind: Kind) {
    let pair = pair(kind, Class::Bulk);
    let memory = Memory::new(4096);
    for _ in 0..3 {
        let mut regions = Vec::new();
        let error = loop {
            match pair.asking.fabric.register(memory.area(), Access::REMOTE_READ) {
                Ok(region) => regions.push(region),
                Err(error) => break error,
            }
        };
        assert!(regions.len() >= 4096, "{} regions", regions.len());
        assert!(error.to_string().contains("in use"), "{error}");
        let mut keys: Vec<u64> = regions.iter().map(|region| region.remote().rkey).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), regions.len(), "keys are distinct");
    }
}

fn memory_that_is_not_there_fails_cleanly(kind: Kind) {
    if matches!(kind, Kind::Tls | Kind::Verbs) {
        // Tls: this process copies, not the kernel, so what is promised of the memory must hold. Verbs: what is
        // registered is pinned, and stays there whatever becomes of the mapping.
        return;
    }
    let mut pair = pair(kind, Class::Bulk);
    // Beyond what is looked through for zeros, so that only the kernel meets the hole.
    let len = 6 << 20;
    let source = Memory::filled(len, 1);
    let target = Memory::new(len);
    let from = source.register(&*pair.asked.fabric, Access { remote_read: true, remote_write: true });
    let to = target.register(&*pair.asking.fabric, Access::LOCAL);
    source.revoke(3 << 20, 4096);
    pair.asking.endpoint.post_read(WrId(1), &[read_segment(&from, 0, &to, 0, len)]).unwrap();
    let (done, _) = pair.drive(1, 0);
    assert_eq!(done[0].status, Err(RemoteStatus::Fault));
    pair.asking
        .endpoint
        .post_write(WrId(2), &[WriteSegment { local: local(&to, 0, len), remote: remote(&from, 0) }])
        .unwrap();
    let (done, _) = pair.drive(1, 0);
    assert_eq!((&done[0].kind, done[0].status), (&CompletionKind::Write, Err(RemoteStatus::Fault)));
    // Local memory that is not there.
    target.revoke(1 << 20, 4096);
    pair.asking.endpoint.post_read(WrId(3), &[read_segment(&from, 0, &to, 0, 2 << 20)]).unwrap();
    let (done, _) = pair.drive(1, 0);
    done[0].status.unwrap_err();
    pair.asking.endpoint.post_read(WrId(4), &[read_segment(&from, 0, &to, 4096, 4096)]).unwrap();
    let (done, _) = pair.drive(1, 0);
    assert_eq!(whole_read(&done[0]), WrId(4));
}
