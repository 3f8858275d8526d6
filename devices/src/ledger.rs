//! The journal of devices and their VMs. Each device is recorded before it is changed.
//!
//! After a kill, the restarted daemon finds in the journal every device that was changed, with its former state. [`Ledger::recover`]
//! completes unfinished operations: a device that was being given to a VM, or returned, returns to the host. A device that a VM has stays.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmove_node::journal::Journal;

use crate::error::{Act, Cause, DeviceError};
use crate::migration::OwnState;
use crate::vf::{FormerIdentity, Functions};
use crate::{
    Device, DeviceKind, DeviceRequest, NodeDevices, PciAddress, Sys, bind, group, list, migration, vf,
};

/// Size in bytes beyond which the journal is rewritten when it is opened.
const REWRITE_BYTES: u64 = 256 << 10;

/// A device that a VM has, is receiving, or is returning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Claim {
    /// The VM.
    pub vm: String,
    /// The device, its role and its addresses.
    pub request: DeviceRequest,
    /// Its IOMMU group: `/dev/vfio/GROUP`.
    pub group: u32,
    /// How far it is.
    pub step: Step,
    /// What it was before.
    pub former: Former,
    /// Somebody else bound it and started the QEMU that has it: nothing of it is changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub taken_in: bool,
    /// What it says of its own state: asked as it was taken, since later the VM has it open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_state: Option<OwnState>,
}

/// How far a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// It is being given to the VM.
    Taking,
    /// The VM has it.
    Held,
    /// It is being given back to the host.
    Returning,
}

/// What a device was before a VM got it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Former {
    /// The driver that had it.
    pub driver: Option<String>,
    /// The driver that alone might take it.
    pub driver_override: Option<String>,
    /// Its addresses.
    pub identity: FormerIdentity,
    /// User and group of `/dev/vfio/GROUP`, if it was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_owner: Option<(u32, u32)>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Record {
    claims: Vec<Claim>,
}

/// The devices of this node that VMs have.
pub struct Ledger {
    journal: Journal<Record>,
    sys: Sys,
    functions: Box<dyn Functions>,
    /// User and group that QEMUs run as; `None` for root.
    user: Option<(u32, u32)>,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger")
            .field("journal", &self.journal)
            .field("sys", &self.sys)
            .finish_non_exhaustive()
    }
}

