//! Malformed messages are errors, whatever the bytes.

use proptest::prelude::*;
use vmove_node::peer::codec::{CodecError, decode, encode, receive};
use vmove_types::report::Report;
use vmove_types::time::Mono;

use super::message::{Complete, Counted, Outdated, ToDestination, ToSource};
use crate::pending::{WirePart, WireSet};

fn block_on<F: Future>(f: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(f)
}

proptest! {
    #[test]
    fn no_bytes_make_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode::<ToDestination>(&bytes);
        let _ = decode::<ToSource>(&bytes);
        let _: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
    }

    #[test]
    fn a_flipped_byte_is_an_error_or_another_message(at in 0usize..1000, bit in 0u8..8) {
        let message = ToDestination::Outdated(vec![Outdated { block: 0, part: WirePart { first: 5, pages: 40, set: WireSet::Runs(vec![(3, 4), (1, 9)]) } }]);
        let mut bytes = encode(&message).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        let _: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
    }
}

#[test]
fn a_frame_that_ends_early_is_lost_not_closed() {
    let bytes = encode(&ToSource::Pong { token: 1, now: Mono(2) }).unwrap();
    for cut in 1..bytes.len() {
        let got: Result<ToSource, _> = block_on(receive(&mut &bytes[..cut]));
        assert!(matches!(got, Err(CodecError::Io(_))), "cut at {cut}: {got:?}");
    }
    let got: Result<ToSource, _> = block_on(receive(&mut &[][..]));
    assert!(matches!(got, Err(CodecError::Closed)));
}

#[test]
fn a_huge_length_is_refused_before_anything_is_read() {
    let got: Result<ToSource, _> = block_on(receive(&mut &[0xff, 0xff, 0xff, 0xff, 0][..]));
    assert!(matches!(got, Err(CodecError::TooLong(_))));
}

#[test]
fn bytes_after_the_message_are_refused() {
    let mut bytes = encode(&ToDestination::Commit).unwrap();
    bytes.push(0);
    let len = u32::try_from(bytes.len() - 4).unwrap();
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    let got: Result<ToDestination, _> = block_on(receive(&mut bytes.as_slice()));
    assert!(matches!(got, Err(CodecError::Malformed { .. })));
}

#[test]
fn figures_of_a_peer_that_cannot_be_are_as_large_as_can_be() {
    let counted = Counted { wire_bytes: u64::MAX, ..Counted::default() };
    let complete = Complete { counted, state_bytes: 5, ..Complete::default() };
    let mut report = Report::default();
    complete.add_to(&mut report);
    assert_eq!(report.bytes_sent, u64::MAX);
}
