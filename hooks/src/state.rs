//! What is counted of a hook since the daemon was started.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmove_types::hook::{HookInfo, HookRun};
use vmove_types::time::{Mono, ms};

use crate::config::Hook;
use crate::rate::{AtMost, Runs};

/// A hook, and what came of it.
#[derive(Debug)]
pub(crate) struct Kept {
    pub hook: Hook,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub done: u64,
    pub failed: u64,
    pub forbidden: u64,
    pub held_back: u64,
    pub loops: u64,
    pub at_work: u64,
    pub last: Option<HookRun>,
    pub runs: Runs,
    /// VMs that it moves, forks, saves or pauses now: an event that comes meanwhile asks for the same.
    pub acting_on: HashSet<String>,
    /// Of the last event that was held back, the log has a line already.
    pub told: bool,
}

impl Kept {
    pub(crate) fn new(hook: Hook) -> Self {
        Self { hook, state: Mutex::default() }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Counts and single insertions: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn info(&self) -> HookInfo {
        let (hook, state) = (&self.hook, self.state());
        HookInfo {
            name: hook.name.clone(),
            on: hook.on.to_string(),
            vms: vms_in_words(hook),
            action: hook.action.to_string(),
            order: hook.order,
            time_limit_ms: u64::try_from(hook.time_limit.as_millis()).unwrap_or(u64::MAX),
            retries: hook.retries,
            at_most: match hook.at_most {
                AtMost::Rate(rate) => Some(rate.to_string()),
                AtMost::Unlimited => None,
            },
            dry_run: hook.dry_run,
            done: state.done,
            failed: state.failed,
            forbidden: state.forbidden,
            held_back: state.held_back,
            loops: state.loops,
            at_work: state.at_work,
            last: state.last.clone(),
        }
    }
}

fn vms_in_words(hook: &Hook) -> String {
    let names = hook.vms.iter().map(ToString::to_string);
    let labels = hook.labels.iter().map(|(key, pattern)| format!("{key}={pattern}"));
    let all: Vec<String> = names.chain(labels).collect();
    if all.is_empty() { "all".to_owned() } else { all.join(", ") }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    Failed,
    Forbidden,
    Would,
}

impl Outcome {
    pub(crate) const ALL: [Self; 4] = [Self::Done, Self::Failed, Self::Forbidden, Self::Would];

    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Forbidden => "forbidden",
            Self::Would => "would",
        }
    }
}

/// The end of a run.
#[derive(Debug)]
pub(crate) struct RunEnd<'a> {
    pub id: &'a str,
    pub vm: Option<&'a str>,
    /// Seconds since 1970.
    pub at: u64,
    pub begun: Mono,
    pub waited_ms: f64,
    pub attempts: u32,
    pub outcome: Outcome,
    pub said: String,
}

impl Kept {
    /// Counts and logs the end of a run.
    pub(crate) fn ended(&self, end: RunEnd<'_>) -> HookRun {
        let took = Mono::now().since(end.begun);
        let name = &self.hook.name;
        let run = HookRun {
            id: end.id.to_owned(),
            vm: end.vm.map(str::to_owned),
            at: end.at,
            took_ms: ms(took),
            waited_ms: end.waited_ms,
            attempts: end.attempts,
            outcome: end.outcome.word().to_owned(),
            said: end.said,
        };
        let (outcome, said) = (end.outcome.word(), &run.said);
        match end.outcome {
            Outcome::Failed => {
                tracing::warn!(hook = %name, run = end.id, vm = end.vm, attempts = end.attempts, said, "a hook has failed");
            }
            _ => {
                tracing::info!(hook = %name, run = end.id, vm = end.vm, outcome, took_ms = run.took_ms, said, "hook ended");
            }
        }
        crate::metrics::ended(name, outcome, took);
        let mut state = self.state();
        match end.outcome {
            Outcome::Done | Outcome::Would => state.done += 1,
            Outcome::Failed => state.failed += 1,
            Outcome::Forbidden => state.forbidden += 1,
        }
        state.last = Some(run.clone());
        run
    }
}
