//! The node of a guest that forked itself asks the hosts of its children how these have ended, until it knows of all, and has told the
//! hosts that nobody waits any more.
//!
//! A host that cannot be reached is asked again and again. Its children keep their results there. After `from-guest-lost-after-s` they count as
//! lost: they are ended as soon as the host answers.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::Guests;
use super::family::lost;
use super::line::MAX_LINE;
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;
use crate::engine::message::{AskTicket, TicketAct, TicketEnds, ToHost, ToParent};

/// For an answer: a host waits [`super::hosted::HOLD`] for something to tell.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two questions to a host that does not answer.
const AGAIN: Duration = Duration::from_secs(1);
/// The same once its children count as lost.
const LATER: Duration = Duration::from_secs(30);
/// A host that does not answer for so long is not told any more.
const GIVE_UP: Duration = Duration::from_secs(24 * 3600);

impl Guests {
    /// What a host is to be asked next about a ticket; nothing if it knows all that it must.
    fn question(&self, ticket: &str, node: &str) -> Option<AskTicket> {
        let state = self.lock();
        let family = state.families.get(ticket).filter(|family| family.record.hosts.contains(node))?;
        let act = if family.record.kill_on.contains(node) {
            TicketAct::Kill
        } else if family.record.closed || family.living_on(Some(node)).is_empty() {
            TicketAct::Forget
        } else {
            TicketAct::Wait
        };
        Some(AskTicket { ticket: ticket.to_owned(), act, taken: family.ended_on(node) })
    }

    fn living_on(&self, ticket: &str, node: &str) -> Vec<u32> {
        let state = self.lock();
        let family = state.families.get(ticket);
        family.map(|f| f.living_on(Some(node)).iter().map(|(i, _)| *i).collect()).unwrap_or_default()
    }
}

impl ForkEngine {
    /// Asks the hosts of a ticket, each in a task of its own.
    pub(super) fn follow_hosts(self: &Arc<Self>, ticket: &str) {
        let mut state = self.guests.lock();
        let Some(family) = state.families.get(ticket) else { return };
        for node in family.record.hosts.clone() {
            if state.followed.insert((ticket.to_owned(), node.clone())) {
                tokio::spawn(self.clone().follow_host(ticket.to_owned(), node));
            }
        }
    }

    async fn follow_host(self: Arc<Self>, ticket: String, node: String) {
        let lost_after = Duration::from_secs(self.policy.from_guest_lost_after_s);
        let mut heard = Instant::now();
        loop {
            match self.ask_host(&ticket, &node).await {
                Ok(true) => heard = Instant::now(),
                Ok(false) => break,
                Err(error) => {
                    tracing::debug!(%ticket, %node, why = %error.message(), "a host is not asked for ends of children");
                    let silent = heard.elapsed();
                    if silent > GIVE_UP {
                        self.told_host(&ticket, &node).await;
                        break;
                    }
                    if silent > lost_after {
                        self.lose_host(&ticket, &node).await;
                    }
                    tokio::time::sleep(if silent > lost_after { LATER } else { AGAIN }).await;
                }
            }
        }
        self.guests.lock().followed.remove(&(ticket, node));
    }

    /// Asks a host once. False if there is nothing to ask.
    pub(super) async fn ask_host(self: &Arc<Self>, ticket: &str, node: &str) -> Result<bool, ForkError> {
        let Some(question) = self.guests.question(ticket, node) else { return Ok(false) };
        let act = question.act;
        let target = self.peers.target(node)?;
        match self.peers.ask_within(&target, ToHost::Ticket(question), ANSWER_TIMEOUT).await? {
            ToParent::Ends(ends) => self.take_ends(ticket, node, act, ends).await,
            other => return Err(self.unexpected(node, "ends of children", &other)),
        }
        Ok(true)
    }

    async fn take_ends(self: &Arc<Self>, ticket: &str, node: &str, act: TicketAct, found: TicketEnds) {
        let mut living = self.guests.living_on(ticket, node);
        let nothing_new = found.ends.is_empty();
        for (index, end) in found.ends {
            // A host speaks of its own children only.
            if living.contains(&index) {
                self.note_end(ticket, index, read_end(&end)).await;
            }
        }
        if !found.known || (found.living == 0 && nothing_new) {
            living = self.guests.living_on(ticket, node);
            for index in living {
                self.note_end(ticket, index, lost("its host has no such child")).await;
            }
        }
        match act {
            TicketAct::Wait => {}
            TicketAct::Kill => {
                if let Some(family) = self.guests.lock().families.get_mut(ticket) {
                    family.record.kill_on.remove(node);
                }
                self.write_ticket(ticket).await;
            }
            TicketAct::Forget => self.told_host(ticket, node).await,
        }
    }

    /// A host knows that nobody waits any more.
    async fn told_host(self: &Arc<Self>, ticket: &str, node: &str) {
        if let Some(family) = self.guests.lock().families.get_mut(ticket) {
            family.record.hosts.remove(node);
            family.record.kill_on.remove(node);
        }
        self.forget_if_done(ticket).await;
    }

    async fn lose_host(&self, ticket: &str, node: &str) {
        let living = self.guests.living_on(ticket, node);
        if living.is_empty() {
            return;
        }
        tracing::warn!(%ticket, %node, children = living.len(), after_s = self.policy.from_guest_lost_after_s,
            "a host cannot be reached: the children that a guest has there count as lost");
        if let Some(family) = self.guests.lock().families.get_mut(ticket) {
            family.record.kill_on.insert(node.to_owned());
        }
        self.write_ticket(ticket).await;
        for index in living {
            self.note_end(ticket, index, lost("its host cannot be reached")).await;
        }
    }
}

/// The end of a child in the words of its host, which may be any.
fn read_end(text: &str) -> Value {
    let is_end = |end: &Value| {
        end.as_object().is_some_and(|end| {
            end.len() == 1 && (end.contains_key("result") || end.get("lost").is_some_and(Value::is_string))
        })
    };
    // The line of a child, whose numbers may be longer in other words (1e15), and the word before it.
    let short = text.len() <= 8 * MAX_LINE;
    let read = short.then(|| serde_json::from_str(text).ok()).flatten().filter(is_end);
    read.unwrap_or_else(|| lost("its host told of no result that can be read"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_hosts_say_of_ends_is_read_with_care() {
        for good in
            [json!({ "result": null }), json!({ "result": { "a": [1] } }), json!({ "lost": "killed" })]
        {
            assert_eq!(read_end(&good.to_string()), good);
        }
        let long = json!({ "result": "x".repeat(8 * MAX_LINE) }).to_string();
        for bad in ["", "7", "{}", "[]", r#"{"lost":1}"#, r#"{"result":1,"index":7}"#, &long] {
            assert!(read_end(bad)["lost"].as_str().unwrap().contains("can be read"), "{bad:.80}");
        }
    }
}
