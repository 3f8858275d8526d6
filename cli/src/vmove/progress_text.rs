//! How a migration is told: its state, its report, what is in its way.

use serde_json::{Value, json};

use vmove_types::disk::DiskReport;
use vmove_types::go_home::GoHome;
use vmove_types::migration::MigrationList;
use vmove_types::problem::Exit;
use vmove_types::progress::{GoingHome, GuestPlace, MissingDevice, Outcome, Phase, Progress, Role};
use vmove_types::report::{
    DeviceTimes, FaultStats, HeadStartStats, HostCpuUse, NetworkStats, PhaseTime, Report, SlowFault, VisitEnd,
};
use vmove_types::units::{format_bytes, format_ms, format_rate, to_f64};

use super::bar::line;
use super::disk_latency::told;
use crate::output::{End, fields, note, say, say_json, table};

/// Says which devices the guest lacks, and what to do.
pub fn note_missing(progress: &Progress) {
    for MissingDevice { role, why, node, mend } in &progress.missing_devices {
        let vm = &progress.vm;
        note(&format!("vmove: the guest {vm:?} lacks its device {role}: {why}\n  next, on {node}: {mend}"));
    }
}

/// The one object that ends `migrate --json`: the report itself, or what went wrong.
pub fn final_object(progress: &Progress, exit: Exit) -> Value {
    let mut object = match &progress.outcome {
        Outcome::Done { report } => {
            let mut object = serde_json::to_value(report).unwrap_or_default();
            add_missing(&mut object, progress);
            return object;
        }
        Outcome::Running | Outcome::Reconnecting { .. } => json!({ "error": "not finished", "guest": null }),
        Outcome::Refused { blockers } => json!({
            "error": format!("Refused: {}", blockers.iter().map(|b| b.message.as_str()).collect::<Vec<_>>().join("; ")),
            "blockers": blockers,
            "guest": GuestPlace::Source,
        }),
        Outcome::Failed { error, guest, cancelled } => {
            json!({ "error": error, "guest": guest, "cancelled": cancelled })
        }
    };
    object["id"] = json!(progress.id);
    object["vm"] = json!(progress.vm);
    object["phase"] = json!(progress.phase);
    object["exit_code"] = json!(exit.code());
    add_missing(&mut object, progress);
    object
}

fn visit_end(end: VisitEnd) -> &'static str {
    match end {
        VisitEnd::Home => "the guest came home; what it had not touched has never left it",
        VisitEnd::Stayed => "the guest stays; all of its memory has followed it",
        VisitEnd::Ended => "the guest ended on its visit; its home has kept nothing",
    }
}

/// Devices that the guest lacks, if it does.
fn add_missing(object: &mut Value, progress: &Progress) {
    if !progress.missing_devices.is_empty() {
        object["missing_devices"] = json!(progress.missing_devices);
    }
}

pub fn print_list(list: &MigrationList, none: &str, json: bool) -> Result<(), End> {
    if json {
        return say_json(list);
    }
    if list.migrations.is_empty() {
        return say(none);
    }
    // Those of a group are known by it.
    let grouped = list.migrations.iter().any(|m| m.group.is_some());
    let rows: Vec<Vec<String>> = list
        .migrations
        .iter()
        .map(|m| {
            let arrow =
                if m.role == Role::Source { format!("to {}", m.peer) } else { format!("from {}", m.peer) };
            let mode = m.mode.clone().unwrap_or_else(|| "-".to_owned());
            let began = m.began_at.as_deref().map_or_else(|| "-".to_owned(), time);
            let mut row = vec![m.id.clone(), began, m.vm.clone(), arrow, mode, format_ms(m.elapsed_ms)];
            row.extend(grouped.then(|| m.group.clone().unwrap_or_else(|| "-".to_owned())));
            row.push(state(m));
            row
        })
        .collect();
    let head = ["ID", "BEGAN (UTC)", "VM", "PEER", "MODE", "TIME", "GROUP", "STATE"];
    let head: Vec<&str> = head.into_iter().filter(|name| grouped || *name != "GROUP").collect();
    say(&table(&head, &rows))
}

/// RFC 3339 as people read it; the zone is known.
fn time(rfc3339: &str) -> String {
    // To the second.
    rfc3339.get(..19).unwrap_or(rfc3339).replacen('T', " ", 1)
}

