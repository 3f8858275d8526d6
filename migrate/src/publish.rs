//! Shows a session's progress and keeps its phase times.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};

use crate::autogroup::NiceRequest;
use crate::coming::Coming;
use crate::over_time::OverTime;
use crate::proto::message::Arrived;
use crate::records::Reached;
use vmove_types::progress::{GuestPlace, Outcome, Phase, Progress, Role};
use vmove_types::report::{PhaseTime, ProgressPoint};
use vmove_types::time::{Mono, ms};

/// Rates are taken over at least this long.
const RATE_INTERVAL: Duration = Duration::from_millis(100);

/// The writing end of a session's progress.
#[derive(Debug)]
pub struct Publisher {
    started: Mono,
    sender: watch::Sender<Progress>,
    clockwork: Mutex<Clockwork>,
    abandon: Arc<Notify>,
    only_owes: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Clockwork {
    phases: Vec<PhaseTime>,
    phase_began: Mono,
    rate_from: (Mono, u64),
    over_time: OverTime,
    nice_request: Option<NiceRequest>,
    coming: Coming,
}

/// An operator's word that a session need not wait for its peer any longer. It counts only while the session waits.
#[derive(Debug, Clone)]
pub(crate) struct Abandon {
    asked: Arc<Notify>,
    progress: watch::Receiver<Progress>,
    only_owes: Arc<AtomicBool>,
}

impl Abandon {
    /// Tells the session.
    pub(crate) fn ask(&self) {
        self.asked.notify_waiters();
    }

    /// Whether the session waits for nothing but a disk, and does not need the VM that may be here: it is the node's, to be ended like any.
    pub(crate) fn only_owes(&self) -> bool {
        self.only_owes.load(Ordering::Acquire)
    }

    /// Waits for the word. Cancel-safe.
    pub(crate) async fn asked(&self) {
        loop {
            self.asked.notified().await;
            // A peer that has come back meanwhile is not left alone.
            if matches!(self.progress.borrow().outcome, Outcome::Reconnecting { .. }) {
                return;
            }
        }
    }
}

impl Publisher {
    /// Begins a session's progress in [`Phase::Check`].
    #[must_use]
    pub fn new(id: &str, vm: &str, role: Role, peer: &str) -> (Self, watch::Receiver<Progress>) {
        let began_at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        Self::taken_up(id, vm, role, peer, Some(began_at))
    }

    /// The same of a session that an earlier life of the daemon has begun.
    #[must_use]
    pub(crate) fn taken_up(
        id: &str,
        vm: &str,
        role: Role,
        peer: &str,
        began_at: Option<String>,
    ) -> (Self, watch::Receiver<Progress>) {
        let started = Mono::now();
        let begun = Progress { began_at, ..Progress::begun(id, vm, role, peer) };
        let (sender, receiver) = watch::channel(begun);
        let clockwork = Clockwork {
            phases: Vec::new(),
            phase_began: started,
            rate_from: (started, 0),
            over_time: OverTime::default(),
            nice_request: None,
            coming: Coming::default(),
        };
        let clockwork = Mutex::new(clockwork);
        let (abandon, only_owes) = (Arc::default(), Arc::default());
        (Self { started, sender, clockwork, abandon, only_owes }, receiver)
    }

    /// When the session began.
    pub(crate) fn began_at(&self) -> Option<String> {
        self.sender.borrow().began_at.clone()
    }

    /// How far the session is, to be noted where it is called off.
    pub(crate) fn reached(&self) -> Box<Reached> {
        Box::new(Reached::of(&self.sender.borrow()))
    }

    /// By which an operator is to end the session.
    pub(crate) fn abandon(&self) -> Abandon {
        let (asked, only_owes) = (Arc::clone(&self.abandon), Arc::clone(&self.only_owes));
        Abandon { asked, progress: self.sender.subscribe(), only_owes }
    }

    /// When the session began.
    #[must_use]
    pub const fn started(&self) -> Mono {
        self.started
    }

    /// Changes the snapshot.
    pub fn update(&self, change: impl FnOnce(&mut Progress)) {
        self.sender.send_modify(|p| {
            change(p);
            p.elapsed_ms = Mono::now().ms_since(self.started);
        });
    }

