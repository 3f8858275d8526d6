//! Hooks that somebody waits for: they may forbid what was asked for.

use std::sync::Arc;

use crate::config::IfItFails;
use crate::node::Vm;
use crate::run::{Run, Verdict};
use crate::{Event, Hooks};

/// A hook forbids it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("hook \"{hook}\" forbids it: {reason}")]
pub struct ForbiddenByHook {
    /// The hook.
    pub hook: String,
    /// Its reason: the last line that its program has said.
    pub reason: String,
}

impl Hooks {
    /// Asks every hook that waits for this event, one after the other. Takes as long as they do, each at most its time limit.
    ///
    /// # Errors
    /// The first that forbids it. One that gives no answer (missing, hangs, crashes) does so only with `if-it-fails = "forbid"`.
    pub async fn ask(self: &Arc<Self>, event: Event) -> Result<(), ForbiddenByHook> {
        if !self.wants(&event.name) {
            return Ok(());
        }
        let labels = event.labels.clone().unwrap_or_default();
        let vm = event.vm.clone().map(|name| Vm { name, labels, made_by: None });
        let event = Arc::new(event);
        for kept in &self.hooks {
            let hook = &kept.hook;
            let Ok(cause) = self.holds(kept, &event, vm.as_ref()) else { continue };
            let run = Run::new(Arc::clone(kept), Arc::clone(&event), vm.clone(), cause);
            let reason = match self.answer(&run).await {
                Verdict::Allowed => continue,
                Verdict::Forbidden(reason) => reason,
                Verdict::NoAnswer(why) if hook.if_it_fails == IfItFails::Forbid => why,
                Verdict::NoAnswer(why) => {
                    tracing::warn!(hook = %hook.name, why, "a hook gave no answer: what was asked for goes on");
                    continue;
                }
            };
            return Err(ForbiddenByHook { hook: hook.name.clone(), reason });
        }
        Ok(())
    }
}
