//! Processors and memory that VMs have for themselves: who gets them, and that threads stay on them.

mod keep;
mod report;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use vmove_node::admission::{Admission, Coming};
use vmove_tuning::choose::Wish;
use vmove_tuning::pins::{Pins, TuningPolicy};
use vmove_types::Backing;
use vmove_types::problem::{Code, Problem, chain};
use vmove_types::tuning::{NumaShare, PINNED_CPUS, PinRequest};
use vmove_types::vm::{RunRequest, VmDetail};

use super::grants::{Grants, demand};

/// Pins of this node, and what gets VMs into it.
#[derive(Debug)]
pub struct Tuning {
    pins: Arc<Pins>,
    grants: Option<Arc<Grants>>,
    /// VMs that are being started: the registry does not list them yet.
    starting: Mutex<BTreeSet<String>>,
}

/// A VM that is being started on its processors. Dropped before [`Starting::started`], it gives them back.
pub struct Starting {
    tuning: Arc<Tuning>,
    vm: String,
    started: bool,
}

impl Starting {
    pub fn started(mut self) {
        self.started = true;
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.tuning.starting().remove(&self.vm);
        if !self.started {
            self.tuning.pins.end(&self.vm);
        }
    }
}

impl Tuning {
    pub fn open(
        policy: TuningPolicy,
        grants: Option<Arc<Grants>>,
        state_dir: &Path,
    ) -> anyhow::Result<Arc<Self>> {
        let file = state_dir.join("pins.json");
        let pins = Pins::open(Path::new("/"), policy, file.clone());
        let pins =
            pins.with_context(|| format!("Could not read the processors of VMs in {}", file.display()))?;
        Ok(Arc::new(Self { pins: Arc::new(pins), grants, starting: Mutex::default() }))
    }

    pub fn pins(&self) -> &Arc<Pins> {
        &self.pins
    }

    fn starting(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a VM that is to be started here its processors, and notes how many it has, so that other nodes give it as many.
    pub fn start(self: &Arc<Self>, request: &mut RunRequest) -> Result<Option<Starting>, Problem> {
        let granted = self.granted(&request.name);
        let asked = request.pin.clone().or_else(|| granted.map(|numa| PinRequest { numa, required: false }));
        let Some(asked) = asked else { return Ok(None) };
        let starting = Starting { tuning: Arc::clone(self), vm: request.name.clone(), started: false };
        self.starting().insert(request.name.clone());
        let wanted = self.pin(request, asked, Coming::ByMigration)?;
        request.environment.insert(PINNED_CPUS.to_owned(), wanted.to_string());
        Ok(Some(starting))
    }

    /// What the grant of a VM gives it of which NUMA node.
    fn granted(&self, vm: &str) -> Option<Vec<NumaShare>> {
        let numa = self.grants.as_ref()?.numa_of(vm)?;
        (!numa.is_empty()).then_some(numa)
    }

    /// Pins a VM, if it can be, or if that is required. Tells how many processors it should have.
    fn pin(&self, vm: &RunRequest, asked: PinRequest, coming: Coming) -> Result<u32, Problem> {
        let demand = demand(vm).map_err(|error| Problem::bad_request(chain(&error)))?;
        let named: u32 = asked.numa.iter().map(|share| share.cpus).sum();
        let carried = vm.environment.get(PINNED_CPUS).and_then(|text| text.parse().ok());
        let cpus = if named > 0 { named } else { carried.unwrap_or(demand.cores) };
        let huge_page = match vm.memory.parse::<Backing>() {
            Ok(Backing::Hugetlb2M) => Some(2 << 20),
            Ok(Backing::Hugetlb1G) => Some(1 << 30),
            _ => None,
        };
        let mib = demand.memory_mib + demand.huge_2m_mib + demand.huge_1g_mib;
        let wish = match coming {
            Coming::ByMigration => Wish { numa: asked.numa, cpus, memory: mib << 20, huge_page },
            // It has only what it writes, and nobody knows how much that will be.
            Coming::AsChild => Wish { numa: asked.numa, cpus, memory: 0, huge_page: None },
        };
        match self.pins.take(&vm.name, &wish, demand.cores) {
            Ok(()) => Ok(cpus),
            Err(error) if asked.required => Err(Problem::new(
                Code::NotPinned,
                format!("VM {:?} cannot be pinned: {}", vm.name, chain(&error)),
            )),
            Err(error) => {
                tracing::info!(vm = vm.name, why = chain(&error), "the VM is not pinned");
                Ok(cpus)
            }
        }
    }

    /// Notes where a VM is pinned.
    pub fn mark(&self, vm: &mut VmDetail) {
        vm.pinned = self.pins.info(&vm.summary.name);
        vm.not_pinned = self.pins.not_pinned(&vm.summary.name);
    }

    /// Pins a VM that comes from another node, or as a child, if it was pinned there or its grant says so.
    fn admitted(&self, asked: &RunRequest, coming: Coming) -> Result<(), Problem> {
        let numa = self.granted(&asked.name);
        if numa.is_none() && !asked.environment.contains_key(PINNED_CPUS) {
            return Ok(());
        }
        self.pin(asked, PinRequest { numa: numa.unwrap_or_default(), required: false }, coming).map(drop)
    }
}

/// Grants decide who may come; who was pinned is pinned here, too.
impl Admission for Tuning {
    fn would_admit(&self, asked: &RunRequest) -> Result<(), Problem> {
        self.grants.as_ref().map_or(Ok(()), |grants| grants.would_admit(asked))
    }

    fn admit(&self, asked: &RunRequest, coming: Coming) -> Result<(), Problem> {
        if let Some(grants) = &self.grants {
            grants.admit(asked, coming)?;
        }
        self.admitted(asked, coming)
    }
}