    /// Enters a phase; the time of the one before is kept. Entering the same phase again does nothing.
    pub fn enter(&self, phase: Phase) {
        if self.sender.borrow().phase == phase {
            return;
        }
        let left = self.sender.borrow().phase;
        let over = self.close(left);
        tracing::info!(progress = phase.as_str(), "enters");
        self.update(|p| {
            p.phase = phase;
            p.phases.push(over);
        });
        // The new one first: of both together, the one that hurries counts.
        let nice_request = NiceRequest::in_phase(phase);
        self.lock().nice_request = nice_request;
    }

    fn close(&self, phase: Phase) -> PhaseTime {
        let now = Mono::now();
        let mut clockwork = self.lock();
        let time = PhaseTime {
            name: phase.as_str().to_owned(),
            start_ms: clockwork.phase_began.ms_since(self.started),
            duration_ms: now.ms_since(clockwork.phase_began),
        };
        clockwork.phases.push(time.clone());
        clockwork.phase_began = now;
        time
    }

    /// The phases up to now, the current one included.
    #[must_use]
    pub fn phases(&self) -> Vec<PhaseTime> {
        self.close(self.sender.borrow().phase);
        std::mem::take(&mut self.lock().phases)
    }

    /// What this side, a destination, has last shown of the guest's memory.
    #[must_use]
    pub(crate) fn arrived(&self) -> Arrived {
        let now = self.sender.borrow();
        Arrived { blocks: now.arrived.clone(), faults: now.faults, disks: now.disks.clone() }
    }

    /// How far it was over time.
    #[must_use]
    pub(crate) fn over_time(&self) -> Vec<ProgressPoint> {
        self.lock().over_time.take()
    }

    /// What is to come is known better now.
    pub(crate) fn coming(&self, change: impl FnOnce(&mut Coming)) {
        let (done, left) = {
            let mut clockwork = self.lock();
            change(&mut clockwork.coming);
            (clockwork.coming.done(), clockwork.coming.left(None))
        };
        self.update(|p| (p.bytes_done, p.bytes_total) = (done, done + left));
    }

    /// Reports payload bytes that have landed since the session began; rates and the time left follow from it. `missing_bytes`: what the
    /// destination lacks after the stop, zero pages perhaps among it.
    pub(crate) fn landed(&self, landed_bytes: u64, wire_bytes: u64, missing_bytes: Option<u64>) {
        let now = Mono::now();
        let (rate, done, left) = {
            let mut clockwork = self.lock();
            clockwork.coming.landed(landed_bytes);
            let (done, left) = (clockwork.coming.done(), clockwork.coming.left(missing_bytes));
            let (since, bytes) = clockwork.rate_from;
            let took = now.since(since);
            let rate = (took >= RATE_INTERVAL).then(|| {
                clockwork.rate_from = (now, landed_bytes);
                let at_ms = now.ms_since(self.started);
                clockwork.over_time.add(ProgressPoint { at_ms, sent_bytes: wire_bytes, left_bytes: left });
                landed_bytes.saturating_sub(bytes) as f64 / took.as_secs_f64()
            });
            (rate, done, left)
        };
        self.update(|p| {
            p.bytes_sent = wire_bytes;
            if let Some(rate) = rate {
                p.rate_bytes_per_s = rate;
            }
            (p.bytes_done, p.bytes_total) = (done, done + left);
            p.eta_ms = (p.rate_bytes_per_s > 0.0 && left > 0).then(|| left as f64 / p.rate_bytes_per_s * 1e3);
        });
    }

    /// The peer was lost after the hand-over. Of several losses in a row, the first one's time is shown.
    pub fn reconnecting(&self, error: String) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        self.update(|p| {
            let since = if let Outcome::Reconnecting { since, .. } = p.outcome { since } else { now };
            p.outcome = Outcome::Reconnecting { error, since };
        });
    }

    /// A file cannot be written, and is tried again. Of several failures in a row, the first is told, and logged.
    pub(crate) fn cannot_write(&self, path: &Path, error: &io::Error) {
        if self.sender.borrow().unwritten.is_some() {
            return;
        }
        let text = vmove_node::files::cannot_write(path, &error.to_string(), SystemTime::now());
        tracing::warn!("{text}");
        self.update(|p| p.unwritten = Some(text));
    }

