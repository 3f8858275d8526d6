//! Children of guests of other nodes that are prepared on this one. They are kept while the daemon of the guest's node lives and wants
//! them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use vmove_node::peer::Channel;
use vmove_types::problem::chain;

use crate::CloneError;
use crate::child::Base;
use crate::engine::ForkEngine;
use crate::engine::children::{Planned, Prepared, discard_all, finish_all};
use crate::engine::error::ForkError;
use crate::engine::message::{Kind, Order, ToHost, ToParent, WarmOrder};
use crate::engine::templates::same_qemu;
use crate::identity::child_name;

/// A parent's daemon that says nothing for so long is gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// Prepared children of a guest of another node on this one.
#[derive(Debug)]
pub struct HostedSet {
    order: WarmOrder,
    /// Children whose QEMUs are being started.
    starting: usize,
    prepared: Vec<Prepared>,
}

impl HostedSet {
    /// Takes the place of what an order asks for, before anything is started. `allowed` is asked about the children of all sets.
    fn reserve(
        sets: &mut HashMap<String, Self>,
        order: &WarmOrder,
        allowed: impl FnOnce(usize) -> Result<(), ForkError>,
    ) -> Result<(), ForkError> {
        if sets.contains_key(&order.id) {
            return Err(ForkError::SetKnown(order.id.clone()));
        }
        let starting = order.indexes.len();
        let others: usize = sets.values().map(|set| set.starting + set.prepared.len()).sum();
        allowed(starting + others)?;
        let set = Self { order: order.clone(), starting, prepared: Vec::new() };
        sets.insert(order.id.clone(), set);
        Ok(())
    }
}

impl ForkEngine {
    /// Prepares children of a guest of another node, and keeps them while its daemon lives and wants them.
    pub(in crate::engine) async fn host_prepared(
        self: Arc<Self>,
        order: WarmOrder,
        mut channel: Channel<ToHost>,
    ) {
        let kept = match self.reserve_hosted(&order) {
            Ok(()) => {
                let kept = self.keep_hosted(&order, &mut channel).await;
                let set = self.lock().hosted.remove(&order.id);
                discard_all(set.map(|set| set.prepared).unwrap_or_default()).await;
                kept
            }
            Err(error) => Err(error),
        };
        let last = match kept {
            Ok(()) => ToParent::Ended("prepared".to_owned()),
            Err(error) => {
                tracing::error!(parent = %order.parent, node = %order.node, why = %chain(&error),
                    "no children are prepared for a guest of another node");
                ToParent::refused(&error)
            }
        };
        let _ = channel.send(&last).await;
    }

    /// Two orders at once count each other: neither has started anything yet.
    fn reserve_hosted(&self, order: &WarmOrder) -> Result<(), ForkError> {
        if order.node == self.node {
            return Err(ForkError::AskedItself(self.node.clone()));
        }
        HostedSet::reserve(&mut self.lock().hosted, order, |count| self.allowed(&order.id, count))
    }

    /// Returns when they are not wanted any more.
    async fn keep_hosted(
        self: &Arc<Self>,
        order: &WarmOrder,
        channel: &mut Channel<ToHost>,
    ) -> Result<(), ForkError> {
        let prepared = self.prepare_hosted(order).await?;
        let unwanted = match self.lock().hosted.get_mut(&order.id) {
            Some(set) => {
                (set.starting, set.prepared) = (0, prepared);
                Vec::new()
            }
            None => prepared,
        };
        if !unwanted.is_empty() {
            discard_all(unwanted).await;
            return Err(ForkError::Ending(self.node.clone()));
        }
        if channel.send(&ToParent::Prepared).await.is_ok() {
            while let Ok(Ok(ToHost::Alive)) = tokio::time::timeout(SILENCE_TIMEOUT, channel.receive()).await {
            }
        }
        Ok(())
    }

    /// Their place is reserved.
    async fn prepare_hosted(self: &Arc<Self>, order: &WarmOrder) -> Result<Vec<Prepared>, ForkError> {
        self.peers.able().map_err(ForkError::Peers)?;
        let base = self.hosted_base(&order.kind, &order.parent).await?;
        let planned: Vec<Planned> = order
            .indexes
            .iter()
            .map(|index| self.plan_hosted(&base, *index, &child_name(&order.parent, *index)))
            .collect::<Result<_, _>>()?;
        let (mut ready, mut failed) = (Vec::new(), None);
        for start in finish_all(self.start_all(&order.id, planned)).await {
            match start {
                Ok((prepared, _)) => ready.push(prepared),
                Err((_, _, error)) => failed = Some(error.into()),
            }
        }
        let missing = ready.len() < order.indexes.len();
        let Some(error) =
            failed.or_else(|| missing.then(|| CloneError::Task("it was not started".to_owned()).into()))
        else {
            return Ok(ready);
        };
        discard_all(ready).await;
        Err(error)
    }

