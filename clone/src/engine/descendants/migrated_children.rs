//! Children that migrations have taken to other nodes. A node knows from its journals where it has sent a guest and by which session;
//! the node that it came to knows it by that session. So they are followed from node to node.

use std::collections::{HashMap, HashSet};

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

    /// Names of a VM's children that migrations have taken from here. They may live, so their names are not given again.
    pub(in crate::engine) async fn names_taken_away(&self, parent: &str) -> HashSet<String> {
        let mut members = self.members.list();
        members.retain(|member| self.registry.vms().get(&member.vm).is_err());
        // Most guests have no child that is not here: no journal is read for them.
        if !members.iter().any(|member| was_here(member, parent)) {
            return HashSet::new();
        }
        names_of(&members, parent, &self.all_moved().await)
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

/// A child of this VM that was started here.
fn was_here(member: &Member, parent: &str) -> bool {
    member.parent.as_deref() == Some(parent) && member.node.is_none()
}

/// Names of those children of a VM that migrations took.
fn names_of(members: &[Member], parent: &str, moved: &HashMap<QemuId, Moved>) -> HashSet<String> {
    let gone = |m: &&Member| was_here(m, parent) && moved.contains_key(&(m.pid, m.pid_start));
    members.iter().filter(gone).map(|member| member.vm.clone()).collect()
}

/// How many nodes have been asked when the next one is, if it may be. The number before may be whatever another daemon says.
const fn one_more(passed: u8) -> Option<u8> {
    if passed < MOST { Some(passed + 1) } else { None }
}

#[cfg(test)]
mod tests {
    use vmove_node::peer::{PeerTarget, SessionId};

    use super::*;

    #[test]
    fn the_name_of_a_child_that_moved_away_is_not_given_again() {
        let member = |vm: &str, parent: &str, pid: i32, node: Option<&str>| Member {
            vm: vm.to_owned(),
            pid,
            pid_start: 7,
            parent: Some(parent.to_owned()),
            index: 1,
            fork: "f".to_owned(),
            node: node.map(str::to_owned),
            private: Vec::new(),
            stopped_to_move: false,
            by_guest: false,
            lineage: None,
        };
        let to = PeerTarget { name: "a".to_owned(), address: "a:7420".to_owned() };
        let moved = |pid| ((pid, 7), Moved { session: SessionId::random(), to: to.clone() });
        let members = [
            member("web.1", "web", 1, None),
            member("web.2", "web", 2, None),
            member("web.3", "web", 3, Some("c")),
            member("db.1", "db", 4, None),
        ];
        let found = names_of(&members, "web", &HashMap::from([moved(2), moved(3), moved(4)]));
        assert_eq!(found, HashSet::from(["web.2".to_owned()]));
    }

    #[test]
    fn no_number_of_another_daemon_passes_the_bound() {
        assert_eq!((one_more(0), one_more(MOST - 1)), (Some(1), Some(MOST)));
        for passed in MOST..=u8::MAX {
            assert_eq!(one_more(passed), None, "{passed}");
        }
    }
}
