//! Loads children whose QEMUs wait: maps their memory, loads the device state, asks the operator's hooks, writes the record.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_node::blocking::{TaskFailed, run_blocking};
use vmove_node::record::VmRecord;
use vmove_node::registry::starting;
use vmove_types::fork_report::{ForkReport, LoadWrite};
use vmove_types::problem::chain;

use super::{LoadOrder, Loaded, Prepared, Start};
use crate::CloneError;
use crate::engine::ForkEngine;
use crate::record::Member;

/// A loaded child and whether it was prepared before the fork; or index, name and error of a child that could not be loaded.
type LoadEnd = Result<(Loaded, bool), (u32, String, CloneError)>;

fn task(failed: &TaskFailed) -> CloneError {
    CloneError::Task(failed.to_string())
}

impl ForkEngine {
    /// Loads all children: those that were prepared before the fork at once, those that are `starting` as soon as their QEMU is there.
    /// None runs before all are loaded: children that run would take the processors from those that load.
    ///
    /// Returns each child that was loaded, and whether it was prepared before the fork.
    pub(in crate::engine) async fn load_all(
        self: &Arc<Self>,
        id: &str,
        prepared: Vec<Prepared>,
        mut starting: JoinSet<Start>,
        order: &Arc<LoadOrder>,
        report: &mut ForkReport,
    ) -> Vec<(Loaded, bool)> {
        self.update(id, |p| p.phase = "load".to_owned());
        let mut loading = JoinSet::new();
        let load = |child: Prepared, was_prepared: bool, loading: &mut JoinSet<LoadEnd>| {
            let (engine, order, id) = (self.clone(), Arc::clone(order), id.to_owned());
            loading.spawn(async move {
                let loaded = engine.load_child(child, &order).await?;
                engine.update(&id, |p| p.loaded += 1);
                Ok((loaded, was_prepared))
            });
        };
        for child in prepared {
            load(child, true, &mut loading);
        }
        while let Some(ended) = starting.join_next().await {
            match ended {
                Ok(Ok((child, was_prepared))) => load(child, was_prepared, &mut loading),
                Ok(Err((index, name, error))) => report.children.push(self.lost(index, name, &error)),
                Err(error) => tracing::error!(%error, "a task that starts a child failed"),
            }
        }
        let mut loaded = Vec::new();
        while let Some(ended) = loading.join_next().await {
            match ended {
                Ok(Ok(child)) => loaded.push(child),
                Ok(Err((index, name, error))) => report.children.push(self.lost(index, name, &error)),
                Err(error) => tracing::error!(%error, "a task that loads a child failed"),
            }
        }
        loaded
    }

    /// Loads one child, which does not run yet. On an error nothing of it is left.
    async fn load_child(
        &self,
        mut prepared: Prepared,
        order: &LoadOrder,
    ) -> Result<Loaded, (u32, String, CloneError)> {
        let turn = self.at_work.acquire().await;
        let (index, name) = (prepared.child.plan.index, prepared.child.plan.name().to_owned());
        let done = self.fill(&mut prepared, order).await;
        drop(turn);
        match done {
            Ok(written_while_loading) => {
                Ok(Loaded { child: prepared.child, written_while_loading, _reserved: prepared.reserved })
            }
            Err(error) => {
                prepared.discard().await;
                Err((index, name, error))
            }
        }
    }

    /// Gives back what was written into its memory while the device state was loaded, if that was to be looked at.
    async fn fill(&self, prepared: &mut Prepared, order: &LoadOrder) -> Result<Vec<LoadWrite>, CloneError> {
        let child = &mut prepared.child;
        child.map_template(&order.sources).await?;
        if let Some(service) = &order.service {
            child.be_served(service).await?;
        }
        child.load(&order.state).await?;
        let written = if order.verify { child.verify(&order.files).await? } else { Vec::new() };
        self.ask_child_start(child, &order.fork, &order.parent).await?;
        let devices = order.devices.get(&child.plan.index).cloned().unwrap_or_default();
        let record = VmRecord { devices, ..child.record() };
        let member = Member {
            vm: record.name.clone(),
            pid: record.pid,
            pid_start: record.pid_start,
            parent: Some(order.parent.clone()),
            index: child.plan.index,
            fork: order.fork.clone(),
            node: None,
            private: child.mappings.clone(),
            stopped_to_move: false,
            by_guest: self.guests.asked_for(&order.fork),
            lineage: self.guests.lineage(&order.fork),
        };
        let members = Arc::clone(&self.members);
        run_blocking(move || members.put(&member)).await.map_err(|e| task(&e))??;
        self.registry.monitors().insert(&record.qmp_socket, child.client.clone()).await;
        let vm_dir = record.vm_dir.clone();
        if let Err(error) = self.registry.enter(record.clone()).await {
            self.registry.monitors().forget(&record.qmp_socket).await;
            return Err(CloneError::Task(chain(&error)));
        }
        run_blocking(move || starting::done(&vm_dir)).await.map_err(|e| task(&e))?;
        Ok(written)
    }
}
