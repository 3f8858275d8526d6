//! Requests of guests, answered.

use std::sync::Arc;

use serde_json::{Value, json};

use super::LOOK_INTERVAL;
use super::family::{Family, MAX_TICKETS};
use super::limit::{self, Share};
use super::line::{Line, MAX_LINE, Refusal, Request, parse};
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;
use vmove_types::fork::ForkRequest;
use vmove_types::problem::Code;

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
            Ok(_) if !self.policy.from_guest => {
                Err(Refusal::new(Code::Forbidden, "this host lets no guest fork itself"))
            }
            Ok(Request::Fork(count)) => self.fork_for(vm, count).await,
            Ok(Request::Join(ticket)) => self.join_for(vm, &ticket).await,
            Ok(Request::Kill(ticket)) => self.kill_for(vm, &ticket).await,
            Ok(Request::Exit(ticket, result)) => match self.exit_of(vm, &ticket, &result) {
                Ok(()) => {
                    self.end_child(vm).await;
                    return None;
                }
                Err(refusal) => Err(refusal),
            },
            Err(refusal) => Err(refusal),
        };
        Some(done.unwrap_or_else(|refusal| {
            tracing::debug!(vm = %vm, why = %refusal.line(), "a guest's request is refused");
            refusal.line()
        }))
    }

    async fn fork_for(self: &Arc<Self>, vm: &str, count: usize) -> Result<Value, Refusal> {
        let members = self.members.list();
        if members.iter().any(|member| member.vm == vm && member.parent.is_some()) {
            return Err(Refusal::new(Code::Forbidden, "a child cannot fork itself"));
        }
        let lives = |name: &str| self.registry.vms().get(name).is_ok();
        let living = members.iter().filter(|m| m.parent.as_deref() == Some(vm) && lives(&m.vm)).count();
        let most = self.policy.max_children;
        if count > most.saturating_sub(living) {
            let text = format!("{count} children were asked for and {living} live, {most} are allowed");
            return Err(Refusal::new(Code::Forbidden, text));
        }
        let ticket = uuid::Uuid::new_v4().simple().to_string();
        {
            let _turn = self.guests.admission.lock().await;
            let asked = self.within_limits(vm, count)?;
            let mut state = self.guests.lock();
            if state.families.values().filter(|family| family.parent == vm).count() >= MAX_TICKETS {
                let text = format!("{MAX_TICKETS} tickets are open: join or kill one");
                return Err(Refusal::new(Code::Forbidden, text));
            }
            state.families.insert(ticket.clone(), Family::new(vm, asked));
        }
        tracing::info!(vm = %vm, count, fork = %ticket, "a guest forks itself");
        let request = ForkRequest {
            vm: Some(vm.to_owned()),
            count,
            id: Some(ticket.clone()),
            ..ForkRequest::default()
        };
        // Not cancelled in the middle, whatever becomes of this port.
        let done = tokio::spawn(self.clone().create(request)).await;
        if let Some(family) = self.guests.lock().families.get_mut(&ticket) {
            family.under_way = None;
        }
        match done.unwrap_or_else(|error| Err(ForkError::Task(error.into()))) {
            Ok(report) => Ok(self.told_parent(&ticket, &report)),
            Err(error) => {
                self.guests.lock().families.remove(&ticket);
                tracing::warn!(vm = %vm, fork = %ticket, why = %error.message(), "a guest could not be forked as it asked");
                // Paths and names of the host are none of the guest's business.
                let text = match error.code() {
                    Code::BadOption | Code::Forbidden => error.message(),
                    _ => "the host could not do it, and has noted why".to_owned(),
                };
                Err(Refusal::new(error.code(), text))
            }
        }
    }

    /// What a guest asks for, if this host has so much left for guests that fork themselves.
    fn within_limits(&self, vm: &str, count: usize) -> Result<Share, Refusal> {
        let memory = |name: &str| {
            let record = self.registry.vms().get(name).ok()?;
            Some(record.ram.iter().map(|ram| ram.size).sum())
        };
        // First: a fork that ends meanwhile is then counted as under way, and not left out.
        let under_way: Vec<(String, Share)> = {
            let state = self.guests.lock();
            let all = state.families.iter().filter_map(|(id, family)| Some((id.clone(), family.under_way?)));
            all.collect()
        };
        let asked = Share::of(count, memory(vm).unwrap_or_default());
        let taken = limit::taken(&under_way, &self.members.list(), memory);
        limit::admit(&self.policy, taken, asked).map(|()| asked).inspect_err(|refusal| {
            tracing::warn!(vm = %vm, count, taken = taken.children, taken_mib = taken.bytes >> 20,
                why = %refusal.line(), "a guest may not fork itself as it asked");
        })
    }

    /// Waits for the ends of all children of a ticket. They are gone then: as many may be asked for again.
    async fn join_for(self: &Arc<Self>, vm: &str, ticket: &str) -> Result<Value, Refusal> {
        loop {
            let changes = {
                let mut state = self.guests.lock();
                let family = state.families.get_mut(ticket).filter(|family| family.parent == vm);
                let family = family.ok_or_else(unknown)?;
                for child in family.living() {
                    if self.registry.vms().get(&child).is_err() {
                        family.ended(&child, || json!({ "lost": "it ended without a result" }));
                    }
                }
                let gone = family.names().all(|child| self.registry.vms().get(child).is_err());
                if let Some(children) = family.results().filter(|_| gone) {
                    state.families.remove(ticket);
                    return Ok(json!({ "joined": ticket, "children": children }));
                }
                // Registered before the lock is let go of: no end can come in between.
                let changes = family.changes();
                let mut told = Box::pin(changes.notified_owned());
                told.as_mut().enable();
                told
            };
            let _ = tokio::time::timeout(LOOK_INTERVAL, changes).await;
            if self.registry.vms().get(vm).is_err() {
                // Nobody is left to tell.
                return Err(unknown());
            }
        }
    }

    async fn kill_for(self: &Arc<Self>, vm: &str, ticket: &str) -> Result<Value, Refusal> {
        let living = {
            let state = self.guests.lock();
            let family = state.families.get(ticket).filter(|family| family.parent == vm);
            family.ok_or_else(unknown)?.living()
        };
        for child in &living {
            if let Some(family) = self.guests.lock().families.get_mut(ticket) {
                family.ended(child, || json!({ "lost": "killed" }));
            }
            self.end_child(child).await;
        }
        Ok(json!({ "killed": ticket, "children": living.len() }))
    }

    fn exit_of(&self, vm: &str, ticket: &str, result: &Value) -> Result<(), Refusal> {
        let mut state = self.guests.lock();
        let family = state.families.get_mut(ticket).filter(|family| family.has(vm));
        family.ok_or_else(unknown)?.ended(vm, || json!({ "result": result }));
        Ok(())
    }

    async fn end_child(&self, vm: &str) {
        if let Err(error) = self.registry.stop(vm, true).await {
            tracing::warn!(child = %vm, %error, "could not end a child that is done");
        }
        self.guests.lock().families.values().filter(|family| family.has(vm)).for_each(Family::tell);
    }
}

fn unknown() -> Refusal {
    Refusal::new(Code::BadRequest, "no such ticket of this machine")
}
