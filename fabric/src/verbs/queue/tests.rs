use super::*;

const PAGE: u32 = 4096;

fn segment(local: usize, remote: u64, len: u32) -> (LocalSlice, RemoteSlice) {
    (LocalSlice { addr: local, len, key: 1 }, RemoteSlice { addr: remote, rkey: 5 })
}

fn add(queue: &mut SendQueue, wr: u64, need: Need, segments: &[(LocalSlice, RemoteSlice)]) {
    let bytes = segments.iter().map(|(local, _)| u64::from(local.len)).sum();
    queue.push(WrId(wr), need, bytes, segments.iter().copied());
}

fn fill(queue: &mut SendQueue) -> (Vec<Post>, Stop) {
    let mut posts = Vec::new();
    let stop = queue.fill(&mut posts, |_| Some(9));
    (posts, stop)
}

#[test]
fn only_the_last_piece_of_a_request_is_told() {
    let mut queue = SendQueue::new(100, 1 << 20);
    let scattered: Vec<_> = (0..5).map(|n| segment(n << 20, 0x1000, PAGE)).collect();
    add(&mut queue, 7, Need::Read, &scattered);
    add(&mut queue, 8, Need::Read, &scattered[..1]);
    let (posts, stop) = fill(&mut queue);
    assert_eq!(stop, Stop::Nothing);
    let told: Vec<bool> = posts.iter().map(|post| post.signalled).collect();
    assert_eq!(told, [false, false, false, false, true, true]);
    assert_eq!(posts[4].id, posts[0].id, "a failed piece names its group");
    assert_ne!(posts[5].id, posts[4].id);
    let ending = queue.end(posts[0].id, false).unwrap();
    assert_eq!((ending.wr, ending.bytes), (WrId(7), 5 * 4096));
    assert_eq!(queue.end(posts[5].id, false).unwrap().wr, WrId(8));
    assert!(queue.open() == 0 && !queue.is_busy());
}

#[test]
fn neighbours_become_one_piece_and_long_segments_several() {
    let mut queue = SendQueue::new(100, 8192);
    let neighbours = [segment(0, 0x1000, PAGE), segment(4096, 0x2000, PAGE), segment(8192, 0x3000, PAGE)];
    add(&mut queue, 1, Need::Read, &neighbours);
    add(&mut queue, 2, Need::Write, &[segment(0, 0x1000, 20_000)]);
    let (posts, _) = fill(&mut queue);
    let pieces: Vec<_> = posts.iter().map(|post| (post.local, post.remote, post.len)).collect();
    assert_eq!(
        pieces,
        [
            (0, 0x1000, 8192),
            (8192, 0x3000, 4096),
            (0, 0x1000, 8192),
            (8192, 0x3000, 8192),
            (16384, 0x5000, 3616)
        ]
    );
}

#[test]
fn a_request_larger_than_the_queue_goes_in_parts() {
    let mut queue = SendQueue::new(40, 4096);
    add(&mut queue, 1, Need::Read, &[segment(0, 0, 100 * PAGE)]);
    let mut all = Vec::new();
    let mut ended = None;
    while ended.is_none() {
        let (posts, stop) = fill(&mut queue);
        assert_eq!(stop, Stop::Nothing);
        assert!(!posts.is_empty(), "stuck after {} pieces", all.len());
        let told: Vec<u64> = posts.iter().filter(|post| post.signalled).map(|post| post.id).collect();
        all.extend(posts);
        for id in told {
            ended = ended.or(queue.end(id, false));
        }
    }
    assert_eq!(all.iter().map(|post| u64::from(post.len)).sum::<u64>(), 100 * 4096);
    assert!(all.iter().enumerate().all(|(n, post)| post.local == n as u64 * 4096), "a piece is missing");
    assert_eq!(queue.open(), 0);
}

#[test]
fn a_message_waits_for_the_writes_before_it_but_not_for_reads() {
    let mut queue = SendQueue::new(100, 1 << 20);
    add(&mut queue, 1, Need::Read, &[segment(0, 0, PAGE)]);
    queue.push_message(WrId(2), b"first".to_vec());
    add(&mut queue, 3, Need::Write, &[segment(0, 0, PAGE)]);
    queue.push_message(WrId(4), b"second".to_vec());
    let (_, stop) = fill(&mut queue);
    assert_eq!(stop, Stop::Message);
    assert_eq!(queue.pop_message().unwrap().0, WrId(2));
    let (posts, stop) = fill(&mut queue);
    assert_eq!((posts.len(), stop), (1, Stop::Nothing));
    assert_eq!(queue.end(1, false).unwrap().wr, WrId(1));
    assert_eq!(fill(&mut queue).1, Stop::Nothing, "the WRITE has not ended");
    assert_eq!(queue.end(posts[0].id, false).unwrap().wr, WrId(3));
    assert_eq!(fill(&mut queue).1, Stop::Message);
    assert_eq!(queue.pop_message().unwrap().1, b"second");
    assert_eq!(queue.open(), 0);
}

#[test]
fn memory_that_went_away_and_keys_that_cannot_be_are_told() {
    let mut queue = SendQueue::new(100, 1 << 20);
    add(&mut queue, 1, Need::Read, &[segment(0, 0, PAGE)]);
    let mut posts = Vec::new();
    assert_eq!(queue.fill(&mut posts, |_| None), Stop::LocalGone { started: false });
    assert_eq!(queue.pop_failed().unwrap().wr, WrId(1));
    let (local, remote) = segment(0, 0, PAGE);
    add(&mut queue, 2, Need::Read, &[(local, remote), (local, RemoteSlice { rkey: 1 << 40, ..remote })]);
    assert_eq!(queue.fill(&mut posts, |_| Some(1)), Stop::BadKey);
    assert_eq!(queue.pop_failed().unwrap().wr, WrId(2));
    assert_eq!((queue.open(), queue.is_waiting()), (0, false));
    // With the device already, in full or in part.
    for pages in [1, 200] {
        let mut queue = SendQueue::new(40, 4096);
        add(&mut queue, 3, Need::Read, &[segment(0, 0, pages * PAGE)]);
        fill(&mut queue);
        assert_eq!(queue.first_lost(|_| Some(9)), None);
        let lost = queue.first_lost(|_| None).unwrap();
        assert_eq!(queue.end(lost, true).unwrap().wr, WrId(3));
    }
}
