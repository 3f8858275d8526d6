//! Takes guests home from visits by themselves: after a time, on an event of their QEMU, or when they are idle.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use vmove_migrate::visiting::VisitHere;
use vmove_node::monitors::Listener;
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_types::go_home::AwaitedEvent;
use vmove_types::progress::Outcome;
use vmove_types::spec::{MigrationSpec, Visit};
use vmove_types::time::Mono;

use super::App;
use super::hooks::begin_migration;

/// How often visits are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Over at least so long the use of processors is measured.
const LEAST_SAMPLE: Duration = Duration::from_secs(1);
/// A sample that took longer says nothing of each second.
const LONGEST_SAMPLE: Duration = Duration::from_secs(3);
/// For a QEMU's monitor, beside which others wait.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
/// An idle guest uses less than this of one processor: a Linux without work uses some 1 to 3 %.
const IDLE_SHARE: f64 = 0.05;
/// Between two tries, doubled after each.
const FIRST_WAIT: Duration = Duration::from_secs(10);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Visitors that go home on an event, by their monitors.
#[derive(Debug, Default)]
pub struct Visitors(Mutex<HashMap<PathBuf, Awaited>>);

#[derive(Debug)]
struct Awaited {
    event: AwaitedEvent,
    has_come: bool,
}

impl Visitors {
    /// By which it hears of the events of QEMUs.
    pub fn listener(self: &Arc<Self>) -> Listener {
        let visitors = Arc::clone(self);
        Box::new(move |socket, event| visitors.hear(socket, &event.name, &event.data))
    }

    fn hear(&self, socket: &Path, name: &str, data: &Value) {
        if let Some(awaited) = self.lock().get_mut(socket) {
            awaited.has_come |= awaited.event.is(name, data);
        }
    }

    /// Whether the event has come, which is awaited from the first call on.
    fn has_come(&self, socket: &Path, event: &AwaitedEvent) -> bool {
        let awaited = |event: &AwaitedEvent| Awaited { event: event.clone(), has_come: false };
        self.lock().entry(socket.to_owned()).or_insert_with(|| awaited(event)).has_come
    }

    fn forget(&self, socket: &Path) {
        self.lock().remove(socket);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Awaited>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of a visit while it lasts.
#[derive(Debug)]
struct Visitor {
    visit: VisitHere,
    pid: i32,
    idle: Idle,
    socket: PathBuf,
    /// The migration that was begun to take it home.
    trial: Option<String>,
    tries: u32,
    not_before: Mono,
}

/// Since when a QEMU has used next to no processor time.
#[derive(Debug)]
struct Idle {
    since: Mono,
    sampled: Mono,
    used: Duration,
}

impl Idle {
    const fn begun(now: Mono, used: Duration) -> Self {
        Self { since: now, sampled: now, used }
    }

    /// How long it has been idle, having used so much processor time in all.
    fn lasts(&mut self, now: Mono, used: Duration) -> Duration {
        let sample = now.since(self.sampled);
        if sample >= LEAST_SAMPLE {
            let share = used.saturating_sub(self.used).as_secs_f64() / sample.as_secs_f64();
            if share >= IDLE_SHARE || sample > LONGEST_SAMPLE {
                self.since = now;
            }
            (self.sampled, self.used) = (now, used);
        }
        self.sampled.since(self.since)
    }
}

/// Takes home whose time has come. Never returns.
pub async fn take_home(app: Arc<App>) {
    let mut known: HashMap<SessionId, Visitor> = HashMap::new();
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let here = app.engine.visits_that_end();
        known.retain(|id, visitor| {
            let stays = here.iter().any(|(visit, _)| visit == id);
            if !stays {
                app.visitors.forget(&visitor.socket);
            }
            stays
        });
        for (id, leaves) in here {
            if let Entry::Vacant(unknown) = known.entry(id)
                && let Some(visitor) = Visitor::found(&app, id)
            {
                unknown.insert(visitor);
            }
            let Some(visitor) = known.get_mut(&id).filter(|_| !leaves) else { continue };
            if let Some(why) = visitor.why_not_home(&app) {
                visitor.stays_for_now(&app, id, why);
            }
            if visitor.is_due(&app).await && Mono::now() >= visitor.not_before {
                visitor.take_home(&app, id).await;
            }
        }
    }
}

impl Visitor {
    fn found(app: &App, id: SessionId) -> Option<Self> {
        let visit = app.engine.visit(id)?;
        let VmRecord { pid, qmp_socket: socket, .. } = app.registry.vms().get(&visit.vm).ok()?;
        let now = Mono::now();
        let idle = Idle::begun(now, processor_time(pid).unwrap_or_default());
        Some(Self { visit, pid, idle, socket, trial: None, tries: 0, not_before: now })
    }