/// A few words.
pub fn state(progress: &Progress) -> String {
    match &progress.outcome {
        Outcome::Running | Outcome::Reconnecting { .. } => line(progress),
        Outcome::Done { report } if is_partial(report) => "done".to_owned(),
        Outcome::Done { report } => format!("done, down {}", format_ms(report.downtime_ms)),
        Outcome::Refused { blockers } => format!("refused, {} in the way", blockers.len()),
        Outcome::Failed { cancelled: true, guest, .. } => format!("cancelled, {}", place(*guest)),
        Outcome::Failed { guest, .. } => format!("failed, {}", place(*guest)),
    }
}

/// All of it, for one migration.
pub fn describe(progress: &Progress) -> String {
    let Progress { id, vm, peer, .. } = progress;
    match &progress.outcome {
        Outcome::Done { report } => summary(report),
        Outcome::Running | Outcome::Reconnecting { .. } => {
            let mut rows = vec![
                ("migration", id.clone()),
                ("vm", vm.clone()),
                ("group", progress.group.clone().unwrap_or_else(|| "none".to_owned())),
                (if progress.role == Role::Source { "to" } else { "from" }, peer.clone()),
                ("mode", progress.mode.clone().unwrap_or_else(|| "not decided yet".to_owned())),
                ("fabric", progress.fabric.clone().unwrap_or_else(|| "not agreed on yet".to_owned())),
                ("began", progress.began_at.as_deref().map_or_else(|| "unknown".to_owned(), time)),
                ("time", format_ms(progress.elapsed_ms)),
                ("state", line(progress)),
            ];
            rows.extend(progress.going_home.iter().map(|going| ("goes home", goes_home(going))));
            fields(&rows)
        }
        Outcome::Refused { blockers } => {
            let mut out = format!("{vm:?} cannot move to {peer} as asked; nothing was changed:");
            for blocker in blockers {
                out.push_str(&format!("\n  {}", blocker_line(blocker)));
            }
            out
        }
        Outcome::Failed { error, guest, cancelled } => {
            let what = if *cancelled { "was cancelled" } else { "failed" };
            let next = match guest {
                GuestPlace::PausedAtSource => {
                    format!("\n  next: vmove recover {id}, on the source")
                }
                // What it left of its disks is at two nodes, and `reclaim` would write to one of them.
                GuestPlace::PausedAtDestination if progress.phase == Phase::DisksAfter => format!(
                    "\n  next: vmove recover {id}, on the source, if the guest lives; if it has ended there, see to its images before anything is started from them: {DISKS_GUIDE}"
                ),
                GuestPlace::PausedAtDestination => format!(
                    "\n  next: vmove recover {id}, on the source; if the destination has given up, too, there first\n  \
                     if its QEMU has ended there: vmove reclaim {id} --guest-is-lost, on the source, runs the copy that was stopped there"
                ),
                GuestPlace::Source | GuestPlace::Destination | GuestPlace::Unknown => String::new(),
            };
            format!(
                "Migration {id} of {vm:?} {what} in phase {}: {error}\n  the guest {}{next}",
                progress.phase.as_str(),
                place(*guest)
            )
        }
    }
}

/// One blocker for people: `code (subject): message [only for modes]`.
pub fn blocker_line(blocker: &vmove_types::check::Blocker) -> String {
    let subject = blocker.subject.as_ref().map(|s| format!(" ({s})")).unwrap_or_default();
    let modes = if blocker.modes.is_empty() {
        String::new()
    } else {
        format!(" [only {}]", blocker.modes.join(", "))
    };
    format!("{}{subject}: {}{modes}", blocker.code, blocker.message)
}

/// When a guest goes home by itself.
pub fn when(go_home: &GoHome) -> String {
    let after = go_home.after_ms.map(|ms| format!("{} after it came", format_ms(to_f64(ms))));
    let event = go_home.on_event.as_ref().map(|event| format!("on {event}"));
    let idle = go_home.when_idle_ms.map(|ms| format!("when it has been idle for {}", format_ms(to_f64(ms))));
    let all: Vec<String> = [after, event, idle].into_iter().flatten().collect();
    all.join(", or ")
}

fn goes_home(going: &GoingHome) -> String {
    let failed = going.failed.as_ref().map(|why| format!("; the last try failed: {why}"));
    format!("{}{}", when(&going.when), failed.unwrap_or_default())
}

