//! Goals: before anything is changed a migration promises to keep them, or does not begin. They then say how it goes, and in the end what came of them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::asking::Guest;
use super::error::{SourceError, Stop};
use super::link_rate::LinkRate;
use super::memory::SourceMemory;
use super::session::Session;
use super::steering::Steering;
use super::watch::watch;
use crate::node::Node;
use crate::past::{Measured, MoveTimes};
use crate::plan::{self, Hurry, LinkKnown, Standing};
use crate::promise::{Beside, Broken, Hosts, Outlook, promise};
use vmove_node::blocking::spawn_blocking;
use vmove_node::record::VmRecord;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::goal::{Goal, Goals};
use vmove_types::progress::Phase;
use vmove_types::promise::{Promise, Verdict};
use vmove_types::report::{CpuUse, HostCpuUse, PhaseTime, Report};
use vmove_types::spec::{MigrationSpec, Mode, Visit};

/// Of a node to which no migration is remembered: QEMU starts in half a second, and loads its state in some ten milliseconds.
const UNKNOWN: Beside =
    Beside { setup_ms: 100.0, ready_ms: 700.0, pause_ms: 15.0, pause_up_to_ms: 15.0, after_ms: 250.0 };

/// So many migrations say what is usual. How long pauses may become is told by all that are remembered: it takes ten to know what one in ten exceeds.
const LAST: usize = 8;

/// What one processor moves of pages, if nobody knows. Unit: bytes per second.
const UNKNOWN_PROCESSOR: f64 = 1e9;

/// Less says nothing of what the processors can move. Unit: bytes.
const ENOUGH_LANDED: u64 = 64 << 20;

/// Less says nothing of the rate at which it came. Unit: bytes.
const ENOUGH_FETCHED: f64 = 8e6;

/// What is known before a migration of a guest.
#[derive(Debug)]
pub(super) struct Known {
    pub outlook: Outlook,
    /// What of that is known how, for people.
    pub basis: String,
    /// Whether the kernel can follow the guest's writes.
    can_track: bool,
}

impl Known {
    /// What a migration would be like. `modes`: those that nothing is in the way of.
    pub(super) fn promise(&self, spec: &MigrationSpec, modes: &[Mode]) -> Result<Promise, Broken> {
        let wanted = |mode: &Mode| spec.mode.fixed().is_none_or(|fixed| fixed == *mode);
        let can = |mode: &Mode| wanted(mode) && (self.can_track || *mode == Mode::Postcopy);
        let allowed: Vec<Mode> = modes.iter().copied().filter(can).collect();
        promise(&spec.goals, &allowed, &self.outlook, &self.basis)
    }
}

/// Watches a guest, and looks up what earlier migrations to a node have shown.
pub(super) async fn look_ahead(
    node: &Arc<Node>,
    vm: &VmRecord,
    (to, spec): (&str, &MigrationSpec),
    runs: bool,
) -> Result<Known, SourceError> {
    let begun = Instant::now();
    let (record, vmm) = (vm.clone(), Arc::clone(&node.config.vmm));
    let memory = spawn_blocking(move || SourceMemory::open(&*vmm, &record)).await?;
    let memory = Arc::new(memory.map_err(SourceError::memory("open the guest's memory"))?);
    let watched = watch(&memory, runs).await?;
    let CountedOn { link, again, beside, hosts, known } = counted_on(node, to, spec);
    // A migration with goals begins by watching its guest.
    let watching = if spec.goals.is_empty() { Duration::ZERO } else { begun.elapsed() };
    let watching_ms = vmove_types::time::ms(watching);
    let beside =
        Beside { setup_ms: beside.setup_ms + watching_ms, ready_ms: beside.ready_ms + watching_ms, ..beside };
    let outlook = Outlook {
        content_bytes: watched.content_bytes,
        writes: watched.writes,
        link_bytes_per_s: link.bytes_per_s,
        again_bytes_per_s: if link.known == LinkKnown::Limit {
            link.bytes_per_s
        } else {
            again.unwrap_or(link.bytes_per_s)
        },
        hosts,
        limited: link.known == LinkKnown::Limit,
        pages_in_pause_ms: pages_in_pause_ms(spec, beside),
        beside,
        within_ms: None,
    };
    let can_track = node.config.vmm.can_follow_writes();
    Ok(Known { outlook, basis: format!("{}; {known}", link.told()), can_track })
}