impl Ledger {
    /// Opens the journal at `path`, or begins it. [`Ledger::recover`] is to be called next.
    ///
    /// # Errors
    /// The kernel's answer; `InvalidData` if the journal cannot be read: it is left as it is.
    pub fn open(path: &Path, sys: Sys, functions: Box<dyn Functions>) -> io::Result<Self> {
        let journal = match std::fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Journal::create(path, Record::default())?
            }
            Err(error) => return Err(error),
            Ok(found) if found.len() > REWRITE_BYTES => {
                let record = Journal::<Record>::read(path)?;
                let short = path.with_extension("part");
                // Of an earlier life that was killed here.
                let _ = std::fs::remove_file(&short);
                drop(Journal::create(&short, record)?);
                std::fs::rename(&short, path)?;
                Journal::open(path)?
            }
            Ok(_) => Journal::open(path)?,
        };
        Ok(Self { journal, sys, functions, user: None })
    }

    /// Lets QEMUs of this user and group open the devices that VMs get.
    #[must_use]
    pub fn for_user(self, user: Option<(u32, u32)>) -> Self {
        Self { user, ..self }
    }

    /// The node that it is about.
    #[must_use]
    pub fn sys(&self) -> &Sys {
        &self.sys
    }

    /// All claims.
    #[must_use]
    pub fn claims(&self) -> &[Claim] {
        &self.journal.record().claims
    }

    /// The claim of a VM's role.
    #[must_use]
    pub fn claim(&self, vm: &str, role: &str) -> Option<&Claim> {
        self.claims().iter().find(|claim| claim.vm == vm && claim.request.role == role)
    }

    /// Gives a device to a VM: checks it, sets its addresses and hands it to `vfio-pci`. If anything fails it is as it was before, or the
    /// claim stays for [`Ledger::recover`]. Asked again for what the VM has, it changes nothing,
    /// unless somebody has taken that off `vfio-pci`, or made it anew: then it is given once more.
    ///
    /// # Errors
    /// [`Cause::Taken`], [`Cause::RoleTaken`], what [`check`] and [`vf::apply`] and [`bind::bind`] give, and [`Cause::Journal`].
    pub fn take(&mut self, vm: &str, request: &DeviceRequest) -> Result<Claim, DeviceError> {
        let address = request.address;
        let failed = |cause: Cause| cause.of(address, Act::Take);
        if let Some(claim) = self.claim(vm, &request.role)
            && claim.request == *request
            && claim.step == Step::Held
        {
            return self.renew(claim.clone());
        }
        self.is_free(vm, request).map_err(failed)?;
        let device = list::read(&self.sys, address)?;
        let group = check(&self.sys, &NodeDevices::read(&self.sys), &device).map_err(failed)?;
        if device.driver.as_deref().is_some_and(bind::is_vfio) {
            // Somebody else may have it whom we do not know.
            bind::wait_until_free(&self.sys, group, Duration::ZERO).map_err(failed)?;
        }
        let identity = vf::current(&self.sys, &*self.functions, &device, &request.identity)?;
        let former = Former {
            driver: device.driver.clone(),
            driver_override: bind::named(&self.sys, address),
            identity,
            group_owner: self.sys.owner(&group_file(group)),
        };
        let own_state = own_state(&self.sys, &device);
        let claim = Claim {
            vm: vm.to_owned(),
            request: request.clone(),
            group,
            step: Step::Taking,
            former,
            taken_in: false,
            own_state,
        };
        self.note(address, |claims| claims.push(claim.clone()))?;
        let given = vf::apply(&self.sys, &*self.functions, &device, &request.identity)
            .and_then(|()| bind::bind(&self.sys, address))
            .and_then(|()| self.let_open(group, self.user).map_err(|cause| cause.of(address, Act::Take)))
            .and_then(|()| self.step(address, Step::Held));
        if let Err(error) = given {
            // If this fails, too, the claim stays, and the restarted daemon tries again. The caller gets the first error.
            let _ = self.undo(address, Duration::ZERO);
            return Err(error);
        }
        Ok(Claim { step: Step::Held, ..claim })
    }

    /// Sees to it that what a VM has can be plugged in.
    fn renew(&mut self, claim: Claim) -> Result<Claim, DeviceError> {
        let address = claim.request.address;
        let device = list::read(&self.sys, address)?;
        let is_bound = device.driver.as_deref().is_some_and(bind::is_vfio);
        if claim.taken_in || (is_bound && device.group == Some(claim.group)) {
            return Ok(claim);
        }
        let failed = |cause: Cause| cause.of(address, Act::Take);
        let group = check(&self.sys, &NodeDevices::read(&self.sys), &device).map_err(failed)?;
        let claim = Claim { group, ..claim };
        self.note(address, |claims| {
            let ours = claims.iter_mut().filter(|known| known.request.address == address);
            ours.for_each(|known| known.group = group);
        })?;
        vf::apply(&self.sys, &*self.functions, &device, &claim.request.identity)?;
        bind::bind(&self.sys, address)?;
        self.let_open(group, self.user).map_err(failed)?;
        Ok(claim)
    }

    /// Notes a device that the QEMU of a VM has already, which somebody else started. Nothing of it is changed, also not when it is given
    /// back.
    ///
    /// # Errors
    /// [`Cause::Taken`], [`Cause::RoleTaken`], [`Cause::Absent`], [`Cause::NoIommu`], [`Cause::NotBound`], [`Cause::Journal`].
    pub fn take_in(&mut self, vm: &str, request: &DeviceRequest) -> Result<Claim, DeviceError> {
        let address = request.address;
        let failed = |cause: Cause| cause.of(address, Act::Take);
        self.is_free(vm, request).map_err(failed)?;
        let device = list::read(&self.sys, address)?;
        let group = device.group.ok_or_else(|| failed(Cause::NoIommu))?;
        if !device.driver.as_deref().is_some_and(bind::is_vfio) {
            return Err(failed(Cause::NotBound { wanted: bind::VFIO.to_owned(), found: device.driver }));
        }
        let claim = Claim {
            vm: vm.to_owned(),
            request: request.clone(),
            group,
            step: Step::Held,
            former: Former::default(),
            taken_in: true,
            own_state: None,
        };
        self.note(address, |claims| claims.push(claim.clone()))?;
        Ok(claim)
    }

    /// Forgets the devices of a VM that goes on with them.
    ///
    /// # Errors
    /// [`Cause::Journal`].
    pub fn forget(&mut self, vm: &str) -> Result<(), DeviceError> {
        let Some(claim) = self.claims().iter().find(|claim| claim.vm == vm) else { return Ok(()) };
        self.note(claim.request.address, |claims| claims.retain(|claim| claim.vm != vm))
    }

    /// Gives a VM's device back to the host, once no process has its group open. A device that has vanished is forgotten.
    ///
    /// # Errors
    /// [`Cause::GroupOpen`] after `limit`: the VM still has it. [`Cause::File`], [`Cause::NotBound`], [`Cause::Refused`],
    /// [`Cause::Journal`]: the claim stays, and this can be tried again.
    pub fn give_back(&mut self, vm: &str, role: &str, limit: Duration) -> Result<(), DeviceError> {
        let Some(claim) = self.claim(vm, role) else { return Ok(()) };
        let address = claim.request.address;
        self.undo(address, limit)
    }

    /// Whether a process has a VM's device open.
    #[must_use]
    pub fn is_open(&self, vm: &str, role: &str) -> bool {
        self.claim(vm, role).is_some_and(|claim| bind::is_open(&self.sys, claim.group))
    }

    /// Completes the unfinished operations of an earlier daemon: returns all devices that no VM holds yet, and those of VMs that
    /// `lives` does not know. Returns the errors; the claims of failed devices stay.
    pub fn recover(&mut self, lives: impl Fn(&str) -> bool, limit: Duration) -> Vec<DeviceError> {
        let left: Vec<PciAddress> = self
            .claims()
            .iter()
            .filter(|claim| claim.step != Step::Held || !lives(&claim.vm))
            .map(|claim| claim.request.address)
            .collect();
        left.into_iter().filter_map(|address| self.undo(address, limit).err()).collect()
    }

    fn undo(&mut self, address: PciAddress, limit: Duration) -> Result<(), DeviceError> {
        let Some(claim) = self.claims().iter().find(|claim| claim.request.address == address).cloned() else {
            return Ok(());
        };
        match list::read(&self.sys, address) {
            _ if claim.taken_in => {}
            Err(DeviceError { cause: Cause::Absent, .. }) => {}
            Err(error) => return Err(error),
            Ok(device) => {
                if device.driver.as_deref().is_some_and(bind::is_vfio) {
                    let free = bind::wait_until_free(&self.sys, claim.group, limit);
                    free.map_err(|cause| cause.of(address, Act::Return))?;
                }
                self.step(address, Step::Returning)?;
                let Claim { former, request, .. } = &claim;
                // Before its old driver looks at it.
                vf::restore(&self.sys, &*self.functions, &device, &request.identity, &former.identity)?;
                if former.driver.as_deref().is_some_and(bind::is_vfio) {
                    self.let_open(claim.group, former.group_owner)
                        .map_err(|cause| cause.of(address, Act::Return))?;
                }
                bind::unbind(
                    &self.sys,
                    address,
                    former.driver.as_deref(),
                    former.driver_override.as_deref(),
                )?;
            }
        }
        self.note(address, |claims| claims.retain(|claim| claim.request.address != address))
    }

    /// Whether neither the device nor the role has been given.
    fn is_free(&self, vm: &str, request: &DeviceRequest) -> Result<(), Cause> {
        if let Some(claim) = self.claims().iter().find(|claim| claim.request.address == request.address) {
            return Err(Cause::Taken { vm: claim.vm.clone(), role: claim.request.role.clone() });
        }
        if let Some(claim) = self.claim(vm, &request.role) {
            let (role, other) = (request.role.clone(), claim.request.address);
            return Err(Cause::RoleTaken { vm: vm.to_owned(), role, other });
        }
        Ok(())
    }

    /// Whose the device's file is from now on: QEMU opens it as its own user.
    fn let_open(&self, group: u32, user: Option<(u32, u32)>) -> Result<(), Cause> {
        user.map_or(Ok(()), |user| self.sys.give(&group_file(group), user))
    }

    fn step(&mut self, address: PciAddress, step: Step) -> Result<(), DeviceError> {
        self.note(address, |claims| {
            claims
                .iter_mut()
                .filter(|claim| claim.request.address == address)
                .for_each(|claim| claim.step = step);
        })
    }

    fn note(&mut self, address: PciAddress, change: impl FnOnce(&mut Vec<Claim>)) -> Result<(), DeviceError> {
        let path: PathBuf = self.journal.path().to_owned();
        let noted = self.journal.update(|record| change(&mut record.claims));
        noted.map_err(|source| Cause::Journal { path, source }.of(address, Act::Take))
    }
}

