//! The soak with blows, in short: it strikes where it says, sees what it must see, and ends clean.
#![cfg(test)]

use std::time::Duration;

use vmove_skip::need;
use vmove_tests::blows::deck::{Blow, Moment, Victim};
use vmove_tests::blows::field::Kind;
use vmove_tests::blows::strike::Lengths;
use vmove_tests::blows::{Plan, Until, soak};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::ready;

/// The link in the rounds, the destination's daemon before it is told of the commit, the source's daemon while pages are fetched. The seed
/// chooses order, modes and times.
#[test]
fn three_moves_with_three_blows_leave_one_guest_and_nothing_else() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let booted = std::env::var_os("VMOVE_BOOTED").map_or_else(|| sandbox.path().join("booted"), Into::into);
    let plan = Plan {
        seed: 1,
        first: 0,
        until: Until::Moves(3),
        deck: vec![
            (Moment::Rounds, Victim::Link, Blow::Cut),
            (Moment::Committed, Victim::Destination, Blow::Kill),
            (Moment::Fetch, Victim::Source, Blow::Kill),
        ],
        options: String::new(),
        lengths: Lengths { silence: Duration::from_secs(1), full: Duration::from_secs(1) },
        lanes: 1,
        guest: Kind::Linux,
    };
    let tally = soak(&plan, &booted, |line| eprintln!("{line}")).expect("it runs");
    assert!(tally.is_harmless(), "{}", tally.table());
    assert_eq!((tally.tried(), tally.survived()), (3, 3), "{}", tally.table());
}
