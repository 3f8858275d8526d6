//! Children on other nodes: which of them live, and their end. Asked by the daemon that forked them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vmove_node::migrations::Moved;
use vmove_node::peer::{Channel, PeerTarget};
use vmove_types::fork::ForkNode;
use vmove_types::vm::Stopped;

use crate::engine::ForkEngine;
use crate::engine::error::{ForkError, TalkError};
use crate::engine::message::{Kin, ToHost, ToParent};
use crate::record::Member;

impl ForkEngine {
    /// Ends a child of a guest of this node, wherever it is.
    ///
    /// # Errors
    /// [`ForkError`]: it is not known, or does not end.
    pub async fn kill(self: Arc<Self>, name: String) -> Result<Stopped, ForkError> {
        let Some(member) = self.members.list().into_iter().find(|member| member.vm == name) else {
            return Ok(self.registry.stop(&name, true).await?);
        };
        let (node, answer) = if let Some(node) = &member.node {
            (node.clone(), self.ask_node(node, ToHost::End(kin(&member))).await?)
        } else {
            let is_here = self.registry.vms().get(&name).is_ok();
            let moved = if is_here { None } else { self.moved(&member).await };
            let Some(moved) = moved else { return Ok(self.registry.stop(&name, true).await?) };
            (moved.to.name.clone(), self.pursue(moved, true).await?)
        };
        match answer {
            ToParent::Ended(how) => Ok(Stopped { name, how, owed: None }),
            other => Err(self.unexpected(&node, "the end of a child", &other)),
        }
    }

    /// As [`Self::tree`], with children that were moved to other nodes. With `ask` those of the VM's own children on other nodes that do
    /// not live are `ended`; those of a node that does not answer stay `elsewhere`.
    ///
    /// # Errors
    /// [`ForkError`]: nothing is known of it.
    pub async fn whole_tree(&self, name: &str, ask: bool) -> Result<ForkNode, ForkError> {
        let mut tree = self.tree(name)?;
        if ask {
            self.ask_which_live(name, &mut tree).await?;
        }
        // After those, whose nodes do not know of these.
        self.told_apart(&mut tree, ask).await;
        Ok(tree)
    }

    /// Of children that were started on other nodes.
    async fn ask_which_live(&self, name: &str, tree: &mut ForkNode) -> Result<(), ForkError> {
        let mut by_node: BTreeMap<String, Vec<Kin>> = BTreeMap::new();
        for member in self.members.list().iter().filter(|member| member.parent.as_deref() == Some(name)) {
            if let Some(node) = &member.node {
                by_node.entry(node.clone()).or_default().push(kin(member));
            }
        }
        for (node, children) in by_node {
            match self.ask_node(&node, ToHost::Which(children)).await {
                Ok(ToParent::Living(living)) => {
                    let living: BTreeSet<String> = living.into_iter().collect();
                    let gone = |child: &&mut ForkNode| {
                        child.node.as_ref() == Some(&node)
                            && child.status == "elsewhere"
                            && !living.contains(&child.name)
                    };
                    tree.children
                        .iter_mut()
                        .filter(gone)
                        .for_each(|child| "ended".clone_into(&mut child.status));
                }
                Ok(other) => return Err(self.unexpected(&node, "names of children", &other)),
                Err(error) => {
                    tracing::debug!(%node, why = %error.message(), "a node is not asked which children live");
                }
            }
        }
        Ok(())
    }

    async fn ask_node(&self, node: &str, question: ToHost) -> Result<ToParent, ForkError> {
        self.peers.ask(&self.peers.target(node)?, question).await
    }

    pub(in crate::engine) fn unexpected(
        &self,
        node: &str,
        expected: &'static str,
        found: &ToParent,
    ) -> ForkError {
        let host = self
            .peers
            .target(node)
            .unwrap_or_else(|_| PeerTarget { name: node.to_owned(), address: node.to_owned() });
        let source = TalkError::Unexpected { expected, found: found.word() };
        ForkError::Host { host, act: "cannot be asked", source }
    }

    /// Answers the daemon that forked children of this node: of no others.
    pub(in crate::engine) async fn answer_question(
        self: &Arc<Self>,
        question: ToHost,
        mut channel: Channel<ToHost>,
    ) {
        let answer = match question {
            ToHost::Which(children) => Ok(ToParent::Living(self.living(children).await)),
            ToHost::End(child) => self.end(&child).await,
            ToHost::Came(came) => self.answer_for(came).await,
            ToHost::Reads(session) => Ok(ToParent::Reads(self.images.reads(session))),
            ToHost::Ticket(ask) => Ok(ToParent::Ends(self.answer_ticket(ask).await)),
            _ => return,
        };
        let _ = channel.send(&answer.unwrap_or_else(|error| ToParent::refused(&error))).await;
    }

    /// Names of those that live, here or where migrations took them.
    async fn living(&self, children: Vec<Kin>) -> Vec<String> {
        // One of which nothing can be read may live.
        let may_live = |child: &Kin| self.lives(child) || self.members.unreadable(&child.name).is_some();
        let (here, others): (Vec<Kin>, Vec<Kin>) = children.into_iter().partition(may_live);
        let mut living: Vec<String> = here.into_iter().map(|child| child.name).collect();
        if others.is_empty() {
            return living;
        }
        let (members, mut gone) = (self.members.list(), self.all_moved().await);
        for child in others {
            let member = members.iter().find(|member| is_of(member, &child));
            let Some(moved) = member.and_then(|m| gone.remove(&(m.pid, m.pid_start))) else { continue };
            if self.lives_there(moved).await {
                living.push(child.name);
            }
        }
        living
    }

    async fn end(&self, child: &Kin) -> Result<ToParent, ForkError> {
        if let Some(path) = self.members.unreadable(&child.name) {
            return Err(ForkError::UnreadableMember { vm: child.name.clone(), path });
        }
        if self.lives(child) {
            return Ok(ToParent::Ended(self.registry.stop(&child.name, true).await?.how));
        }
        if let Some(moved) = self.gone(child).await {
            return self.pursue(moved, true).await;
        }
        Err(ForkError::NoChild { node: self.node.clone(), child: child.name.clone() })
    }

    /// Where a child has gone that was here.
    async fn gone(&self, child: &Kin) -> Option<Moved> {
        let member = self.members.list().into_iter().find(|member| is_of(member, child))?;
        self.moved(&member).await
    }

    fn lives(&self, child: &Kin) -> bool {
        let Ok(record) = self.registry.vms().get(&child.name) else { return false };
        self.members.get(&record).is_some_and(|member| member.fork == child.fork && member.parent.is_some())
    }
}

/// Whether this is what a node has noted of a child that came of an order.
fn is_of(member: &Member, child: &Kin) -> bool {
    member.vm == child.name && member.fork == child.fork && member.parent.is_some()
}

fn kin(member: &Member) -> Kin {
    Kin { name: member.vm.clone(), fork: member.fork.clone() }
}
