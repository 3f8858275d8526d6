//! A peer that talks nonsense, cleverly: an error or nothing, never a crash, never a byte outside what was granted.
#![allow(missing_docs, clippy::tests_outside_test_module)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use proptest::prelude::*;
use support::{Memory, patterned, sockets};
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{Access, Class, Completions, Endpoint, Fabric, ReadSegment, Region, RemoteSlice, WrId};

const PAGE: usize = 4096;

/// An endpoint with memory of each kind, some READs under way, and the raw socket of its peer.
struct Victim {
    memory: Memory,
    regions: Vec<Region>,
    endpoint: Box<dyn Endpoint>,
    _fabric: Arc<TcpFabric>,
    attacker: TcpStream,
}

/// Pages: 1 readable, 3 writable, 5 the landing place of READs; those between belong to nobody.
fn victim() -> Victim {
    let fabric = Arc::new(TcpFabric::new(TcpOptions::default()).unwrap());
    let memory = Memory::filled(7 * PAGE, 1);
    let part = |page: usize, access| {
        let start = memory.area().ptr().as_ptr().wrapping_add(page * PAGE);
        let start = std::ptr::NonNull::new(start).unwrap();
        // SAFETY: inside the memory, which the victim keeps until its regions are dropped.
        #[allow(unsafe_code)]
        let area = unsafe { vmove_fabric::MemoryArea::new(start, PAGE as u64) };
        fabric.register(area, access).unwrap()
    };
    let regions = vec![part(1, Access::REMOTE_READ), part(3, Access::REMOTE_WRITE), part(5, Access::LOCAL)];
    let (here, attacker) = sockets();
    let mut endpoint = fabric.adopt(here, Class::Bulk).unwrap();
    for n in 0..4 {
        let segments: Vec<_> = (0..4_u64)
            .map(|part| ReadSegment {
                remote: RemoteSlice { addr: part, rkey: 7 },
                local: regions[2].local(part * 1000, 900).unwrap(),
            })
            .collect();
        // Tags 130 and 131 await the other kind of reply.
        let posted = if n < 2 {
            endpoint.post_read(WrId(n), &segments)
        } else {
            endpoint.post_read_changed(WrId(n), &segments)
        };
        posted.unwrap();
    }
    endpoint.flush().unwrap();
    Victim { memory, regions, endpoint, _fabric: fabric, attacker }
}

impl Victim {
    /// Sends the bytes, hangs up, and lets the endpoint work until it gives up.
    fn attack(mut self, bytes: &[u8]) {
        let mut found = Completions::default();
        let mut completed = 0;
        // In pieces that fit the buffers, so that this one thread can play both sides.
        let mut pieces = bytes.chunks(30_000);
        let mut over = false;
        self.attacker.set_nonblocking(true).unwrap();
        let mut sink = vec![0; 1 << 16];
        for _ in 0..100_000 {
            if let Some(piece) = pieces.next() {
                let _ = self.attacker.write_all(piece);
            } else if !over {
                self.attacker.shutdown(Shutdown::Write).unwrap();
                over = true;
            }
            while self.attacker.read(&mut sink).is_ok_and(|read| read > 0) {}
            match self.endpoint.poll(&mut found) {
                Ok(count) => completed += count,
                Err(error) => {
                    let _ = error.to_string();
                    break;
                }
            }
        }
        let reads = found.iter().filter(|completion| completion.status.is_ok()).count();
        assert!(reads <= 4 + completed, "more completions than requests");
        for page in [0, 2, 4, 6] {
            let intact = self.memory.read(page * PAGE, PAGE) == patterned(page * PAGE, PAGE, 1);
            assert!(intact, "page {page}, which nobody was granted, has changed");
        }
        assert!(
            self.memory.read(PAGE, PAGE) == patterned(PAGE, PAGE, 1),
            "memory granted for reading has changed"
        );
        let landing = self.memory.read(5 * PAGE, PAGE);
        for part in 0..4 {
            let gap = part * 1000 + 900..(part + 1) * 1000;
            let whole = patterned(5 * PAGE, PAGE, 1);
            assert!(landing[gap.clone()] == whole[gap], "memory between the segments of a READ has changed");
        }
        assert!(self.endpoint.outstanding() <= 4);
    }

    /// The key of one of the regions, or something near it.
    fn key(&self, choice: u8) -> u64 {
        let known = self.regions[usize::from(choice % 3)].remote().rkey;
        match choice / 3 % 4 {
            0 | 1 => known,
            2 => known ^ (1 << (choice % 64)),
            _ => u64::from(choice),
        }
    }
}

