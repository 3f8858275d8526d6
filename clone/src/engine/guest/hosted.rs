//! Children that guests of other nodes have here: whether they may come, and what their node is told of their ends.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use vmove_types::problem::Code;

use super::LOOK_INTERVAL;
use super::family::{Family, lost};
use super::line::Refusal;
use super::tickets::new_ticket;
use crate::engine::ForkEngine;
use crate::engine::error::{self, ForkError};
use crate::engine::message::{AskTicket, Numbers, OfGuest, Order, TicketAct, TicketEnds};
use crate::record::Lineage;

/// For something to tell.
pub const HOLD: Duration = Duration::from_secs(10);
/// Bytes of ends in one answer, beyond which the others come with the next one.
const MOST: usize = 1 << 20;
/// Results that nobody has fetched are kept for so long after the last child has ended.
const KEPT: Duration = Duration::from_secs(24 * 3600);

impl ForkEngine {
    /// Whether the children of an order may come, if a guest has asked for them. They count from now on.
    pub(in crate::engine) async fn admit_order(&self, order: &Order) -> Result<(), ForkError> {
        let Some(OfGuest { root, depth }) = &order.guest else { return Ok(()) };
        if !self.policy.from_guest {
            return Err(refused(Refusal::not_here()));
        }
        let lineage = Lineage { root: root.clone(), depth: *depth };
        self.not_too_deep(&lineage).map_err(refused)?;
        let count = order.indexes.len();
        let _turn = self.guests.admission.lock().await;
        let asked = (order.parent.as_str(), count, order.guest_bytes);
        let share = self.admit_guests(&lineage, count, asked).map_err(refused)?;
        let mut state = self.guests.lock();
        if state.families.contains_key(&order.fork) {
            return Err(ForkError::IdTaken(order.fork.clone()));
        }
        let record = new_ticket(&order.fork, &order.parent, Some(&order.node), lineage);
        state.families.insert(order.fork.clone(), Family::new(record, count, share));
        Ok(())
    }

    /// Gives the children of an order their numbers, and writes them down, before any of them runs.
    pub(in crate::engine) async fn number_hosted(
        &self,
        order: &Order,
        numbers: Option<Numbers>,
    ) -> Result<(), ForkError> {
        if order.guest.is_none() {
            return Ok(());
        }
        let Some((numbers, all)) = numbers.and_then(|n| Some((n, range(n, order.indexes.len())?))) else {
            let text = format!("expected numbers for {} children, found {numbers:?}", order.indexes.len());
            return Err(refused(Refusal::new(Code::BadRequest, text)));
        };
        if let Some(family) = self.guests.lock().families.get_mut(&order.fork) {
            for (index, (_, name)) in all.zip(order.children()) {
                family.add(index, &name, None);
            }
            family.record.size = numbers.size;
        }
        self.write_ticket(&order.fork).await;
        Ok(())
    }

    /// The part of this node in a fork has failed: no child of it lives. What some have left before is kept.
    pub(in crate::engine) async fn order_failed(&self, order: &Order) {
        if order.guest.is_none() {
            return;
        }
        self.guests.made(&order.fork);
        let left =
            self.guests.lock().families.get(&order.fork).is_some_and(|f| f.ends_but(&[]).next().is_some());
        if !left {
            self.forget_ticket(&order.fork).await;
        }
    }

    /// Answers the node of a guest that has children here.
    pub(in crate::engine) async fn answer_ticket(self: &Arc<Self>, ask: AskTicket) -> TicketEnds {
        let AskTicket { ticket, act, taken } = ask;
        let is_hosted = |family: &&Family| family.record.home.is_some();
        if self.guests.lock().families.get(&ticket).filter(is_hosted).is_none() {
            return TicketEnds::default();
        }
        match act {
            TicketAct::Wait => self.wait_for_ends(&ticket, &taken).await,
            TicketAct::Kill => {
                let living =
                    self.guests.lock().families.get(&ticket).map(|f| f.living_on(None)).unwrap_or_default();
                for (index, child) in living {
                    self.note_end(&ticket, index, lost("killed")).await;
                    self.end_child(&child).await;
                }
                self.ends(&ticket, &taken)
            }
            TicketAct::Forget => {
                let ends = self.ends(&ticket, &taken);
                self.forget_ticket(&ticket).await;
                ends
            }
        }
    }

    async fn wait_for_ends(&self, ticket: &str, taken: &[u32]) -> TicketEnds {
        let begun = Instant::now();
        loop {
            let Some(changes) = self.guests.changes(ticket) else { return TicketEnds::default() };
            let mut changed = Box::pin(changes.notified_owned());
            changed.as_mut().enable();
            self.note_those_that_are_gone(ticket).await;
            let ends = self.ends(ticket, taken);
            if !ends.ends.is_empty() || ends.living == 0 || begun.elapsed() > HOLD {
                return ends;
            }
            let _ = tokio::time::timeout(LOOK_INTERVAL, changed).await;
        }
    }

    fn ends(&self, ticket: &str, taken: &[u32]) -> TicketEnds {
        let state = self.guests.lock();
        let Some(family) = state.families.get(ticket) else { return TicketEnds::default() };
        let mut living = if family.under_way.is_some() { family.asked } else { family.living().len() };
        let mut found = TicketEnds { known: true, ..TicketEnds::default() };
        let mut bytes = 0;
        for (index, end) in family.ends_but(taken) {
            // Told when it is gone: as many may be asked for again.
            if family.name_here(index).is_some_and(|vm| self.registry.vms().get(vm).is_ok()) {
                living += 1;
                continue;
            }
            let text = end.to_string();
            bytes += text.len();
            found.ends.push((index, text));
            if bytes > MOST {
                break;
            }
        }
        found.living = u32::try_from(living).unwrap_or(u32::MAX);
        found
    }

    /// Forgets results that nobody has fetched for long.
    pub(super) async fn expire_hosted(&self) {
        let hosted: Vec<String> = {
            let state = self.guests.lock();
            let hosted = state.families.iter().filter(|(_, family)| family.record.home.is_some());
            hosted.map(|(ticket, _)| ticket.clone()).collect()
        };
        for ticket in hosted {
            self.note_those_that_are_gone(&ticket).await;
            if self.guests.over_for(&ticket) > KEPT {
                tracing::warn!(%ticket, "results of children were never fetched by the node of their parent: they are forgotten");
                self.forget_ticket(&ticket).await;
            }
        }
    }
}

/// What the asking node is told.
fn refused(why: Refusal) -> ForkError {
    let (code, message) = why.into_parts();
    error::Refusal { code, message }.into()
}

/// The numbers of so many children, if they are among those of all.
fn range(numbers: Numbers, count: usize) -> Option<RangeInclusive<u32>> {
    let Numbers { first, size } = numbers;
    let last = first.checked_add(u32::try_from(count).ok()?)?.checked_sub(1)?;
    (first >= 1 && last <= size).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_another_node_are_among_those_of_all_children() {
        let of = |first, size, count| range(Numbers { first, size }, count);
        assert_eq!(of(3, 8, 2), Some(3..=4));
        assert_eq!(of(7, 8, 2), Some(7..=8));
        for (first, size, count) in [(0, 8, 2), (8, 8, 2), (u32::MAX, u32::MAX, 2), (1, 0, 1)] {
            assert_eq!(of(first, size, count), None, "{first} of {size}");
        }
    }
}
