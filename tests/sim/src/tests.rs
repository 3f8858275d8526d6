//! Schedules of chance, and those that have once found something.

mod groups;
mod visits;

use std::path::PathBuf;

use crate::plan::{Blow, DiskError, Manner, Moment, Planned, Schedule};
use crate::run::{End, Report, run};

/// A folder on tmpfs for a test of this name.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(format!("/dev/shm/vmove-sim-{:010}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn walk(name: &str, schedule: Schedule) -> Report {
    let folder = Folder::new(name);
    let report = run(schedule, &folder.0, false).unwrap();
    assert_eq!(report.violations, Vec::<String>::new(), "{:#?}", report.schedule);
    report
}

const SOURCE: usize = 0;
const DESTINATION: usize = 1;

const fn kill(node: usize, down_ms: u64) -> Blow {
    Blow::Kill { node, written_percent: 0, down_ms, other_version: false }
}

/// The first line of this state is written, and the blow comes before it.
fn at(node: usize, part: &'static str, blow: Blow) -> Planned {
    Planned { when: Moment::Doing(node, part), blow }
}

#[test]
fn a_guest_moves_in_every_mode_there_and_back() {
    for mode in ["precopy", "postcopy", "hybrid", "auto"] {
        let report = walk(mode, Schedule::with(mode, Vec::new()));
        // And back.
        assert_eq!(report.end, End::Stayed, "{mode}");
        assert!(report.steps.iter().all(|steps| *steps > 60), "{mode}: {:?}", report.steps);
    }
}

#[test]
fn a_guest_with_a_device_moves_in_every_mode_there_and_back() {
    for mode in ["precopy", "postcopy", "hybrid", "auto"] {
        let report =
            walk(&format!("device-{mode}"), Schedule { device: true, ..Schedule::with(mode, Vec::new()) });
        assert_eq!(report.end, End::Stayed, "{mode}");
    }
}

/// What the device writes meanwhile is found when it has left, and little else crosses twice.
#[test]
fn what_is_sent_ahead_while_a_guest_has_its_device_is_compared_afterwards() {
    for mode in ["precopy", "hybrid", "auto"] {
        let schedule = Schedule { device: true, ..Schedule::with(mode, Vec::new()) };
        let report = walk(&format!("ahead-{mode}"), schedule);
        assert_eq!(report.head_starts.len(), 2, "{mode}: to and fro");
        for ahead in &report.head_starts {
            assert!(ahead.made && ahead.rounds > 0 && ahead.compared_bytes > 0, "{mode}: {ahead:?}");
            assert!((1..ahead.compared_bytes).contains(&ahead.changed_bytes), "{mode}: {ahead:?}");
        }
    }
    let schedule = Schedule { device: true, ..Schedule::with("postcopy", Vec::new()) };
    let report = walk("ahead-postcopy", schedule);
    assert!(report.head_starts.iter().all(|ahead| !ahead.made && ahead.reason.contains("post-copy")));
}

fn with_device(blows: Vec<Planned>) -> Schedule {
    Schedule { device: true, ..Schedule::with("hybrid", blows) }
}

/// What a daemon does about a device, in the order in which it does it: it dies at each step.
#[test]
fn a_guest_has_its_device_wherever_a_daemon_is_killed() {
    let steps = [
        (DESTINATION, "devices: take"),
        (DESTINATION, "devices: bind"),
        (DESTINATION, "devices: hold"),
        (SOURCE, "run a script in the guest"),
        (SOURCE, "device_del"),
        (SOURCE, "prepare the migration"),
        (SOURCE, "source.jsonl: stopped"),
        (DESTINATION, "destination.jsonl: loaded"),
        (DESTINATION, "device_add"),
        (DESTINATION, "destination.jsonl: complete"),
        (SOURCE, "end QEMU"),
        (SOURCE, "devices: return"),
        (SOURCE, "devices: unbind"),
        (SOURCE, "devices: forget"),
    ];
    for (node, step) in steps {
        for (who, down_ms) in [(SOURCE, 20), (SOURCE, 4_000), (DESTINATION, 20), (DESTINATION, 4_000)] {
            let name = format!("step-{node}-{who}-{down_ms}");
            let report = walk(&name, with_device(vec![at(node, step, kill(who, down_ms))]));
            assert_eq!(report.struck, 1, "{step} never came");
        }
    }
}

