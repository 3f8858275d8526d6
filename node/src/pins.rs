//! What the VMs of a host have for themselves, in a file that outlives the daemon.
//!
//! Some processors are never given away: the *housekeeping* ones, for the daemon, for QEMU's threads beside virtual processors and for VMs that are
//! not pinned. All of these keep off processors that a VM has for itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use vmove_types::tuning::PinInfo;

use vmove_tuning::choose::{NoPlace, Place, Wish, choose};
use vmove_tuning::cpus::Cpus;
use vmove_tuning::host::{Host, HostError};
use vmove_tuning::pin::{Pin, Vcpu};
use vmove_tuning::policy::{self, StartsThere};
use vmove_tuning::threads;

use crate::files::write_durably;

/// A host with fewer processors gives none away unless told which ones to keep: one pinned VM would leave too little for all else.
const FEWEST: usize = 4;

/// `[tuning]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct TuningPolicy {
    /// Whether VMs are pinned.
    pub pin: bool,
    /// Processors that no VM gets for itself. By default those of the first core.
    pub housekeeping_cpus: Option<Cpus>,
}

impl Default for TuningPolicy {
    fn default() -> Self {
        Self { pin: true, housekeeping_cpus: None }
    }
}

/// Why a VM is not pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// It is configured so.
    #[error("VMs are not pinned here: pin = false in [tuning]")]
    Off,
    /// The host is small.
    #[error(
        "this host has {cpus} processors: none is given away unless housekeeping-cpus in [tuning] says which ones to keep (for example \"0\")"
    )]
    Small {
        /// How many.
        cpus: usize,
    },
    /// There is no room.
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
    /// The host could not be read.
    #[error("the processors of this host are not known")]
    Host(#[from] HostError),
    /// The file of the ledger.
    #[error("could not write {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

#[derive(Debug, Default)]
struct Kept {
    pins: BTreeMap<String, Pin>,
    /// VMs that asked for it and are not pinned: for what, and why not.
    not_pinned: BTreeMap<String, (Wish, String)>,
    /// VMs whose threads were put where they belong, by the process.
    settled: BTreeMap<String, u32>,
}

/// The pins of a host.
#[derive(Debug)]
pub struct Pins {
    root: PathBuf,
    allowed: Cpus,
    policy: TuningPolicy,
    file: Option<PathBuf>,
    kept: Mutex<Kept>,
}

impl Pins {
    /// No VM is pinned.
    #[must_use]
    pub fn none() -> Self {
        let policy = TuningPolicy { pin: false, housekeeping_cpus: None };
        Self { root: "/".into(), allowed: Cpus::none(), policy, file: None, kept: Mutex::default() }
    }

    /// Those that an earlier daemon has written into `file`. Only processors on which this process may run are given away; `root` is where `/sys` is.
    ///
    /// # Errors
    /// The file cannot be read, or is not one that this version writes; no housekeeping processor is there.
    pub fn open(root: &Path, policy: TuningPolicy, file: PathBuf) -> io::Result<Self> {
        let pins = match std::fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(error),
        };
        let allowed = threads::of(None)?;
        if let Some(cpus) = policy.housekeeping_cpus.as_ref().filter(|cpus| cpus.and(&allowed).is_empty()) {
            let why = format!("housekeeping-cpus in [tuning]: expected some of {allowed}, found \"{cpus}\"");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let kept = Mutex::new(Kept { pins, ..Kept::default() });
        Ok(Self { root: root.to_owned(), allowed, policy, file: Some(file), kept })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Processors on which this process may run: no others are given away.
    #[must_use]
    pub const fn allowed(&self) -> &Cpus {
        &self.allowed
    }

    /// The host as it is now.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn host(&self) -> Result<Host, HostError> {
        Host::read(&self.root, &self.allowed)
    }

    /// Processors that no VM gets for itself.
    #[must_use]
    pub fn housekeeping(&self, host: &Host) -> Cpus {
        let first = || host.cores.iter().find(|core| !core.is_empty()).cloned().unwrap_or_default();
        self.policy.housekeeping_cpus.clone().unwrap_or_else(first).and(&self.allowed)
    }

    /// Processors that VMs can get, whether they are free or not.
    ///
    /// # Errors
    /// Why none can be had.
    pub fn given_away(&self, host: &Host) -> Result<Cpus, PinError> {
        if !self.policy.pin {
            return Err(PinError::Off);
        }
        if self.policy.housekeeping_cpus.is_none() && self.allowed.len() < FEWEST {
            return Err(PinError::Small { cpus: self.allowed.len() });
        }
        Ok(self.allowed.without(&self.housekeeping(host)))
    }

    /// Gives a VM what it wishes, until [`Self::end`]. What it `has` of the host's memory already (in bytes, by NUMA node) is there for it.
    ///
    /// # Errors
    /// [`PinError`]; nothing has changed then, and [`Self::not_pinned`] tells why.
    pub fn take(&self, vm: &str, wish: &Wish, vcpus: u32, has: &BTreeMap<u32, u64>) -> Result<(), PinError> {
        let mut kept = self.kept();
        let taken = self.place(&kept, vm, wish, has).and_then(|place| {
            let mut pins = kept.pins.clone();
            let (promised, huge_page) = (wish.memory, wish.huge_page);
            let pin = Pin { cpus: place.cpus, memory: place.memory, vcpus, promised, huge_page };
            pins.insert(vm.to_owned(), pin);
            self.write(&pins)?;
            Ok(pins)
        });
        match taken {
            Ok(pins) => {
                kept.pins = pins;
                kept.not_pinned.remove(vm);
                // Processors for the other threads of VMs have become fewer.
                kept.settled.clear();
                Ok(())
            }
            Err(error) => {
                kept.not_pinned.insert(vm.to_owned(), (wish.clone(), told(&error)));
                Err(error)
            }
        }
    }

    fn place(&self, kept: &Kept, vm: &str, wish: &Wish, has: &BTreeMap<u32, u64>) -> Result<Place, PinError> {
        let mut host = self.host()?;
        let others = || kept.pins.iter().filter(|(name, _)| *name != vm).map(|(_, pin)| pin);
        let taken = others().fold(Cpus::none(), |all, pin| all.or(&pin.set()));
        others().for_each(|pin| promise(&mut host, pin));
        for node in &mut host.nodes {
            node.give_back(has.get(&node.id).copied().unwrap_or(0), wish.huge_page);
        }
        let free = self.given_away(&host)?.without(&taken);
        Ok(choose(&host, &free, wish)?)
    }

    fn write(&self, pins: &BTreeMap<String, Pin>) -> Result<(), PinError> {
        let Some(path) = &self.file else { return Ok(()) };
        write_durably(path, pins).map_err(|source| PinError::File { path: path.clone(), source })
    }

    /// What a VM has.
    #[must_use]
    pub fn of(&self, vm: &str) -> Option<Pin> {
        self.kept().pins.get(vm).cloned()
    }

    /// Why a VM that asked for it is not pinned.
    #[must_use]
    pub fn not_pinned(&self, vm: &str) -> Option<String> {
        self.kept().not_pinned.get(vm).map(|(_, why)| why.clone())
    }

    /// What a VM asked for that is not pinned.
    #[must_use]
    pub fn wished(&self, vm: &str) -> Option<Wish> {
        self.kept().not_pinned.get(vm).map(|(wish, _)| wish.clone())
    }

    /// The VMs that are pinned, or asked for it.
    #[must_use]
    pub fn vms(&self) -> BTreeSet<String> {
        let kept = self.kept();
        kept.pins.keys().chain(kept.not_pinned.keys()).cloned().collect()
    }

    /// A VM is no more. True if it had something.
    pub fn end(&self, vm: &str) -> bool {
        let mut kept = self.kept();
        kept.not_pinned.remove(vm);
        if kept.pins.remove(vm).is_none() {
            return false;
        }
        kept.settled.clear();
        // If it cannot be written, the next daemon finds that the VM has ended, as this one did.
        let _ = self.write(&kept.pins);
        true
    }

    /// Processors that no VM has for itself.
    #[must_use]
    pub fn shared(&self) -> Cpus {
        let kept = self.kept();
        kept.pins.values().fold(self.allowed.clone(), |shared, pin| shared.without(&pin.set()))
    }

    /// Processors for what a VM runs beside its virtual processors: those that nobody has on its NUMA nodes, else any that nobody has.
    #[must_use]
    pub fn others_of(&self, pin: &Pin) -> Cpus {
        let shared = self.shared();
        let near = self.host().map_or_else(
            |_| Cpus::none(),
            |host| {
                let nodes = host.nodes_of(&pin.set());
                let cpus = nodes.iter().filter_map(|id| host.node(*id));
                cpus.fold(Cpus::none(), |all, node| all.or(&node.cpus)).and(&shared)
            },
        );
        if near.is_empty() { shared } else { near }
    }

    /// Where a VM is pinned, for people.
    #[must_use]
    pub fn info(&self, vm: &str) -> Option<PinInfo> {
        let pin = self.of(vm)?;
        Some(PinInfo {
            cpus: pin.set().to_string(),
            one_each: pin.one_each(),
            others: self.others_of(&pin).to_string(),
            memory_nodes: pin.memory,
        })
    }

    /// For the start of a VM's QEMU by the calling thread: it begins on the VM's processors and those of its other threads, and what it allocates is
    /// on its NUMA nodes. None: the VM is not pinned, and starts where this process is.
    ///
    /// # Errors
    /// The kernel refuses processors or nodes.
    pub fn starts(&self, vm: &str) -> io::Result<Option<StartsThere>> {
        let Some(pin) = self.of(vm) else { return Ok(None) };
        StartsThere::begin(&pin.set().or(&self.others_of(&pin)), &pin.memory).map(Some)
    }

    /// Pages of a VM's RAM file are allocated on its NUMA nodes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind(&self, vm: &str, file: &File) -> io::Result<()> {
        match self.of(vm) {
            Some(pin) if !pin.memory.is_empty() => policy::bind_file(file, &pin.memory),
            _ => Ok(()),
        }
    }

    /// Puts the threads of a VM where they belong: `vcpus` are the threads of its virtual processors, by index.
    ///
    /// # Errors
    /// The kernel's.
    pub fn settle(&self, vm: &str, process: u32, vcpus: &[(u32, u32)]) -> io::Result<()> {
        let Some(pin) = self.of(vm) else { return Ok(()) };
        let mut of_vcpus = Vec::new();
        for vcpu in pin.vcpus(vcpus) {
            threads::keep(vcpu.thread, &vcpu.cpus)?;
            of_vcpus.push(vcpu.thread);
        }
        threads::keep_process(process, &self.others_of(&pin), &of_vcpus)?;
        self.kept().settled.insert(vm.to_owned(), process);
        Ok(())
    }

    /// Whether the threads of this process were put where they belong.
    #[must_use]
    pub fn is_settled(&self, vm: &str, process: u32) -> bool {
        self.kept().settled.get(vm) == Some(&process)
    }

    /// Virtual processors that are not where they belong, by index and with where they are.
    #[must_use]
    pub fn astray(&self, vm: &str, vcpus: &[(u32, u32)]) -> Vec<(u32, Cpus)> {
        let Some(pin) = self.of(vm) else { return Vec::new() };
        let wrong = |vcpu: Vcpu| {
            let now = threads::of(Some(vcpu.thread)).ok()?;
            (now != vcpu.cpus).then_some((vcpu.index, now))
        };
        pin.vcpus(vcpus).into_iter().filter_map(wrong).collect()
    }
}

/// What a VM was promised is not there for others, whether it has touched it or not.
fn promise(host: &mut Host, pin: &Pin) {
    let share = pin.promised / (pin.memory.len().max(1) as u64);
    for node in host.nodes.iter_mut().filter(|node| pin.memory.contains(&node.id)) {
        match pin.huge_page {
            Some(size) => node.promise_huge(size, share.div_ceil(size)),
            None => node.promise(share),
        }
    }
}

/// An error and what led to it, in one line.
fn told(error: &PinError) -> String {
    vmove_types::problem::chain(error)
}