fn place(guest: GuestPlace) -> &'static str {
    match guest {
        GuestPlace::Source => "is at the source, as before",
        GuestPlace::Destination => "belongs to the destination",
        GuestPlace::PausedAtSource => "is paused at the source",
        GuestPlace::PausedAtDestination => "is paused at the destination, or has ended there",
        GuestPlace::Unknown => "is unknown",
    }
}

/// Where operators read how two images become one.
const DISKS_GUIDE: &str = "docs/guides/disks.md, \"The guest first, its disks behind it\"";

/// A fault that took longer is told of by itself.
const SLOW_FAULT_US: f64 = 5000.0;

/// The figures of a finished migration.
pub fn summary(r: &Report) -> String {
    fields(&facts(r))
}

/// The destination has not heard from the source how it went.
fn is_partial(r: &Report) -> bool {
    r.pages_total == 0
}

fn facts_of_destination(r: &Report) -> Vec<(&'static str, String)> {
    let mut rows = vec![("moved", format!("{:?} from {} to this node", r.vm, r.source))];
    rows.extend(Some(&r.mode).filter(|mode| !mode.is_empty()).map(|mode| ("mode", mode.clone())));
    if r.faults.count > 0 {
        rows.push(("faults", faults(&r.faults)));
    }
    rows.push(("the rest", format!("is told at {}: vmove report {}", r.source, r.id)));
    rows
}

/// The same as names and values.
pub fn facts(r: &Report) -> Vec<(&'static str, String)> {
    if is_partial(r) {
        return facts_of_destination(r);
    }
    let memory = r.pages_total.saturating_mul(r.page_size);
    let share = if memory > 0 { 100.0 * to_f64(r.bytes_sent) / to_f64(memory) } else { 0.0 };
    let zero = format_bytes(r.pages_zero.saturating_mul(r.page_size));
    let mut rows = vec![
        ("moved", format!("{:?} from {} to {} in {}", r.vm, r.source, r.destination, format_ms(r.total_ms))),
        ("downtime", if r.paused { "left paused, as asked".to_owned() } else { downtime(r) }),
        ("mode", with_reason(&r.mode, &r.mode_reason)),
        ("fabric", format!("{}, memory {}", with_reason(&r.fabric, &r.fabric_reason), r.memory)),
        (
            "sent",
            format!(
                "{} for {} of guest memory ({share:.1} %), of which {zero} were zero",
                format_bytes(r.bytes_sent),
                format_bytes(memory)
            ),
        ),
    ];
    rows.extend(r.ended_copy.iter().map(|told| ("twice", told.clone())));
    rows.extend(r.visit.map(|end| ("visit", visit_end(end).to_owned())));
    rows.extend(r.choice.iter().map(|choice| ("chosen", format!("{choice} ({})", choice.basis))));
    rows.extend(r.promise.iter().map(|promise| ("promised", format!("{promise} ({})", promise.basis))));
    rows.extend(r.verdict.iter().map(|verdict| ("goal", verdict.to_string())));
    rows.extend(host_cpu(&r.host_cpu).map(|used| ("processors", used)));
    if !r.rounds.is_empty() {
        rows.push(("rounds", with_reason(&r.rounds.len().to_string(), &r.rounds_reason)));
    }
    if r.faults.count > 0 {
        rows.push(("faults", faults(&r.faults)));
    }
    let slow = r.slowest_faults.first().filter(|fault| fault.total_us >= SLOW_FAULT_US);
    rows.extend(slow.map(|fault| ("slow fault", slow_fault(fault))));
    let times = |all: &[PhaseTime]| {
        all.iter().map(|p| format!("{} {}", p.name, format_ms(p.duration_ms))).collect::<Vec<_>>().join(", ")
    };
    if !r.pause.is_empty() {
        rows.push(("pause", times(&r.pause)));
    }
    if !r.phases.is_empty() {
        rows.push(("phases", times(&r.phases)));
    }
    rows.extend(r.network.iter().map(|seen| ("network", network(seen))));
    if let Some(quiesce) = r.quiesce_ms {
        rows.push(("quiesced", format!("in {}", format_ms(quiesce))));
    }
    rows.extend(r.head_start.iter().map(|ahead| ("head start", head_start(ahead))));
    rows.extend(r.devices.iter().map(|device| ("device", device_times(device))));
    for disk in &r.disks {
        rows.push(("disk", disk_text(disk)));
        rows.extend(told(&disk.latency).map(|told| ("requests", format!("{}: {told}", disk.name))));
    }
    if let Some(resume) = r.resume_ms {
        let problem = r.resume_problem.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        let waited = r.resume_waited_ms.map(|ms| format!(", waited {} for its group", format_ms(ms)));
        rows.push(("resumed", format!("in {}{}{problem}", format_ms(resume), waited.unwrap_or_default())));
    }
    rows.extend(r.disks.iter().filter_map(compared).map(|told| ("compared", told)));
    rows.extend(r.verified.map(|verified| ("verified", verified_text(r, verified))));
    if r.recoveries > 0 {
        rows.push(("recovered", format!("{} times from a lost peer or daemon", r.recoveries)));
    }
    rows.extend(r.began_at.iter().map(|at| ("began", format!("{} UTC", time(at)))));
    rows.push(("migration", r.id.clone()));
    rows
}

