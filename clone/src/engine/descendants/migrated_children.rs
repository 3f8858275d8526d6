//! Children that migrations have taken to other nodes. A node knows from its journals where it has sent a guest and by which session;
//! the node that it came to knows it by that session. So they are followed from node to node.

use std::collections::HashMap;

use vmove_node::blocking::run_blocking;
use vmove_node::migrations::{Moved, QemuId};
use vmove_node::record::VmRecord;
use vmove_types::fork::ForkNode;

use crate::engine::ForkEngine;
use crate::engine::error::ForkError;
use crate::engine::message::{Came, ToHost, ToParent};
use crate::record::Member;

/// Nodes that are asked for one guest, each by the one before it.
const MOST: u8 = 16;

impl ForkEngine {
    /// Where a child has gone that was here, if a migration took it.
    pub(super) async fn moved(&self, child: &Member) -> Option<Moved> {
        self.all_moved().await.remove(&(child.pid, child.pid_start))
    }

    pub(super) async fn all_moved(&self) -> HashMap<QemuId, Moved> {
        let migrations = self.registry.migrations().clone();
        run_blocking(move || migrations.moved()).await.unwrap_or_default()
    }

    /// Asks where it has gone whether it lives, or has it ended there.
    pub(super) async fn pursue(&self, moved: Moved, end: bool) -> Result<ToParent, ForkError> {
        self.pursue_on(moved, end, 0).await
    }

    async fn pursue_on(&self, moved: Moved, end: bool, passed: u8) -> Result<ToParent, ForkError> {
        let Some(passed) = one_more(passed) else {
            return Err(ForkError::MovedTooOften { most: MOST, to: moved.to });
        };
        let came = Came { session: moved.session, passed, end };
        self.peers.ask(&moved.to, ToHost::Came(came)).await
    }

    /// Whether it lives where it has gone. What cannot be asked counts as living.
    pub(super) async fn lives_there(&self, moved: Moved) -> bool {
        let to = moved.to.name.clone();
        match self.pursue(moved, false).await {
            Ok(ToParent::Living(living)) => !living.is_empty(),
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(node = %to, why = %error.message(), "a node is not asked whether a child lives");
                true
            }
        }
    }

    /// Answers for a guest that came here by a migration.
    pub(super) async fn answer_for(&self, came: Came) -> Result<ToParent, ForkError> {
        let Came { session, passed, end } = came;
        let migrations = self.registry.migrations().clone();
        let Some(vm) = run_blocking(move || migrations.came(session)).await? else {
            return Err(ForkError::UnknownMigration { node: self.node.clone(), session });
        };
        let same = |here: VmRecord| here.pid == vm.pid && here.pid_start == vm.pid_start;
        if self.registry.vms().get(&vm.name).is_ok_and(same) {
            if end {
                return Ok(ToParent::Ended(self.registry.stop(&vm.name, true).await?.how));
            }
            return Ok(ToParent::Living(vec![vm.name]));
        }
        match self.all_moved().await.remove(&(vm.pid, vm.pid_start)) {
            Some(moved) => self.pursue_on(moved, end, passed).await,
            None if end => Err(ForkError::HasEnded(self.node.clone())),
            None => Ok(ToParent::Living(Vec::new())),
        }
    }

    /// Tells the VM's own children that migrations took from here from those that have ended.
    pub(super) async fn told_apart(&self, tree: &mut ForkNode, ask: bool) {
        let ended = |child: &ForkNode| child.status == "ended";
        if !tree.children.iter().any(ended) {
            return;
        }
        let (members, mut gone) = (self.members.list(), self.all_moved().await);
        for child in tree.children.iter_mut().filter(|child| ended(child)) {
            let Some(member) = members.iter().find(|m| m.vm == child.name && m.node.is_none()) else {
                continue;
            };
            let Some(moved) = gone.remove(&(member.pid, member.pid_start)) else { continue };
            child.node = Some(moved.to.name.clone());
            if !ask || self.lives_there(moved).await {
                "elsewhere".clone_into(&mut child.status);
            }
        }
    }
}

/// How many nodes have been asked when the next one is, if it may be. The number before may be whatever another daemon says.
const fn one_more(passed: u8) -> Option<u8> {
    if passed < MOST { Some(passed + 1) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_of_another_daemon_passes_the_bound() {
        assert_eq!((one_more(0), one_more(MOST - 1)), (Some(1), Some(MOST)));
        for passed in MOST..=u8::MAX {
            assert_eq!(one_more(passed), None, "{passed}");
        }
    }
}
