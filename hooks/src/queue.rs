//! Events that nobody waits for: which hooks run for them.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_types::time::Mono;

use crate::condition::Unmet;
use crate::event::Event;
use crate::node::{Node, Vm};
use crate::run::Run;
use crate::state::Kept;
use crate::{Hooks, metrics};

/// Why a hook does not run for an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Not {
    /// It waits for another.
    Other,
    /// A condition does not hold.
    Unmet(Unmet),
    /// Not for this VM.
    OtherVm,
    /// It ran too often.
    TooOften,
    /// It acts on this VM already.
    AtWork,
    /// Its own action has caused it.
    Loop(Vec<String>),
}

impl Hooks {
    /// Heeds events, after what an earlier daemon has left. Never returns.
    pub async fn serve(self: Arc<Self>, node: Arc<dyn Node>) {
        let Some(mut events) = self.take_receiver() else { return };
        self.run_again(&node).await;
        while let Some(event) = events.recv().await {
            self.heed(event, &node);
        }
    }

    /// Decides at once, and starts a task if any hook is to run.
    fn heed(self: &Arc<Self>, event: Event, node: &Arc<dyn Node>) {
        let event = Arc::new(event);
        let groups: Vec<Vec<Run>> = self.hooks.iter().map(|kept| self.runs(kept, &event, node)).collect();
        if groups.iter().all(Vec::is_empty) {
            return;
        }
        let Ok(turn) = Arc::clone(&self.events_at_work).try_acquire_owned() else {
            groups.iter().flatten().for_each(Run::leave);
            return self.count_dropped();
        };
        let (hooks, node) = (Arc::clone(self), Arc::clone(node));
        tokio::spawn(async move {
            hooks.note(&groups).await;
            for group in groups {
                hooks.run_all(group, &node).await;
            }
            drop(turn);
        });
    }

    /// The runs of one hook for an event: one, or one for each VM.
    fn runs(&self, kept: &Arc<Kept>, event: &Arc<Event>, node: &Arc<dyn Node>) -> Vec<Run> {
        if !kept.hook.on.fits(&kept.hook.name, event) {
            return Vec::new();
        }
        let begin = |vm: Option<Vm>| match self.holds(kept, event, vm.as_ref()) {
            Ok(cause) => Some(Run::new(Arc::clone(kept), Arc::clone(event), vm, cause)),
            Err(_) => None,
        };
        match &event.vm {
            Some(name) => {
                let found = node.vm(name);
                let vm = found.unwrap_or_else(|| Vm {
                    name: name.clone(),
                    labels: event.labels.clone().unwrap_or_default(),
                    made_by: None,
                });
                begin(Some(vm)).into_iter().collect()
            }
            None if kept.is_for_each_vm() => {
                node.vms().into_iter().filter_map(|vm| begin(Some(vm))).collect()
            }
            None => begin(None).into_iter().collect(),
        }
    }

    /// Whether a hook runs for an event of this VM now; if so, that counts as a run. Gives the hooks that have led here, this one last.
    pub(crate) fn holds(&self, kept: &Kept, event: &Event, vm: Option<&Vm>) -> Result<Vec<String>, Not> {
        let hook = &kept.hook;
        kept.fits(event, vm)?;
        let mut cause = self.loops.cause(event, vm);
        let mut state = kept.state();
        let acts = vm.filter(|_| hook.action.needs_vm());
        // A loop is told as one, also while the action that has caused it is still at work.
        let why = if cause.contains(&hook.name) {
            Not::Loop(cause)
        } else if acts.is_some_and(|vm| state.acting_on.contains(&vm.name)) {
            Not::AtWork
        } else if !state.runs.take(hook.at_most, vm.map(|vm| vm.name.as_str()), Mono::now()) {
            Not::TooOften
        } else {
            if let Some(vm) = acts {
                state.acting_on.insert(vm.name.clone());
            }
            state.told = false;
            cause.push(hook.name.clone());
            return Ok(cause);
        };
        state.held_back += 1;
        state.loops += u64::from(matches!(why, Not::Loop(_)));
        let first = !std::mem::replace(&mut state.told, true);
        drop(state);
        if first {
            why.tell(&hook.name, event, vm);
        }
        why.count(&hook.name);
        Err(why)
    }

    /// Runs of one hook, at the same time.
    async fn run_all(self: &Arc<Self>, runs: Vec<Run>, node: &Arc<dyn Node>) {
        let mut tasks = JoinSet::new();
        for run in runs {
            let (hooks, node) = (Arc::clone(self), Arc::clone(node));
            tasks.spawn(async move { hooks.run(run, &node).await });
        }
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a task that runs a hook failed");
            }
        }
    }
}

impl Kept {
    /// Event, conditions, name and labels. Counts nothing.
    pub(crate) fn fits(&self, event: &Event, vm: Option<&Vm>) -> Result<(), Not> {
        let hook = &self.hook;
        if !hook.on.fits(&hook.name, event) {
            return Err(Not::Other);
        }
        hook.conditions.check(&event.data).map_err(Not::Unmet)?;
        if vm.is_none_or(|vm| self.is_for(vm)) { Ok(()) } else { Err(Not::OtherVm) }
    }

    /// Whether a VM has the name and the labels.
    pub(crate) fn is_for(&self, vm: &Vm) -> bool {
        let hook = &self.hook;
        let named = hook.vms.is_empty() || hook.vms.iter().any(|pattern| pattern.matches(&vm.name));
        let has = |(key, pattern): (&String, &glob::Pattern)| {
            vm.labels.get(key).is_some_and(|value| pattern.matches(value))
        };
        named && hook.labels.iter().all(has)
    }

    /// Whether it runs once for each VM when the host tells something; a program may also run just once.
    pub(crate) fn is_for_each_vm(&self) -> bool {
        let hook = &self.hook;
        hook.action.needs_vm() || !hook.vms.is_empty() || !hook.labels.is_empty()
    }
}

impl Not {
    /// One line in the log; more of the same are counted.
    fn tell(&self, hook: &str, event: &Event, vm: Option<&Vm>) {
        let (event, vm) = (event.name.as_str(), vm.map(|vm| vm.name.as_str()));
        match self {
            Self::Loop(cause) => {
                let way = format!("{} -> {event} -> {hook}", cause.join(" -> "));
                tracing::warn!(
                    hook,
                    event,
                    vm,
                    way,
                    "the hook's own action has caused this event: it is not run again, it would go on for ever"
                );
            }
            Self::TooOften => tracing::warn!(
                hook,
                event,
                vm,
                "the hook ran as often as at-most allows: further events are counted only"
            ),
            Self::AtWork => tracing::info!(
                hook,
                event,
                vm,
                "the hook acts on this VM already: further events are counted only"
            ),
            Self::Other | Self::Unmet(_) | Self::OtherVm => {}
        }
    }

    fn count(&self, hook: &str) {
        match self {
            Self::Loop(_) => metrics::held_back(hook, "loop"),
            Self::TooOften => metrics::held_back(hook, "at-most"),
            Self::AtWork => metrics::held_back(hook, "at-work"),
            Self::Other | Self::Unmet(_) | Self::OtherVm => {}
        }
    }
}
