//! `vmove tune`: what could be better, and making it so.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use vmove_node::blocking::run_blocking;
use vmove_node::record::VmRecord;
use vmove_node::registry::{Registry, RegistryError};
use vmove_tuning::advice::{Finding, Look, Looked, of_host, of_vm};
use vmove_tuning::host::Host;
use vmove_tuning::{memory, policy};
use vmove_types::problem::{Code, Problem, chain};
use vmove_types::tuning::{Advice, AdviceState, PINNED_CPUS, PinRequest, TuningReport};
use vmove_types::vm::RunRequest;

use super::Tuning;
use crate::server::problem::IntoProblem;
use vmove_node::admission::Coming;

impl Tuning {
    /// Compares this host and its VMs, or one of them, with advice; with `apply`, does first what can be done now.
    pub async fn report(
        &self,
        registry: &Arc<Registry>,
        vm: Option<&str>,
        apply: bool,
    ) -> Result<TuningReport, Problem> {
        let records: Vec<VmRecord> = match vm {
            None => registry.records(),
            Some(name) => {
                vec![registry.vms().get(name).map_err(|error| RegistryError::from(error).into_problem())?]
            }
        };
        let mut report = TuningReport { advice: Vec::new() };
        if vm.is_none() {
            let passthrough = records.iter().any(|record| !record.devices.is_empty());
            let findings = self.of_host(passthrough, apply).await?;
            report.advice.extend(findings.into_iter().map(|finding| finding.advice));
        }
        let host = self.host()?;
        for record in &records {
            match self.of_vm(registry, &host, record, apply).await {
                Ok(advice) => report.advice.extend(advice),
                // One that has ended meanwhile.
                Err(problem) if vm.is_none() && problem.code == Code::UnknownVm => {}
                Err(problem) => return Err(problem),
            }
        }
        Ok(report)
    }

    /// What is told of a VM, after doing what can be done.
    async fn of_vm(
        &self,
        registry: &Arc<Registry>,
        host: &Host,
        record: &VmRecord,
        apply: bool,
    ) -> Result<Vec<Advice>, Problem> {
        let before = self.look(registry, record).await?;
        let advice = of_vm(&before, host);
        let unpinned = before.pin.is_none() && before.not_pinned.is_some() && !before.adopted;
        if !apply || !(unpinned || advice.iter().any(|one| one.state == AdviceState::CanApply)) {
            return Ok(advice);
        }
        let failed = self.apply_to(registry, record, unpinned).await.err();
        let mut after = of_vm(&self.look(registry, record).await?, host);
        for (old, new) in advice.iter().zip(&mut after) {
            match &failed {
                None if old.state != AdviceState::Good && new.state == AdviceState::Good => {
                    new.state = AdviceState::Applied;
                }
                // One VM that cannot be pinned does not keep the others from it.
                Some(why) if new.state == AdviceState::CanApply || new.topic == "pinning" => {
                    new.state = AdviceState::Better;
                    new.better = Some(format!("could not be applied: {}", why.message));
                }
                _ => {}
            }
        }
        Ok(after)
    }

    fn host(&self) -> Result<Host, Problem> {
        self.pins.host().map_err(|error| Problem::new(Code::Internal, chain(&error)))
    }

    async fn of_host(&self, passthrough: bool, apply: bool) -> Result<Vec<Finding>, Problem> {
        let (host, pins) = (self.host()?, self.pins.clone());
        let findings = run_blocking(move || {
            let dedicated = pins.allowed().without(&pins.shared());
            let look = Look { root: PathBuf::from("/"), host: &host, dedicated, passthrough };
            let mut findings = of_host(&look);
            if apply {
                findings.iter_mut().for_each(Finding::apply);
            }
            findings
        });
        findings.await.map_err(|error| Problem::new(Code::Internal, chain(&error)))
    }