/// What the link to a node carries for pages that no limit holds back.
pub(super) fn free_link(node: &Node, to: &str) -> plan::Link {
    counted_on(node, to, &MigrationSpec::default()).link
}

/// What a goal leaves of the pause for pages.
fn pages_in_pause_ms(spec: &MigrationSpec, beside: Beside) -> f64 {
    let left = |pause| (pause as f64 - beside.pause_up_to_ms).max(1.0);
    spec.goals.max_pause_ms.map_or(spec.max_downtime_ms as f64, left)
}

/// What is known of a node.
struct CountedOn {
    link: plan::Link,
    /// For pages that the destination has memory for. Unit: bytes per second.
    again: Option<f64>,
    beside: Beside,
    hosts: Hosts,
    /// How that is known.
    known: String,
}

/// What earlier migrations to a node have shown.
fn counted_on(node: &Node, to: &str, spec: &MigrationSpec) -> CountedOn {
    let past = node.past.of_node(to);
    let fabric = past.first().map(|one| one.fabric.clone()).unwrap_or_default();
    let pauses: Vec<f64> = past.iter().filter_map(|one| one.times?.pause_ms).collect();
    let link = usual_link(&past, spec, node.past.link(to, &fabric));
    let times = last_times(&past);
    if times.is_empty() {
        let known = "no migration to this node is remembered".to_owned();
        return CountedOn { link, again: None, beside: UNKNOWN, hosts: hosts_unknown(), known };
    }
    let pause_ms = median(times.iter().filter_map(|one| one.pause_ms)).unwrap_or(UNKNOWN.pause_ms);
    let beside = Beside {
        setup_ms: median(times.iter().map(|one| one.setup_ms)).unwrap_or(UNKNOWN.setup_ms),
        ready_ms: median(times.iter().map(|one| one.ready_ms)).unwrap_or(UNKNOWN.ready_ms),
        pause_ms,
        pause_up_to_ms: ninth_of_ten(pauses.iter().copied()).unwrap_or(UNKNOWN.pause_up_to_ms).max(pause_ms),
        after_ms: median(times.iter().map(|one| one.after_ms)).unwrap_or(UNKNOWN.after_ms),
    };
    let again = median(times.iter().filter_map(|one| one.again_bytes_per_s));
    let hosts = median(times.iter().filter_map(|one| one.host_bytes_per_s));
    let hosts =
        hosts.map_or_else(hosts_unknown, |bytes_per_s| Hosts { bytes_per_s, is_known: true, share: None });
    let known = format!(
        "beside memory as the last {} to this node, the pause at most as nine of ten of the last {}",
        times.len(),
        pauses.len()
    );
    CountedOn { link, again, beside, hosts, known }
}

/// Of the last migrations, newest first. Visits and trials of fabrics, of which no times are known, do not push them out.
fn last_times(past: &[Measured]) -> Vec<MoveTimes> {
    past.iter().filter_map(|one| one.times).take(LAST).collect()
}

/// Of hosts of which no migration has shown what their processors can move: both are taken for such as this one.
fn hosts_unknown() -> Hosts {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Hosts { bytes_per_s: UNKNOWN_PROCESSOR * processors as f64, is_known: false, share: None }
}

/// What a link has usually carried: one migration may have met a busy host. `last`: what is remembered first.
fn usual_link(past: &[Measured], spec: &MigrationSpec, last: Option<Measured>) -> plan::Link {
    let same =
        |one: &&Measured| last.as_ref().is_some_and(|last| (one.by, &one.fabric) == (last.by, &last.fabric));
    let rates: Vec<f64> =
        past.iter().filter(same).filter_map(|one| one.link_bytes_per_s).take(LAST).collect();
    let (migrations, usual) = (rates.len(), median(rates.into_iter()));
    let before = last.map(|last| Measured { link_bytes_per_s: usual, ..last });
    let link = LinkRate::default().link(spec.bandwidth, before.as_ref());
    match link.known {
        LinkKnown::Before { .. } if migrations > 1 => {
            plan::Link { known: LinkKnown::Usual { migrations }, ..link }
        }
        _ => link,
    }
}

