//! Children on other nodes: which of them live, and their end. Asked by the daemon that forked them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use vmove_clone::record::Member;
use vmove_migrate::link::Dialer;
use vmove_migrate::proto::channel::Channel;
use vmove_migrate::proto::hello::{LinkKind, SessionId, Token};

use super::message::{Kin, ToHost, ToParent};
use crate::api::forks::ForkNode;
use crate::api::problem::{Code, Problem, chain};
use crate::api::types::Stopped;
use crate::server::forks::Forks;

/// For an answer; QEMU may take a while to end.
const ANSWER: Duration = Duration::from_secs(40);

impl Forks {
    /// Ends a child of a guest of this node, wherever it is.
    pub async fn kill(self: Arc<Self>, name: String) -> Result<Stopped, Problem> {
        let member = self.members.list().into_iter().find(|member| member.vm == name);
        let node = member.as_ref().and_then(|member| member.node.clone());
        let (Some(member), Some(node)) = (member, node) else {
            return self.registry.stop(&name, true).await;
        };
        match self.ask(&node, ToHost::End(kin(&member))).await? {
            ToParent::Ended(how) => Ok(Stopped { name, how }),
            other => Err(unexpected(&node, &other)),
        }
    }

    /// As [`Self::tree`]; of the VM's own children on other nodes it is asked whether they live. Those of a node that does not answer
    /// stay `elsewhere`.
    pub async fn asked_tree(&self, name: &str) -> Result<ForkNode, Problem> {
        let mut tree = self.tree(name)?;
        let mut by_node: BTreeMap<String, Vec<Kin>> = BTreeMap::new();
        for member in self.members.list().iter().filter(|member| member.parent.as_deref() == Some(name)) {
            if let Some(node) = &member.node {
                by_node.entry(node.clone()).or_default().push(kin(member));
            }
        }
        for (node, children) in by_node {
            match self.ask(&node, ToHost::Which(children)).await {
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
                Ok(other) => return Err(unexpected(&node, &other)),
                Err(problem) => tracing::debug!(%node, %problem, "a node is not asked which children live"),
            }
        }
        Ok(tree)
    }

    async fn ask(&self, node: &str, question: ToHost) -> Result<ToParent, Problem> {
        let failed = |why: String| Problem::new(Code::ForkFailed, format!("{node} cannot be asked: {why}"));
        let target = self.remote.target(node)?;
        let hello = self.remote.hello(LinkKind::Fork, SessionId::random(), Token::random());
        let stream = self.remote.dialer.stream(&target, &hello).await.map_err(|e| failed(chain(&e)))?;
        let mut channel: Channel<ToParent> = Channel::new(stream);
        channel.send(&question).await.map_err(|e| failed(chain(&e)))?;
        match tokio::time::timeout(ANSWER, channel.receive()).await {
            Ok(Ok(ToParent::Refused(problem))) => Err(serde_json::from_str(&problem)
                .unwrap_or_else(|_| failed("it refused without a reason".to_owned()))),
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(failed(chain(&error))),
            Err(_) => Err(failed(format!("no answer within {} s", ANSWER.as_secs()))),
        }
    }

    /// Answers the daemon that forked children of this node: of no others.
    pub(super) async fn answer_kin(&self, question: ToHost, mut channel: Channel<ToHost>) {
        let answer = match question {
            ToHost::Which(children) => {
                let living = children.into_iter().filter(|child| self.lives(child));
                ToParent::Living(living.map(|child| child.name).collect())
            }
            ToHost::End(child) if self.lives(&child) => match self.registry.stop(&child.name, true).await {
                Ok(stopped) => ToParent::Ended(stopped.how),
                Err(problem) => ToParent::refused(&problem),
            },
            ToHost::End(child) => {
                let text = format!("{} has no child {:?} of that fork (any more)", self.node, child.name);
                ToParent::refused(&Problem::new(Code::UnknownVm, text))
            }
            _ => return,
        };
        let _ = channel.send(&answer).await;
    }

    fn lives(&self, child: &Kin) -> bool {
        let Ok(record) = self.registry.vms.get(&child.name) else { return false };
        self.members.get(&record).is_some_and(|member| member.fork == child.fork && member.parent.is_some())
    }
}

fn kin(member: &Member) -> Kin {
    Kin { name: member.vm.clone(), fork: member.fork.clone() }
}

fn unexpected(node: &str, found: &ToParent) -> Problem {
    Problem::new(Code::ForkFailed, format!("Expected an answer of {node}, found {found:?}"))
}
