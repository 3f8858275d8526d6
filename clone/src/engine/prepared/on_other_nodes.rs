//! Children of a guest of this node that are prepared on other nodes: their QEMUs wait there for as long as the connection by which they
//! were asked for is open.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use vmove_node::peer::{Channel, SessionId, Token};
use vmove_types::fork::{ForkRequest, WarmNode};

use crate::engine::ForkEngine;
use crate::engine::error::{ForkError, TalkError};
use crate::engine::message::{Order, ToHost, ToParent, WarmOrder};
use crate::engine::peers::answer;
use crate::identity::child_name;

/// For a host to start QEMUs, many at once.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// How often the parent's daemon tells that it lives.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// For a host to end its QEMUs.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// Prepared children of a guest of this node on another one.
#[derive(Debug)]
pub struct AwaySet {
    node: String,
    id: String,
    /// Numbers of those that have not been used.
    indexes: BTreeSet<u32>,
    keeper: JoinHandle<()>,
    /// Dropped or used: it is to end.
    end: oneshot::Sender<()>,
}

impl AwaySet {
    fn lives(&self) -> bool {
        !self.keeper.is_finished() && !self.indexes.is_empty()
    }

    async fn end(self) {
        let _ = self.end.send(());
        let _ = self.keeper.await;
    }
}

/// Which of a fork's children on a host were prepared there.
#[derive(Debug, Default)]
pub struct Numbers {
    pub indexes: Vec<u32>,
    pub sets: Vec<String>,
}

impl ForkEngine {
    /// Keeps `count` children of a VM prepared on another node; 0 ends those that there are. The caller has claimed the VM.
    pub(in crate::engine) async fn prepare_away(
        self: &Arc<Self>,
        vm: &str,
        node: &str,
        count: usize,
    ) -> Result<(), ForkError> {
        let target = self.peers.target(node)?;
        let have = self.count_away(vm, node);
        if count < have {
            self.end_away(vm, Some(node)).await;
        }
        let missing = count - if count < have { 0 } else { have };
        if missing == 0 {
            return Ok(());
        }
        let outline = self.look(vm).await?.outline();
        self.possible(&outline, &ForkRequest::default())?;
        if !outline.base.disks.is_empty() {
            return Err(ForkError::PreparedWithDisks(vm.to_owned()));
        }
        let mut next = self.first_index(vm, 0);
        let indexes: BTreeSet<u32> = (0..missing).map(|_| self.next_index(vm, &mut next)).collect();
        let id = uuid::Uuid::new_v4().simple().to_string();
        let order = WarmOrder {
            id: id.clone(),
            parent: vm.to_owned(),
            node: self.node.clone(),
            indexes: indexes.iter().copied().collect(),
            kind: outline.kind(),
        };
        let failed =
            |source| ForkError::Host { host: target.clone(), act: "did not prepare children", source };
        let order = ToHost::Warm(Box::new(order));
        let answered = async {
            let mut channel = self.peers.call(&target, SessionId::random(), Token::random(), &order).await?;
            let answer = answer(&mut channel, START_TIMEOUT).await?;
            Ok((channel, answer))
        };
        let (channel, answer) = answered.await.map_err(failed)?;
        match answer.unless_refused(&target)? {
            ToParent::Prepared => {}
            other => {
                let found = other.word();
                return Err(failed(TalkError::Unexpected { expected: "prepared children", found }));
            }
        }
        let (end, ended) = oneshot::channel();
        let keeper = tokio::spawn(keep(channel, ended));
        let set = AwaySet { node: node.to_owned(), id, indexes, keeper, end };
        self.lock().away.entry(vm.to_owned()).or_default().push(set);
        self.end_with_parent(vm);
        Ok(())
    }

    /// Children of a VM that are prepared on `node`.
    fn count_away(&self, vm: &str, node: &str) -> usize {
        self.nodes_away(vm).into_iter().find(|known| known.node == node).map_or(0, |known| known.prepared)
    }

