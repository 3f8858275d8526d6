//! One run of a hook.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::{Instant, sleep, timeout_at};
use vmove_types::hook::HookRun;
use vmove_types::time::{Mono, ms};

use crate::Hooks;
use crate::action::Action;
use crate::event::Event;
use crate::facts::Facts;
use crate::journal::Note;
use crate::node::{ActError, Node, Order, Vm};
use crate::program::{Ended, Program, ProgramError};
use crate::state::{Kept, Outcome, RunEnd};

/// How often a VM that something else is being done to is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A run that is about to begin.
#[derive(Debug)]
pub(crate) struct Run {
    id: String,
    kept: Arc<Kept>,
    event: Arc<Event>,
    vm: Option<Vm>,
    /// Hooks that have led here, this one last.
    cause: Vec<String>,
    at: u64,
    again: bool,
    pub(crate) test: bool,
}

/// The word of a hook that may forbid.
#[derive(Debug)]
pub(crate) enum Verdict {
    Allowed,
    Forbidden(String),
    NoAnswer(String),
}

/// What an attempt came to.
enum Attempt {
    Done(String),
    Failed(String),
    /// Not to be tried again.
    Over(String),
}

impl Run {
    pub(crate) fn new(kept: Arc<Kept>, event: Arc<Event>, vm: Option<Vm>, cause: Vec<String>) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let id = uuid::Uuid::new_v4().simple().to_string()[..16].to_owned();
        Self { id, kept, event, vm, cause, at, again: false, test: false }
    }

    fn vm_name(&self) -> Option<&str> {
        self.vm.as_ref().map(|vm| vm.name.as_str())
    }

    pub(crate) fn facts(&self, attempt: u32) -> Facts<'_> {
        Facts {
            run: &self.id,
            hook: &self.kept.hook.name,
            event: &self.event,
            vm: self.vm.as_ref(),
            cause: &self.cause[..self.cause.len().saturating_sub(1)],
            attempt,
            again: self.again,
            test: self.test,
            at: self.at,
        }
    }

    fn note(&self) -> Note {
        Note {
            id: self.id.clone(),
            hook: self.kept.hook.name.clone(),
            vm: self.vm.as_ref().map(|vm| vm.name.clone()),
            labels: self.vm.as_ref().map(|vm| vm.labels.clone()).unwrap_or_default(),
            data: self.event.data.clone(),
            cause: self.cause.clone(),
            at: self.at,
        }
    }

    /// It does not come to be, or has ended: the hook may act on this VM again.
    pub(crate) fn leave(&self) {
        if let Some(vm) = self.vm_name() {
            self.kept.state().acting_on.remove(vm);
        }
    }

    /// What it would do, in words.
    pub(crate) fn would(&self) -> String {
        let on = self.vm_name().map(|vm| format!(" ({vm})")).unwrap_or_default();
        format!("would {}{on}", self.kept.hook.action)
    }
}

impl Hooks {
    /// Writes down what is about to be run. What cannot be written down is run all the same.
    pub(crate) async fn note(&self, groups: &[Vec<Run>]) {
        let notes: Vec<Note> = groups.iter().flatten().map(Run::note).collect();
        let journal = self.journal.clone();
        let write = move || {
            for note in notes {
                if let Err(error) = journal.begin(&note) {
                    tracing::warn!(run = %note.id, hook = %note.hook, %error, "a run could not be noted: if the daemon ends meanwhile, it is lost");
                }
            }
        };
        let _ = tokio::task::spawn_blocking(write).await;
    }

