//! Decoders of what a peer sends, each on any bytes: for `tests/fuzz` alone. A wrong result is a panic.

use crate::Class;
use crate::multicast::{Key, Session};
use crate::wire::{DATAGRAM_HEADER, Descriptor, Envelope, Header, Hello, MAX_BODY, Numbers, Reply, Trailer};
use crate::wire::{decode_descriptor, part};

pub use crate::stream::fuzzing::{KEY, frames, frames_seeds};

const SESSION: Session = Session { tag: 0x7461_6773, seed: 0x7365_6564, key: None };
const SECRET: Session = Session { key: Some(Key([7; 32])), ..SESSION };

/// Headers, segment descriptors and trailers, alone.
pub fn headers(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk() {
        if let Ok(header) = Header::decode(bytes) {
            assert_eq!(header.encode(), *bytes);
        }
        if let Ok(descriptor) = decode_descriptor(bytes) {
            assert_eq!(descriptor.encode(), *bytes);
        }
    }
    if let Some(bytes) = bytes.first_chunk()
        && let Ok(trailer) = Trailer::decode(bytes)
    {
        assert_eq!(trailer.encode(), *bytes);
    }
}

/// Valid input of [`headers`].
#[must_use]
pub fn headers_seeds() -> Vec<Vec<u8>> {
    let descriptor = Descriptor { rkey: 7, addr: 4096, len: 4096 };
    let read = Header::ReadReply { tag: 5, status: Ok(()), zero_mask: 6, len: 4096 };
    let trailer = Trailer { tag: 5, status: Ok(()) };
    vec![descriptor.encode().to_vec(), read.encode().to_vec(), trailer.encode().to_vec()]
}

/// What each side of a connection says first: of `tcp`, of `local`, of `verbs`, and of a trial of a group.
pub fn hellos(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk()
        && let Ok(hello) = Hello::decode(head)
    {
        let again = Hello::encode(hello.class, &vec![0; hello.greeting]).expect("it was decoded");
        assert_eq!(again[..head.len()], *head);
    }
    if let Some(head) = bytes.first_chunk()
        && Reply::decode(head).is_ok()
    {
        assert_eq!(Reply::encode(), *head);
    }
    crate::local::any_hello(bytes);
    crate::trial::any_message(bytes);
    #[cfg(feature = "verbs")]
    crate::verbs::any_hello(bytes);
}

/// Valid input of [`hellos`].
#[must_use]
pub fn hellos_seeds() -> Vec<Vec<u8>> {
    let local = [&b"vmvl\x01\0\x01\0"[..], &3_u32.to_le_bytes(), &7_u32.to_le_bytes(), &[1; 16]].concat();
    vec![
        Hello::encode(Class::Bulk, b"for you").expect("it is short"),
        Reply::encode().to_vec(),
        local,
        [&b"join"[..], &[239, 255, 118, 109], &[7; 16]].concat(),
        b"count".to_vec(),
        #[cfg(feature = "verbs")]
        crate::verbs::some_hello(),
    ]
}

/// A datagram of a session, without a key and with one: as it is, and closed as one does who knows the session. Then numbers of
/// datagrams, in any order.
pub fn datagram(bytes: &[u8]) {
    for session in [SESSION, SECRET] {
        let mut envelope = Envelope::new(session);
        drop(envelope.open(&mut bytes.to_vec()).map(|found| found.payload.to_vec()));
        let room = DATAGRAM_HEADER + 1..=DATAGRAM_HEADER + MAX_BODY - envelope.tail();
        if room.contains(&bytes.len()) {
            let (number, immediate) =
                (u64::from_le_bytes(part(bytes, 16)), u32::from_le_bytes(part(bytes, 24)));
            let mut closed = bytes.to_vec();
            closed.resize(bytes.len() + envelope.tail(), 0);
            envelope.close(number, immediate, &mut closed);
            let found = envelope.open(&mut closed).expect("it was closed");
            assert_eq!((found.number, found.immediate), (number, immediate));
            assert_eq!(found.payload, &bytes[DATAGRAM_HEADER..]);
        }
    }
    let mut numbers = Numbers::new();
    for number in bytes.chunks_exact(8).take(16).map(|chunk| u64::from_le_bytes(part(chunk, 0))) {
        numbers.note(number);
        assert!(!numbers.note(number), "{number} is new twice");
        let _ = numbers.lost();
    }
}

/// Valid input of [`datagram`].
#[must_use]
pub fn datagram_seeds() -> Vec<Vec<u8>> {
    let closed = |session: Session, number: u64, payload: &[u8]| {
        let mut envelope = Envelope::new(session);
        let mut bytes = [&[0; DATAGRAM_HEADER][..], payload].concat();
        bytes.resize(bytes.len() + envelope.tail(), 0);
        envelope.close(number, 7, &mut bytes);
        bytes
    };
    vec![closed(SESSION, 0, b"payload"), closed(SESSION, u64::MAX, &[0; 256]), closed(SECRET, 1, b"payload")]
}
