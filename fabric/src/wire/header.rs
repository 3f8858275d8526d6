//! Encoding and decoding of frame headers. Pure functions over bytes.

use crate::endpoint::{MAX_MESSAGE, MAX_SEGMENTS, MAX_TRANSFER};
use crate::error::RemoteStatus;

/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 24;
/// Bytes of a segment descriptor.
pub(crate) const DESCRIPTOR_LEN: usize = 24;
/// Bytes of a trailer.
pub(crate) const TRAILER_LEN: usize = 8;
/// Bytes of the fingerprint of one segment, see [`Header::ChangedRequest`].
pub(crate) const FINGERPRINT_LEN: usize = 16;
/// Bytes of the mask that follows the header of a [`Header::ChangedReply`].
pub(crate) const SAME_MASK_LEN: usize = 8;

const READ_REQUEST: u8 = 1;
const READ_REPLY: u8 = 2;
const WRITE_REQUEST: u8 = 3;
const WRITE_REPLY: u8 = 4;
const MESSAGE: u8 = 5;
const CHANGED_REQUEST: u8 = 6;
const CHANGED_REPLY: u8 = 7;
/// Begins a trailer: a stream that lost step is noticed at the end of each payload.
const TRAILER_MAGIC: [u8; 3] = *b"end";

/// A decoded header. Layout: kind `u8`, segments `u8`, status `u8`, 0 `u8`, tag `u32`, mask `u64`, length `u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    /// Asks for memory of the receiver.
    ReadRequest { tag: u32, segments: u8 },
    /// Answers a read request. `zero_mask` and `len` (bytes of payload) are 0 unless `status` is `Ok`.
    ReadReply { tag: u32, status: Result<(), RemoteStatus>, zero_mask: u64, len: u64 },
    /// Asks for those segments of the receiver's memory whose fingerprint differs from the given one. After the descriptors
    /// come as many fingerprints: XXH3-128 with `seed`.
    ChangedRequest { tag: u32, segments: u8, seed: u64 },
    /// Answers such a request. A mask of the segments that are the same follows, then the payload: what neither mask names.
    ChangedReply { tag: u32, status: Result<(), RemoteStatus>, zero_mask: u64, len: u64 },
    /// Carries `len` bytes for the receiver's memory.
    WriteRequest { tag: u32, segments: u8, len: u64 },
    /// Answers a write request.
    WriteReply { tag: u32, status: Result<(), RemoteStatus> },
    /// Carries `len` bytes for the receiver's program.
    Message { len: u32 },
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("{0} segments in a request; expected 1 to 64")]
    Segments(u8),
    #[error("unknown status {0}")]
    Status(u8),
    #[error("{0} bytes in one frame; more than allowed")]
    Length(u64),
    #[error("a field that must be zero is not")]
    Reserved,
    #[error("payload does not end with a trailer")]
    Trailer,
}

impl Header {
    /// The header's bytes.
    pub(crate) fn encode(self) -> [u8; HEADER_LEN] {
        let ok = Ok(());
        let (kind, segments, status, tag, mask, len) = match self {
            Self::ReadRequest { tag, segments } => (READ_REQUEST, segments, ok, tag, 0, 0),
            Self::ReadReply { tag, status, zero_mask, len } => (READ_REPLY, 0, status, tag, zero_mask, len),
            Self::ChangedRequest { tag, segments, seed } => (CHANGED_REQUEST, segments, ok, tag, seed, 0),
            Self::ChangedReply { tag, status, zero_mask, len } => {
                (CHANGED_REPLY, 0, status, tag, zero_mask, len)
            }
            Self::WriteRequest { tag, segments, len } => (WRITE_REQUEST, segments, ok, tag, 0, len),
            Self::WriteReply { tag, status } => (WRITE_REPLY, 0, status, tag, 0, 0),
            Self::Message { len } => (MESSAGE, 0, ok, 0, 0, u64::from(len)),
        };
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = kind;
        bytes[1] = segments;
        bytes[2] = RemoteStatus::to_wire(status);
        bytes[4..8].copy_from_slice(&tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&mask.to_le_bytes());
        bytes[16..24].copy_from_slice(&len.to_le_bytes());
        bytes
    }

