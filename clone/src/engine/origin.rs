//! Where children come from: a guest or a template, looked at before anything is done to it.

use std::path::Path;
use std::sync::Arc;

use vmove_memory::MemoryDir;
use vmove_node::blocking::run_blocking;
use vmove_node::guest_devices::DeviceMonitor;
use vmove_node::guest_devices::fit::{owned, why_not_leave};
use vmove_node::layout;
use vmove_node::record::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::confine::Confinement;
use vmove_qmp::inspect::VmFacts;
use vmove_types::Backing;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::fork_report::OwnMemory;

use super::ForkEngine;
use super::devices::Away;
use super::distribution::allocated;
use super::error::ForkError;
use super::message::Kind;
use super::promote::Forked;
use crate::CloneError;
use crate::check::{self, GuestRam, Way};
use crate::child::Base;
use crate::disk::{self, Images};
use crate::template::Template;

/// A guest that is to be forked.
pub struct Guest {
    pub record: VmRecord,
    pub client: Client,
    pub facts: VmFacts,
    pub base: Base,
    /// How it was given memory of its own first, if it had none.
    pub own_memory_before: Option<OwnMemory>,
}

/// What is to be forked, as far as another host must know it beforehand.
#[derive(Debug)]
pub struct Outline {
    pub base: Base,
    /// QEMU that writes the device state.
    pub qemu: String,
    pub guest_bytes: u64,
    /// Bytes of it that have memory now.
    pub live_bytes: u64,
    /// Bytes of it that would be registered.
    pub registered_bytes: u64,
    /// The guest's monitor; none for a template.
    pub client: Option<Client>,
}

impl Outline {
    /// What a child that was prepared must have in common with one that is ordered.
    pub fn kind(&self) -> Kind {
        Kind {
            command_line: self.base.command_line.clone(),
            environment: self.base.environment.clone(),
            machine: self.base.machine.clone(),
            qemu: self.qemu.clone(),
            backing: self.base.backing,
        }
    }
}

impl Guest {
    /// What is needed of it, if its memory becomes private and it can be given memory of its own at once. While a device is plugged in it
    /// cannot: the device reaches the pages that were pinned. Such a guest gets it when it next lets its devices go.
    pub fn forked(&self, ram: &GuestRam) -> Option<Forked> {
        (ram.way == Way::Remapped && self.record.devices.is_empty()).then(|| Forked {
            record: self.record.clone(),
            client: self.client.clone(),
            facts: self.facts.clone(),
        })
    }

    /// What another host must know.
    pub fn outline(&self) -> Outline {
        let files: Vec<&Path> = self.record.ram.iter().map(|ram| ram.path.as_path()).collect();
        let (live_bytes, registered_bytes) = allocated(&files);
        Outline {
            base: self.base.clone(),
            qemu: format!("{} {}", self.facts.version, self.facts.package).trim().to_owned(),
            guest_bytes: self.record.ram.iter().map(|ram| ram.size).sum(),
            live_bytes,
            registered_bytes,
            client: Some(self.client.clone()),
        }
    }
}

/// Where children come from.
pub enum Origin {
    Guest(Box<Guest>, Arc<GuestRam>),
    Template(Box<Template>, Box<Base>),
}

impl Origin {
    pub const fn base(&self) -> &Base {
        match self {
            Self::Guest(guest, _) => &guest.base,
            Self::Template(_, base) => base,
        }
    }

    /// What another host must know.
    pub fn outline(&self) -> Outline {
        let template = match self {
            Self::Guest(guest, _) => return guest.outline(),
            Self::Template(template, _) => template,
        };
        let manifest = template.manifest();
        let files: Vec<&Path> = manifest.ram.iter().map(|ram| ram.file.as_path()).collect();
        let (live_bytes, registered_bytes) = allocated(&files);
        let (base, guest_bytes) = (self.base().clone(), self.guest_bytes());
        let qemu = manifest.qemu.clone();
        Outline { base, qemu, guest_bytes, live_bytes, registered_bytes, client: None }
    }

    /// The guest's memory, if it becomes private: what it writes then is kept apart from the template.
    pub fn private(&self) -> Option<Arc<GuestRam>> {
        match self {
            Self::Guest(_, ram) if ram.way == Way::Remapped => Some(ram.clone()),
            _ => None,
        }
    }

    /// Whether the template gets a copy of the guest's memory, beside that of the guest.
    pub fn is_copied(&self) -> bool {
        matches!(self, Self::Guest(_, ram) if ram.way == Way::WriteProtected)
    }

    /// Whether the guest has devices to get back: all of its memory is pinned then, and copied where it is private.
    pub fn is_pinned_again(&self) -> bool {
        matches!(self, Self::Guest(guest, ram) if ram.way == Way::Remapped && !guest.record.devices.is_empty())
    }