    /// From now on the session waits for nothing but a disk.
    pub(crate) fn only_owes(&self) {
        self.only_owes.store(true, Ordering::Release);
    }

    /// Everything is written.
    pub(crate) fn can_write(&self) {
        self.only_owes.store(false, Ordering::Release);
        if self.sender.borrow().unwritten.is_some() {
            tracing::info!("what could not be written is written");
            self.update(|p| p.unwritten = None);
        }
    }

    /// Ends the session's progress.
    pub fn finish(&self, outcome: Outcome) {
        if let Outcome::Failed { error, guest, .. } = &outcome {
            tracing::warn!(error, guest = guest.as_str(), "migration failed");
        }
        self.lock().nice_request = None;
        self.update(|p| {
            if matches!(outcome, Outcome::Done { .. }) {
                p.phases.clear();
                // The last word of how much had landed may be older.
                p.bytes_done = p.bytes_total;
            }
            p.outcome = outcome;
            p.eta_ms = None;
            p.arrived.clear();
        });
    }

    /// Ends it with an error.
    pub fn fail(&self, error: impl std::fmt::Display, guest: GuestPlace, cancelled: bool) {
        self.finish(Outcome::Failed { error: error.to_string(), guest, cancelled });
    }

    /// What is said at the end, with the devices that the guest lacks.
    pub(crate) fn with_missing(&self, what: &str) -> String {
        let lacks = self.sender.borrow().missing_devices.clone();
        if lacks.is_empty() { what.to_owned() } else { format!("{what}; {}", crate::devices::told(&lacks)) }
    }

    /// Milliseconds since the session began.
    #[must_use]
    pub fn elapsed_ms(&self) -> f64 {
        ms(Mono::now().since(self.started))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Clockwork> {
        self.clockwork.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_each_other_without_gaps() {
        let (p, seen) = Publisher::new("id", "vm", Role::Source, "peer");
        p.enter(Phase::Prepare);
        p.enter(Phase::Prepare);
        std::thread::sleep(Duration::from_millis(3));
        p.enter(Phase::Rounds);
        let phases = p.phases();
        let names: Vec<_> = phases.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["check", "prepare", "rounds"]);
        for pair in phases.windows(2) {
            assert!((pair[0].start_ms + pair[0].duration_ms - pair[1].start_ms).abs() < 1e-6);
        }
        assert!(phases[1].duration_ms >= 3.0);
        assert_eq!(seen.borrow().phase, Phase::Rounds);
        assert_eq!(seen.borrow().phases[..], phases[..2], "those that are over");
        p.fail("lost", GuestPlace::Source, false);
        assert_eq!(seen.borrow().phases.len(), 2, "a failure tells where its time went");
    }

    #[test]
    fn the_first_of_several_failures_to_write_is_told_until_it_is_written() {
        let (p, seen) = Publisher::new("id", "vm", Role::Source, "peer");
        let told = || seen.borrow().unwritten.clone();
        p.can_write();
        assert_eq!(told(), None);
        p.cannot_write(Path::new("/s/j"), &io::Error::from(io::ErrorKind::StorageFull));
        let first = told().unwrap();
        assert!(first.starts_with("cannot write /s/j: no storage space; trying again since 2"), "{first}");
        p.cannot_write(Path::new("/s/k"), &io::Error::from(io::ErrorKind::Other));
        assert_eq!(told().as_ref(), Some(&first));
        p.can_write();
        assert_eq!(told(), None);
    }

    #[test]
    fn the_time_left_follows_the_rate() {
        let (p, seen) = Publisher::new("id", "vm", Role::Source, "peer");
        p.coming(|coming| coming.begin(3_000_000));
        std::thread::sleep(RATE_INTERVAL);
        p.landed(1_000_000, 1_000_100, None);
        let now = seen.borrow().clone();
        assert_eq!((now.bytes_done, now.bytes_total), (1_000_000, 3_000_000));
        let eta = now.eta_ms.unwrap();
        assert!((150.0..600.0).contains(&eta), "{eta}");
        let points = p.over_time();
        assert_eq!((points.len(), points[0].sent_bytes, points[0].left_bytes), (1, 1_000_100, 2_000_000));
    }
}