/// And while it is brought back: the first kill calls the migration off.
#[test]
fn a_guest_has_its_device_back_though_its_daemon_is_killed_again() {
    for again in ["take up the migration", "ask QEMU for a device", "device_add", "run a script in the guest"]
    {
        let blows =
            vec![at(SOURCE, "source.jsonl: stopped", kill(SOURCE, 20)), at(SOURCE, again, kill(SOURCE, 20))];
        walk("again-device", with_device(blows));
    }
}

#[test]
fn a_guest_has_its_device_though_a_qemu_dies_or_the_migration_is_called_off() {
    for step in ["device_del", "source.jsonl: stopped", "migrate"] {
        walk("qemu-dies", with_device(vec![at(SOURCE, step, Blow::QemuDies { node: DESTINATION })]));
        walk("cancelled", with_device(vec![at(SOURCE, step, Blow::Cancel)]));
        walk("reset", with_device(vec![at(SOURCE, step, Blow::Reset)]));
    }
}

#[test]
fn a_guest_that_does_not_let_its_device_go_stays_with_it() {
    for manner in [Manner::Refuses, Manner::Late(19_500), Manner::Late(22_000), Manner::Late(60_000)] {
        walk("keeps", Schedule { manner, ..with_device(Vec::new()) });
    }
}

#[test]
fn a_device_is_given_back_once_there_is_room_for_the_ledger() {
    for step in ["devices: return", "devices: forget"] {
        let (error, ms) = (DiskError::NoSpace, 8_000);
        let full =
            Blow::Disk { node: SOURCE, error, ms, written_percent: 0, cuts_fail: false, reads_fail: false };
        walk("ledger", with_device(vec![at(SOURCE, step, full)]));
    }
}

/// 500 that differ in mode, latency, and what breaks when. `./run sim` takes more.
#[test]
fn schedules_of_five_hundred_seeds_hold() {
    let folder = Folder::new("many");
    let mut struck = 0;
    for seed in 1..=500 {
        let report = run(Schedule::of(seed), &folder.0, false).unwrap();
        assert_eq!(report.violations, Vec::<String>::new(), "./run sim --seed {seed} shows it step by step");
        struck += report.struck;
    }
    assert!(struck > 300, "only {struck} blows came while something was under way");
}

/// A connection broke in the middle of a read, and the page was zero when it was named again: what had come of it stayed in the file.
#[test]
fn what_has_come_of_a_read_that_was_cut_is_not_taken_for_zeros() {
    let folder = Folder::new("cut");
    let report = run(Schedule::of(101_889), &folder.0, false).unwrap();
    assert_eq!(report.violations, Vec::<String>::new());
}

#[test]
fn a_seed_comes_out_the_same_each_time() {
    let folder = Folder::new("same");
    for seed in 1..=20 {
        let once = run(Schedule::of(seed), &folder.0, false).unwrap();
        let again = run(Schedule::of(seed), &folder.0, false).unwrap();
        assert_eq!((once.hash, once.took, once.steps), (again.hash, again.took, again.steps), "seed {seed}");
    }
    let one = run(Schedule::of(1), &folder.0, false).unwrap();
    let other = run(Schedule::of(2), &folder.0, false).unwrap();
    assert_ne!(one.hash, other.hash);
}

/// It told how far it was first, and the source took that for the answer.
#[test]
fn a_destination_that_holds_the_state_hears_that_the_guest_stays() {
    let report = walk(
        "told",
        Schedule::with("precopy", vec![at(DESTINATION, "destination.jsonl: loaded", Blow::Reset)]),
    );
    assert!(report.took.as_secs() < 60, "{:?}", report.took);
}

/// It had to bring the guest back, could not, and said nothing.
#[test]
fn a_destination_hears_it_too_where_the_sources_qemu_has_ended() {
    let blows = vec![
        at(DESTINATION, "destination.jsonl: loaded", kill(SOURCE, 20_000)),
        Planned { when: Moment::Millis(5_000), blow: Blow::QemuDies { node: SOURCE } },
    ];
    let report = walk("dead", Schedule::with("precopy", blows));
    assert_eq!(report.end, End::Died);
}