    /// Where a VM's threads and memory are.
    async fn look(&self, registry: &Arc<Registry>, record: &VmRecord) -> Result<Looked, Problem> {
        let detail = registry.show(&record.name).await.map_err(IntoProblem::into_problem)?;
        let vcpus = match registry.monitors().client(&record.qmp_socket).await {
            Ok(client) => vmove_qmp::inspect::vcpu_threads(&client).await.unwrap_or_default(),
            // It ends, or a migration has its monitor: then its threads are not known.
            Err(_) => Vec::new(),
        };
        let memory = memory_of(record).await?;
        let (pins, name) = (self.pins.clone(), record.name.clone());
        let devices: Vec<String> =
            record.devices.iter().map(|device| device.request.address.to_string()).collect();
        let roles: Vec<String> = record.devices.iter().map(|device| device.request.role.clone()).collect();
        let looked = run_blocking(move || Looked {
            pin: pins.of(&name),
            not_pinned: pins.not_pinned(&name),
            astray: pins.astray(&name, &vcpus),
            devices: roles
                .into_iter()
                .zip(devices.iter().map(|address| memory::node_of_device(address)))
                .filter_map(|(role, node)| Some((role, node?)))
                .collect(),
            vm: name,
            ..Looked::default()
        });
        let looked = looked.await.map_err(|error| Problem::new(Code::Internal, chain(&error)))?;
        let not_pinned = looked.not_pinned.clone().or_else(|| {
            let asked = looked.pin.is_none() && record.environment.iter().any(|(key, _)| key == PINNED_CPUS);
            asked.then(|| "it could not be before vmoved was started again".to_owned())
        });
        Ok(Looked { memory, not_pinned, huge_share: detail.huge_share, adopted: record.adopted, ..looked })
    }

    /// Pins a VM that could not be pinned when it came, puts its threads where they belong, and moves its memory there.
    async fn apply_to(
        &self,
        registry: &Arc<Registry>,
        record: &VmRecord,
        unpinned: bool,
    ) -> Result<(), Problem> {
        let failed = |text: String| Problem::new(Code::NotPinned, text);
        let has = memory_of(record).await?;
        if unpinned {
            self.pin_later(record, has.as_ref())?;
        }
        self.settle_now(registry, record).await.map_err(|error| failed(format!("{error:#}")))?;
        let (Some(pin), Some(_)) = (self.pins.of(&record.name), has) else { return Ok(()) };
        let (pins, host, record) = (self.pins.clone(), self.host()?, record.clone());
        let moved = run_blocking(move || {
            for ram in &record.ram {
                let file = std::fs::File::options().read(true).write(true).open(&ram.path)?;
                pins.bind(&record.name, &file)?;
            }
            let others = host.nodes.iter().map(|node| node.id).filter(|id| !pin.memory.contains(id));
            let others: Vec<u32> = others.collect();
            // What stays, since it is in use or there is no room, the next look tells.
            if others.is_empty() {
                return Ok(0);
            }
            policy::move_memory(record.pid.unsigned_abs(), &others, &pin.memory)
        });
        let moved = moved.await.map_err(|error| Problem::new(Code::Internal, chain(&error)))?;
        moved.map(drop).map_err(|error| failed(format!("its memory could not be moved: {error}")))
    }

    /// Pins a VM that is here, as it was asked for; after a restart of this daemon only the number of its processors is known.
    fn pin_later(&self, record: &VmRecord, has: Option<&BTreeMap<u32, u64>>) -> Result<(), Problem> {
        let request = RunRequest {
            name: record.name.clone(),
            memory: record.backing.to_string(),
            command_line: record.command_line.clone(),
            environment: record.environment.iter().cloned().collect(),
            devices: Vec::new(),
            grant: None,
            pin: None,
        };
        // A child has only what it writes.
        let coming = if has.is_some() { Coming::ByMigration } else { Coming::AsChild };
        let wished =
            self.pins.wished(&record.name).map(|wish| PinRequest { numa: wish.numa, required: true });
        let asked = wished.or_else(|| self.granted(&record.name)).unwrap_or_default();
        let none = BTreeMap::new();
        self.pin(&request, PinRequest { required: true, ..asked }, coming, has.unwrap_or(&none)).map(drop)
    }
}

/// A VM's memory by NUMA node; none of a child.
async fn memory_of(record: &VmRecord) -> Result<Option<BTreeMap<u32, u64>>, Problem> {
    let process = record.pid.unsigned_abs();
    let files: Vec<PathBuf> = record.ram.iter().map(|ram| ram.path.clone()).collect();
    let looked = run_blocking(move || memory::by_node(process, &files).ok().flatten());
    looked.await.map_err(|error| Problem::new(Code::Internal, chain(&error)))
}