fn verified_text(r: &Report, verified: bool) -> String {
    let disks = || r.disks.iter().filter_map(|disk| disk.verified.as_ref());
    let text = match (verified, disks().any(|disk| disk.is_right() == Some(false))) {
        (true, _) if disks().next().is_some() => {
            "every page is equal on both sides, and what the guest left on its disks"
        }
        (true, _) => "every page is equal on both sides",
        (false, true) => "DISKS DIFFER",
        (false, false) => "PAGES DIFFER",
    };
    text.to_owned()
}

/// What `--verify` found of a disk.
fn compared(disk: &DiskReport) -> Option<String> {
    let found = disk.verified.as_ref()?;
    let bytes = |chunks: u64| format_bytes(chunks.saturating_mul(found.chunk_bytes));
    let read = format!(
        "read {} here and {} there in {}",
        format_bytes(found.source_read_bytes),
        format_bytes(found.destination_read_bytes),
        format_ms(found.took_ms)
    );
    let result = match (found.first_difference, &found.problem) {
        (Some(first), _) => format!("{} DIFFER, from byte {first} on", bytes(found.differing_chunks)),
        (None, Some(problem)) => return Some(format!("{}: NOT COMPARED: {problem}", disk.name)),
        (None, None) => "nothing differs".to_owned(),
    };
    let (equal, written) = (bytes(found.equal_chunks), bytes(found.written_chunks));
    Some(format!(
        "{}: {result}; {equal} are equal, the guest has written to {written} since; {read}",
        disk.name
    ))
}

fn disk_text(disk: &DiskReport) -> String {
    let rate = format_rate(to_f64(disk.sent_bytes) / (disk.copy_ms / 1e3).max(1e-3));
    let left = match (&disk.left_at, &disk.problem) {
        (_, Some(problem)) => format!("{} stays as it is: {problem}", disk.from),
        (Some(path), None) => format!("the image here is {path} now"),
        (None, None) => format!("{} is deleted", disk.from),
    };
    let still = if disk.begin_pause_ms > 0.0 {
        format!("; the guest stood still for {} when it began", format_ms(disk.begin_pause_ms))
    } else {
        String::new()
    };
    let when = if disk.after { "followed the guest, " } else { "" };
    format!(
        "{} ({}, {}) to {}: {when}{} sent in {} ({rate}){still}; {left}",
        disk.name,
        disk.format,
        format_bytes(disk.size_bytes),
        disk.to,
        format_bytes(disk.sent_bytes),
        format_ms(disk.copy_ms)
    )
}

/// What was used of the processors of each host, as far as that is known.
fn host_cpu(used: &HostCpuUse) -> Option<String> {
    let hosts = [("source", used.source), ("destination", used.destination)];
    let told: Vec<_> = hosts
        .into_iter()
        .filter_map(|(name, of)| {
            of.map(|of| format!("{name} {:.1} % ({})", of.percent, format_ms(of.cpu_ms)))
        })
        .collect();
    (!told.is_empty()).then(|| told.join(", "))
}

/// `what (why)`, or `what` if nobody has said why.
fn with_reason(what: &str, why: &str) -> String {
    if why.is_empty() { what.to_owned() } else { format!("{what} ({why})") }
}

/// Only those for which a page had to be fetched have waited for a time that is measured.
fn faults(f: &FaultStats) -> String {
    if f.fetched == 0 {
        return format!("{} (none had to wait for a page to be fetched)", f.count);
    }
    format!(
        "{} ({} fetched): p50 {:.0} us, p99 {:.0} us, p99.9 {:.0} us, max {:.0} us",
        f.count, f.fetched, f.p50_us, f.p99_us, f.p999_us, f.max_us
    )
}