/// QEMU was left in a state from which it cannot be moved.
#[test]
fn a_paused_guest_can_be_moved_after_its_daemon_was_killed_while_it_was_put_back() {
    let blows = vec![
        at(DESTINATION, "destination.jsonl: loaded", kill(SOURCE, 100)),
        at(SOURCE, "take up the migration", kill(SOURCE, 100)),
    ];
    walk("paused", Schedule { paused: true, ..Schedule::with("precopy", blows) });
}

/// It ended its QEMU, while its journal may have said that the guest was its own.
#[test]
fn a_destination_keeps_its_qemu_until_the_line_that_failed_is_cut_off() {
    let (error, ms) = (DiskError::Io, 30_000);
    let fails =
        Blow::Disk { node: DESTINATION, error, ms, written_percent: 100, cuts_fail: true, reads_fail: false };
    let blows = vec![
        at(DESTINATION, "destination.jsonl: owner", fails),
        Planned { when: Moment::Millis(2_000), blow: kill(SOURCE, 20) },
        Planned { when: Moment::Millis(2_000), blow: kill(DESTINATION, 1) },
    ];
    let report = walk("owner", Schedule::with("postcopy", blows));
    assert_eq!(report.end, End::Stayed, "there and back");
}

/// Every page was there, and so it was whole by its journal, before it had been found out that nobody had resumed it.
#[test]
fn a_guest_that_is_whole_runs_though_its_daemon_was_killed_twice_before_it_was_resumed() {
    let whole_line = Blow::Kill { node: DESTINATION, written_percent: 100, down_ms: 1, other_version: false };
    let blows = vec![
        at(DESTINATION, "cont", kill(DESTINATION, 500)),
        at(DESTINATION, "destination.jsonl: complete", whole_line),
    ];
    let report = walk("whole", Schedule { and_back: false, ..Schedule::with("precopy", blows) });
    assert_eq!(report.end, End::Moved);
}

/// The word that the destination had lost them came just before the commit, and was read and forgotten.
#[test]
fn page_connections_that_break_just_before_the_commit_are_made_anew() {
    let report = walk(
        "pages",
        Schedule::with("postcopy", vec![at(DESTINATION, "destination.jsonl: loaded", Blow::PagesBreak)]),
    );
    assert!(report.took.as_secs() < 100, "{:?}", report.took);
}

/// It had answered before it had written down what it had heard, and waited for ever after that.
#[test]
fn a_destination_killed_as_it_hears_that_the_guest_stays_hears_it_again() {
    let blows = vec![
        at(DESTINATION, "destination.jsonl: loaded", kill(SOURCE, 1)),
        at(DESTINATION, "destination.jsonl: gone", kill(DESTINATION, 1)),
    ];
    let report = walk("again", Schedule::with("postcopy", blows));
    assert!(report.took.as_secs() < 100, "{:?}", report.took);
}

/// It had no record yet, and was taken for one that an operator had ended: nobody removed its memory.
#[test]
fn nothing_is_left_of_a_guest_that_died_before_it_had_a_record() {
    let blows = vec![
        at(DESTINATION, "write vms/guest.part", kill(DESTINATION, 500)),
        at(DESTINATION, "write vms/guest.part", Blow::QemuDies { node: DESTINATION }),
    ];
    let report = walk("record", Schedule::with("precopy", blows));
    assert_eq!(report.end, End::Died);
}

/// Neither side has begun anything, and the next attempt finds nothing of this one.
#[test]
fn a_first_line_that_cannot_be_written_leaves_the_guest_where_it_is() {
    for (name, node, line) in
        [("first-a", SOURCE, "source.jsonl: warm"), ("first-b", DESTINATION, "destination.jsonl: filling")]
    {
        for (error, written_percent) in [(DiskError::Io, 0), (DiskError::Io, 50), (DiskError::NoSpace, 50)] {
            let fails =
                Blow::Disk { node, error, ms: 3000, written_percent, cuts_fail: true, reads_fail: false };
            let report = walk(name, Schedule::with("postcopy", vec![at(node, line, fails)]));
            assert!(report.struck == 1, "{name}: it was not struck");
            assert!(report.took.as_secs() < 60, "{name}: {:?}", report.took);
        }
    }
}