    /// Runs what an earlier daemon has begun and not ended.
    pub(crate) async fn run_again(self: &Arc<Self>, node: &Arc<dyn Node>) {
        let journal = self.journal.clone();
        let left = tokio::task::spawn_blocking(move || journal.left()).await.unwrap_or_default();
        for note in left {
            let Some(kept) = self.hooks.iter().find(|kept| kept.hook.name == note.hook) else {
                tracing::warn!(hook = %note.hook, run = %note.id, "an earlier vmoved has begun a run of a hook that is no more: it is not run again");
                self.end_note(&note.id);
                continue;
            };
            tracing::warn!(hook = %note.hook, run = %note.id, vm = note.vm, "an earlier vmoved has begun this run and not ended it: it is run again");
            let name = kept.hook.on.example(&kept.hook.name);
            let event =
                Event { vm: note.vm.clone(), cause: note.cause.clone(), ..Event::of_host(name, note.data) };
            let vm =
                note.vm.map(|name| node.vm(&name).unwrap_or(Vm { name, labels: note.labels, made_by: None }));
            if let (Some(vm), true) = (&vm, kept.hook.action.needs_vm()) {
                kept.state().acting_on.insert(vm.name.clone());
            }
            let begun = Run::new(Arc::clone(kept), Arc::new(event), vm, note.cause);
            let run = Run { id: note.id, at: note.at, again: true, ..begun };
            let (hooks, node) = (Arc::clone(self), Arc::clone(node));
            tokio::spawn(async move { hooks.run(run, &node).await });
        }
    }