/// The slowest of all: what it waited for.
fn slow_fault(f: &SlowFault) -> String {
    let us = |us: f64| format_ms(us / 1e3);
    let read = if f.own_read { "its read" } else { "a read under way" };
    format!(
        "{} at {} + {:#x}, {} after the first could be answered: {} until its read was sent, {} for {read}, {} until it was mapped",
        us(f.total_us),
        f.block,
        f.offset,
        format_ms(f.at_ms),
        us(f.asked_us),
        us(f.read_us),
        us(f.map_us)
    )
}

/// What crossed while the guest had its devices, and what of it counted.
fn head_start(ahead: &HeadStartStats) -> String {
    let sent = || format!("{} sent in {}", format_bytes(ahead.sent_bytes), format_ms(ahead.duration_ms));
    if !ahead.made {
        let tried = if ahead.sent_bytes > 0 { format!("; {}, in vain", sent()) } else { String::new() };
        return format!("none: {}{tried}", ahead.reason);
    }
    format!(
        "{} while it had its devices; then {} compared in {}, of which {} had changed ({})",
        sent(),
        format_bytes(ahead.compared_bytes),
        format_ms(ahead.compare_ms),
        format_bytes(ahead.changed_bytes),
        ahead.reason
    )
}

/// How long the guest was without a device.
fn device_times(times: &DeviceTimes) -> String {
    let DeviceTimes { role, source, destination, unplug_ms, away_ms, plug_ms, problem, left_at_source } =
        times;
    let mut out = format!("{role}: {source}, now {destination}; unplug {}", format_ms(*unplug_ms));
    if let (Some(away), Some(plug)) = (away_ms, plug_ms) {
        let all = format_ms(unplug_ms + away + plug);
        out.push_str(&format!(
            ", away {}, plug {}: without it for {all}",
            format_ms(*away),
            format_ms(*plug)
        ));
    }
    for problem in [problem, left_at_source].into_iter().flatten() {
        out.push_str(&format!("; {problem}"));
    }
    out
}

fn network(seen: &NetworkStats) -> String {
    let announced = match seen.announced_ms {
        Some(ms) => format!("announced {} after the guest ran", format_ms(ms)),
        None => "when the guest was announced is not known".to_owned(),
    };
    let lost =
        if seen.frames_lost > 0 { format!(", no room for {}", seen.frames_lost) } else { String::new() };
    let problem = seen.problem.as_ref().map(|why| format!("; not passed on: {why}")).unwrap_or_default();
    format!("{announced}; frames passed on: {}{lost}{problem}", seen.frames_passed_on)
}

fn downtime(r: &Report) -> String {
    let error = if r.downtime_error_ms > 0.0 {
        format!(" (+/- {})", format_ms(r.downtime_error_ms))
    } else {
        String::new()
    };
    format!("{}{error}", format_ms(r.downtime_ms))
}

#[cfg(test)]
mod tests {
    use vmove_types::check::{Blocker, BlockerCode};

    use super::*;

    fn progress(outcome: Outcome) -> Progress {
        Progress {
            phase: Phase::Switchover,
            elapsed_ms: 1.0,
            outcome,
            ..Progress::begun("42", "two words", Role::Source, "b")
        }
    }

    #[test]
    fn what_was_not_measured_is_not_shown_as_nothing() {
        assert_eq!(with_reason("1", ""), "1");
        assert_eq!(with_reason("2", "the next would not pay"), "2 (the next would not pay)");
        let none = FaultStats { count: 3, ..FaultStats::default() };
        let slow = SlowFault {
            at_ms: 12.0,
            block: "pc.ram".into(),
            offset: 0x5000,
            total_us: 46_000.0,
            asked_us: 1000.0,
            read_us: 40_000.0,
            map_us: 5000.0,
            own_read: true,
        };
        assert_eq!(
            slow_fault(&slow),
            "46.0 ms at pc.ram + 0x5000, 12.0 ms after the first could be answered: 1.0 ms until its read was sent, 40.0 ms for its read, \
             5.0 ms until it was mapped"
        );
        assert_eq!(faults(&none), "3 (none had to wait for a page to be fetched)");
        let some =
            FaultStats { count: 3, fetched: 1, p50_us: 40.0, p99_us: 90.0, p999_us: 95.0, max_us: 95.0 };
        assert_eq!(faults(&some), "3 (1 fetched): p50 40 us, p99 90 us, p99.9 95 us, max 95 us");
    }

