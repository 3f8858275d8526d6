//! Guests that go for a visit, and what breaks meanwhile.

use super::*;
use crate::plan::VisitEnds;

const BACK: VisitEnds = VisitEnds { after_ms: 300, stays: false, turned: false };
const STAYS: VisitEnds = VisitEnds { after_ms: 300, stays: true, turned: false };

fn visiting(ends: VisitEnds, blows: Vec<Planned>) -> Schedule {
    Schedule { visit: Some(ends), and_back: false, ..Schedule::with("hybrid", blows) }
}

#[test]
fn a_guest_comes_home_from_its_visit_or_stays() {
    let report = walk("back", visiting(BACK, Vec::new()));
    assert_eq!((report.visited, report.end), (true, End::Stayed), "it is home");
    let report = walk("stays", visiting(STAYS, Vec::new()));
    assert_eq!((report.visited, report.end), (true, End::Moved));
    // Where it has come from or to, it moves as any other.
    walk("back-and-on", Schedule { and_back: true, ..visiting(BACK, Vec::new()) });
    walk("stays-and-back", Schedule { and_back: true, ..visiting(STAYS, Vec::new()) });
}

/// What the home (`SOURCE`) and the node that is visited do, in the order in which they do it.
const THERE: [(usize, &str); 10] = [
    (SOURCE, "source.jsonl: warm"),
    (DESTINATION, "destination.jsonl: filling"),
    (DESTINATION, "take the page faults"),
    (SOURCE, "source.jsonl: stopped"),
    (DESTINATION, "destination.jsonl: loaded"),
    (SOURCE, "source.jsonl: committed"),
    (DESTINATION, "destination.jsonl: owner"),
    (DESTINATION, "cont"),
    (SOURCE, "kill QEMU"),
    (SOURCE, "remove vms/guest.json"),
];
const HOME: [(usize, &str); 12] = [
    (DESTINATION, "source.jsonl: warm"),
    (SOURCE, "destination.jsonl: filling"),
    (SOURCE, "give QEMU its memory of before"),
    (SOURCE, "rename thp/guest"),
    (DESTINATION, "source.jsonl: stopped"),
    (SOURCE, "destination.jsonl: loaded"),
    (DESTINATION, "source.jsonl: committed"),
    (SOURCE, "destination.jsonl: owner"),
    (DESTINATION, "end QEMU"),
    (DESTINATION, "source.jsonl: released"),
    (SOURCE, "source.jsonl: released"),
    (SOURCE, "remove thp/.vmove"),
];

#[test]
fn a_guest_is_somewhere_wherever_a_daemon_is_killed_on_its_visit() {
    for (node, step) in THERE.into_iter().chain(HOME) {
        for (who, down_ms) in [(SOURCE, 20), (SOURCE, 4_000), (DESTINATION, 20), (DESTINATION, 4_000)] {
            let blows = vec![at(node, step, kill(who, down_ms))];
            let report = walk(&format!("visit-{node}-{who}-{down_ms}"), visiting(BACK, blows));
            assert_eq!(report.struck, 1, "{step} never came");
        }
    }
}

#[test]
fn a_guest_is_whole_wherever_a_daemon_is_killed_as_it_is_told_to_stay() {
    for step in ["destination.jsonl: owner", "destination.jsonl: complete", "send Control 12"] {
        for (who, down_ms) in [(SOURCE, 20), (SOURCE, 4_000), (DESTINATION, 20), (DESTINATION, 4_000)] {
            let blows = vec![at(DESTINATION, step, kill(who, down_ms))];
            let report = walk(&format!("stay-{who}-{down_ms}"), visiting(STAYS, blows));
            assert_eq!((report.struck, report.end), (1, End::Moved), "{step}");
        }
    }
}

/// By what both sides say as a migration becomes a visit: the question, the home's answer, and that pages come by demand.
const TURNS: [(usize, &str); 3] =
    [(DESTINATION, "send Control 16"), (SOURCE, "send Control 20"), (DESTINATION, "send Control 17")];

#[test]
fn a_migration_becomes_a_visit_from_which_its_guest_comes_home_or_stays() {
    let turned = |ends| VisitEnds { turned: true, ..ends };
    let report = walk("turned", visiting(turned(BACK), Vec::new()));
    assert_eq!((report.visited, report.end), (true, End::Stayed), "it is home");
    let report = walk("turned-stays", visiting(turned(STAYS), Vec::new()));
    assert_eq!((report.visited, report.end), (true, End::Moved));
    for (node, step) in TURNS.into_iter().chain(HOME) {
        for (who, down_ms) in [(SOURCE, 20), (SOURCE, 4_000), (DESTINATION, 20), (DESTINATION, 4_000)] {
            let blows = vec![at(node, step, kill(who, down_ms))];
            let report = walk(&format!("turned-{node}-{who}-{down_ms}"), visiting(turned(BACK), blows));
            assert_eq!(report.struck, 1, "{step} never came");
        }
    }
}

/// Its record at home could not be removed just then, and was left for good: its name was taken there.
#[test]
fn a_guest_comes_home_though_the_disk_there_failed_as_it_left() {
    let (error, ms) = (DiskError::Io, 1);
    let fails =
        Blow::Disk { node: SOURCE, error, ms, written_percent: 100, cuts_fail: true, reads_fail: true };
    let report = walk("record-left", visiting(BACK, vec![at(SOURCE, "remove vms/guest.json", fails)]));
    assert_eq!((report.struck, report.end), (1, End::Stayed));
}

#[test]
fn a_guest_whose_qemu_dies_on_its_visit_leaves_nothing_at_home() {
    let dies = Planned { when: Moment::Millis(400), blow: Blow::QemuDies { node: DESTINATION } };
    let report = walk("dies", visiting(VisitEnds { after_ms: 2_000, ..BACK }, vec![dies]));
    assert_eq!(report.end, End::Died);
    // It was ours, had never run, and had no record: nobody removed its memory.
    let dies = at(DESTINATION, "cont", Blow::QemuDies { node: DESTINATION });
    assert_eq!(walk("dies-early", visiting(BACK, vec![dies])).end, End::Died);
}
