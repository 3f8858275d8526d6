//! Tickets of a node: entered, written down, and closed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;
use vmove_node::blocking::run_blocking;

use super::Guests;
use super::family::{Family, TicketRecord, lost};
use super::store::Waits;
use crate::engine::ForkEngine;
use crate::engine::message::Numbers;
use crate::record::Lineage;

/// A ticket without children yet; `home`: the node of its parent, if that is another one.
pub fn new_ticket(ticket: &str, parent: &str, home: Option<&str>, lineage: Lineage) -> TicketRecord {
    TicketRecord {
        ticket: ticket.to_owned(),
        parent: parent.to_owned(),
        home: home.map(str::to_owned),
        lineage,
        children: BTreeMap::new(),
        size: 0,
        hosts: BTreeSet::new(),
        kill_on: BTreeSet::new(),
        closed: false,
    }
}

/// A child is being ended.
pub(super) struct Ending<'a>(&'a Guests, &'a str);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.lock().ending.remove(self.1);
    }
}

impl Guests {
    /// Whether VM `parent` of this node may join it.
    pub(super) fn is_of(&self, ticket: &str, parent: &str) -> bool {
        self.lock().families.get(ticket).is_some_and(|family| family.is_of(parent))
    }

    /// Those that a VM of this node may join.
    pub(super) fn tickets_of(&self, parent: &str) -> Vec<String> {
        let state = self.lock();
        state.families.iter().filter(|(_, family)| family.is_of(parent)).map(|(t, _)| t.clone()).collect()
    }

    /// `None` if somebody ends this child already.
    pub(super) fn begin_to_end<'a>(&'a self, vm: &'a str) -> Option<Ending<'a>> {
        let is_first = self.lock().ending.insert(vm.to_owned());
        // Made only then: to drop one takes the child off the list, and needs the lock.
        is_first.then(|| Ending(self, vm))
    }

    pub(super) fn changes(&self, ticket: &str) -> Option<Arc<Notify>> {
        Some(self.lock().families.get(ticket)?.changes())
    }

    pub(super) fn living(&self, ticket: &str) -> Vec<u32> {
        self.lock().families.get(ticket).map(|family| family.living()).unwrap_or_default()
    }

    /// How long all children of a ticket have ended.
    pub(super) fn over_for(&self, ticket: &str) -> Duration {
        let state = self.lock();
        state.families.get(ticket).and_then(Family::over).map_or(Duration::ZERO, |over| over.elapsed())
    }

    /// The fork is over: its children run, or never will.
    pub(in crate::engine) fn made(&self, ticket: &str) {
        if let Some(family) = self.lock().families.get_mut(ticket) {
            family.under_way = None;
            family.tell();
        }
    }
}

impl ForkEngine {
    /// Takes up the tickets that an earlier life of the daemon has left.
    pub(in crate::engine) fn recover_tickets(self: &Arc<Self>) {
        let store = &self.guests.store;
        store.sweep(|vm| self.registry.vms().get(vm).is_ok());
        for family in store.read_all() {
            let ticket = family.record.ticket.clone();
            tracing::info!(%ticket, parent = %family.record.parent, children = family.record.children.len(),
                "a ticket of a guest is taken up");
            self.guests.lock().families.insert(ticket.clone(), family);
            self.follow_hosts(&ticket);
        }
    }

    /// For a fork that a guest asked for and that other hosts take part in: gives each child its number, and writes down where it is, before
    /// any of them runs. `here`: names in order. Returns for each host what its children are told.
    pub(in crate::engine) async fn number_children(
        &self,
        fork: &str,
        here: &[String],
        hosts: &[(String, Vec<String>)],
    ) -> Option<Vec<Numbers>> {
        let mut numbers = Vec::new();
        {
            let mut state = self.guests.lock();
            let family = state.families.get_mut(fork)?;
            let all = here.len() + hosts.iter().map(|(_, children)| children.len()).sum::<usize>();
            let size = u32::try_from(all).unwrap_or(u32::MAX);
            let mut next = 1..;
            here.iter().zip(&mut next).for_each(|(child, index)| family.add(index, child, None));
            for (node, children) in hosts {
                let first = next.start;
                children.iter().zip(&mut next).for_each(|(child, i)| family.add(i, child, Some(node)));
                numbers.push(Numbers { first, size });
            }
            family.record.size = size;
        }
        self.write_ticket(fork).await;
        Some(numbers)
    }

