//! Threads stay where they belong, and what VMs had is free when they have ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use vmove_node::blocking::run_blocking;
use vmove_node::record::VmRecord;
use vmove_node::registry::{Registry, process_of};
use vmove_tuning::cpus::Cpus;
use vmove_tuning::threads;

use super::Tuning;

/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

impl Tuning {
    /// Puts threads where they belong and takes back what ended VMs had, until the task is dropped.
    pub async fn keep(self: Arc<Self>, registry: Arc<Registry>) {
        let mut kept = KeptOff::default();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let pinned = self.pins.vms();
            if pinned.is_empty() && kept.dedicated.is_empty() {
                continue;
            }
            // Asked first: what has come to its end meanwhile has a record by then.
            let comes = |vm: &String| registry.is_expected(vm) || self.starting().contains(vm);
            let gone: Vec<String> = pinned.into_iter().filter(|vm| !comes(vm)).collect();
            let mut records = registry.records();
            records.retain(|record| process_of(record).is_some());
            for vm in gone.iter().filter(|vm| !records.iter().any(|record| record.name == **vm)) {
                if self.pins.end(vm) {
                    tracing::info!(vm, "the processors of the VM are free");
                }
            }
            for record in &records {
                self.settle(&registry, record).await;
            }
            self.keep_others_off(&mut kept, &records).await;
        }
    }

    /// Puts the threads of a pinned VM where they belong, once.
    async fn settle(&self, registry: &Registry, record: &VmRecord) {
        let process = record.pid.unsigned_abs();
        if self.pins.of(&record.name).is_none() || self.pins.is_settled(&record.name, process) {
            return;
        }
        if let Err(error) = self.settle_now(registry, record).await {
            tracing::debug!(
                vm = record.name,
                error = format!("{error:#}"),
                "the VM's threads are not where they belong yet"
            );
        }
    }

    /// Puts the threads of a pinned VM where they belong.
    pub(super) async fn settle_now(&self, registry: &Registry, record: &VmRecord) -> anyhow::Result<()> {
        let client = registry.monitors().client(&record.qmp_socket).await?;
        let vcpus = vmove_qmp::inspect::vcpu_threads(&client).await?;
        let (pins, name, process) = (self.pins.clone(), record.name.clone(), record.pid.unsigned_abs());
        run_blocking(move || pins.settle(&name, process, &vcpus)).await??;
        let cpus = self.pins.of(&record.name).map(|pin| pin.set().to_string());
        tracing::info!(vm = record.name, cpus, "the VM is on its processors");
        Ok(())
    }

    /// This process, and VMs that are not pinned, keep off processors that VMs have for themselves.
    async fn keep_others_off(&self, kept: &mut KeptOff, records: &[VmRecord]) {
        let (host, shared) = (self.pins.allowed().clone(), self.pins.shared());
        let dedicated = host.without(&shared);
        let unpinned =
            records.iter().filter(|record| !record.adopted && self.pins.of(&record.name).is_none());
        let processes: Vec<Process> =
            unpinned.map(|record| (record.pid.unsigned_abs(), record.pid_start)).collect();
        kept.processes.retain(|process, _| processes.contains(process));
        let is_there = |process: &Process| kept.processes.get(process).unwrap_or(&host) == &shared;
        let late: Vec<Process> = processes.into_iter().filter(|process| !is_there(process)).collect();
        // Its own threads each time: one that starts a QEMU is elsewhere for a moment, and goes back to where it was before.
        let own = (!dedicated.is_empty() || dedicated != kept.dedicated).then(std::process::id);
        let wanted: Vec<u32> = late.iter().map(|(pid, _)| *pid).chain(own).collect();
        let cpus = shared.clone();
        let moved = run_blocking(move || {
            for process in wanted {
                // One that has ended meanwhile needs no processors.
                if let Err(error) = threads::keep_process(process, &cpus, &[]) {
                    tracing::debug!(process, %error, "could not be kept off the processors of VMs");
                }
            }
        });
        if moved.await.is_err() {
            return;
        }
        kept.processes.extend(late.into_iter().map(|process| (process, shared.clone())));
        if dedicated != kept.dedicated {
            tracing::info!(processors = %dedicated, "kept for pinned VMs");
            kept.dedicated = dedicated;
        }
    }
}

/// A process by its number, and when it was started.
type Process = (u32, u64);

/// What was kept off processors of VMs.
#[derive(Debug, Default)]
struct KeptOff {
    /// Processors of VMs.
    dedicated: Cpus,
    /// QEMUs that are not pinned, and where they were put.
    processes: HashMap<Process, Cpus>,
}