/// The one in the middle.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values = sorted(values);
    values.get(values.len() / 2).copied()
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// What the next one does not exceed in nine of ten cases, if it is like these: of *n* values that are alike, the next is within the *k*-th in
/// *k* of *n* + 1 cases. The largest, of up to ten: of fewer than nine even that is exceeded more often.
fn ninth_of_ten(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values = sorted(values);
    let rank = ((values.len() + 1) * 9).div_ceil(10).min(values.len());
    values.get(rank.checked_sub(1)?).copied()
}

impl Guest {
    /// Promises to keep the goals, if there are any; refuses otherwise. Changes nothing.
    pub(super) async fn promise(&self, session: &mut Session) -> Result<(), Stop> {
        let spec = session.spec().clone();
        if spec.goals.is_empty() {
            return Ok(());
        }
        let (node, vm, to) = (Arc::clone(&session.node), session.vm().clone(), session.to().name.clone());
        let elapsed_ms = session.publisher.elapsed_ms();
        let known = look_ahead(&node, &vm, (&to, &spec), self.runs()).await?;
        session.watched_ms = session.publisher.elapsed_ms() - elapsed_ms;
        let beside = known.outlook.beside;
        let promised =
            known.promise(&spec, &self.modes).map_err(|broken| Stop::Refused(vec![goal_blocker(broken)]))?;
        let may_turn = spec.mode.fixed().is_none();
        if may_turn {
            session.mode = promised.mode;
            session.report.mode_reason = format!("it keeps the goals: {}", promised.basis);
        }
        let begun = Instant::now() - Duration::from_secs_f64(session.publisher.elapsed_ms() / 1e3);
        session.steering = Some(Steering {
            pages_in_pause_ms: spec.goals.max_pause_ms.map(|_| pages_in_pause_ms(&spec, beside)),
            until: spec.goals.within_ms.map(|within| begun + Duration::from_millis(within)),
            rest_ms: beside.pause_ms + beside.after_ms,
            may_turn,
        });
        session.report.promise = Some(promised.clone());
        session.publisher.update(|p| p.promise = Some(promised));
        Ok(())
    }
}

/// A goal is in the way.
pub(super) fn goal_blocker(broken: Broken) -> Blocker {
    Blocker::new(BlockerCode::Goal, broken.why)
}

impl Session {
    /// Whether the time for more rounds is over. Says why.
    pub(super) fn out_of_time(&mut self, standing: Standing, pages_in_pause_ms: f64) -> Option<String> {
        let steering = self.steering?;
        let left = steering.until?.saturating_duration_since(Instant::now());
        let left_ms = vmove_types::time::ms(left) - steering.rest_ms;
        let hurry = plan::hurry(self.mode, steering.may_turn, (left_ms, pages_in_pause_ms), standing)?;
        self.hurried = true;
        match hurry {
            Hurry::Stop(why) => Some(why),
            Hurry::Turn(why) => {
                self.mode = Mode::Hybrid;
                let name = self.mode.to_string();
                self.report.mode.clone_from(&name);
                self.publisher.update(|p| p.mode = Some(name));
                Some(why)
            }
        }
    }

