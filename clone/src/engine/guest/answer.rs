//! Requests of guests, answered.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::LOOK_INTERVAL;
use super::family::{Family, MAX_TICKETS, lost};
use super::line::{Line, MAX_LINE, Refusal, Request, parse};
use super::store::Waits;
use super::tickets::new_ticket;
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;
use crate::engine::options::SELF;
use crate::engine::parent::Division;
use vmove_types::fork::ForkRequest;
use vmove_types::fork_report::ForkReport;
use vmove_types::problem::Code;

/// A host that does not answer for so long ends its children later.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

impl ForkEngine {
    /// What a line is answered with; `None` if the VM has ended by it.
    pub(super) async fn answer(self: &Arc<Self>, vm: &str, line: Line) -> Option<Value> {
        let asked = match line {
            Line::Whole(line) => parse(&line),
            Line::TooLong => {
                Err(Refusal::new(Code::BadRequest, format!("a line has {MAX_LINE} bytes at most")))
            }
            Line::TooFast => Err(Refusal::new(Code::Busy, "too many lines: wait for each answer")),
        };
        let done = match asked {
            Ok(_) if !self.policy.from_guest => Err(Refusal::not_here()),
            Ok(Request::Fork(count)) => self.fork_for(vm, count).await,
            Ok(Request::Join(ticket)) => self.join_for(vm, &ticket).await,
            Ok(Request::Kill(ticket)) => self.kill_for(vm, &ticket).await,
            Ok(Request::Exit(ticket, result)) => match self.exit_of(vm, &ticket, &result).await {
                Ok(()) => {
                    self.end_child(vm).await;
                    return None;
                }
                Err(refusal) => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        };
        Some(told(vm, done))
    }

    /// What a guest is told that asked an earlier life of the daemon.
    pub(super) async fn answer_again(self: &Arc<Self>, vm: &str, waits: Waits) -> Value {
        let done = match waits {
            Waits::Line(line) => Ok(line),
            Waits::Join(ticket) => self.join_for(vm, &ticket).await,
            Waits::Kill(ticket) => self.kill_for(vm, &ticket).await,
            Waits::Fork(ticket) if self.guests.is_of(&ticket, vm) => {
                Ok(self.told_parent(&ticket, None).await)
            }
            Waits::Fork(_) => Err(Refusal::new(
                Code::ForkFailed,
                "the host's daemon was ended before there were children: ask again",
            )),
        };
        told(vm, done)
    }

    async fn fork_for(self: &Arc<Self>, vm: &str, count: usize) -> Result<Value, Refusal> {
        // A child may run before all of its memory is there; it is forked when that is.
        while self.lock().fetching.contains_key(vm) {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        let ticket = uuid::Uuid::new_v4().simple().to_string();
        let request = ForkRequest {
            vm: Some(vm.to_owned()),
            count,
            id: Some(ticket.clone()),
            nodes: self.nodes_for_guests(),
            ..ForkRequest::default()
        };
        self.admit_fork_of(vm, &ticket, &request).await?;
        self.owe(vm, Waits::Fork(ticket.clone()));
        tracing::info!(vm = %vm, count, fork = %ticket, "a guest forks itself");
        // Not cancelled in the middle, whatever becomes of this port.
        let done = tokio::spawn(self.clone().create(request)).await;
        match done.unwrap_or_else(|error| Err(ForkError::Task(error.into()))) {
            Ok(report) => Ok(self.told_parent(&ticket, Some(&report)).await),
            Err(error) => {
                self.close_ticket(&ticket, true).await;
                tracing::warn!(vm = %vm, fork = %ticket, why = %error.message(), "a guest could not be forked as it asked");
                // Paths and names of the host are none of the guest's business.
                let text = match error.code() {
                    Code::BadOption | Code::Forbidden if !matches!(error, ForkError::NoHost(_)) => {
                        error.message()
                    }
                    _ => "the host could not do it, and has noted why".to_owned(),
                };
                Err(Refusal::new(error.code(), text))
            }
        }
    }

    /// The nodes that children of guests are dealt out to; none: this one alone.
    fn nodes_for_guests(&self) -> Vec<String> {
        let mut nodes: Vec<String> = Vec::new();
        for node in &self.policy.from_guest_to {
            let node = if node == SELF { &self.node } else { node };
            if !nodes.contains(node) {
                nodes.push(node.clone());
            }
        }
        if nodes == [self.node.clone()] { Vec::new() } else { nodes }
    }

    /// Enters a ticket for what a guest asks for, if it may have that.
    async fn admit_fork_of(&self, vm: &str, ticket: &str, request: &ForkRequest) -> Result<(), Refusal> {
        let lineage = self.below(vm)?;
        let division = Division::of(request, &self.node);
        let here = division.map_err(|wrong| Refusal::new(Code::BadOption, wrong.to_string()))?.here;
        let _turn = self.guests.admission.lock().await;
        let share = self.admit_guests(&lineage, request.count, (vm, here, self.memory_of(vm)))?;
        let mut state = self.guests.lock();
        if state.families.values().filter(|family| family.is_of(vm)).count() >= MAX_TICKETS {
            let text = format!("{MAX_TICKETS} tickets are open: join one");
            return Err(Refusal::new(Code::Forbidden, text));
        }
        let record = new_ticket(ticket, vm, None, lineage);
        state.families.insert(ticket.to_owned(), Family::new(record, request.count, share));
        Ok(())
    }

    /// What a parent is told of its fork, which is over; without a report, that was in an earlier life of the daemon.
    async fn told_parent(self: &Arc<Self>, ticket: &str, report: Option<&ForkReport>) -> Value {
        let mut failed = Vec::new();
        let size = {
            let mut state = self.guests.lock();
            let Some(family) = state.families.get_mut(ticket) else { return Value::Null };
            family.under_way = None;
            let here = report.iter().flat_map(|report| &report.children).filter(|c| c.error.is_some());
            failed.extend(here.filter_map(|child| family.index_of(&child.name)));
            family.record.size
        };
        for index in failed {
            self.note_end(ticket, index, lost("it did not run")).await;
        }
        self.follow_hosts(ticket);
        json!({ "role": "parent", "index": 0, "size": size, "ticket": ticket })
    }

    /// Waits for the ends of all children of a ticket. They are gone then: as many may be asked for again.
    async fn join_for(self: &Arc<Self>, vm: &str, ticket: &str) -> Result<Value, Refusal> {
        if !self.guests.is_of(ticket, vm) {
            return Err(unknown());
        }
        self.owe(vm, Waits::Join(ticket.to_owned()));
        loop {
            // Registered before anything is looked at: no end can come in between.
            let changes = self.guests.changes(ticket).ok_or_else(unknown)?;
            let mut changed = Box::pin(changes.notified_owned());
            changed.as_mut().enable();
            self.note_those_that_are_gone(ticket).await;
            let results = {
                let state = self.guests.lock();
                let family = state.families.get(ticket).filter(|family| family.is_of(vm));
                let family = family.ok_or_else(unknown)?;
                let gone = family.names_here().all(|child| self.registry.vms().get(child).is_err());
                family.results().filter(|_| gone)
            };
            if let Some(children) = results {
                let answer = json!({ "joined": ticket, "children": children });
                // Before the results are forgotten: whatever becomes of this port, the guest gets them.
                self.owe(vm, Waits::Line(answer.clone()));
                self.close_ticket(ticket, false).await;
                return Ok(answer);
            }
            let _ = tokio::time::timeout(LOOK_INTERVAL, changed).await;
            if self.registry.vms().get(vm).is_err() {
                // Nobody is left to tell.
                return Err(unknown());
            }
        }
    }

    async fn kill_for(self: &Arc<Self>, vm: &str, ticket: &str) -> Result<Value, Refusal> {
        let (here, hosts, living) = {
            let mut state = self.guests.lock();
            let family = state.families.get_mut(ticket).filter(|family| family.is_of(vm));
            let family = family.ok_or_else(unknown)?;
            let hosts = family.record.hosts.clone();
            family.record.kill_on.extend(hosts.iter().cloned());
            (family.living_on(None), hosts, family.living().len())
        };
        self.owe(vm, Waits::Kill(ticket.to_owned()));
        self.write_ticket(ticket).await;
        // Children elsewhere that have a result keep it.
        let mut asks = JoinSet::new();
        for node in hosts {
            let (engine, ticket) = (self.clone(), ticket.to_owned());
            asks.spawn(async move {
                let turn = engine.ask_host(&ticket, &node);
                let _ = tokio::time::timeout(KILL_PATIENCE, turn).await;
            });
        }
        for (index, child) in &here {
            self.note_end(ticket, *index, lost("killed")).await;
            self.end_child(child).await;
        }
        asks.join_all().await;
        for index in self.guests.living(ticket) {
            self.note_end(ticket, index, lost("killed")).await;
        }
        self.follow_hosts(ticket);
        Ok(json!({ "killed": ticket, "children": living }))
    }

    async fn exit_of(&self, vm: &str, ticket: &str, result: &Value) -> Result<(), Refusal> {
        let index = {
            let state = self.guests.lock();
            state.families.get(ticket).and_then(|family| family.index_of(vm))
        };
        if let Some(index) = index {
            self.note_end(ticket, index, json!({ "result": result })).await;
            return Ok(());
        }
        // Nobody here knows the ticket, so nobody waits for the child any more. It ends as it asks to.
        if self.guests.lock().families.contains_key(ticket) {
            return Err(unknown());
        }
        let record = self.registry.vms().get(vm).ok();
        let member = record.and_then(|record| self.members.get(&record));
        let is_child = member.is_some_and(|m| m.by_guest && m.parent.is_some());
        if is_child { Ok(()) } else { Err(unknown()) }
    }

    /// Ends a child, and all that it has forked itself: nobody could join those.
    pub(super) fn end_child<'a>(
        self: &'a Arc<Self>,
        vm: &'a str,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            let Some(_ending) = self.guests.begin_to_end(vm) else { return };
            for ticket in self.guests.tickets_of(vm) {
                self.close_ticket(&ticket, true).await;
            }
            if let Err(error) = self.registry.stop(vm, true).await {
                tracing::warn!(child = %vm, %error, "could not end a child that is done");
            }
            self.guests.store.told(vm);
            self.guests.lock().families.values().filter(|family| family.has(vm)).for_each(Family::tell);
        })
    }
}

fn told(vm: &str, done: Result<Value, Refusal>) -> Value {
    done.unwrap_or_else(|refusal| {
        tracing::debug!(vm = %vm, why = %refusal.line(), "a guest's request is refused");
        refusal.line()
    })
}

fn unknown() -> Refusal {
    Refusal::new(Code::BadRequest, "no such ticket of this machine")
}
