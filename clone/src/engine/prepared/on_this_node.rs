//! Children that are prepared beforehand: QEMU is started, the parent's memory files are mapped, the device state is missing.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_node::blocking::run_blocking;
use vmove_node::record::VmRecord;
use vmove_node::registry::process_of;
use vmove_qmp::QemuProcess;
use vmove_types::fork::{Warm, WarmNode, WarmRequest};

use crate::CloneError;
use crate::engine::ForkEngine;
use crate::engine::children::Prepared;
use crate::engine::error::ForkError;
use crate::template::Source;

impl ForkEngine {
    /// Keeps children of a VM prepared, here or on the nodes that are named; 0 of no node ends all of them.
    ///
    /// # Errors
    /// [`ForkError`]. Those that could be prepared stay.
    pub async fn prepare(self: Arc<Self>, vm: String, request: WarmRequest) -> Result<Warm, ForkError> {
        let _claim = self.claim_at_home(&vm).await?;
        let WarmRequest { count, nodes } = request;
        self.allowed_prepared(count)?;
        let (own, others): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| **node == self.node);
        for node in &others {
            self.prepare_away(&vm, node, count).await?;
        }
        if nodes.is_empty() && count == 0 {
            self.end_away(&vm, None).await;
        }
        if nodes.is_empty() || !own.is_empty() {
            self.prepare_here(&vm, count).await?;
        }
        let (prepared, nodes) = (self.count_here(&vm), self.nodes_away(&vm));
        Ok(Warm { vm, prepared, nodes })
    }

    /// Ends all prepared children of a VM, here and elsewhere: its disks get other images, over which none of them lies.
    pub async fn end_prepared_of(self: &Arc<Self>, vm: &str) {
        self.end_away(vm, None).await;
        for prepared in self.take_prepared(vm, usize::MAX) {
            prepared.discard().await;
        }
    }

    fn count_here(&self, vm: &str) -> usize {
        self.lock().prepared.get(vm).map_or(0, Vec::len)
    }

    /// Where children of a VM are prepared, and how many.
    pub(in crate::engine) fn prepared_nodes(&self, vm: &str) -> Vec<WarmNode> {
        let here = WarmNode { node: self.node.clone(), prepared: self.count_here(vm) };
        std::iter::once(here).filter(|here| here.prepared > 0).chain(self.nodes_away(vm)).collect()
    }

    fn allowed_prepared(&self, count: usize) -> Result<(), ForkError> {
        let most = self.policy.max_children;
        if count <= most {
            return Ok(());
        }
        Err(ForkError::TooManyPrepared { asked: count, allowed: most })
    }

    /// Prepares children until there are `count`, or ends those that are too many. The caller has claimed the VM.
    pub(in crate::engine) async fn prepare_here(
        self: &Arc<Self>,
        vm: &str,
        count: usize,
    ) -> Result<(), ForkError> {
        let mut have = self.take_prepared(vm, usize::MAX);
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
    ) -> Result<(), ForkError> {
        let guest = self.look(vm).await?;
        let planned = self.plan(&guest.base, vm, missing, &[], &[]).await?;
        // Where the parent's memory is its RAM file, that is what will be frozen.
        let private = self.members.get(&guest.record).is_some_and(|m| !m.private.is_empty());
        let record = guest.record.clone();
        let sources: Vec<Source> = if private {
            Vec::new()
        } else {
            let open = move || -> Result<Vec<Source>, CloneError> {
                record.ram.iter().map(|ram| Source::open(&ram.path)).collect()
            };
            run_blocking(open).await??
        };
        let sources = Arc::new(sources);
        let mut tasks = JoinSet::new();
        for plan in planned {
            let (engine, sources) = (self.clone(), Arc::clone(&sources));
            tasks.spawn(async move {
                let mut prepared = engine.start_child(plan).await?;
                if !sources.is_empty()
                    && let Err(error) = prepared.child.map_template(&sources).await
                {
                    prepared.discard().await;
                    return Err(error);
                }
                Ok(prepared)
            });
        }
        let mut failed = None;
        while let Some(ended) = tasks.join_next().await {
            match ended {
                Ok(Ok(prepared)) => have.push(prepared),
                Ok(Err(error)) => failed = Some(error.into()),
                Err(error) => tracing::error!(%error, "a task that prepares a child failed"),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Takes up to `count` prepared children of a VM whose QEMUs are alive.
    pub(in crate::engine) fn take_prepared(&self, vm: &str, count: usize) -> Vec<Prepared> {
        let mut state = self.lock();
        let Some(all) = state.prepared.get_mut(vm) else { return Vec::new() };
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
    pub(in crate::engine) fn give_back(&self, vm: &str, prepared: Vec<Prepared>) {
        if !prepared.is_empty() {
            self.lock().prepared.entry(vm.to_owned()).or_default().extend(prepared);
        }
    }

    /// Prepared children of a VM that has ended are of no use. It may have ended while they were being prepared.
    pub(super) fn end_with_parent(self: &Arc<Self>, vm: &str) {
        let record = self.registry.vms().get(vm).ok();
        let (engine, vm) = (self.clone(), vm.to_owned());
        tokio::spawn(async move {
            if let Some(record) = record {
                until_ended(&record).await;
            }
            for prepared in engine.take_prepared(&vm, usize::MAX) {
                prepared.discard().await;
            }
            engine.end_away(&vm, None).await;
        });
    }

    /// Ends all prepared children: the daemon ends.
    pub async fn end_prepared(&self) {
        let all: Vec<Prepared> = self.lock().prepared.drain().flat_map(|(_, prepared)| prepared).collect();
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
    if let Ok(qemu) = QemuProcess::adopt(pid, &vmove_qmp::process::log_in(&record.vm_dir))
        && process_of(record).is_some()
    {
        qemu.exited().await;
    }
}