/// One frame as an attacker might build it.
#[derive(Debug, Clone)]
struct Frame {
    kind: u8,
    segments: u8,
    status: u8,
    reserved: u8,
    tag: u32,
    mask: u64,
    /// Second mask of a reply to a request for what has changed; makes the fingerprints of such a request.
    same: u64,
    /// Length of the payload that is really sent.
    payload: u16,
    /// What is added to that in the header.
    lie: i64,
    descriptors: Vec<(u8, u64, u32)>,
    trailer: bool,
}

fn small_or(any: impl Strategy<Value = u64>, limit: u64) -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..limit, 1 => any]
}

fn frame() -> impl Strategy<Value = Frame> {
    let descriptors = prop::collection::vec((any::<u8>(), small_or(any::<u64>(), 5000), 0..6000_u32), 0..5);
    let head = (
        prop_oneof![8 => 1..=7_u8, 1 => any::<u8>()],
        prop_oneof![6 => Just(0_u8), 1 => any::<u8>()],
        prop_oneof![6 => Just(0_u8), 1 => 0..6_u8],
        prop_oneof![12 => Just(0_u8), 1 => any::<u8>()],
        // The tags of the first requests of a connection, and others.
        prop_oneof![6 => 128..132_u32, 1 => any::<u32>()],
        prop_oneof![3 => Just(0_u64), 2 => 0..16_u64, 1 => any::<u64>()],
        prop_oneof![3 => Just(0_u64), 2 => 0..16_u64, 1 => any::<u64>()],
    );
    let rest = (
        prop_oneof![1 => 0..9000_u16, 2 => prop::sample::select(vec![0_u16, 900, 1800, 2700, 3600])],
        prop_oneof![8 => Just(0_i64), 1 => -5..5_i64, 1 => any::<i64>()],
        descriptors,
        any::<bool>(),
    );
    (head, rest).prop_map(
        |((kind, segments, status, reserved, tag, mask, same), (payload, lie, descriptors, trailer))| Frame {
            kind,
            segments,
            status,
            reserved,
            tag,
            mask,
            same,
            payload,
            lie,
            descriptors,
            trailer,
        },
    )
}

impl Frame {
    fn bytes(&self, victim: &Victim) -> Vec<u8> {
        let request = matches!(self.kind, 1 | 3 | 6);
        let count = if request { u8::try_from(self.descriptors.len()).unwrap() } else { 0 };
        let mut payload = u64::from(self.payload);
        if self.kind == 3 {
            payload = self.descriptors.iter().map(|(_, _, len)| u64::from(*len)).sum();
        }
        if matches!(self.kind, 1 | 4 | 6) || self.status != 0 {
            payload = 0;
        }
        let announced = payload.wrapping_add_signed(self.lie);
        let mask = if matches!(self.kind, 2 | 6 | 7) { self.mask } else { 0 };
        let tag = if self.kind == 5 { 0 } else { self.tag };
        let mut bytes = vec![self.kind, self.segments ^ count, self.status, self.reserved];
        bytes.extend(tag.to_le_bytes());
        bytes.extend(mask.to_le_bytes());
        bytes.extend(announced.to_le_bytes());
        if request {
            for (key, addr, len) in &self.descriptors {
                bytes.extend(victim.key(*key).to_le_bytes());
                bytes.extend(addr.to_le_bytes());
                bytes.extend(u64::from(*len).to_le_bytes());
            }
        }
        if self.kind == 6 {
            bytes.extend(self.descriptors.iter().flat_map(|_| u128::from(self.same).to_le_bytes()));
        }
        if self.kind == 7 {
            bytes.extend(self.same.to_le_bytes());
        }
        bytes.extend((0..payload).map(|_| 0xEE));
        if matches!(self.kind, 2 | 7) && payload > 0 && self.trailer {
            bytes.extend(b"end\0");
            bytes.extend(self.tag.to_le_bytes());
        }
        bytes
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn frames_that_are_nearly_right_do_no_harm(frames in prop::collection::vec(frame(), 1..20)) {
        let victim = victim();
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.bytes(&victim)).collect();
        victim.attack(&bytes);
    }