    #[test]
    fn success_ends_with_the_report_itself() {
        let report = Report { id: "42".to_owned(), downtime_ms: 5.5, ..Report::default() };
        let object = final_object(&progress(Outcome::Done { report: Box::new(report) }), Exit::Done);
        for key in [
            "id",
            "vm",
            "mode",
            "mode_reason",
            "fabric",
            "memory",
            "total_ms",
            "downtime_ms",
            "setup_ms",
            "rounds",
            "bytes_sent",
            "pages_total",
            "pages_zero",
            "faults",
            "phases",
            "verified",
        ] {
            assert!(object.get(key).is_some(), "{key}");
        }
        assert_eq!(object["downtime_ms"], 5.5);
    }

    #[test]
    fn failure_ends_with_error_place_and_id() {
        let outcome =
            Outcome::Failed { error: "cut".to_owned(), guest: GuestPlace::PausedAtSource, cancelled: false };
        let failed = progress(outcome);
        let object = final_object(&failed, Exit::of(&failed.outcome));
        assert_eq!(object["error"], "cut");
        assert_eq!(object["guest"], "paused-at-source");
        assert_eq!(object["id"], "42");
        assert_eq!(object["exit_code"], 4);
        assert!(describe(&failed).contains("vmove recover 42"));
        assert!(!describe(&failed).contains("reclaim"), "its only copy is at the source");
        let guest = GuestPlace::PausedAtDestination;
        let failed = progress(Outcome::Failed { error: "cut".to_owned(), guest, cancelled: false });
        assert!(describe(&failed).contains("vmove reclaim 42 --guest-is-lost"), "{}", describe(&failed));
        let following = Progress { phase: Phase::DisksAfter, ..failed };
        let said = describe(&following);
        assert!(said.contains(DISKS_GUIDE) && !said.contains("reclaim"), "{said}");
    }

    #[test]
    fn a_guest_that_lacks_a_device_is_told_with_the_command_that_mends_it() {
        let times = DeviceTimes {
            role: "net0".to_owned(),
            unplug_ms: 200.0,
            away_ms: Some(1500.0),
            plug_ms: Some(300.0),
            ..DeviceTimes::default()
        };
        assert!(device_times(&times).contains("without it for 2.00 s"), "{}", device_times(&times));
        let mut done = progress(Outcome::Done { report: Box::default() });
        assert_eq!(Exit::of_progress(&done), Exit::Done);
        done.missing_devices.push(MissingDevice {
            role: "net0".to_owned(),
            why: "its group is busy".to_owned(),
            node: "b".to_owned(),
            mend: "vmove devices attach web net0".to_owned(),
        });
        assert_eq!(Exit::of_progress(&done), Exit::NeedsRecovery);
        let object = final_object(&done, Exit::NeedsRecovery);
        assert_eq!(object["missing_devices"][0]["mend"], "vmove devices attach web net0");
    }

    #[test]
    fn a_head_start_says_what_it_gained_and_what_was_in_vain() {
        let mut ahead = HeadStartStats {
            reason: "why".to_owned(),
            sent_bytes: 3 << 20,
            compared_bytes: 2 << 20,
            changed_bytes: 1 << 20,
            ..HeadStartStats::default()
        };
        assert_eq!(head_start(&ahead), "none: why; 3.00 MiB sent in 0.0 ms, in vain");
        ahead.made = true;
        let text = head_start(&ahead);
        assert!(text.contains("2.00 MiB compared in 0.0 ms, of which 1.00 MiB had changed (why)"), "{text}");
    }

    #[test]
    fn every_blocker_is_told() {
        let blockers = vec![
            Blocker::new(BlockerCode::Vfio, "a device").about("hostdev0"),
            Blocker::new(BlockerCode::NoPagemapScan, "old kernel")
                .only_for(&[vmove_types::spec::Mode::Precopy]),
        ];
        let refused = progress(Outcome::Refused { blockers });
        let text = describe(&refused);
        assert!(text.contains("vfio (hostdev0): a device") && text.contains("[only precopy]"), "{text}");
        assert_eq!(final_object(&refused, Exit::Refused)["blockers"].as_array().unwrap().len(), 2);
    }
}
