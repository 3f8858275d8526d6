//! Two guests that move at one barrier: both are there in the end, or both are back.

use super::{DESTINATION, SOURCE, at, kill, walk};
use crate::plan::{Blow, DiskError, Moment, Planned, Schedule};
use crate::run::End;

fn two(mode: &'static str, blows: Vec<Planned>) -> Schedule {
    Schedule { guests: 2, ..Schedule::with(mode, blows) }
}

/// SIGKILL just after this was written.
const fn kill_after(node: usize, down_ms: u64) -> Blow {
    Blow::Kill { node, written_percent: 100, down_ms, other_version: false }
}

#[test]
fn a_group_moves_in_every_mode_there_and_back() {
    for mode in ["precopy", "postcopy", "hybrid", "auto"] {
        let report = walk(&format!("group-{mode}"), two(mode, Vec::new()));
        assert_eq!(report.end, End::Stayed, "{mode}: there and back");
        let report = walk(&format!("there-{mode}"), Schedule { and_back: false, ..two(mode, Vec::new()) });
        assert_eq!(report.end, End::Moved, "{mode}");
        let device = Schedule { device: true, ..two(mode, Vec::new()) };
        assert_eq!(walk(&format!("group-device-{mode}"), device).end, End::Stayed, "{mode}: with a device");
    }
}

/// One guest owns a device, the other none: its script is not run before the first has its own, wherever they are, and whoever was killed.
#[test]
fn no_guest_of_a_group_is_told_to_go_on_before_all_have_their_devices() {
    for mode in ["precopy", "postcopy", "hybrid"] {
        for blow in [
            None,
            Some(at(SOURCE, "source.jsonl: stopped", Blow::Cancel)),
            Some(at(DESTINATION, "device_add", kill(DESTINATION, 3_000))),
            Some(at(DESTINATION, "device_add", kill(SOURCE, 3_000))),
            Some(at(DESTINATION, "run a script in the guest", kill(SOURCE, 3_000))),
            Some(at(DESTINATION, "destination.jsonl: complete", kill(SOURCE, 20))),
            Some(at(DESTINATION, "device_add", Blow::Partition { ms: 5_000 })),
        ] {
            let blows = blow.into_iter().collect();
            let schedule = Schedule { device: true, and_back: false, ..two(mode, blows) };
            let report = walk("together", schedule);
            assert_eq!(report.early_resumes, 0, "{:#?}", report.schedule);
        }
    }
}

/// What the daemons write and ask for on the way, in the order in which they do it: one of them dies at each step.
#[test]
fn a_group_is_not_parted_wherever_a_daemon_is_killed() {
    let steps = [
        (SOURCE, "group.jsonl: gathering"),
        (SOURCE, "source.jsonl: warm"),
        (DESTINATION, "destination.jsonl: filling"),
        (DESTINATION, "start QEMU"),
        (SOURCE, "prepare the migration"),
        (SOURCE, "source.jsonl: stopped"),
        (SOURCE, "migrate"),
        (DESTINATION, "destination.jsonl: loaded"),
        (SOURCE, "group.jsonl: decided"),
        (SOURCE, "source.jsonl: committed"),
        (DESTINATION, "destination.jsonl: owner"),
        (DESTINATION, "cont"),
        (DESTINATION, "destination.jsonl: complete"),
        (SOURCE, "source.jsonl: released"),
        (SOURCE, "end QEMU"),
    ];
    for (node, step) in steps {
        for who in [SOURCE, DESTINATION] {
            for blow in [kill(who, 20), kill_after(who, 4_000)] {
                let report = walk(&format!("group-{node}-{who}"), two("hybrid", vec![at(node, step, blow)]));
                assert_eq!(report.struck, 1, "{step} never came");
            }
        }
    }
}

/// One member's own line said so, the other's did not.
#[test]
fn a_member_whose_own_line_is_not_written_is_committed_by_its_groups() {
    for down_ms in [20, 4_000] {
        let blow = at(SOURCE, "source.jsonl: committed", kill_after(SOURCE, down_ms));
        let report = walk("line", Schedule { and_back: false, ..two("precopy", vec![blow]) });
        assert_eq!((report.end, report.followed), (End::Moved, 0), "it was decided for both");
    }
}

#[test]
fn a_decision_that_cannot_be_written_brings_all_back() {
    for (error, written_percent, cuts_fail) in
        [(DiskError::NoSpace, 0, false), (DiskError::Io, 100, true), (DiskError::Io, 50, true)]
    {
        let fails =
            Blow::Disk { node: SOURCE, error, ms: 3_000, written_percent, cuts_fail, reads_fail: false };
        walk("decision", two("hybrid", vec![at(SOURCE, "group.jsonl: decided", fails)]));
    }
}

/// The line of the decision was whole on the disk, in spite of the error: nobody may act before it is cut off, since whoever finds it believes it.
#[test]
fn nobody_runs_before_the_line_of_a_decision_that_failed_is_cut_off() {
    let (error, written_percent, cuts_fail) = (DiskError::Io, 100, true);
    let fails = Blow::Disk { node: SOURCE, error, ms: 3_000, written_percent, cuts_fail, reads_fail: false };
    let blows = vec![
        at(SOURCE, "group.jsonl: decided", fails),
        at(SOURCE, "group.jsonl: decided", Blow::Partition { ms: 5_000 }),
        at(SOURCE, "ask QEMU for its run state", kill(SOURCE, 20)),
        at(SOURCE, "cancel the migration", kill_after(SOURCE, 20)),
        Planned { when: Moment::Millis(2_500), blow: kill(SOURCE, 20) },
    ];
    walk("unsure", two("precopy", blows));
}

/// The destination could not write that the guest was its own, and gave it back: the other one runs there.
#[test]
fn a_member_that_its_destination_has_lost_follows_the_others() {
    let (error, ms) = (DiskError::NoSpace, 2_000);
    let fails =
        Blow::Disk { node: DESTINATION, error, ms, written_percent: 0, cuts_fail: false, reads_fail: false };
    let full = vec![at(DESTINATION, "destination.jsonl: owner", fails)];
    let report = walk("follows", Schedule { and_back: false, ..two("precopy", full) });
    assert_eq!(report.end, End::Moved, "all go forward");
    assert!(report.followed > 0, "nobody had to follow");
}

#[test]
fn a_cancel_calls_all_off_or_none() {
    for step in
        ["source.jsonl: warm", "prepare the migration", "source.jsonl: stopped", "group.jsonl: decided"]
    {
        walk("cancel", two("hybrid", vec![at(SOURCE, step, Blow::Cancel)]));
    }
    for step in ["destination.jsonl: filling", "destination.jsonl: loaded", "destination.jsonl: owner"] {
        walk("cancel-there", two("hybrid", vec![at(DESTINATION, step, Blow::Cancel)]));
    }
}