    fn end_note(&self, id: &str) {
        match self.journal.end(id) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(run = id, %error, "the note of a run could not be removed: the next vmoved runs it again");
            }
            _ => {}
        }
    }

    /// Runs it to its end, with all attempts.
    pub(crate) async fn run(self: &Arc<Self>, run: Run, node: &Arc<dyn Node>) -> HookRun {
        let Ok(_turn) = self.runs_at_once.acquire().await else { return run.kept.ended(self.never(&run)) };
        // A program acts through requests of its own, which nobody can tell from others: its hook must hear of the next event all the same.
        let acts = run.kept.hook.action.needs_vm();
        let _at_work = acts.then(|| self.loops.begin(&run.id, run.vm_name(), run.cause.clone()));
        let (begun, waited_ms) = (Mono::now(), ms(run.event.age()));
        let hook = &run.kept.hook;
        run.kept.state().at_work += 1;
        tracing::info!(hook = %hook.name, run = %run.id, event = run.event.name.as_str(), vm = run.vm_name(), waited_ms, again = run.again, "hook begins");
        let (mut attempts, mut end) = (0, Attempt::Done(run.would()));
        if !hook.dry_run {
            while attempts <= hook.retries {
                attempts += 1;
                end = self.attempt(&run, attempts, node).await;
                match &end {
                    Attempt::Failed(why) if attempts <= hook.retries => {
                        tracing::warn!(hook = %hook.name, run = %run.id, attempts, why, "an attempt has failed, another follows");
                        sleep(hook.retry_after).await;
                    }
                    _ => break,
                }
            }
        }
        let (outcome, said) = match end {
            Attempt::Done(said) if hook.dry_run => (Outcome::Would, said),
            Attempt::Done(said) => (Outcome::Done, said),
            Attempt::Failed(why) | Attempt::Over(why) => (Outcome::Failed, why),
        };
        run.leave();
        self.end_note(&run.id);
        run.kept.state().at_work -= 1;
        let (id, vm, at) = (run.id.as_str(), run.vm_name(), run.at);
        run.kept.ended(RunEnd { id, vm, at, begun, waited_ms, attempts, outcome, said })
    }

    /// The semaphore is never closed.
    fn never<'a>(&self, run: &'a Run) -> RunEnd<'a> {
        RunEnd {
            id: &run.id,
            vm: run.vm_name(),
            at: run.at,
            begun: Mono::now(),
            waited_ms: 0.0,
            attempts: 0,
            outcome: Outcome::Failed,
            said: "the daemon is about to end".to_owned(),
        }
    }

    async fn attempt(&self, run: &Run, attempt: u32, node: &Arc<dyn Node>) -> Attempt {
        match (&run.kept.hook.action, &run.vm) {
            (Action::Run { .. }, _) => match self.program(run, attempt).await {
                Ok(ended) if ended.success => Attempt::Done(ended.output.last_line()),
                Ok(ended) => {
                    Attempt::Failed(format!("ended with {}: {}", ended.status, ended.output.last_line()))
                }
                Err(error) => Attempt::Failed(error.to_string()),
            },
            (action, Some(vm)) => self.act(run, action, vm, node).await,
            (_, None) => Attempt::Over("there is no VM to do it to".to_owned()),
        }
    }

    /// An engine's work must not be cut off: it goes on in a task of its own when its time is up.
    async fn act(&self, run: &Run, action: &Action, vm: &Vm, node: &Arc<dyn Node>) -> Attempt {
        let hook = &run.kept.hook;
        let until = Instant::now() + hook.time_limit;
        loop {
            let order = Order {
                run: run.id.clone(),
                hook: hook.name.clone(),
                vm: vm.name.clone(),
                cause: run.cause.clone(),
                again: run.again,
            };
            let (node, action) = (Arc::clone(node), action.clone());
            let work = tokio::spawn(async move { node.act(&action, order).await });
            let busy = match timeout_at(until, work).await {
                Ok(Ok(Ok(said))) => return Attempt::Done(said),
                Ok(Ok(Err(ActError::Busy(why)))) => why,
                // What the hook wanted was for a VM that is here.
                Ok(Ok(Err(ActError::Gone(why)))) => return Attempt::Over(why),
                Ok(Ok(Err(ActError::Failed(why)))) => return Attempt::Failed(why),
                Ok(Err(failed)) => return Attempt::Failed(format!("its task failed ({failed})")),
                Err(_) => {
                    let why = format!(
                        "it takes longer than {:?}; it goes on, and is not waited for",
                        hook.time_limit
                    );
                    return Attempt::Over(why);
                }
            };
            if Instant::now() + LOOK_AGAIN >= until {
                return Attempt::Failed(format!(
                    "for {:?} something else was being done: {busy}",
                    hook.time_limit
                ));
            }
            tracing::debug!(hook = %hook.name, run = %run.id, busy, "waits");
            sleep(LOOK_AGAIN).await;
        }
    }

    async fn program(&self, run: &Run, attempt: u32) -> Result<Ended, ProgramError> {
        let hook = &run.kept.hook;
        let Action::Run { program, arguments } = &hook.action else {
            return Err(ProgramError::NoProgram);
        };
        let facts = run.facts(attempt);
        let program = Program {
            path: program,
            arguments,
            environment: facts.environment(self),
            input: format!("{}\n", facts.json(self)).into_bytes(),
            time_limit: hook.time_limit,
        };
        let ended = program.run().await?;
        tracing::debug!(hook = %hook.name, run = %run.id, left_out = ended.output.left_out(), output = ended.output.text(), "said");
        Ok(ended)
    }

    /// Asks a hook that may forbid. One attempt, and no turn to wait for.
    pub(crate) async fn answer(&self, run: &Run) -> Verdict {
        let (begun, waited_ms) = (Mono::now(), ms(run.event.age()));
        run.kept.state().at_work += 1;
        let verdict = if run.kept.hook.dry_run { Verdict::Allowed } else { self.asked_program(run).await };
        run.kept.state().at_work -= 1;
        let (outcome, said) = match &verdict {
            Verdict::Allowed if run.kept.hook.dry_run => (Outcome::Would, run.would()),
            Verdict::Allowed => (Outcome::Done, "allowed".to_owned()),
            Verdict::Forbidden(reason) => (Outcome::Forbidden, reason.clone()),
            Verdict::NoAnswer(why) => (Outcome::Failed, why.clone()),
        };
        let (id, vm, at) = (run.id.as_str(), run.vm_name(), run.at);
        run.kept.ended(RunEnd { id, vm, at, begun, waited_ms, attempts: 1, outcome, said });
        verdict
    }

    async fn asked_program(&self, run: &Run) -> Verdict {
        match self.program(run, 1).await {
            Ok(ended) if ended.success => Verdict::Allowed,
            Ok(ended) => {
                let reason = ended.output.last_line();
                let silent = || format!("its program ended with {} and gave no reason", ended.status);
                Verdict::Forbidden(if reason.is_empty() { silent() } else { reason })
            }
            Err(error) => Verdict::NoAnswer(error.to_string()),
        }
    }
}
