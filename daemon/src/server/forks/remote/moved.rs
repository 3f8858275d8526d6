//! Children that migrations have taken to other nodes. A node knows from its journals where it has sent a guest and by which session;
//! the node that it came to knows it by that session. So they are followed from node to node.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use vmove_clone::record::Member;
use vmove_migrate::history::{Moved, QemuId};
use vmove_migrate::proto::hello::SessionId;
use vmove_migrate::vm::VmRecord;

use super::message::{ToHost, ToParent};
use crate::api::forks::ForkNode;
use crate::api::problem::{Code, Problem};
use crate::server::forks::Forks;
use crate::server::registry::off_worker;

/// Nodes that are asked for one guest, each by the one before it.
const MOST: u8 = 16;

/// A guest that came to a node by a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Came {
    session: SessionId,
    /// Nodes that have been asked before.
    passed: u8,
    /// It is to be ended.
    end: bool,
}

impl Forks {
    /// Where a child has gone that was here, if a migration took it.
    pub(super) async fn moved(&self, child: &Member) -> Option<Moved> {
        self.all_moved().await.remove(&(child.pid, child.pid_start))
    }

    pub(super) async fn all_moved(&self) -> HashMap<QemuId, Moved> {
        let engine = self.engine.clone();
        off_worker(move || engine.moved()).await.unwrap_or_default()
    }

    /// Asks where it has gone whether it lives, or has it ended there.
    pub(super) async fn pursue(&self, moved: Moved, end: bool) -> Result<ToParent, Problem> {
        self.pursue_on(moved, end, 0).await
    }

    async fn pursue_on(&self, moved: Moved, end: bool, passed: u8) -> Result<ToParent, Problem> {
        let Some(passed) = one_more(passed) else {
            let text = format!("It was moved on more than {MOST} times: ask {}", moved.to);
            return Err(Problem::new(Code::ForkFailed, text));
        };
        let came = Came { session: moved.session, passed, end };
        self.ask_at(&moved.to, ToHost::Came(came)).await
    }

    /// Whether it lives where it has gone. What cannot be asked counts as living.
    pub(super) async fn lives_there(&self, moved: Moved) -> bool {
        let to = moved.to.name.clone();
        match self.pursue(moved, false).await {
            Ok(ToParent::Living(living)) => !living.is_empty(),
            Ok(_) => true,
            Err(problem) => {
                tracing::debug!(node = %to, %problem, "a node is not asked whether a child lives");
                true
            }
        }
    }

    /// Answers for a guest that came here by a migration.
    pub(super) async fn answer_for(&self, came: Came) -> Result<ToParent, Problem> {
        let Came { session, passed, end } = came;
        let engine = self.engine.clone();
        let Some(vm) = off_worker(move || engine.came(session)).await? else {
            let text = format!("{} knows no migration {session} that brought a guest", self.node);
            return Err(Problem::new(Code::UnknownMigration, text));
        };
        let same = |here: VmRecord| here.pid == vm.pid && here.pid_start == vm.pid_start;
        if self.registry.vms.get(&vm.name).is_ok_and(same) {
            if end {
                return Ok(ToParent::Ended(self.registry.stop(&vm.name, true).await?.how));
            }
            return Ok(ToParent::Living(vec![vm.name]));
        }
        match self.all_moved().await.remove(&(vm.pid, vm.pid_start)) {
            Some(moved) => self.pursue_on(moved, end, passed).await,
            None if end => Err(Problem::new(Code::UnknownVm, format!("It has ended on {}", self.node))),
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