    /// Bytes of the guest that have no memory yet.
    pub fn hole_bytes(&self) -> u64 {
        let files: Vec<&Path> = match self {
            Self::Guest(guest, _) => guest.record.ram.iter().map(|ram| ram.path.as_path()).collect(),
            Self::Template(template, _) => {
                template.manifest().ram.iter().map(|ram| ram.file.as_path()).collect()
            }
        };
        self.guest_bytes().saturating_sub(allocated(&files).0)
    }

    pub fn own_memory_before(&self) -> Option<OwnMemory> {
        if let Self::Guest(guest, _) = self { guest.own_memory_before } else { None }
    }

    /// See [`Guest::forked`].
    pub fn forked(&self) -> Option<Forked> {
        if let Self::Guest(guest, ram) = self { guest.forked(ram) } else { None }
    }

    pub fn guest_bytes(&self) -> u64 {
        match self {
            Self::Guest(guest, _) => guest.record.ram.iter().map(|ram| ram.size).sum(),
            Self::Template(template, _) => template.manifest().guest_bytes(),
        }
    }
}

impl ForkEngine {
    /// Looks at a guest and its memory; gives it memory of its own first, if an earlier fork has left it none.
    pub(super) async fn guest(
        self: &Arc<Self>,
        id: &str,
        away: &mut Away,
    ) -> Result<(Guest, Arc<GuestRam>), ForkError> {
        let mut guest = self.look(&away.vm).await?;
        if self.members.get(&guest.record).is_some_and(|m| !m.private.is_empty()) {
            self.detach_devices(away, &guest.record, &guest.client).await?;
            self.update(id, |p| p.phase = "rehome".to_owned());
            guest.own_memory_before =
                self.rehome(Some(id), &guest.record, &guest.client, &guest.facts).await?;
        }
        let record = guest.record.clone();
        let memory = self.registry.memory_dir().to_owned();
        let look = move || {
            let ram = GuestRam::open(&record)?;
            // Mounted with the first VM of its kind that the node starts; this one may be another's.
            let folder = MemoryDir::prepare(&layout::memory_dir(&memory, record.backing), record.backing)?;
            ram.can_be_template_below(&record, folder.path())?;
            Ok::<_, CloneError>(ram)
        };
        let ram = run_blocking(look).await??;
        Ok((guest, Arc::new(ram)))
    }

    /// Looks at a guest, and refuses it with everything that is in the way.
    pub(super) async fn look(&self, name: &str) -> Result<Guest, ForkError> {
        self.registry.not_at_work(name)?;
        let record = self.registry.vms().get(name)?;
        let (client, facts) = self.registry.inspect(&record).await?;
        let mut blockers = check::blockers(&facts, &record.devices);
        for device in &record.devices {
            let seat = client.seat(&device.id).await.map_err(CloneError::from)?;
            let why = why_not_leave(device, seat.as_ref(), &facts.status);
            blockers
                .extend(why.map(|why| Blocker::new(BlockerCode::Device, why).about(&device.request.role)));
        }
        let (disks, more) = disk::look(&client, &record, &facts).await?;
        blockers.extend(more);
        if !blockers.is_empty() {
            return Err(CloneError::Refused(blockers).into());
        }
        let base = Base {
            command_line: record.command_line.clone(),
            environment: record.environment.clone(),
            disks,
            devices: owned(&**self.registry.devices(), &record).await,
            confinement: Confinement::of_process(record.pid.unsigned_abs())
                .unwrap_or_else(|| self.registry.confinement().clone()),
            ..self.base(&facts.machine, record.backing)
        };
        Ok(Guest { record, client, facts, base, own_memory_before: None })
    }

    pub(super) fn template_origin(&self, name: &str, as_it_was: bool) -> Result<Origin, ForkError> {
        let template = self.loaded_template(name)?;
        let manifest = template.manifest();
        let base = Base {
            command_line: manifest.command_line.clone(),
            environment: manifest.environment.clone(),
            disks: manifest.disks.clone(),
            devices: manifest.devices.clone(),
            as_it_was,
            ..self.base(&manifest.machine, manifest.backing)
        };
        Ok(Origin::Template(Box::new(template), Box::new(base)))
    }

    /// What children have in common on this node, whatever they are children of.
    pub(super) fn base(&self, machine: &str, backing: Backing) -> Base {
        Base {
            command_line: Vec::new(),
            environment: Vec::new(),
            machine: machine.to_owned(),
            backing,
            run_dir: self.registry.run_dir().to_owned(),
            memory_dir: self.registry.memory_dir().to_owned(),
            disks: Vec::new(),
            images: Images::Here,
            overlay_dir: self.policy.overlay_dir.clone(),
            starter: self.registry.starter().clone(),
            confinement: self.registry.confinement().clone(),
            devices: Vec::new(),
            as_it_was: false,
        }
    }
}