    /// Prepared children of a VM on other nodes.
    pub(in crate::engine) fn nodes_away(&self, vm: &str) -> Vec<WarmNode> {
        let mut nodes: Vec<WarmNode> = Vec::new();
        let state = self.lock();
        for set in state.away.get(vm).into_iter().flatten().filter(|set| set.lives()) {
            match nodes.iter_mut().find(|known| known.node == set.node) {
                Some(known) => known.prepared += set.indexes.len(),
                None => nodes.push(WarmNode { node: set.node.clone(), prepared: set.indexes.len() }),
            }
        }
        nodes
    }

    /// Numbers that no other child of a VM may have: those of prepared children on other nodes, and of children of tickets that are not joined.
    pub(in crate::engine) fn numbers_kept(&self, vm: &str) -> Vec<u32> {
        let mut kept = self.guests.numbers_in_tickets(vm);
        kept.extend(self.lock().away.get(vm).into_iter().flatten().flat_map(|set| &set.indexes));
        kept
    }

    /// Numbers for `count` children on a node, those of prepared ones first, and of which sets these are; the others from `next` on.
    pub(in crate::engine) fn numbers(
        &self,
        vm: &str,
        node: &str,
        count: usize,
        next: &mut u32,
        use_prepared: bool,
    ) -> Numbers {
        let mut numbers = Numbers::default();
        let state = self.lock();
        let useful = |set: &&AwaySet| use_prepared && set.node == node && set.lives();
        for set in state.away.get(vm).into_iter().flatten().filter(useful) {
            let room = count - numbers.indexes.len();
            if room > 0 {
                numbers.indexes.extend(set.indexes.iter().take(room));
                numbers.sets.push(set.id.clone());
            }
        }
        drop(state);
        while numbers.indexes.len() < count {
            numbers.indexes.push(self.next_index(vm, next));
        }
        numbers
    }

    /// The next number from `next` on whose name no VM here has: one that a migration brought, say.
    fn next_index(&self, vm: &str, next: &mut u32) -> u32 {
        loop {
            let index = *next;
            *next = next.saturating_add(1);
            if self.registry.vms().get(&child_name(vm, index)).is_err() {
                return index;
            }
        }
    }

    /// A host has taken an order: what was prepared for it there is not prepared any more.
    pub(in crate::engine) fn used_away(&self, order: &Order) {
        let mut state = self.lock();
        let Some(sets) = state.away.get_mut(&order.parent) else { return };
        for set in sets.iter_mut().filter(|set| order.warm.contains(&set.id)) {
            set.indexes.retain(|index| !order.indexes.contains(index));
        }
        sets.retain(AwaySet::lives);
    }

    /// Ends prepared children of a VM on other nodes, or on one of them.
    pub(in crate::engine) async fn end_away(&self, vm: &str, node: Option<&str>) {
        let sets: Vec<AwaySet> = {
            let mut state = self.lock();
            let Some(sets) = state.away.get_mut(vm) else { return };
            let (end, stay) = sets.drain(..).partition(|set| node.is_none_or(|node| node == set.node));
            *sets = stay;
            end
        };
        let mut tasks = JoinSet::new();
        for set in sets {
            tasks.spawn(set.end());
        }
        tasks.join_all().await;
    }
}

/// Holds the connection on which prepared children elsewhere depend, until they are to end or are gone.
async fn keep(mut channel: Channel<ToParent>, mut ended: oneshot::Receiver<()>) {
    loop {
        tokio::select! {
            _ = &mut ended => {
                if channel.send(&ToHost::Release).await.is_ok() {
                    // It answers when they have ended.
                    let _ = tokio::time::timeout(END_TIMEOUT, channel.receive()).await;
                }
                return;
            }
            _ = channel.receive() => return,
            () = tokio::time::sleep(ALIVE_INTERVAL) => if channel.send(&ToHost::Alive).await.is_err() {
                return;
            },
        }
    }
}