    /// What this migration took beside the memory that crossed, once it has ended.
    pub(super) fn times(&self) -> Option<MoveTimes> {
        let report = &self.report;
        // A visit takes as long as the guest likes, and most of its pages never cross.
        if self.spec().visit != Visit::No {
            return None;
        }
        // The guest runs there from the one on, and is whole from the other.
        let whole_ms = began(report, Phase::DisksAfter).or_else(|| began(report, Phase::Finish))?;
        let runs_ms = began(report, Phase::Fetch)?;
        let ready_ms = self.ready_ms?;
        let limit = self.spec().bandwidth.map(|limit| limit.0 as f64);
        let promised = report.promise.as_ref().map(|promise| promise.link_bytes_per_s);
        let link = report.link_bytes_per_s.or(limit).or(promised).unwrap_or(1e9);
        let bytes = |pages: u64| (pages * report.page_size) as f64;
        let (in_pause_ms, fetched) = match self.mode {
            Mode::Precopy => (bytes(self.pages_at_stop) / link.max(1.0) * 1e3, 0.0),
            Mode::Hybrid => (0.0, bytes(report.pages_after_resume)),
            // Zeros are missing, too, and do not cross.
            Mode::Postcopy => (0.0, bytes(report.pages_after_resume.saturating_sub(report.pages_zero))),
        };
        let enough = fetched >= ENOUGH_FETCHED;
        let rate = fetched / ((whole_ms - runs_ms).max(1.0) / 1e3);
        // What little is fetched takes no time of its own.
        let pages_are_here_ms = if enough { whole_ms } else { runs_ms };
        let disks = time_of(report, Phase::Disks);
        (report.downtime_ms > 0.0 && report.recoveries == 0).then(|| MoveTimes {
            setup_ms: (report.setup_ms - self.watched_ms).max(0.0),
            ready_ms: (ready_ms - self.watched_ms - disks).max(0.0),
            pause_ms: Some(report.downtime_ms - in_pause_ms).filter(|rest| *rest > in_pause_ms),
            after_ms: (report.total_ms - pages_are_here_ms).max(1.0),
            again_bytes_per_s: Some(rate).filter(|_| enough && limit.is_none() && !self.cpu.is_shared()),
            host_bytes_per_s: host_bytes_per_s(&report.host_cpu, self.counted.landed_bytes),
        })
    }

    /// What came of each goal.
    pub(super) fn verdict(&self) -> Vec<Verdict> {
        let Some(promise) = &self.report.promise else { return Vec::new() };
        verdict(&self.report, &self.spec().goals, promise)
    }
}

/// What all processors could have moved, of the host at which that was less.
fn host_bytes_per_s(used: &HostCpuUse, landed: u64) -> Option<f64> {
    let (source, destination) = (used.source?, used.destination?);
    let all_s = |host: CpuUse| host.cpu_ms / 1e3 / f64::from(host.processors.max(1));
    let took = all_s(source).max(all_s(destination));
    (landed >= ENOUGH_LANDED && took > 0.0).then(|| landed as f64 / took)
}

fn times_in(report: &Report, phase: Phase) -> impl Iterator<Item = &PhaseTime> {
    report.phases.iter().filter(move |time| time.name == phase.as_str())
}

fn time_of(report: &Report, phase: Phase) -> f64 {
    times_in(report, phase).map(|time| time.duration_ms).sum()
}

/// When a phase began for the first time, in milliseconds after the request.
fn began(report: &Report, phase: Phase) -> Option<f64> {
    times_in(report, phase).map(|time| time.start_ms).next()
}

fn verdict(report: &Report, goals: &Goals, promise: &Promise) -> Vec<Verdict> {
    let of = |(goal, wanted): (Goal, f64)| {
        let measured = match goal {
            // Not known if the guest was paused before, or this daemon was started anew.
            Goal::MaxPause => (report.downtime_ms > 0.0).then_some(report.downtime_ms),
            Goal::Within => {
                Some(report.total_ms - time_of(report, Phase::Disks) - time_of(report, Phase::DisksAfter))
            }
            Goal::HostCpu => report.host_cpu.most(),
        };
        let kept = measured.map(|measured| measured <= wanted);
        Verdict { goal, unit: goal.unit(), wanted, promised: promise.of(goal), measured, kept }
    };
    goals.each().map(of).collect()
}

#[cfg(test)]
mod tests {
    use vmove_types::goal::Unit;

    use super::*;
    use crate::past::By;