    /// Whether it is to go home now.
    async fn is_due(&mut self, app: &App) -> bool {
        let when = &self.visit.go_home;
        let lasts = self.visit.began_at.as_deref().and_then(|at| humantime::parse_rfc3339(at).ok());
        let lasts = lasts.and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        if when.after_ms.is_some_and(|after| lasts >= Duration::from_millis(after)) {
            return true;
        }
        if let Some(event) = &when.on_event {
            // Without a connection there are no events.
            let connected = app.registry.monitors().client(&self.socket);
            if !matches!(tokio::time::timeout(CONNECT_TIMEOUT, connected).await, Ok(Ok(_))) {
                tracing::debug!(vm = self.visit.vm, "its event is not heard until its monitor answers");
            }
            if app.visitors.has_come(&self.socket, event) {
                return true;
            }
        }
        let (Some(idle_ms), Ok(used)) = (when.when_idle_ms, processor_time(self.pid)) else { return false };
        self.idle.lasts(Mono::now(), used) >= Duration::from_millis(idle_ms)
    }

    /// Why the last try has failed, once.
    fn why_not_home(&mut self, app: &App) -> Option<String> {
        let trial = self.trial.take()?;
        let progress = app.engine.progress(&trial).ok()?.borrow().clone();
        match progress.outcome {
            Outcome::Failed { error, .. } => Some(error),
            Outcome::Refused { blockers } => {
                let all: Vec<String> = blockers.into_iter().map(|blocker| blocker.message).collect();
                Some(all.join("; "))
            }
            _ => {
                self.trial = Some(trial);
                None
            }
        }
    }

    /// It could not be taken home, which is tried again.
    fn stays_for_now(&self, app: &App, id: SessionId, why: String) {
        tracing::warn!(vm = self.visit.vm, why, "the guest could not be taken home, which is tried again");
        app.engine.was_not_taken_home(id, why);
    }

    async fn take_home(&mut self, app: &Arc<App>, id: SessionId) {
        let wait = FIRST_WAIT.saturating_mul(1 << self.tries.min(5)).min(LONGEST_WAIT);
        self.not_before =
            Mono(Mono::now().0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)));
        self.tries += 1;
        let VisitHere { vm, home, home_address, .. } = &self.visit;
        let to = app.known.named_by_peer(home, home_address.as_deref().unwrap_or_default());
        let options = MigrationSpec { visit: Visit::Back, ..MigrationSpec::default() };
        tracing::info!(vm, %home, when = ?self.visit.go_home, "the guest is taken home from its visit");
        match begin_migration(app, vm, to, options).await {
            Ok(taken) => self.trial = Some(taken.id),
            Err(problem) => {
                self.stays_for_now(app, id, problem.message);
            }
        }
    }
}

/// What a process has used of processors, all of its threads together; proc(5), `stat`.
fn processor_time(pid: i32) -> std::io::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    read_processor_time(&stat).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn read_processor_time(stat: &str) -> Option<Duration> {
    // The name in parentheses may have blanks. Ticks are 10 ms on x86-64 (USER_HZ).
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_that_of_user_and_kernel() {
        let stat = "7 (qemu (x) y) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 9 9 20 0 4 0 100 1 1";
        assert_eq!(read_processor_time(stat), Some(Duration::from_secs(2)));
        assert_eq!(read_processor_time("7 (qemu"), None);
        processor_time(i32::try_from(std::process::id()).unwrap()).unwrap();
    }

    #[test]
    fn a_guest_is_idle_for_as_long_as_it_uses_next_to_nothing() {
        let at = |ms: u64| Mono(ms * 1_000_000);
        let used = Duration::from_millis;
        let mut idle = Idle::begun(at(0), used(0));
        assert_eq!(idle.lasts(at(500), used(400)), Duration::ZERO, "too short to be measured");
        assert_eq!(idle.lasts(at(1000), used(500)), Duration::ZERO, "half of a processor");
        assert_eq!(idle.lasts(at(2000), used(530)), used(1000));
        assert_eq!(idle.lasts(at(4000), used(600)), used(3000));
        assert_eq!(idle.lasts(at(5000), used(700)), Duration::ZERO, "a tenth of a processor");
        assert_eq!(idle.lasts(at(6000), used(700)), used(1000));
        assert_eq!(idle.lasts(at(16_000), used(710)), Duration::ZERO, "nobody looked for ten seconds");
    }

    #[test]
    fn the_awaited_event_is_heard_once_it_is_awaited() {
        let visitors = Visitors::default();
        let (socket, event) = (Path::new("/run/qmp"), "STOP".parse().unwrap());
        visitors.hear(socket, "STOP", &Value::Null);
        assert!(!visitors.has_come(socket, &event));
        visitors.hear(socket, "RESUME", &Value::Null);
        visitors.hear(Path::new("/run/other"), "STOP", &Value::Null);
        assert!(!visitors.has_come(socket, &event));
        visitors.hear(socket, "STOP", &Value::Null);
        assert!(visitors.has_come(socket, &event));
        visitors.forget(socket);
        assert!(!visitors.has_come(socket, &event));
    }
}
