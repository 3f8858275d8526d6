//! Malformed messages are errors, whatever the bytes.

use proptest::prelude::*;
use vmove_node::peer::codec::{CodecError, decode, encode, receive};
use vmove_types::report::Report;
use vmove_types::time::Mono;

use super::message::{Complete, Counted, Outdated, ToDestination, ToSource, WireRun};
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

/// Pages as a peer names them never lie outside of the block: each way in which a run, or two of them in a part, can lie at the edges of a
/// block and of 64 bits, against the same said with 128 bits, which cannot overflow.
#[test]
fn no_run_of_pages_reaches_beyond_its_block() {
    let near = |edge: u64| [edge.saturating_sub(1), edge, edge.saturating_add(1)];
    let numbers = |pages: u64| [0, 1, pages, 1 << 63, u64::MAX].into_iter().flat_map(near);
    let (mut taken, mut refused) = (0, 0);
    for pages in [0, 1, 2, 64, 65, 1 << 40, u64::MAX] {
        for (start, len) in numbers(pages).flat_map(|start| numbers(pages).map(move |len| (start, len))) {
            let fits = len > 0 && u128::from(start) + u128::from(len) <= u128::from(pages);
            let found = WireRun { block: 0, start, len, zero: false }.range(pages);
            assert_eq!(found, fits.then(|| start..start + len), "{start}+{len} of {pages}");
            for (first, within) in numbers(pages).flat_map(|first| [pages, len, 3].map(|n| (first, n))) {
                let set = WireSet::Runs(vec![(start, len), (1, 1)]);
                let part = WirePart { first, pages: within, set };
                let mut told = Vec::new();
                let answer = part.each_run(pages, |run| told.push(run));
                let end = u128::from(start) + u128::from(len) + 2;
                let fits = len > 0
                    && end <= u128::from(within)
                    && u128::from(first) + u128::from(within) <= u128::from(pages);
                assert_eq!(answer.is_ok(), fits, "{part:?} of {pages}");
                // What was told before a mistake was found lies inside, too.
                assert!(
                    told.iter().all(|run| run.start < run.end && run.end <= pages),
                    "{part:?} of {pages}"
                );
                taken += u32::from(fits);
                refused += u32::from(!fits);
            }
        }
    }
    assert!(taken > 50 && refused > 1000, "{taken} {refused}");
}
