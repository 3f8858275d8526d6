//! What of a guest cannot be forked.

use std::path::Path;

use serde::{Deserialize, Serialize};
use vmove_memory::{
    Keeper, MappingHints, MemoryError, Process, QemuMapping, RamFile, find_mappings, is_shared_whole,
};
use vmove_node::guest_devices::fit::leaves_with;
use vmove_node::record::VmRecord;
use vmove_qmp::inspect::{BlockerKind, DeviceKind, VmFacts};
use vmove_qmp::switchover::GUEST_PANICKED;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::device::VmDevice;

use crate::CloneError;

/// Blockers that QEMU's own account of itself shows. Disks are no blocker by where they are: children are on this host. Those that
/// can be written are [`disk::look`](fn@crate::disk::look)'s. `owned`: devices that the guest lets go before.
#[must_use]
pub fn blockers(facts: &VmFacts, owned: &[VmDevice]) -> Vec<Blocker> {
    let of_disks = |kind| matches!(kind, BlockerKind::Disk | BlockerKind::DiskSocket);
    // A guest that has panicked stands still as a paused one does, and a copy of it is what a debugger wants.
    let panicked = |kind: BlockerKind| kind == BlockerKind::RunState && facts.status == GUEST_PANICKED;
    let waived =
        |b: &vmove_qmp::inspect::Blocker| of_disks(b.kind) || panicked(b.kind) || leaves_with(b, owned);
    let fatal = facts.blockers().into_iter().filter(|b| b.fatal && !waived(b));
    let mut found: Vec<Blocker> =
        fatal.map(|b| Blocker::new(code(b.kind), b.message).about(b.subject)).collect();
    for device in facts.devices.iter().filter(|d| d.kind == DeviceKind::Balloon) {
        let message = format!(
            "Device {} ({}) gives pages of guest memory back to the host, and they would come back with what they held at the \
             fork instead of zeros: detach it (device_del) before the fork",
            device.id, device.driver
        );
        found.push(Blocker::new(BlockerCode::Balloon, message).about(&device.id));
    }
    found
}

const fn code(kind: BlockerKind) -> BlockerCode {
    match kind {
        BlockerKind::Ram => BlockerCode::RamNotShared,
        BlockerKind::OutsideWriter => BlockerCode::OutsideWriter,
        BlockerKind::HostDevice => BlockerCode::HostDevice,
        BlockerKind::RunState => BlockerCode::RunState,
        BlockerKind::Qemu => BlockerCode::Qemu,
        _ => BlockerCode::Other,
    }
}

/// How a guest's memory is frozen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// It is mapped again, privately: its file is the template. Nothing is copied.
    #[default]
    Remapped,
    /// It is write-protected while it is copied to the template; the guest goes on with its file.
    WriteProtected,
}

impl Way {
    /// As reports have it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Remapped => "remapped",
            Self::WriteProtected => "write-protected",
        }
    }
}

/// Why locked memory is not remapped.
pub(crate) const LOCKED: &str = "guest memory is locked (-overcommit mem-lock=on): a private mapping would be copied as a whole \
                                 while the guest stands still";

/// A guest's memory as it is mapped, for whoever is about to map it in another way.
#[derive(Debug)]
pub struct GuestRam {
    /// Its QEMU.
    pub process: Process,
    /// Its RAM files.
    pub files: Vec<RamFile>,
    /// Where they are mapped.
    pub mappings: Vec<QemuMapping>,
    /// What QEMU asked of the kernel, for each mapping.
    pub hints: Vec<MappingHints>,
    /// How it can be frozen.
    pub way: Way,
}

impl GuestRam {
    /// Looks at a guest with shared memory.
    ///
    /// # Errors
    /// [`CloneError::Refused`] for memory that is watched, or locked on a kernel that cannot protect it; [`CloneError::Memory`], in
    /// particular [`MemoryError::NotMapped`] where memory is private already.
    pub fn open(vm: &VmRecord) -> Result<Self, CloneError> {
        let process = Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)?;
        let files = open_files(vm)?;
        let mappings = find_mappings(&process, &files.iter().collect::<Vec<_>>())?;
        let hints = read_hints(&process, &mappings)?;
        let locked = hints.iter().any(|h| h.locked);
        let way = if locked { Way::WriteProtected } else { Way::Remapped };
        if let (true, Err(why)) = (locked, Keeper::supported()) {
            let message =
                format!("{LOCKED}, and it cannot be protected instead: {why}; start the guest without it");
            return Err(CloneError::Refused(vec![Blocker::new(BlockerCode::MemoryLocked, message)]));
        }
        Ok(Self { process, files, mappings, hints, way })
    }

    /// Refuses a guest whose RAM files are elsewhere than in the node's folder for guest memory: a template is a second name of such a file, in a
    /// folder beside. Of memory that is copied there the place does not count.
    ///
    /// # Errors
    /// [`CloneError::Refused`]; [`CloneError::Io`] if a place cannot be looked at.
    pub fn can_be_template_below(&self, vm: &VmRecord, folder: &Path) -> Result<(), CloneError> {
        if self.way == Way::WriteProtected {
            return Ok(());
        }
        let look = |path: &Path, why| CloneError::io("look at", path)(why);
        let Some(elsewhere) = vm.ram_elsewhere_than(folder, look)? else { return Ok(()) };
        let path = elsewhere.display();
        let message = format!(
            "expected RAM files on the file system of {}, the node's folder for guest memory, found {path}: start the guest with \
             `vmove run`, or with mem-path= in that folder",
            folder.display()
        );
        let blocker = Blocker::new(BlockerCode::RamPlace, message).about(path.to_string());
        Err(CloneError::Refused(vec![blocker]))
    }
}

/// Whether a guest's memory is private: what it has written is in none of its RAM files.
///
/// # Errors
/// [`CloneError::Memory`].
pub fn is_private(vm: &VmRecord) -> Result<bool, CloneError> {
    let process = Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)?;
    let files = open_files(vm)?;
    Ok(!is_shared_whole(&process, &files.iter().collect::<Vec<_>>())?)
}

/// The RAM files of a VM.
pub(crate) fn open_files(vm: &VmRecord) -> Result<Vec<RamFile>, MemoryError> {
    vm.ram.iter().map(|ram| RamFile::open(&ram.path)).collect()
}

/// Hints of mappings that are to be replaced, refused where another mapping could not keep a promise.
pub(crate) fn hints_of(process: &Process, mappings: &[QemuMapping]) -> Result<Vec<MappingHints>, CloneError> {
    let hints = read_hints(process, mappings)?;
    if hints.iter().any(|h| h.locked) {
        let message = format!("{LOCKED}; start the guest without it");
        return Err(CloneError::Refused(vec![Blocker::new(BlockerCode::MemoryLocked, message)]));
    }
    Ok(hints)
}

fn read_hints(process: &Process, mappings: &[QemuMapping]) -> Result<Vec<MappingHints>, CloneError> {
    let hints: Vec<MappingHints> =
        mappings.iter().map(|m| MappingHints::read(process, m.hva)).collect::<Result<_, _>>()?;
    if hints.iter().any(|h| h.watched) {
        let message = "Guest memory is watched by a userfaultfd, as during a migration: wait for its end";
        return Err(CloneError::Refused(vec![Blocker::new(BlockerCode::MemoryWatched, message)]));
    }
    Ok(hints)
}