    #[test]
    fn a_goal_is_kept_or_missed_by_what_was_measured() {
        let disks = PhaseTime { name: "disks".to_owned(), start_ms: 0.0, duration_ms: 9_000.0 };
        let mut report =
            Report { downtime_ms: 31.0, total_ms: 10_000.0, phases: vec![disks], ..Report::default() };
        let goals = Goals { max_pause_ms: Some(20), within_ms: Some(2_000), host_cpu_percent: Some(5) };
        let used = |percent| Some(CpuUse { cpu_ms: 1.0, percent, processors: 2 });
        report.host_cpu = HostCpuUse { source: used(4.0), destination: used(5.5) };
        let promise = Promise {
            mode: Mode::Hybrid,
            pause_ms: 7.0,
            pause_up_to_ms: Some(9.0),
            time_ms: 900.0,
            sent_bytes: 0,
            rounds: 1,
            dirty_bytes_per_s: 0.0,
            link_bytes_per_s: 1e9,
            host_cpu_percent: Some(4.9),
            holds_to_bytes_per_s: None,
            basis: String::new(),
        };
        let told = verdict(&report, &goals, &promise);
        assert_eq!((told[0].kept, told[0].measured, told[0].promised), (Some(false), Some(31.0), 9.0));
        // Disks are not counted.
        assert_eq!((told[1].kept, told[1].measured), (Some(true), Some(1_000.0)));
        // The host at which it was more counts.
        assert_eq!((told[2].kept, told[2].measured, told[2].unit), (Some(false), Some(5.5), Unit::Percent));
        report.downtime_ms = 0.0;
        assert_eq!(verdict(&report, &goals, &promise)[0].kept, None);
    }

    #[test]
    fn what_processors_can_move_is_learnt_from_the_host_that_takes_more() {
        let host = |cpu_ms, processors| Some(CpuUse { cpu_ms, percent: 0.0, processors });
        let used = HostCpuUse { source: host(500.0, 1), destination: host(600.0, 4) };
        assert_eq!(host_bytes_per_s(&used, 1 << 30), Some((2_u64 << 30) as f64));
        assert_eq!(host_bytes_per_s(&used, 1 << 20), None);
        assert_eq!(host_bytes_per_s(&HostCpuUse { source: None, ..used }, 1 << 30), None);
    }

    #[test]
    fn nine_of_ten_pauses_are_no_longer() {
        let first = |count: u32| ninth_of_ten((0..count).rev().map(f64::from));
        assert_eq!((first(0), first(1), first(2), first(8)), (None, Some(0.0), Some(1.0), Some(7.0)));
        // One of twenty may be longer: of 21 with the next, two.
        assert_eq!((first(9), first(10), first(20)), (Some(8.0), Some(9.0), Some(18.0)));
    }

    #[test]
    fn visits_and_trials_push_no_migration_out() {
        let times = MoveTimes {
            setup_ms: 1.0,
            ready_ms: 2.0,
            pause_ms: Some(3.0),
            after_ms: 4.0,
            again_bytes_per_s: None,
            host_bytes_per_s: None,
        };
        let moved = Measured {
            times: Some(times),
            link_bytes_per_s: Some(5e8),
            ..Measured::now("b", "tcp", By::Migration)
        };
        let without = || Measured::now("b", "tcp", By::Migration);
        let past: Vec<Measured> = (0..12).map(|_| without()).chain([moved.clone()]).collect();
        assert_eq!(last_times(&past), [times]);
        let link = usual_link(&past, &MigrationSpec::default(), Some(moved.clone()));
        assert!((link.bytes_per_s - 5e8).abs() < 1.0, "{link:?}");
        let many: Vec<Measured> = (0..12).map(|_| moved.clone()).collect();
        assert_eq!(last_times(&many).len(), LAST);
    }

    #[test]
    fn the_middle_of_what_earlier_migrations_took_counts() {
        assert_eq!(median([9.0, 900.0, 10.0].into_iter()), Some(10.0));
        assert_eq!(median(std::iter::empty()), None);
        let moved =
            |rate| Measured { link_bytes_per_s: Some(rate), ..Measured::now("b", "tcp", By::Migration) };
        let past = [moved(6e7), moved(1.2e9), moved(1.3e9)];
        let spec = MigrationSpec::default();
        // The last one met a busy host.
        let link = usual_link(&past, &spec, Some(past[0].clone()));
        assert_eq!((link.bytes_per_s, link.known), (1.2e9, LinkKnown::Usual { migrations: 3 }));
        assert_eq!(usual_link(&[], &spec, None).known, LinkKnown::Assumed);
    }
}