    /// The header in these bytes. Every field is checked, also those that the kind does not use.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, DecodeError> {
        let [kind, segments, status, reserved, rest @ ..] = *bytes;
        let tag = u32::from_le_bytes(part(&rest, 0));
        let zero_mask = u64::from_le_bytes(part(&rest, 4));
        let len = u64::from_le_bytes(part(&rest, 12));
        let status = RemoteStatus::from_wire(status).ok_or(DecodeError::Status(status))?;
        let header = match kind {
            READ_REQUEST => Self::ReadRequest { tag, segments: count(segments)? },
            READ_REPLY => Self::ReadReply { tag, status, zero_mask, len: bounded(len, MAX_TRANSFER)? },
            CHANGED_REQUEST => Self::ChangedRequest { tag, segments: count(segments)?, seed: zero_mask },
            CHANGED_REPLY => Self::ChangedReply { tag, status, zero_mask, len: bounded(len, MAX_TRANSFER)? },
            WRITE_REQUEST => {
                Self::WriteRequest { tag, segments: count(segments)?, len: bounded(len, MAX_TRANSFER)? }
            }
            WRITE_REPLY => Self::WriteReply { tag, status },
            MESSAGE => Self::Message {
                len: u32::try_from(bounded(len, MAX_MESSAGE as u64)?)
                    .map_err(|_| DecodeError::Length(len))?,
            },
            _ => return Err(DecodeError::Kind(kind)),
        };
        let refused_with_payload = matches!(
            header,
            Self::ReadReply { status: Err(_), zero_mask, len, .. } | Self::ChangedReply { status: Err(_), zero_mask, len, .. }
                if zero_mask != 0 || len != 0
        );
        // Encoding again tells at once whether a field that this kind does not use was set.
        if reserved != 0 || refused_with_payload || header.encode() != *bytes {
            return Err(DecodeError::Reserved);
        }
        Ok(header)
    }
}

/// One segment of a request. Layout: key `u64`, address `u64`, length `u32`, 0 `u32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) rkey: u64,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

impl Descriptor {
    pub(crate) fn encode(self) -> [u8; DESCRIPTOR_LEN] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        bytes[..8].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }
}

/// The descriptor in these bytes.
pub(crate) fn decode_descriptor(bytes: &[u8; DESCRIPTOR_LEN]) -> Result<Descriptor, DecodeError> {
    let descriptor = Descriptor {
        rkey: u64::from_le_bytes(part(bytes, 0)),
        addr: u64::from_le_bytes(part(bytes, 8)),
        len: u32::from_le_bytes(part(bytes, 16)),
    };
    if u32::from_le_bytes(part(bytes, 20)) != 0 {
        return Err(DecodeError::Reserved);
    }
    Ok(descriptor)
}

/// Follows the payload of a read reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) tag: u32,
    pub(crate) status: Result<(), RemoteStatus>,
}

impl Trailer {
    pub(crate) fn encode(self) -> [u8; TRAILER_LEN] {
        let mut bytes = [0; TRAILER_LEN];
        bytes[..3].copy_from_slice(&TRAILER_MAGIC);
        bytes[3] = RemoteStatus::to_wire(self.status);
        bytes[4..].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; TRAILER_LEN]) -> Result<Self, DecodeError> {
        if bytes[..3] != TRAILER_MAGIC {
            return Err(DecodeError::Trailer);
        }
        let status = RemoteStatus::from_wire(bytes[3]).ok_or(DecodeError::Status(bytes[3]))?;
        Ok(Self { tag: u32::from_le_bytes(part(bytes, 4)), status })
    }
}

fn count(segments: u8) -> Result<u8, DecodeError> {
    if (1..=MAX_SEGMENTS).contains(&usize::from(segments)) {
        Ok(segments)
    } else {
        Err(DecodeError::Segments(segments))
    }
}

fn bounded(len: u64, max: u64) -> Result<u64, DecodeError> {
    if len <= max { Ok(len) } else { Err(DecodeError::Length(len)) }
}

