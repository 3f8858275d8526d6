//! What every back end for multicast must do. So far there is one, UDP; it is tried on the loopback interface.
#![allow(missing_docs, clippy::tests_outside_test_module)]

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use support::{Memory, patterned};
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::udp::{UdpMulticast, UdpOptions};
use vmove_fabric::{
    Access, Group, GroupAddress, LocalSlice, Multicast, MulticastCounters, MulticastReceiver,
    MulticastSender, Outgoing, Region, Session, Sink,
};

#[path = "support/mod.rs"]
mod support;

const LEN: usize = 1024;

/// A group of its own for each test: they run at the same time.
fn group() -> (Group, SocketAddrV4) {
    group_of(Session::draw().unwrap())
}

fn group_of(session: Session) -> (Group, SocketAddrV4) {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let port = 20_000 + u16::try_from(std::process::id() % 20_000).unwrap() + number;
    let address = SocketAddrV4::new(Ipv4Addr::new(239, 7, 42, u8::try_from(number).unwrap()), port);
    (Group { address: GroupAddress::Udp(address), session }, address)
}

struct Host {
    memory: Memory,
    region: Region,
    multicast: UdpMulticast,
}

impl Host {
    fn new(memory: Memory, tune: impl FnOnce(&mut UdpOptions)) -> Self {
        let fabric = TcpFabric::new(TcpOptions::default()).unwrap();
        let region = memory.register(&fabric, Access::LOCAL);
        let mut options = UdpOptions::on(Ipv4Addr::LOCALHOST);
        options.mtu = Some(1500);
        tune(&mut options);
        Self { memory, region, multicast: UdpMulticast::new(&fabric, options) }
    }

    fn slice(&self, n: u32) -> LocalSlice {
        self.region.local(u64::from(n) * LEN as u64, 1024).unwrap()
    }
}

/// Puts the payload with immediate n at n * LEN, each as often as it comes.
struct Places<'a> {
    host: &'a Host,
    asked: Option<u32>,
    landed: HashMap<u32, u32>,
}

impl<'a> Places<'a> {
    fn new(host: &'a Host) -> Self {
        Self { host, asked: None, landed: HashMap::new() }
    }
}

impl Sink for Places<'_> {
    fn place(&mut self, immediate: u32, len: usize) -> Option<LocalSlice> {
        self.asked = Some(immediate);
        self.host.region.local(u64::from(immediate) * LEN as u64, u32::try_from(len).unwrap())
    }

    fn landed(&mut self, immediate: u32) {
        assert_eq!(self.asked.take(), Some(immediate));
        *self.landed.entry(immediate).or_default() += 1;
    }
}

fn send_all(sender: &mut dyn MulticastSender, batch: &[Outgoing]) {
    let mut sent = 0;
    while sent < batch.len() {
        sent += sender.send(&batch[sent..]).unwrap();
        if sent < batch.len() {
            sender.wait(Duration::from_millis(100)).unwrap();
        }
    }
}

fn batch(from: &Host, numbers: impl IntoIterator<Item = u32>) -> Vec<Outgoing> {
    numbers.into_iter().map(|n| Outgoing { immediate: n, payload: from.slice(n) }).collect()
}

