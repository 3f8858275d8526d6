//! A client on the network speaks with a guest over one TCP connection while the guest moves: the connection is kept, each answer comes once and in
//! order, and the longest gap between two answers is little more than the pause.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::bench::client::{Seen, Way, run};
use vmove_tests::fleet;

/// A segment that is lost is sent again after so long: the least that Linux waits.
const RETRANSMISSION_MS: f64 = 200.0;

/// Without the frames that come while the guest stands still, nearly every move costs the client a retransmission: five of six did, and none had
/// a frame passed on. On a busy machine a guest that fetches its memory may answer as late without one.
#[test]
fn a_client_keeps_its_connection_and_waits_for_no_retransmission() {
    need!(fleet::ready());
    let mut quick = 0;
    for way in [Way::VmoveHybrid, Way::VmovePostcopy] {
        let row = run(way, 4).expect("the guest moves, and the client keeps its connection");
        eprintln!("{}", row.line());
        let is_quick = |seen: &Seen| seen.gap_ms - seen.downtime_ms < RETRANSMISSION_MS;
        quick += row.moves.iter().filter(|seen| is_quick(seen)).count();
        // One frame may be in QEMU's hands when the guest stops.
        let kept = row.moves.iter().filter(|seen| is_quick(seen) || seen.frames > 0);
        assert!(kept.count() >= 3, "{:?}", row.moves);
    }
    // What is passed on is heard: without a retransmission, unless all were late.
    assert!(quick >= 3, "{quick} of 8 moves without a retransmission");
}
