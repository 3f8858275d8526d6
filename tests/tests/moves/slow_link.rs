//! Guests that leave a node together over a link that is slower than their daemons.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::bench::evacuate::{self, Case};
use vmove_tests::guest::Accel;
use vmove_tests::{networks, payload};

/// A page that is being read anyway is behind what else is under way: with 512 KiB for each connection, whatever the link, that would be
/// 42 ms here.
#[test]
fn a_fault_does_not_wait_behind_the_bulk_of_others() {
    let accel = Accel::best(false);
    need!(payload::ready(accel));
    need!(networks::possible());
    let case = Case { guests: 2, mbit: 200, cold_mib: 16, mode: "postcopy".to_owned(), at_once: true };
    let outcome = evacuate::run(&case, accel).expect("both move, whole");
    // Content of 2 x 48 MiB, of 25 MB/s.
    assert!(outcome.wire_ms > 3000.0 && outcome.total_ms < 2.0 * outcome.wire_ms, "{outcome:?}");
    for (p99, slowest) in outcome.fault_p99_us.iter().zip(&outcome.slowest_faults) {
        assert!(*p99 > 0.0 && *p99 < 12_000.0, "{outcome:?}");
        let steps = |fault: &vmove_tests::daemon::SlowFault| fault.asked_us + fault.read_us + fault.map_us;
        assert!(slowest.iter().all(|fault| (steps(fault) - fault.total_us).abs() < 1.0), "{slowest:?}");
        assert!(slowest.is_sorted_by(|one, next| one.total_us >= next.total_us), "{slowest:?}");
        assert!(slowest.iter().all(|fault| fault.block.contains("ram")), "{slowest:?}");
    }
}
