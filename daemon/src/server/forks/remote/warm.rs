//! Children that are prepared on other nodes: their QEMUs wait there for as long as the connection by which they were asked for is open.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use vmove_clone::child::Base;
use vmove_clone::disk::Images;
use vmove_clone::identity::child_name;
use vmove_migrate::link::Dialer;
use vmove_migrate::node;
use vmove_migrate::proto::channel::Channel;
use vmove_migrate::proto::hello::{LinkKind, SessionId, Token};

use super::call::Outline;
use super::message::{Kind, Order, ToHost, ToParent, WarmOrder};
use crate::api::forks::{ForkRequest, WarmNode};
use crate::api::problem::{Code, Problem, chain};
use crate::server::forks::Forks;
use crate::server::forks::children::{Planned, Prepared};
use crate::server::forks::create::{Start, finish_all};
use crate::server::forks::problem::clone_problem;

/// For a host to start QEMUs, many at once.
const START: Duration = Duration::from_secs(90);
/// How often the parent's daemon tells that it lives.
const ALIVE: Duration = Duration::from_secs(5);
/// A parent's daemon that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);
/// For a host to end its QEMUs.
const END: Duration = Duration::from_secs(30);

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
        allowed: impl FnOnce(usize) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        if sets.contains_key(&order.id) {
            let text = format!("Expected a new id for prepared children, found {:?} again", order.id);
            return Err(Problem::new(Code::BadRequest, text));
        }
        let starting = order.indexes.len();
        let others: usize = sets.values().map(|set| set.starting + set.prepared.len()).sum();
        allowed(starting + others)?;
        let set = Self { order: order.clone(), starting, prepared: Vec::new() };
        sets.insert(order.id.clone(), set);
        Ok(())
    }
}

/// Which of a fork's children on a host were prepared there.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    pub indexes: Vec<u32>,
    pub sets: Vec<String>,
}

// Of the parent's node.
impl Forks {
    /// Keeps `count` children of a VM prepared on another node; 0 ends those that there are. The caller has claimed the VM.
    pub(in crate::server::forks) async fn fill_away(
        self: &Arc<Self>,
        vm: &str,
        node: &str,
        count: usize,
    ) -> Result<(), Problem> {
        let target = self.remote.target(node)?;
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
            let text = format!(
                "{vm} writes to disks, and what children on other nodes have of them is known when it is forked: prepare children on \
                 this node only, or none"
            );
            return Err(Problem::new(Code::NotMovable, text));
        }
        let mut next = self.first_index(vm, 0);
        let indexes: BTreeSet<u32> = (0..missing).map(|_| self.next_index(vm, &mut next)).collect();
        let id = uuid::Uuid::new_v4().simple().to_string();
        let order = WarmOrder {
            id: id.clone(),
            parent: vm.to_owned(),
            node: self.node.clone(),
            indexes: indexes.iter().copied().collect(),
            kind: kind_of(&outline),
        };
        let failed = |why: String| Problem::new(Code::ForkFailed, format!("{target}: {why}"));
        let hello = self.remote.hello(LinkKind::Fork, SessionId::random(), Token::random());
        let stream = self.remote.dialer.stream(&target, &hello).await.map_err(|e| failed(chain(&e)))?;
        let mut channel: Channel<ToParent> = Channel::new(stream);
        channel.send(&ToHost::Warm(Box::new(order))).await.map_err(|e| failed(chain(&e)))?;
        match tokio::time::timeout(START, channel.receive()).await {
            Ok(Ok(answer)) => match answer.unless_refused(&target)? {
                ToParent::Prepared => {}
                other => return Err(failed(format!("expected prepared children, found {other:?}"))),
            },
            Ok(Err(error)) => return Err(failed(format!("no answer: {}", chain(&error)))),
            Err(_) => return Err(failed(format!("no answer within {} s", START.as_secs()))),
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
        self.warm_nodes(vm).into_iter().find(|known| known.node == node).map_or(0, |known| known.prepared)
    }

