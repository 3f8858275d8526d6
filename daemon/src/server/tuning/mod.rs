//! Processors and memory that VMs have for themselves: who gets them, and that threads stay on them.

mod keep;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use vmove_node::admission::{Admission, Coming};
use vmove_node::pins::{Pins, TuningPolicy};
use vmove_node::registry::Registry;
use vmove_tuning::choose::Wish;
use vmove_types::Backing;
use vmove_types::problem::{Code, Problem, chain};
use vmove_types::tuning::{PINNED_CPUS, PinRequest};
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

    /// Gives a VM that is to be started here its processors, and notes how many it has, so that other nodes give it as many. Under a grant it gets
    /// those of the grant, whatever it asks for.
    pub fn start(
        self: &Arc<Self>,
        registry: &Registry,
        request: &mut RunRequest,
    ) -> Result<Option<Starting>, Problem> {
        let granted = self.granted(&request.name);
        let Some(asked) = granted.or_else(|| request.pin.clone()) else { return Ok(None) };
        let required = request.pin.as_ref().is_some_and(|pin| pin.required);
        // What a VM of this name has stays its own. The registry says that the name is taken.
        let taken = registry.is_expected(&request.name) || registry.vms().has(&request.name);
        if taken || !self.starting().insert(request.name.clone()) {
            return Ok(None);
        }
        let starting = Starting { tuning: Arc::clone(self), vm: request.name.clone(), started: false };
        let wanted =
            self.pin(request, PinRequest { required, ..asked }, Coming::ByMigration, &BTreeMap::new())?;
        request.environment.insert(PINNED_CPUS.to_owned(), wanted.to_string());
        Ok(Some(starting))
    }

    /// What the grant of a VM gives it of which NUMA node. None if it has no grant, or its bridge does not say.
    pub(super) fn granted(&self, vm: &str) -> Option<PinRequest> {
        let numa = self.grants.as_ref()?.processors_of(vm)?.numa;
        (!numa.is_empty()).then_some(PinRequest { numa, required: false })
    }

    /// Most processors that a VM may have for itself: those of its grant.
    fn limit(&self, vm: &str) -> u32 {
        let granted = self.grants.as_ref().and_then(|grants| grants.processors_of(vm));
        granted.map_or(u32::MAX, |granted| granted.cores)
    }

    /// Pins a VM, if it can be, or if that is required. Tells how many processors it should have.
    /// `has` is what it has of this host's memory already, by NUMA node.
    fn pin(
        &self,
        vm: &RunRequest,
        asked: PinRequest,
        coming: Coming,
        has: &BTreeMap<u32, u64>,
    ) -> Result<u32, Problem> {
        let demand = demand(vm).map_err(|error| Problem::bad_request(chain(&error)))?;
        let named = asked.numa.iter().fold(0_u32, |all, share| all.saturating_add(share.cpus));
        let carried = || vm.environment.get(PINNED_CPUS).and_then(|text| text.parse().ok());
        let limit = self.limit(&vm.name);
        if named > limit {
            let vm = &vm.name;
            let text =
                format!("VM {vm:?} is to have {named} processors for itself, and its grant gives {limit}");
            return Err(Problem::new(Code::GrantRefused, text));
        }
        let cpus = if named > 0 { named } else { carried().unwrap_or(demand.cores).min(limit) };
        let backing = vm.memory.parse::<Backing>().unwrap_or(Backing::Thp);
        let huge_page = (backing != Backing::Thp).then(|| backing.page_bytes());
        let mib = demand.memory_mib + demand.huge_2m_mib + demand.huge_1g_mib;
        let wish = match coming {
            Coming::ByMigration => Wish { numa: asked.numa, cpus, memory: mib << 20, huge_page },
            // It has only what it writes, and nobody knows how much that will be.
            Coming::AsChild => Wish { numa: asked.numa, cpus, memory: 0, huge_page: None },
        };
        match self.pins.take(&vm.name, &wish, demand.cores, has) {
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
        let granted = self.granted(&asked.name);
        let none = granted.is_none() && !asked.environment.contains_key(PINNED_CPUS);
        // Its name is being taken by another: that one's processors are not touched.
        if none || self.starting().contains(&asked.name) {
            return Ok(());
        }
        self.pin(asked, granted.unwrap_or_default(), coming, &BTreeMap::new()).map(drop)
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
