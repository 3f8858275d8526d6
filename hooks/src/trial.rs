//! `vmove hook test`: what a hook would do for an event that is made up.

use std::sync::Arc;

use serde_json::{Map, Value};
use vmove_types::hook::{HookTest, HookTestRequest, HookTestRun};

use crate::Hooks;
use crate::config::nearest_hook;
use crate::event::Event;
use crate::node::{Node, Vm};
use crate::queue::Not;
use crate::run::{Run, Verdict};
use crate::state::Kept;

/// A trial that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// No such hook.
    #[error("expected the name of a hook in the configuration of this node, found \"{found}\"{}", .near.as_ref().map_or_else(|| ": see `vmove hook list`".to_owned(), |near| format!("; did you mean \"{near}\"?")))]
    UnknownHook {
        /// What was asked for.
        found: String,
        /// What was probably meant.
        near: Option<String>,
    },
    /// No such VM.
    #[error("No VM {0:?} on this node: see `vmove list`")]
    UnknownVm(String),
    /// The event is none.
    #[error("expected the data of the event as a JSON object, found {0}")]
    NoObject(Value),
}

impl Hooks {
    /// Tries a hook with an event that is made up. Limits and loops do not count, and conditions only if the data of the event is given.
    ///
    /// # Errors
    /// [`TrialError`].
    pub async fn test(
        self: &Arc<Self>,
        name: &str,
        request: HookTestRequest,
        node: &Arc<dyn Node>,
    ) -> Result<HookTest, TrialError> {
        let kept = self.hooks.iter().find(|kept| kept.hook.name == name).ok_or_else(|| {
            let near = nearest_hook(name, self.hooks.iter().map(|kept| kept.hook.name.as_str()));
            TrialError::UnknownHook { found: name.to_owned(), near: near.map(str::to_owned) }
        })?;
        let (given, data) = match request.event {
            None => (false, Map::new()),
            Some(Value::Object(data)) => (true, data),
            Some(other) => return Err(TrialError::NoObject(other)),
        };
        let vms = match &request.vm {
            Some(name) => vec![node.vm(name).ok_or_else(|| TrialError::UnknownVm(name.clone()))?],
            None => node.vms(),
        };
        let event = Arc::new(Event::of_host(kept.hook.on.example(name), data));
        let mut answer = HookTest { name: name.to_owned(), why_not: None, runs: Vec::new() };
        if let Err(Not::Unmet(unmet)) = kept.fits(&event, None)
            && given
        {
            answer.why_not = Some(format!("a condition of `where` does not hold: {unmet}"));
            return Ok(answer);
        }
        let once = kept.hook.on.is_of_host() && !kept.is_for_each_vm();
        let found = vms.len();
        let vms: Vec<Vm> = vms.into_iter().filter(|vm| kept.is_for(vm)).collect();
        if vms.is_empty() && !once {
            answer.why_not =
                Some(format!("of {found} VMs none has the name and the labels that the hook is for"));
            return Ok(answer);
        }
        let targets: Vec<Option<Vm>> = if once { vec![None] } else { vms.into_iter().map(Some).collect() };
        for vm in targets {
            answer.runs.push(self.try_one(kept, &event, vm, request.run, node).await);
        }
        Ok(answer)
    }

    async fn try_one(
        self: &Arc<Self>,
        kept: &Arc<Kept>,
        event: &Arc<Event>,
        vm: Option<Vm>,
        really: bool,
        node: &Arc<dyn Node>,
    ) -> HookTestRun {
        let name = vm.as_ref().map(|vm| vm.name.clone());
        let of_vm = Event { vm: name.clone(), ..(**event).clone() };
        let mut run = Run::new(Arc::clone(kept), Arc::new(of_vm), vm, vec![kept.hook.name.clone()]);
        run.test = true;
        let is_program = !kept.hook.action.needs_vm();
        let facts = is_program.then(|| run.facts(1).json(self));
        let (outcome, said) = if !really {
            ("would".to_owned(), run.would())
        } else if kept.hook.on.is_asked() {
            match self.answer(&run).await {
                Verdict::Allowed => ("done".to_owned(), "allowed".to_owned()),
                Verdict::Forbidden(reason) => ("forbidden".to_owned(), reason),
                Verdict::NoAnswer(why) => ("failed".to_owned(), why),
            }
        } else {
            let ended = self.run(run, node).await;
            (ended.outcome, ended.said)
        };
        HookTestRun { vm: name, outcome, said, facts }
    }
}