    /// Notes what the guest of a VM waits for, in case this daemon is killed.
    pub(super) fn owe(&self, vm: &str, waits: Waits) {
        let Ok(record) = self.registry.vms().get(vm) else { return };
        if let Err(error) = self.guests.store.owe(&record, waits) {
            tracing::warn!(%vm, %error, "what a guest waits for cannot be written down: a daemon started anew would not answer it");
        }
    }

    /// Writes a ticket down as it is now.
    pub(super) async fn write_ticket(&self, ticket: &str) {
        let _turn = self.guests.writing.lock().await;
        let Some(record) = self.guests.lock().families.get(ticket).map(|family| family.record.clone()) else {
            return;
        };
        let store = self.guests.store.clone();
        let written = run_blocking(move || store.put(&record)).await;
        if let Some(why) = why_not(written) {
            tracing::warn!(%ticket, why, "a ticket of a guest cannot be written down: it ends with this daemon");
        }
    }

    /// Notes how a child has ended, on the disk before anybody is told; the first word counts.
    pub(super) async fn note_end(&self, ticket: &str, index: u32, end: Value) {
        let _turn = self.guests.writing.lock().await;
        if self.guests.lock().families.get(ticket).is_none_or(|family| family.has_ended(index)) {
            return;
        }
        let (store, id, value) = (self.guests.store.clone(), ticket.to_owned(), end.clone());
        let written = run_blocking(move || store.put_end(&id, index, &value)).await;
        if let Some(why) = why_not(written) {
            tracing::warn!(%ticket, index, why, "how a child ended cannot be written down: that is known as long as this daemon lives");
        }
        if let Some(family) = self.guests.lock().families.get_mut(ticket) {
            family.ended(index, end);
        }
    }

    /// Children here that have ended without a word.
    pub(super) async fn note_those_that_are_gone(&self, ticket: &str) {
        let living = {
            let state = self.guests.lock();
            let family = state.families.get(ticket).filter(|family| family.under_way.is_none());
            family.map(|family| family.living_on(None)).unwrap_or_default()
        };
        for (index, child) in living {
            if self.registry.vms().get(&child).is_err() {
                self.note_end(ticket, index, lost("it ended without a result")).await;
            }
        }
    }

    /// Nobody waits for a ticket any more; with `end`, its children are ended. It is forgotten when the hosts have been told.
    pub(super) async fn close_ticket(self: &Arc<Self>, ticket: &str, end: bool) {
        let here = {
            let mut state = self.guests.lock();
            let Some(family) = state.families.get_mut(ticket) else { return };
            family.record.closed = true;
            family.under_way = None;
            if end {
                family.record.kill_on = family.record.hosts.clone();
            }
            family.tell();
            if end { family.living_on(None) } else { Vec::new() }
        };
        self.forget_if_done(ticket).await;
        self.follow_hosts(ticket);
        for (_, child) in here {
            self.end_child(&child).await;
        }
    }

    /// Forgets a ticket that is closed and that no host keeps results for; otherwise writes down how it stands.
    pub(super) async fn forget_if_done(&self, ticket: &str) {
        let done = |family: &Family| family.record.closed && family.record.hosts.is_empty();
        let done = self.guests.lock().families.get(ticket).is_some_and(done);
        if done { self.forget_ticket(ticket).await } else { self.write_ticket(ticket).await }
    }

    pub(super) async fn forget_ticket(&self, ticket: &str) {
        let _turn = self.guests.writing.lock().await;
        self.guests.lock().families.remove(ticket);
        let (store, id) = (self.guests.store.clone(), ticket.to_owned());
        if let Some(why) = why_not(run_blocking(move || store.remove(&id)).await) {
            tracing::warn!(%ticket, why, "what was noted of a ticket is left");
        }
    }
}

/// What is said of something that was not written.
fn why_not<E: std::fmt::Display>(written: Result<std::io::Result<()>, E>) -> Option<String> {
    match written {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when a guest kills a child that exits at this moment.
    #[test]
    fn a_child_is_ended_by_one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (say, said) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let guests = Guests::new(dir.path());
            let first = guests.begin_to_end("web.1");
            let others = [guests.begin_to_end("web.1").is_some(), guests.begin_to_end("web.2").is_some()];
            say.send((first.is_some(), others)).unwrap();
            drop(first);
            say.send((guests.begin_to_end("web.1").is_some(), [false; 2])).unwrap();
        });
        // A lock that is taken twice would be waited for without end.
        let patience = Duration::from_secs(20);
        assert_eq!(said.recv_timeout(patience), Ok((true, [false, true])));
        assert_eq!(said.recv_timeout(patience), Ok((true, [false; 2])));
    }
}
