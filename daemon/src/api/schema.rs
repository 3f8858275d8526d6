//! Shapes of the engine's own types for the OpenAPI description.
//!
//! The engine knows nothing of OpenAPI. These mirrors are never sent; a test holds each against what the engine's type
//! really serialises to, so that the description cannot drift.

#![allow(dead_code, clippy::large_enum_variant, reason = "only their shape is used")]

use utoipa::ToSchema;

/// A snapshot of a migration.
#[derive(ToSchema)]
pub struct Progress {
    /// Id of the migration.
    id: String,
    /// Name of the VM.
    vm: String,
    /// `source` or `destination`: this daemon's side.
    role: Role,
    /// The other node.
    peer: String,
    /// `precopy`, `postcopy` or `hybrid`, once decided.
    mode: Option<String>,
    /// Where it stands.
    phase: Phase,
    /// Milliseconds since the request.
    elapsed_ms: f64,
    /// Bytes of guest memory that the destination must come to hold.
    bytes_total: u64,
    /// Bytes of these that are there and still good.
    bytes_done: u64,
    /// Bytes on the wire so far.
    bytes_sent: u64,
    /// Page payload per second over the last interval.
    rate_bytes_per_s: f64,
    /// Pages per second that the guest dirties.
    dirty_pages_per_s: f64,
    /// Current round, from 1; 0 before and in `postcopy`.
    round: u32,
    /// Fabric in use and why, once agreed on.
    fabric: Option<String>,
    /// Estimated milliseconds to the end.
    eta_ms: Option<f64>,
    /// How it ended, or that it has not.
    outcome: Outcome,
}

/// Where a fork stands.
#[derive(ToSchema)]
pub struct ForkProgress {
    id: String,
    parent: String,
    /// `check`, `rehome`, `freeze`, `fetch`, `load`, `run`, `network`, `hosts`, `done` or `failed`.
    phase: String,
    /// Children asked for.
    children: usize,
    prepared: usize,
    loaded: usize,
    running: usize,
    /// Other hosts, as far as they are.
    hosts: Option<Vec<HostProgress>>,
    /// The copy of the parent's memory, where it could not be remapped.
    keep: Option<KeepProgress>,
    elapsed_ms: f64,
    /// The end, when it has come.
    report: Option<ForkReport>,
    error: Option<ForkFailure>,
}

/// Why a fork failed.
#[derive(ToSchema)]
pub struct ForkFailure {
    code: String,
    message: String,
    exit_code: u8,
}

/// A fork that has ended.
#[derive(ToSchema)]
pub struct ForkReport {
    id: String,
    parent: String,
    children: Vec<ChildReport>,
    /// From the parent's STOP to its RESUME; 0 for one that was paused, and for a template.
    parent_pause_ms: f64,
    /// From the request until the last child executed guest code.
    all_running_ms: f64,
    /// From the request until nothing was left to do.
    complete_ms: f64,
    multicast: Multicast,
    /// `local`; with other hosts `verbs`, `tcp`, or both if these are not all the same.
    fabric: String,
    /// Why, if there are other hosts.
    fabric_reason: Option<String>,
    /// Other hosts, in the order of the request.
    hosts: Option<Vec<HostReport>>,
    /// How the template came to them.
    distribution: Option<Distribution>,
    /// How the parent's memory was frozen; absent for a template.
    freeze: Option<FreezeReport>,
    /// The parent was given memory of its own first.
    rehomed_ms: Option<f64>,
    /// Disks that were frozen.
    disks: Option<Vec<FrozenDisk>>,
    warnings: Vec<String>,
}

/// How a guest's memory was frozen.
#[derive(ToSchema)]
pub struct FreezeReport {
    /// `remapped`: its file is the template. `write-protected`: it was copied to the template while the guest ran.
    way: String,
    /// Why it could not be remapped.
    why: Option<String>,
    /// Pages of 4 KiB that were copied since the guest was about to write there; it waited.
    pages_by_faults: u64,
    /// Pages of 4 KiB that were copied in the background.
    pages_by_copy: u64,
    /// What of them was not zero, in bytes.
    kept_bytes: u64,
    /// From the guest's RESUME until the copy was whole.
    whole_ms: f64,
}

