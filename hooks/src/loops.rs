//! Events that the action of a hook has caused: a hook must not trigger itself, be it over others.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmove_types::time::Mono;

use crate::Event;
use crate::node::Vm;

/// Events of an action come a moment later than its end.
const LATE: Duration = Duration::from_secs(2);

/// What hooks are doing, or did a moment ago.
#[derive(Debug, Default)]
pub(crate) struct Loops(Arc<Mutex<Vec<Work>>>);

#[derive(Debug)]
struct Work {
    id: String,
    /// None: to no VM in particular, so it may be any.
    vm: Option<String>,
    /// Hooks that have led to it, the one at work last.
    chain: Vec<String>,
    ended: Option<Mono>,
}

/// An action at work, until this is dropped.
#[derive(Debug)]
pub(crate) struct AtWork {
    list: Arc<Mutex<Vec<Work>>>,
    id: String,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(work) = list.iter_mut().find(|work| work.id == self.id) {
            work.ended = Some(Mono::now());
        }
    }
}

impl Loops {
    pub(crate) fn begin(&self, id: &str, vm: Option<&str>, chain: Vec<String>) -> AtWork {
        let (id, vm) = (id.to_owned(), vm.map(str::to_owned));
        let work = Work { id: id.clone(), vm, chain, ended: None };
        self.lock().push(work);
        AtWork { list: Arc::clone(&self.0), id }
    }

    /// Hooks whose actions on a VM are at work, or were a moment ago.
    pub(crate) fn at_work_on(&self, vm: &str) -> Vec<String> {
        let mut list = self.lock();
        list.retain(|work| work.ended.is_none_or(|at| Mono::now().since(at) < LATE));
        let on_it = |work: &&Work| work.vm.as_ref().is_none_or(|name| name == vm);
        let mut chain: Vec<String> = Vec::new();
        for hook in list.iter().filter(on_it).flat_map(|work| &work.chain) {
            if !chain.contains(hook) {
                chain.push(hook.clone());
            }
        }
        chain
    }

    /// Hooks whose actions have led to an event.
    pub(crate) fn cause(&self, event: &Event, vm: Option<&Vm>) -> Vec<String> {
        let mut chain = event.cause.clone();
        let Some(vm) = vm else { return chain };
        // A copy of a guest does what the guest does: it panics, too.
        let made_by = vm.made_by.iter().cloned();
        let at_work = if event.name.can_be_caused() { self.at_work_on(&vm.name) } else { Vec::new() };
        for hook in made_by.chain(at_work) {
            if !chain.contains(&hook) {
                chain.push(hook);
            }
        }
        chain
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Work>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
