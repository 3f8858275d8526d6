//! Children that are prepared beforehand: QEMU started, memory laid over that of the parent, waiting for device state.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_clone::CloneError;
use vmove_clone::template::Source;
use vmove_migrate::vm::VmRecord;
use vmove_qmp::QemuProcess;

use super::Forks;
use super::children::Prepared;
use super::problem::clone_problem;
use crate::api::forks::{Warm, WarmNode, WarmRequest};
use crate::api::problem::Problem;
use crate::server::registry::{off_worker, process_of};

impl Forks {
    /// Keeps children of a VM prepared, here or on the nodes that are named; 0 of no node ends all of them.
    pub async fn warm(self: Arc<Self>, vm: String, request: WarmRequest) -> Result<Warm, Problem> {
        let _busy = self.claim(&vm)?;
        let WarmRequest { count, nodes } = request;
        self.allowed_warm(count)?;
        let (own, others): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| **node == self.node);
        for node in &others {
            self.fill_away(&vm, node, count).await?;
        }
        if nodes.is_empty() && count == 0 {
            self.end_away(&vm, None).await;
        }
        if nodes.is_empty() || !own.is_empty() {
            self.fill_warm(&vm, count).await?;
        }
        let (prepared, nodes) = (self.warm_here(&vm), self.warm_nodes(&vm));
        Ok(Warm { vm, prepared, nodes })
    }

    fn warm_here(&self, vm: &str) -> usize {
        self.lock().warm.get(vm).map_or(0, Vec::len)
    }

    /// Where children of a VM are prepared, and how many.
    pub(super) fn prepared(&self, vm: &str) -> Vec<WarmNode> {
        let here = WarmNode { node: self.node.clone(), prepared: self.warm_here(vm) };
        std::iter::once(here).filter(|here| here.prepared > 0).chain(self.warm_nodes(vm)).collect()
    }

    fn allowed_warm(&self, count: usize) -> Result<(), Problem> {
        let most = self.policy.max_children;
        if count <= most {
            return Ok(());
        }
        let text = format!(
            "{count} prepared children were asked for, this node allows {most} (max-children in [fork])"
        );
        Err(Problem::new(crate::api::problem::Code::Forbidden, text))
    }

    /// Prepares children until there are `count`, or ends those that are too many. The caller has claimed the VM.
    pub(super) async fn fill_warm(self: &Arc<Self>, vm: &str, count: usize) -> Result<(), Problem> {
        let mut have = self.take_warm(vm, usize::MAX);
        while have.len() > count {
            if let Some(prepared) = have.pop() {
                prepared.discard().await;
            }
        }
        let missing = count - have.len();
        if missing == 0 {
            self.give_back(vm, have);
            return Ok(());
        }
        let result = self.prepare_more(vm, missing, &mut have).await;
        let any = !have.is_empty();
        self.give_back(vm, have);
        if any {
            self.end_with_parent(vm);
        }
        result
    }

    async fn prepare_more(
        self: &Arc<Self>,
        vm: &str,
        missing: usize,
        have: &mut Vec<Prepared>,
    ) -> Result<(), Problem> {
        let parent = self.look(vm).await?;
        let planned = self.plan(&parent.base, vm, missing, &[])?;
        // Where the parent's memory is its RAM file, that is what will be frozen.
        let private = self.members.get(&parent.record).is_some_and(|m| !m.private.is_empty());
        let record = parent.record.clone();
        let sources: Vec<Source> = if private {
            Vec::new()
        } else {
            let open = move || -> Result<Vec<Source>, CloneError> {
                record.ram.iter().map(|ram| Source::open(&ram.path)).collect()
            };
            off_worker(open).await?.map_err(|e| clone_problem(&e))?
        };
        let sources = Arc::new(sources);
        let mut tasks = JoinSet::new();
        for plan in planned {
            let (forks, sources) = (self.clone(), Arc::clone(&sources));
            tasks.spawn(async move {
                let mut prepared = forks.prepare(plan).await?;
                if !sources.is_empty() {
                    if let Err(error) = prepared.child.lay_over(&sources).await {
                        prepared.discard().await;
                        return Err(error);
                    }
                }
                Ok(prepared)
            });
        }
        let mut failed = None;
        while let Some(ended) = tasks.join_next().await {
            match ended {
                Ok(Ok(prepared)) => have.push(prepared),
                Ok(Err(error)) => failed = Some(clone_problem(&error)),
                Err(error) => tracing::error!(%error, "a task that prepares a child failed"),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Takes up to `count` prepared children of a VM whose QEMUs are alive.
    pub(super) fn take_warm(&self, vm: &str, count: usize) -> Vec<Prepared> {
        let mut state = self.lock();
        let Some(all) = state.warm.get_mut(vm) else { return Vec::new() };
        // Lower numbers first.
        all.sort_by_key(|prepared| std::cmp::Reverse(prepared.child.plan.index));
        let mut taken = Vec::new();
        while taken.len() < count {
            match all.pop() {
                Some(prepared) if prepared.child.qemu.alive() => taken.push(prepared),
                Some(prepared) => drop(tokio::spawn(prepared.discard())),
                None => break,
            }
        }
        taken
    }

    /// Puts prepared children back.
    pub(super) fn give_back(&self, vm: &str, prepared: Vec<Prepared>) {
        if !prepared.is_empty() {
            self.lock().warm.entry(vm.to_owned()).or_default().extend(prepared);
        }
    }

    /// Prepared children of a VM that has ended are of no use. It may have ended while they were being prepared.
    pub(super) fn end_with_parent(self: &Arc<Self>, vm: &str) {
        let record = self.registry.vms.get(vm).ok();
        let (forks, vm) = (self.clone(), vm.to_owned());
        tokio::spawn(async move {
            if let Some(record) = record {
                until_ended(&record).await;
            }
            for prepared in forks.take_warm(&vm, usize::MAX) {
                prepared.discard().await;
            }
            forks.end_away(&vm, None).await;
        });
    }

    /// Ends all prepared children: the daemon ends.
    pub async fn end_warm(&self) {
        let all: Vec<Prepared> = self.lock().warm.drain().flat_map(|(_, prepared)| prepared).collect();
        let mut tasks = JoinSet::new();
        for prepared in all {
            tasks.spawn(prepared.discard());
        }
        tasks.join_all().await;
        self.end_hosted().await;
    }
}

/// Waits for the end of a VM's QEMU.
async fn until_ended(record: &VmRecord) {
    let pid = record.pid.unsigned_abs();
    if let Ok(qemu) = QemuProcess::adopt(pid, &vmove_qmp::process::log_in(&record.vm_dir)) {
        if process_of(record).is_some() {
            qemu.exited().await;
        }
    }
}