/// How far a copy of a guest's memory has come.
#[derive(ToSchema)]
pub struct KeepProgress {
    /// Pages of 4 KiB that are in the template.
    pages: u64,
    /// Pages in all.
    of: u64,
}

/// A disk that was frozen.
#[derive(ToSchema)]
pub struct FrozenDisk {
    device: String,
    /// The image, which nobody writes any more.
    base: String,
    /// What the parent writes to since.
    overlay: String,
}

/// One child of a fork.
#[derive(ToSchema)]
pub struct ChildReport {
    name: String,
    index: u32,
    node: String,
    qmp: String,
    pid: i32,
    /// From the request until it executed guest code; absent if it never did.
    running_ms: Option<f64>,
    warm: bool,
    verified: Option<bool>,
    /// `none`, `up`, or what is down and why.
    network: String,
    error: Option<String>,
}

/// Another host's part in a fork.
#[derive(ToSchema)]
pub struct HostReport {
    node: String,
    children: usize,
    /// All, or none.
    running: usize,
    from_root_bytes: u64,
    from_hosts_bytes: u64,
    multicast_bytes: u64,
    /// Pieces that it read because datagrams were lost.
    repaired: u64,
    /// Chunks that arrived with wrong bytes, and were asked for again.
    wrong: u64,
    /// From the request until the whole template was there.
    template_ms: Option<f64>,
    /// Chunks that a child waited for, each once however many children did.
    wanted: u64,
    /// By what it read from the parent's node in the end: `verbs` or `tcp`.
    fabric: Option<String>,
    /// Why that.
    fabric_reason: Option<String>,
    /// How its children get at the images of disks that the guest wrote to: `shared path` or `nbd`.
    disks: Option<String>,
    /// Why that.
    disks_reason: Option<String>,
    /// Faults of children that ran before the whole template was there.
    faults: Option<FaultStats>,
    /// Why there are no children there, or not any more.
    error: Option<String>,
}

/// How the template came to other hosts.
#[derive(ToSchema)]
pub struct Distribution {
    way: String,
    asked: bool,
    /// Bytes of the template that are not zero.
    memory_bytes: u64,
    /// Bytes of that which the guest had written to again, and what lies around them: they went first.
    first_bytes: u64,
    /// Bytes that left the parent's node.
    root_bytes: u64,
    /// From the request until the table of checksums was made.
    prepared_ms: f64,
    estimates: Vec<WayEstimate>,
}

/// What a way would cost.
#[derive(ToSchema)]
pub struct WayEstimate {
    way: String,
    seconds: f64,
    arithmetic: String,
}

/// Where another host stands.
#[derive(ToSchema)]
pub struct HostProgress {
    node: String,
    /// `asked`, `fetch`, `load`, `run`, `done` or `failed`.
    phase: String,
    chunks: u32,
    missing: u32,
    /// Children that are to be there.
    children: usize,
    /// Children that run there.
    running: usize,
    from_root_bytes: u64,
    from_hosts_bytes: u64,
    /// Bytes that came to it by multicast and were wanted.
    multicast_bytes: u64,
    /// Pieces that it read because datagrams were lost.
    repaired: u64,
}

/// Distribution by multicast.
#[derive(ToSchema)]
pub struct Multicast {
    sent_bytes: u64,
    lost_chunks: u64,
    repaired_chunks: u64,
}

/// Side of a migration.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
pub enum Role {
    Source,
    Destination,
}

/// Where a migration stands.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum Phase {
    Check,
    Prepare,
    Rounds,
    Switchover,
    HandOver,
    Fetch,
    Finish,
}

