//! A client on the network speaks with a guest over one TCP connection while the guest moves: the connection is kept, each answer comes once and in
//! order, and the longest gap between two answers is little more than the pause.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::bench::client::{Way, run};
use vmove_tests::fleet;

/// A segment that is lost is sent again after so long: the least that Linux waits.
const RETRANSMISSION_MS: f64 = 200.0;

/// Without the frames that come while the guest stands still, nearly every move costs the client a retransmission: five of six did.
#[test]
fn a_client_keeps_its_connection_and_waits_for_no_retransmission() {
    need!(fleet::ready());
    for way in [Way::VmoveHybrid, Way::VmovePostcopy] {
        let row = run(way, 4).expect("the guest moves, and the client keeps its connection");
        eprintln!("{}", row.line());
        let without = row.moves.iter().filter(|seen| seen.gap_ms - seen.downtime_ms < RETRANSMISSION_MS);
        // One frame may be in QEMU's hands when the guest stops, or the machine may be busy.
        assert!(without.count() >= 3, "{:?}", row.moves);
    }
}
