//! What the host tells: memory errors, lines of the kernel log, files that appear, timers.

mod edac;
mod kernel_log;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, interval_at};

use crate::Hooks;
use crate::event::{Event, Name};
use crate::trigger::Trigger;

pub use edac::{EdacError, counts};

/// How often counts, the log and files are looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Where the host tells things.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sources {
    /// Below it the kernel counts memory errors, in `mc/mc*`.
    pub edac: PathBuf,
    /// The kernel's log.
    pub kernel_log: PathBuf,
}

impl Default for Sources {
    fn default() -> Self {
        Self { edac: "/sys/devices/system/edac".into(), kernel_log: "/dev/kmsg".into() }
    }
}

/// Watches what hooks wait for, and nothing else. Never returns.
pub async fn watch(hooks: Arc<Hooks>, sources: Sources) {
    let mut tasks = JoinSet::new();
    let any = |wanted: fn(&Trigger) -> bool| hooks.triggers().any(|(_, trigger)| wanted(trigger));
    if any(|trigger| *trigger == Trigger::MemoryError) {
        tasks.spawn(edac::watch(Arc::clone(&hooks), sources.edac));
    }
    if any(|trigger| matches!(trigger, Trigger::GpuXid | Trigger::KernelLog)) {
        tasks.spawn(kernel_log::watch(Arc::clone(&hooks), sources.kernel_log));
    }
    for (hook, trigger) in hooks.triggers() {
        match trigger {
            Trigger::File(path) => drop(tasks.spawn(watch_file(Arc::clone(&hooks), path.clone()))),
            Trigger::Timer(every) => drop(tasks.spawn(tick(Arc::clone(&hooks), hook.to_owned(), *every))),
            _ => {}
        }
    }
    while tasks.join_next().await.is_some() {}
    std::future::pending::<()>().await;
}

fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Tells when the file appears; also once if it is there at the start of the daemon, since nobody was told of it then.
async fn watch_file(hooks: Arc<Hooks>, path: PathBuf) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_there = false;
    loop {
        look.tick().await;
        let there = tokio::fs::try_exists(&path).await.unwrap_or(was_there);
        if there && !was_there {
            let data = map(json!({ "file": path.display().to_string() }));
            hooks.tell(Event::of_host(Name::File(path.clone()), data));
        }
        was_there = there;
    }
}

/// The first time after one whole round: a daemon that is started again and again must not act each time.
async fn tick(hooks: Arc<Hooks>, hook: String, every: Duration) {
    let mut rounds = interval_at(tokio::time::Instant::now() + every, every);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        let data = map(json!({ "every_s": every.as_secs() }));
        hooks.tell(Event::of_host(Name::Timer { hook: hook.clone() }, data));
    }
}