/// Where the guest is.
#[derive(ToSchema)]
#[schema(rename_all = "kebab-case")]
pub enum GuestPlace {
    Source,
    Destination,
    PausedAtSource,
    PausedAtDestination,
}

/// How a migration ended, or that it has not.
#[derive(ToSchema)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Outcome {
    /// Still at work.
    Running,
    /// Peer or connection lost after the hand-over: trying again.
    Reconnecting {
        /// What was lost.
        error: String,
    },
    /// The guest is at the destination with all its memory.
    Done {
        /// The numbers.
        report: Report,
    },
    /// Blockers were found and nothing was changed.
    Refused {
        /// All of them.
        blockers: Vec<Blocker>,
    },
    /// It did not work.
    Failed {
        /// What was expected, what was found, what to do.
        error: String,
        /// Where the guest is now.
        guest: GuestPlace,
        /// An operator asked for the end.
        cancelled: bool,
    },
}

/// One reason why a VM cannot move as asked.
#[derive(ToSchema)]
pub struct Blocker {
    /// Stable word for programs.
    code: String,
    /// For people.
    message: String,
    /// What it is about.
    subject: Option<String>,
    /// Modes it rules out; empty: all.
    modes: Vec<String>,
}

/// Everything in the way of a migration.
#[derive(ToSchema)]
pub struct CheckReport {
    /// Name of the VM.
    vm: String,
    /// The node asked about.
    destination: String,
    /// All blockers.
    blockers: Vec<Blocker>,
    /// What is not a blocker but should be known.
    warnings: Vec<String>,
    /// Modes that remain; empty: it cannot move.
    modes: Vec<String>,
    /// Fabric that would be used and why.
    fabric: String,
}

/// Options of a migration.
#[derive(ToSchema)]
pub struct MigrationSpec {
    /// `auto` (default), `precopy`, `postcopy` or `hybrid`.
    mode: ModeRequest,
    /// Longest pause that `precopy` may cause and `auto` plans for. Milliseconds, 1 to 60000, default 300.
    max_downtime_ms: u64,
    /// Cap on bulk traffic in bytes per second, at least 1048576; absent for none.
    bandwidth: Option<u64>,
    /// Leave the guest paused at the destination.
    paused: bool,
    /// Hash every page on both sides and compare.
    verify: bool,
    /// The guest must be handed over within this time. Milliseconds, default 120000, 0 for none.
    timeout_ms: u64,
}

/// How memory is asked to cross.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
pub enum ModeRequest {
    Auto,
    Precopy,
    Postcopy,
    Hybrid,
}

/// The numbers of a finished migration.
#[derive(ToSchema)]
pub struct Report {
    /// Version of this schema: 1.
    schema: u32,
    id: String,
    vm: String,
    /// Node it came from.
    source: String,
    /// Node it went to.
    destination: String,
    mode: String,
    /// Why this mode.
    mode_reason: String,
    fabric: String,
    fabric_reason: String,
    /// Backing of guest memory at the destination.
    memory: String,
    /// From the request to the end.
    total_ms: f64,
    /// From the source's STOP event to the destination's RESUME event.
    downtime_ms: f64,
    /// Uncertainty of `downtime_ms` between two hosts' clocks.
    downtime_error_ms: f64,
    setup_ms: f64,
    rounds: Vec<RoundStats>,
    rounds_reason: String,
    bytes_sent: u64,
    state_bytes: u64,
    pages_total: u64,
    pages_zero: u64,
    pages_after_resume: u64,
    page_size: u64,
    scan_us_per_gib: f64,
    direct_io: String,
    faults: FaultStats,
    phases: Vec<PhaseTime>,
    /// Every page hashed equal on both sides; null when not asked for.
    verified: Option<bool>,
    paused: bool,
    recoveries: u32,
}

