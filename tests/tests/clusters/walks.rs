//! Random sequences of what operators do to clusters, while bridges and daemons are killed. `./run soak --clusters` takes more.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::cluster_walk::{STEPS, Walk, ready};
use vmove_tests::guest::Accel;

#[test]
fn nothing_is_given_twice_or_lost_in_random_sequences() {
    need!(ready(Accel::Tcg));
    let mut walk = Walk::new(Accel::Tcg).expect("eight nodes");
    for seed in 1..=3 {
        walk.sequence(seed, STEPS).unwrap_or_else(|error| panic!("{error:#}"));
    }
    let summary = walk.summary();
    assert!(summary.started > 0 && summary.moved > 0 && summary.kills.0 + summary.kills.1 > 0, "{summary:?}");
}
