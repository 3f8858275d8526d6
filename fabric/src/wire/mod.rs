//! Frames on a byte stream.
//!
//! Every frame begins with a [`Header`] of 24 bytes, little endian. What follows depends on its kind:
//!
//! | kind | after the header | answered by |
//! |---|---|---|
//! | read request | `segments` descriptors | read reply with the same tag |
//! | read reply | payload, then a trailer if there was payload | |
//! | changed request | `segments` descriptors, `segments` fingerprints | changed reply with the same tag |
//! | changed reply | mask of segments that are the same, payload, then a trailer if there was payload | |
//! | write request | `segments` descriptors, payload | write reply with the same tag |
//! | write reply | nothing | |
//! | message | the message | |
//!
//! The payload of a read reply is the segments that its masks do not name, in order, without gaps. The
//! trailer says whether all of it was real: memory that is deregistered while it is being sent is replaced by
//! zeros, since the length was already announced, and the trailer then carries the refusal.
//!
//! A side has at most [`CREDITS`] requests outstanding, so the other side can always take in what arrives
//! without waiting for its own sends: two sides that both ask for a lot cannot block each other.

mod datagram;
mod header;
mod hello;

pub(crate) use datagram::{DATAGRAM_HEADER, Envelope, MAX_BODY, Numbers};
pub(crate) use header::{
    DESCRIPTOR_LEN, DecodeError, Descriptor, FINGERPRINT_LEN, HEADER_LEN, Header, SAME_MASK_LEN, TRAILER_LEN,
    Trailer, decode_descriptor, part,
};
pub(crate) use hello::{HELLO_LEN, Hello, REPLY_LEN, Reply};

/// READ and WRITE requests that one side may have outstanding.
pub(crate) const CREDITS: usize = 128;