    /// What children of a guest of another node have in common here, if this node has its QEMU and may start it for that node.
    pub(in crate::engine) async fn hosted_base(&self, kind: &Kind, parent: &str) -> Result<Base, ForkError> {
        // Before QEMU is started to ask what it is; each child is looked at by its own name later.
        self.takes(&kind.command_line, &kind.environment, &child_name(parent, 0))?;
        same_qemu(&kind.command_line, &kind.qemu, &self.hosted()).await?;
        Ok(Base {
            command_line: kind.command_line.clone(),
            environment: kind.environment.clone(),
            ..self.base(&kind.machine, kind.backing)
        })
    }

    /// A child of a guest of another node. Its command line may use its name.
    fn plan_hosted(&self, base: &Base, index: u32, name: &str) -> Result<Planned, ForkError> {
        self.takes(&base.command_line, &base.environment, name)?;
        self.plan_one(base, index, name)
    }

    /// Whether this node starts it for others.
    fn takes(&self, line: &[String], environment: &[(String, String)], vm: &str) -> Result<(), ForkError> {
        let mut objections = self.peer_policy.objections(line, vm, environment).into_iter();
        objections.next().map_or(Ok(()), |first| Err(ForkError::NotTaken(first)))
    }

    /// Takes what was prepared here for an order. What was prepared for a guest that is another by now is ended: its numbers are free.
    async fn take_hosted(&self, order: &Order) -> Vec<Prepared> {
        let mut taken = Vec::new();
        {
            let mut state = self.lock();
            for id in &order.warm {
                // An order of another node's guest has no right to it.
                let mine =
                    |set: &&mut HostedSet| set.order.parent == order.parent && set.order.node == order.node;
                let Some(set) = state.hosted.get_mut(id).filter(mine) else { continue };
                // One that was prepared has no disks of its own.
                let same = set.order.kind == order.kind && order.disks.is_empty();
                let (wanted, rest): (Vec<_>, Vec<_>) =
                    set.prepared.drain(..).partition(|one| order.indexes.contains(&one.child.plan.index));
                set.prepared = rest;
                taken.extend(wanted.into_iter().map(|one| (one, same)));
            }
        }
        let mut useful = Vec::new();
        for (prepared, same) in taken {
            if same && prepared.child.qemu.alive() {
                useful.push(prepared);
            } else {
                prepared.discard().await;
            }
        }
        useful
    }

    /// The children of an order: those that are to be started, and those that were prepared for it.
    pub(in crate::engine) async fn children_of(
        &self,
        order: &Order,
        base: &Base,
    ) -> Result<(Vec<Planned>, Vec<Prepared>), ForkError> {
        let prepared = self.take_hosted(order).await;
        let there: BTreeSet<u32> = prepared.iter().map(|one| one.child.plan.index).collect();
        let rest = order.children().filter(|(index, _)| !there.contains(index));
        match rest.map(|(index, name)| self.plan_hosted(base, index, &name)).collect() {
            Ok(planned) => Ok((planned, prepared)),
            Err(error) => {
                discard_all(prepared).await;
                Err(error)
            }
        }
    }

    /// Ends all prepared children of other nodes' guests: the daemon ends.
    pub(super) async fn end_hosted(&self) {
        let all = self.lock().hosted.drain().flat_map(|(_, set)| set.prepared).collect();
        discard_all(all).await;
    }
}

#[cfg(test)]
mod tests {
    use vmove_types::problem::Code;

    use super::*;

    #[test]
    fn children_that_are_being_started_count_and_an_id_is_taken_once() {
        let order = |id: &str, count: u32| WarmOrder {
            id: id.to_owned(),
            parent: "web".to_owned(),
            node: "n1".to_owned(),
            indexes: (1..=count).collect(),
            kind: Kind {
                command_line: Vec::new(),
                environment: Vec::new(),
                machine: "pc".to_owned(),
                qemu: "10.0.0".to_owned(),
                backing: vmove_types::Backing::Thp,
            },
        };
        let mut sets = HashMap::new();
        let mut reserve = |order: &WarmOrder| {
            let at_most_three = |count: usize| match count {
                0..=3 => Ok(()),
                _ => Err(ForkError::TooManyChildren { asked: count, allowed: 3 }),
            };
            HostedSet::reserve(&mut sets, order, at_most_three).map_err(|error| error.code())
        };
        assert_eq!(reserve(&order("a", 2)), Ok(()));
        assert_eq!(reserve(&order("b", 2)), Err(Code::Forbidden), "those of a have not even started");
        assert_eq!(reserve(&order("a", 1)), Err(Code::BadRequest));
        assert_eq!(reserve(&order("b", 1)), Ok(()));
        assert_eq!(sets.len(), 2, "what was refused takes no place");
    }
}