    /// Prepared children of a VM on other nodes.
    pub(in crate::server::forks) fn warm_nodes(&self, vm: &str) -> Vec<WarmNode> {
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

    /// Numbers of prepared children of a VM on other nodes, which no other child may have.
    pub(in crate::server::forks) fn numbers_away(&self, vm: &str) -> Vec<u32> {
        self.lock().away.get(vm).into_iter().flatten().flat_map(|set| set.indexes.clone()).collect()
    }

    /// Numbers for `count` children on a node, those of prepared ones first, and of which sets these are; the others from `next` on.
    pub(super) fn numbers(&self, vm: &str, node: &str, count: usize, next: &mut u32) -> Numbers {
        let mut numbers = Numbers::default();
        let state = self.lock();
        for set in state.away.get(vm).into_iter().flatten().filter(|set| set.node == node && set.lives()) {
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
            if self.registry.vms.get(&child_name(vm, index)).is_err() {
                return index;
            }
        }
    }

    /// A host has taken an order: what was prepared for it there is not prepared any more.
    pub(super) fn used_away(&self, order: &Order) {
        let mut state = self.lock();
        let Some(sets) = state.away.get_mut(&order.parent) else { return };
        for set in sets.iter_mut().filter(|set| order.warm.contains(&set.id)) {
            set.indexes.retain(|index| !order.indexes.contains(index));
        }
        sets.retain(AwaySet::lives);
    }

    /// Ends prepared children of a VM on other nodes, or on one of them.
    pub(in crate::server::forks) async fn end_away(&self, vm: &str, node: Option<&str>) {
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
                    let _ = tokio::time::timeout(END, channel.receive()).await;
                }
                return;
            }
            _ = channel.receive() => return,
            () = tokio::time::sleep(ALIVE) => if channel.send(&ToHost::Alive).await.is_err() {
                return;
            },
        }
    }
}

pub(super) fn kind_of(outline: &Outline) -> Kind {
    Kind {
        command_line: outline.base.command_line.clone(),
        environment: outline.base.environment.clone(),
        machine: outline.base.machine.clone(),
        qemu: outline.qemu.clone(),
        backing: node::backing_name(outline.base.backing).to_owned(),
    }
}

// Of the other node.
impl Forks {
    /// Prepares children of a guest of another node, and keeps them while its daemon lives and wants them.
    pub(super) async fn host_warm(self: Arc<Self>, order: WarmOrder, mut channel: Channel<ToHost>) {
        let kept = match self.reserve_hosted(&order) {
            Ok(()) => {
                let kept = self.keep_hosted(&order, &mut channel).await;
                let set = self.lock().hosted.remove(&order.id);
                discard_all(set.map(|set| set.prepared).unwrap_or_default()).await;
                kept
            }
            Err(problem) => Err(problem),
        };
        let last = match kept {
            Ok(()) => ToParent::Ended("prepared".to_owned()),
            Err(problem) => {
                tracing::error!(parent = %order.parent, node = %order.node, why = %problem,
                    "no children are prepared for a guest of another node");
                ToParent::refused(&problem)
            }
        };
        let _ = channel.send(&last).await;
    }

    /// Two orders at once count each other: neither has started anything yet.
    fn reserve_hosted(&self, order: &WarmOrder) -> Result<(), Problem> {
        if order.node == self.node {
            let text = format!("{} was asked by itself: name this node as itself", self.node);
            return Err(Problem::new(Code::BadRequest, text));
        }
        HostedSet::reserve(&mut self.lock().hosted, order, |count| self.allowed(&order.id, count))
    }