    #[test]
    fn noise_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        victim().attack(&bytes);
    }

    #[test]
    fn a_good_reply_with_one_wrong_bit_does_no_harm(bit in 0..(24 + 3600 + 8) * 8_usize, changed in any::<bool>()) {
        let victim = victim();
        let (kind, tag) = if changed { (7, 130) } else { (2, 128) };
        let frame = Frame {
            kind, segments: 0, status: 0, reserved: 0, tag, mask: 0, same: 0, payload: 3600, lie: 0,
            descriptors: Vec::new(), trailer: true,
        };
        let mut bytes = frame.bytes(&victim);
        bytes[bit / 8] ^= 1 << (bit % 8);
        victim.attack(&bytes);
    }
}

#[test]
fn the_frames_of_these_tests_are_understood() {
    // A check of the tests themselves: without mistakes the frames are good, and do what they say.
    let mut victim = victim();
    let plain = Frame {
        kind: 2,
        segments: 0,
        status: 0,
        reserved: 0,
        tag: 128,
        mask: 0b0010,
        same: 0,
        payload: 2700,
        lie: 0,
        descriptors: Vec::new(),
        trailer: true,
    };
    let write = Frame { kind: 3, mask: 0, descriptors: vec![(1, 100, 200), (1, 4000, 96)], ..plain.clone() };
    let mut bytes = plain.bytes(&victim);
    bytes.extend(write.bytes(&victim));
    victim.attacker.write_all(&bytes).unwrap();
    let mut found = Completions::default();
    while victim.endpoint.poll(&mut found).unwrap() == 0 {
        victim.endpoint.wait(None).unwrap();
    }
    let done = found.iter().next().unwrap();
    assert_eq!(done.kind, vmove_fabric::CompletionKind::Read { zero_mask: 0b0010 });
    done.status.unwrap();
    support::wait_until("the WRITE has been taken in", || {
        victim.endpoint.poll(&mut found).unwrap();
        victim.endpoint.counters().writes_served == 1
    });
    assert_eq!(victim.memory.read(3 * PAGE + 100, 200), [0xEE; 200]);
    assert_eq!(victim.memory.read(3 * PAGE + 4000, 96), [0xEE; 96]);
    let mut expected = patterned(5 * PAGE, PAGE, 1);
    for part in [0, 2, 3] {
        expected[part * 1000..part * 1000 + 900].fill(0xEE);
    }
    assert!(victim.memory.read(5 * PAGE, PAGE) == expected, "memory differs");
}

#[test]
fn a_reply_of_another_kind_than_the_request_or_with_masks_that_overlap_ends_the_connection() {
    let good = Frame {
        kind: 7,
        segments: 0,
        status: 0,
        reserved: 0,
        tag: 130,
        mask: 0b0010,
        same: 0b0100,
        payload: 1800,
        lie: 0,
        descriptors: Vec::new(),
        trailer: true,
    };
    let answer = |frame: &Frame| {
        let mut victim = victim();
        victim.attacker.write_all(&frame.bytes(&victim)).unwrap();
        let mut found = Completions::default();
        loop {
            match victim.endpoint.poll(&mut found) {
                Ok(0) => victim.endpoint.wait(None).unwrap(),
                Ok(_) => return Ok(found.iter().next().unwrap().kind.clone()),
                Err(error) => return Err(error.to_string()),
            }
        }
    };
    let read = vmove_fabric::CompletionKind::ReadChanged { zero_mask: 0b0010, same_mask: 0b0100 };
    assert_eq!(answer(&good), Ok(read), "a check of the test itself");
    for (bad, why) in [
        (Frame { tag: 128, ..good.clone() }, "not outstanding"),
        (Frame { kind: 2, mask: 0b0110, ..good.clone() }, "not outstanding"),
        (Frame { same: 0b0010, payload: 2700, ..good.clone() }, "same mask 0x2"),
        (Frame { same: 0b1_0000, payload: 2700, ..good.clone() }, "same mask 0x10"),
    ] {
        let error = answer(&bad).expect_err("it is refused");
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn more_requests_than_credits_end_the_connection() {
    let mut victim = victim();
    let read = Frame {
        kind: 1,
        segments: 0,
        status: 0,
        reserved: 0,
        tag: 5,
        mask: 0,
        same: 0,
        payload: 0,
        lie: 0,
        descriptors: vec![(0, 0, 4096)],
        trailer: false,
    };
    let one = read.bytes(&victim);
    // All at once, so that no reply can have been taken in between.
    let bytes: Vec<u8> = (0..2000).flat_map(|_| one.clone()).collect();
    victim.attacker.write_all(&bytes).unwrap();
    let mut found = Completions::default();
    let error = (0..100_000).find_map(|_| victim.endpoint.poll(&mut found).err()).expect("an error");
    assert!(error.to_string().contains("credits"), "{error}");
}