/// `N` bytes from `at`; the callers' offsets are constants inside the array.
pub(crate) fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn status() -> impl Strategy<Value = Result<(), RemoteStatus>> {
        prop_oneof![
            Just(Ok(())),
            Just(Err(RemoteStatus::BadKey)),
            Just(Err(RemoteStatus::OutOfRange)),
            Just(Err(RemoteStatus::AccessDenied)),
            Just(Err(RemoteStatus::Fault)),
        ]
    }

    fn header() -> impl Strategy<Value = Header> {
        let segments = 1..=64_u8;
        prop_oneof![
            (any::<u32>(), segments.clone())
                .prop_map(|(tag, segments)| Header::ReadRequest { tag, segments }),
            (any::<u32>(), status(), any::<u64>(), 0..=MAX_TRANSFER).prop_map(|(tag, status, mask, len)| {
                let (zero_mask, len) = if status.is_ok() { (mask, len) } else { (0, 0) };
                Header::ReadReply { tag, status, zero_mask, len }
            }),
            (any::<u32>(), segments.clone(), any::<u64>())
                .prop_map(|(tag, segments, seed)| Header::ChangedRequest { tag, segments, seed }),
            (any::<u32>(), status(), any::<u64>(), 0..=MAX_TRANSFER).prop_map(|(tag, status, mask, len)| {
                let (zero_mask, len) = if status.is_ok() { (mask, len) } else { (0, 0) };
                Header::ChangedReply { tag, status, zero_mask, len }
            }),
            (any::<u32>(), segments, 0..=MAX_TRANSFER)
                .prop_map(|(tag, segments, len)| Header::WriteRequest { tag, segments, len }),
            (any::<u32>(), status()).prop_map(|(tag, status)| Header::WriteReply { tag, status }),
            (0..=65_536_u32).prop_map(|len| Header::Message { len }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(header in header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_are_a_canonical_header_or_an_error(bytes in any::<[u8; HEADER_LEN]>(), kind in 0..8_u8) {
            let mut bytes = bytes;
            bytes[0] = kind; // most random kinds are refused at once
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn one_flipped_bit_never_decodes_to_the_same_header(header in header(), bit in 0..HEADER_LEN * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(Header::decode(&bytes), Ok(header));
        }

        #[test]
        fn descriptors_survive(rkey in any::<u64>(), addr in any::<u64>(), len in any::<u32>()) {
            let descriptor = Descriptor { rkey, addr, len };
            prop_assert_eq!(decode_descriptor(&descriptor.encode()), Ok(descriptor));
        }

        #[test]
        fn trailers_survive_and_others_are_refused(tag in any::<u32>(), status in status(), other in any::<[u8; 8]>()) {
            let trailer = Trailer { tag, status };
            prop_assert_eq!(Trailer::decode(&trailer.encode()), Ok(trailer));
            if let Ok(trailer) = Trailer::decode(&other) {
                prop_assert_eq!(trailer.encode(), other);
            }
        }
    }

    #[test]
    fn limits_are_refused_one_beyond() {
        let with = |at: usize, value: u64, kind: u8| {
            let mut bytes = [0; HEADER_LEN];
            bytes[0] = kind;
            bytes[1] = u8::from(kind == WRITE_REQUEST);
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            Header::decode(&bytes)
        };
        assert_eq!(with(16, MAX_TRANSFER + 1, READ_REPLY), Err(DecodeError::Length(MAX_TRANSFER + 1)));
        assert_eq!(with(16, u64::MAX, WRITE_REQUEST), Err(DecodeError::Length(u64::MAX)));
        assert_eq!(with(16, 65_537, MESSAGE), Err(DecodeError::Length(65_537)));
        let mut bytes = Header::ReadRequest { tag: 1, segments: 64 }.encode();
        bytes[1] = 65;
        assert_eq!(Header::decode(&bytes), Err(DecodeError::Segments(65)));
        bytes[1] = 0;
        assert_eq!(Header::decode(&bytes), Err(DecodeError::Segments(0)));
    }
}