    /// Returns when they are not wanted any more.
    async fn keep_hosted(
        self: &Arc<Self>,
        order: &WarmOrder,
        channel: &mut Channel<ToHost>,
    ) -> Result<(), Problem> {
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
            return Err(Problem::new(Code::ForkFailed, format!("vmoved of {} is ending", self.node)));
        }
        if channel.send(&ToParent::Prepared).await.is_ok() {
            while let Ok(Ok(ToHost::Alive)) = tokio::time::timeout(SILENCE, channel.receive()).await {}
        }
        Ok(())
    }

    /// Their place is reserved.
    async fn prepare_hosted(self: &Arc<Self>, order: &WarmOrder) -> Result<Vec<Prepared>, Problem> {
        self.remote.able().map_err(|why| Problem::new(Code::Forbidden, why))?;
        let base = self.hosted_base(&order.kind).await?;
        let planned: Vec<Planned> = order
            .indexes
            .iter()
            .map(|index| self.plan_one(&base, &order.parent, *index))
            .collect::<Result<_, _>>()?;
        let (mut ready, mut failed) = (Vec::new(), None);
        for start in finish_all(self.start_all(&order.id, planned)).await {
            match start {
                Ok((prepared, _)) => ready.push(prepared),
                Err((_, _, error)) => failed = Some(clone_problem(&error)),
            }
        }
        let missing = ready.len() < order.indexes.len();
        let Some(problem) = failed.or_else(|| missing.then(|| Problem::new(Code::Internal, "a task failed")))
        else {
            return Ok(ready);
        };
        discard_all(ready).await;
        Err(problem)
    }

    /// What children of a guest of another node have in common here, if this node has its QEMU.
    pub(super) async fn hosted_base(&self, kind: &Kind) -> Result<Base, Problem> {
        crate::server::forks::templates::same_qemu(&kind.command_line, &kind.qemu)
            .await
            .map_err(|why| clone_problem(&vmove_clone::CloneError::Template { path: self.hosted(), why }))?;
        let unknown =
            || Problem::new(Code::BadRequest, format!("unknown backing {:?} in an order", kind.backing));
        Ok(Base {
            command_line: kind.command_line.clone(),
            environment: kind.environment.clone(),
            machine: kind.machine.clone(),
            backing: node::backing_named(&kind.backing).ok_or_else(unknown)?,
            run_dir: self.registry.run_dir.clone(),
            memory_dir: self.registry.memory_dir.clone(),
            disks: Vec::new(),
            images: Images::Here,
            overlay_dir: None,
        })
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
    pub(super) async fn children_of(
        &self,
        order: &Order,
        base: &Base,
    ) -> Result<(Vec<Planned>, Vec<Prepared>), Problem> {
        let warm = self.take_hosted(order).await;
        let there: BTreeSet<u32> = warm.iter().map(|one| one.child.plan.index).collect();
        let rest = order.indexes.iter().filter(|index| !there.contains(index));
        match rest.map(|index| self.plan_one(base, &order.parent, *index)).collect() {
            Ok(planned) => Ok((planned, warm)),
            Err(problem) => {
                discard_all(warm).await;
                Err(problem)
            }
        }
    }

    /// Ends all prepared children of other nodes' guests: the daemon ends.
    pub(in crate::server::forks) async fn end_hosted(&self) {
        let all = self.lock().hosted.drain().flat_map(|(_, set)| set.prepared).collect();
        discard_all(all).await;
    }
}

/// Ends them, all at once.
pub(super) async fn discard_all(all: Vec<Prepared>) {
    let mut tasks = JoinSet::new();
    for prepared in all {
        tasks.spawn(prepared.discard());
    }
    tasks.join_all().await;
}

/// Those that were prepared, among those that are being started.
pub(super) fn with_prepared(mut starting: JoinSet<Start>, warm: Vec<Prepared>) -> JoinSet<Start> {
    for prepared in warm {
        starting.spawn(async move { Ok((prepared, true)) });
    }
    starting
}

#[cfg(test)]
mod tests {
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
                backing: "thp".to_owned(),
            },
        };
        let mut sets = HashMap::new();
        let mut reserve = |order: &WarmOrder| {
            let at_most_three = |count: usize| match count {
                0..=3 => Ok(()),
                _ => Err(Problem::new(Code::Forbidden, count.to_string())),
            };
            HostedSet::reserve(&mut sets, order, at_most_three).map_err(|problem| problem.code)
        };
        assert_eq!(reserve(&order("a", 2)), Ok(()));
        assert_eq!(reserve(&order("b", 2)), Err(Code::Forbidden), "those of a have not even started");
        assert_eq!(reserve(&order("a", 1)), Err(Code::BadRequest));
        assert_eq!(reserve(&order("b", 1)), Ok(()));
        assert_eq!(sets.len(), 2, "what was refused takes no place");
    }
}