/// Polls until the totals are so.
fn until(receiver: &mut dyn MulticastReceiver, sink: &mut dyn Sink, so: impl Fn(&MulticastCounters) -> bool) {
    let begin = Instant::now();
    while !so(&receiver.counters().read()) {
        assert!(begin.elapsed() < support::TIMEOUT, "not so: {:?}", receiver.counters().read());
        if receiver.poll(sink).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn all_arrive_in_place(segmentation: bool, session: Session) {
    let (group, _) = group_of(session);
    let tail = if session.is_sealed() { 16 } else { 0 };
    let from = Host::new(Memory::filled(1 << 20, 3), |options| options.segmentation = segmentation);
    let hosts = [(); 2].map(|()| Host::new(Memory::filled(1 << 20, 90), |_| {}));
    let mut receivers = hosts.each_ref().map(|host| host.multicast.join(&group).unwrap());
    let mut sender = from.multicast.sender(&group).unwrap();
    assert_eq!(sender.max_payload(), 1440 - tail);
    // Every other place, backwards, and two of other lengths in the middle.
    let mut out = batch(&from, (0..500).rev().map(|n| n * 2));
    out[77].payload = from.region.local(u64::from(out[77].immediate) * LEN as u64, 5).unwrap();
    out[78].payload = from.region.local(u64::from(out[78].immediate) * LEN as u64, 1023).unwrap();
    send_all(&mut *sender, &out);
    let sent = sender.counters().read();
    let bytes = 500 * (32 + tail as u64) + 498 * 1024 + 5 + 1023;
    assert_eq!((sent.sent, sent.bytes_sent), (500, bytes));
    let mut expected = patterned(0, 1 << 20, 90);
    for outgoing in &out {
        let (at, len) = (outgoing.immediate as usize * LEN, outgoing.payload.len() as usize);
        expected[at..at + len].copy_from_slice(&patterned(at, len, 3));
    }
    for (receiver, host) in receivers.iter_mut().zip(&hosts) {
        let mut places = Places::new(host);
        until(&mut **receiver, &mut places, |totals| totals.received == 500);
        assert!(places.landed.len() == 500 && places.landed.values().all(|times| *times == 1));
        assert!(host.memory.read(0, 1 << 20) == expected, "memory differs");
        let totals = receiver.counters().read();
        let bytes_received = sent.bytes_sent;
        assert_eq!(totals, MulticastCounters { received: 500, bytes_received, ..Default::default() });
    }
}

#[test]
fn all_arrive_in_place_and_nowhere_else() {
    all_arrive_in_place(false, Session::draw().unwrap());
    all_arrive_in_place(false, Session::draw_sealed().unwrap());
}

#[test]
fn runs_that_the_kernel_joins_arrive_in_place_and_nowhere_else() {
    all_arrive_in_place(true, Session::draw().unwrap());
    all_arrive_in_place(true, Session::draw_sealed().unwrap());
}

#[test]
fn strangers_forgeries_and_repeats_are_counted_and_dropped() {
    strangers_are_dropped(Session::draw().unwrap(), Session::draw().unwrap());
}

#[test]
fn strangers_forgeries_and_repeats_of_encrypted_datagrams_are_counted_and_dropped() {
    // Another session's datagrams are encrypted, too, or anybody's.
    strangers_are_dropped(Session::draw_sealed().unwrap(), Session::draw_sealed().unwrap());
    strangers_are_dropped(Session::draw_sealed().unwrap(), Session::draw().unwrap());
}

fn strangers_are_dropped(session: Session, another: Session) {
    let (group, address) = group_of(session);
    let from = Host::new(Memory::filled(1 << 16, 3), |_| {});
    let host = Host::new(Memory::new(1 << 16), |_| {});
    let tap = tapped(address);
    let mut receiver = host.multicast.join(&group).unwrap();
    let mut places = Places::new(&host);
    // A stale session on the same address.
    let stale = Group { session: another, ..group };
    send_all(&mut *from.multicast.sender(&stale).unwrap(), &batch(&from, 0..3));
    until(&mut *receiver, &mut places, |totals| totals.refused == 3);
    for _ in 0..3 {
        tap.recv(&mut [0; 2000]).unwrap();
    }
    // A good one; then its bytes again, its bytes with one bit changed, cut ones, and noise.
    send_all(&mut *from.multicast.sender(&group).unwrap(), &batch(&from, [7]));
    let mut bytes = vec![0; 2000];
    let len = tap.recv(&mut bytes).unwrap();
    let in_clear = bytes[..len].windows(16).any(|part| part == &patterned(7 * LEN, 16, 3)[..]);
    assert_eq!(in_clear, !session.is_sealed(), "what whoever hears the group reads");
    let mut forged = bytes[..len].to_vec();
    forged[25] ^= 1; // another place
    let forger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut numbered = bytes[..len].to_vec();
    numbered[16] ^= 1; // not a repeat, as it says
    for bytes in [&bytes[..len], &forged, &numbered, &bytes[..len - 1], &bytes[..20], &[], &[0xff; 1400]] {
        forger.send_to(bytes, address).unwrap();
    }
    until(&mut *receiver, &mut places, |totals| totals.received == 1 && totals.duplicate == 1);
    until(&mut *receiver, &mut places, |totals| totals.refused == 3 + 6);
    assert_eq!(places.landed, HashMap::from([(7, 1)]));
    let mut expected = vec![0; 1 << 16];
    expected[7 * LEN..8 * LEN].copy_from_slice(&patterned(7 * LEN, LEN, 3));
    assert!(host.memory.read(0, 1 << 16) == expected, "memory differs");
}

/// An ordinary socket that hears the group.
fn tapped(address: SocketAddrV4) -> UdpSocket {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let tap = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    sockopt::set_socket_reuseaddr(&tap, true).unwrap();
    bind(&tap, &address).unwrap();
    let tap = UdpSocket::from(tap);
    tap.join_multicast_v4(address.ip(), &Ipv4Addr::LOCALHOST).unwrap();
    tap.set_read_timeout(Some(support::TIMEOUT)).unwrap();
    tap
}

#[test]
fn what_has_no_place_touches_nothing() {
    let (group, _) = group();
    let from = Host::new(Memory::filled(1 << 20, 3), |_| {});
    let host = Host::new(Memory::new(1 << 14), |_| {});
    let mut receiver = host.multicast.join(&group).unwrap();
    let mut sender = from.multicast.sender(&group).unwrap();
    // The receiver's region ends at 16.
    send_all(&mut *sender, &batch(&from, 10..30));
    let mut places = Places::new(&host);
    until(&mut *receiver, &mut places, |totals| totals.received == 20);
    assert_eq!((places.landed.len(), receiver.counters().read().unwanted), (6, 14));
    // A place in memory that is not registered any more, or of another fabric, or too short, is an error.
    struct Wrong(LocalSlice);
    impl Sink for Wrong {
        fn place(&mut self, _: u32, _: usize) -> Option<LocalSlice> {
            Some(self.0)
        }
        fn landed(&mut self, _: u32) {
            panic!("nothing may land");
        }
    }
    let short = host.region.local(0, 1000).unwrap();
    let before = host.memory.read(0, 1 << 14);
    for wrong in [from.slice(0), short] {
        send_all(&mut *sender, &batch(&from, [0]));
        let begin = Instant::now();
        let error = loop {
            match receiver.poll(&mut Wrong(wrong)) {
                Ok(_) => assert!(begin.elapsed() < support::TIMEOUT),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("not registered"), "{error}");
    }
    assert!(host.memory.read(0, 1 << 14) == before);
    // So is sending what is not registered or too long.
    for payload in [host.slice(0), from.region.local(0, 1441).unwrap()] {
        let error = sender.send(&[Outgoing { immediate: 0, payload }]).unwrap_err();
        assert!(error.to_string().contains("1440"), "{error}");
    }
}

#[test]
fn a_ring_that_nobody_empties_overflows_and_says_so() {
    let (group, _) = group();
    let from = Host::new(Memory::filled(1 << 20, 3), |options| options.segmentation = false);
    let host = Host::new(Memory::new(1 << 20), |options| options.ring_bytes = 128 << 10);
    let mut receiver = host.multicast.join(&group).unwrap();
    assert!(receiver.ring_bytes() <= 256 << 10);
    let mut sender = from.multicast.sender(&group).unwrap();
    send_all(&mut *sender, &batch(&from, 0..1000));
    let mut places = Places::new(&host);
    while receiver.poll(&mut places).unwrap() > 0 {}
    // The next one brings the number of those that had no room.
    send_all(&mut *sender, &batch(&from, [1000]));
    until(&mut *receiver, &mut places, |totals| totals.received + totals.ring_full == 1001);
    let totals = receiver.counters().read();
    assert!(totals.ring_full > 0, "{totals:?}");
    assert_eq!(totals.lost, totals.ring_full);
    assert_eq!(places.landed.len() as u64, totals.received);
}

#[test]
fn a_paced_sender_loses_nothing() {
    let (group, _) = group();
    let from = Host::new(Memory::filled(1 << 24, 3), |_| {});
    let host = Host::new(Memory::new(1 << 24), |_| {});
    let mut receiver = host.multicast.join(&group).unwrap();
    let mut sender = from.multicast.sender(&group).unwrap();
    let all = batch(&from, 0..16_384);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            // 40 MB/s in steps of 128 KiB.
            for (step, part) in (0_u32..).zip(all.chunks(128)) {
                send_all(&mut *sender, part);
                let due = Duration::from_micros(3277) * step;
                std::thread::sleep(due.saturating_sub(begin.elapsed()));
            }
        });
        until(&mut *receiver, &mut Places::new(&host), |totals| totals.received == 16_384);
    });
    assert_eq!(receiver.counters().read().lost, 0);
    assert!(host.memory.read(0, 1 << 24) == from.memory.read(0, 1 << 24), "memory differs");
}

#[test]
fn who_joins_late_gets_what_comes_later_and_who_left_gets_nothing() {
    let (group, _) = group();
    let from = Host::new(Memory::filled(1 << 20, 3), |_| {});
    let hosts = [(); 2].map(|()| Host::new(Memory::new(1 << 20), |_| {}));
    let mut early = hosts[0].multicast.join(&group).unwrap();
    let mut sender = from.multicast.sender(&group).unwrap();
    send_all(&mut *sender, &batch(&from, 0..10));
    until(&mut *early, &mut Places::new(&hosts[0]), |totals| totals.received == 10);
    let early = early.counters(); // drops the receiver, keeps its totals
    let mut late = hosts[1].multicast.join(&group).unwrap();
    send_all(&mut *sender, &batch(&from, 10..15));
    let mut places = Places::new(&hosts[1]);
    until(&mut *late, &mut places, |totals| totals.received == 5);
    assert_eq!(late.counters().read().lost, 0, "what came before is not lost");
    let mut landed: Vec<_> = places.landed.into_keys().collect();
    landed.sort_unstable();
    assert_eq!(landed, [10, 11, 12, 13, 14]);
    assert_eq!(early.read().received, 10);
}