/// Page faults at the destination. Unit: microseconds.
#[derive(ToSchema)]
pub struct FaultStats {
    count: u64,
    fetched: u64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// One phase.
#[derive(ToSchema)]
pub struct PhaseTime {
    name: String,
    start_ms: f64,
    duration_ms: f64,
}

/// One pre-copy round.
#[derive(ToSchema)]
pub struct RoundStats {
    pages: u64,
    zero: u64,
    duration_ms: f64,
    scan_us: f64,
    dirty_pages_per_s: f64,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Serialize;
    use utoipa::PartialSchema;
    use vmove_migrate::{check, progress, report, spec};

    fn keys<T: Serialize>(value: &T) -> BTreeSet<String> {
        let json = serde_json::to_value(value).unwrap();
        json.as_object().unwrap().keys().cloned().collect()
    }

    fn described<T: PartialSchema>() -> BTreeSet<String> {
        let json = serde_json::to_value(T::schema()).unwrap();
        json["properties"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn mirrors_have_the_keys_of_the_real_types() {
        assert_eq!(described::<super::Report>(), keys(&report::Report::default()));
        assert_eq!(described::<super::FaultStats>(), keys(&report::FaultStats::default()));
        assert_eq!(described::<super::RoundStats>(), keys(&report::RoundStats::default()));
        let phase = report::PhaseTime { name: String::new(), start_ms: 0.0, duration_ms: 0.0 };
        assert_eq!(described::<super::PhaseTime>(), keys(&phase));
        assert_eq!(described::<super::MigrationSpec>(), keys(&spec::MigrationSpec::default()));
        assert_eq!(described::<super::Blocker>(), keys(&check::Blocker::new("c", "m")));
        assert_eq!(described::<super::CheckReport>(), keys(&check::CheckReport::default()));
        assert_eq!(described::<super::Progress>(), keys(&snapshot(progress::Outcome::Running)));
    }

    #[test]
    fn mirrors_have_the_words_of_the_real_enums() {
        use progress::{GuestPlace as G, Phase as P};
        let phases = [P::Check, P::Prepare, P::Rounds, P::Switchover, P::HandOver, P::Fetch, P::Finish];
        assert_eq!(words::<super::Phase>(), phases.map(|p| p.as_str().to_owned()).into());
        let places = [G::Source, G::Destination, G::PausedAtSource, G::PausedAtDestination];
        assert_eq!(words::<super::GuestPlace>(), places.map(|p| word(&p)).into());
        let outcomes = [
            progress::Outcome::Running,
            progress::Outcome::Reconnecting { error: String::new() },
            progress::Outcome::Done { report: Box::default() },
            progress::Outcome::Refused { blockers: Vec::new() },
            progress::Outcome::Failed { error: String::new(), guest: G::Source, cancelled: false },
        ];
        let schema = serde_json::to_value(super::Outcome::schema()).unwrap().to_string();
        for outcome in outcomes {
            let json = serde_json::to_value(&outcome).unwrap();
            for key in json.as_object().unwrap().keys() {
                assert!(schema.contains(&format!("\"{key}\"")), "{key} is not in {schema}");
            }
            assert!(schema.contains(&json["state"].to_string()), "{} is not in {schema}", json["state"]);
        }
    }

    fn words<T: PartialSchema>() -> BTreeSet<String> {
        let json = serde_json::to_value(T::schema()).unwrap();
        json["enum"].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
    }

    fn word<T: Serialize>(value: &T) -> String {
        serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
    }

    fn snapshot(outcome: progress::Outcome) -> progress::Progress {
        progress::Progress {
            id: String::new(),
            vm: String::new(),
            role: progress::Role::Source,
            peer: String::new(),
            mode: None,
            phase: progress::Phase::Check,
            elapsed_ms: 0.0,
            bytes_total: 0,
            bytes_done: 0,
            bytes_sent: 0,
            rate_bytes_per_s: 0.0,
            dirty_pages_per_s: 0.0,
            round: 0,
            fabric: None,
            eta_ms: None,
            outcome,
        }
    }
}