fn group_file(group: u32) -> String {
    format!("dev/vfio/{group}")
}

/// What a device says of its own state, if it can be asked: `vfio-pci` itself knows none, the drivers of models do.
fn own_state(sys: &Sys, device: &Device) -> Option<OwnState> {
    let driver = device.driver.as_deref().filter(|driver| bind::is_vfio(driver) && *driver != bind::VFIO);
    driver.and_then(|_| migration::probe(sys, device.address).ok().flatten())
}

/// Whether a device may be given to a VM, and its group. Nothing is changed.
///
/// # Errors
/// [`Cause::Kind`], [`Cause::NoIommu`], [`Cause::GroupHoldsOthers`], [`Cause::HostUses`].
pub fn check(sys: &Sys, all: &NodeDevices, device: &Device) -> Result<u32, Cause> {
    if let Some(reason) = device.never_given() {
        return Err(Cause::Kind(reason));
    }
    let group = group::check(all, device)?;
    host_use(sys, device).map_or(Ok(group), |reason| Err(Cause::HostUses(reason)))
}

/// What the host does with a device that is none of its virtual functions.
fn host_use(sys: &Sys, device: &Device) -> Option<String> {
    let driver = device.driver.as_deref().filter(|driver| !bind::is_vfio(driver))?;
    if device.is_virtual() {
        return None;
    }
    if let Some(up) = device.netdevs.iter().find(|netdev| vf::is_up(sys, netdev)) {
        return Some(format!("network device {up} is up"));
    }
    (device.kind == DeviceKind::Storage).then(|| format!("its disks, by driver {driver}"))
}
