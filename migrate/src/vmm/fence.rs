//! Keeps a guest that was given away from running on in the QEMU that it has left, where somebody else (libvirt) may tell that QEMU to run it.
//!
//! All of its memory faults, and nobody answers: a processor of the guest, or a device that works for it, stands still at its first touch, so nothing
//! in the memory changes that the destination still reads. The descriptor stays in QEMU: the fence outlives the daemon.

use vmove_memory::{
    FaultContext, Keep, MemoryError, Process, QemuMapping, RamFile, UffdFeatures, close_in_qemu, create_uffd,
    discard_in_qemu, find_mappings, reopen_uffd, uffds_in,
};
use vmove_node::record::VmRecord;

struct Memory {
    process: Process,
    mappings: Vec<QemuMapping>,
}

impl Memory {
    fn of(vm: &VmRecord) -> Result<Self, MemoryError> {
        let files: Vec<RamFile> =
            vm.ram.iter().map(|ram| RamFile::open(&ram.path)).collect::<Result<_, _>>()?;
        let process = Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)?;
        let mappings = find_mappings(&process, &files.iter().collect::<Vec<_>>())?;
        Ok(Self { process, mappings })
    }

    /// By a descriptor that is there already: that of an earlier life of ours, which may have raised the fence, or of the guest's arrival here.
    fn watched_again(&self) -> Result<Option<FaultContext>, MemoryError> {
        for fd in uffds_in(&self.process)? {
            let context = FaultContext::new(reopen_uffd(&self.process, fd)?);
            if context.register(&self.mappings).is_ok() {
                return Ok(Some(context));
            }
        }
        Ok(None)
    }
}

/// Raises the fence, if it is not up. The guest must stand still, and nobody else may watch its memory.
pub(super) fn raise(vm: &VmRecord) -> Result<(), MemoryError> {
    let memory = Memory::of(vm)?;
    let context = match memory.watched_again()? {
        Some(context) => context,
        None => {
            let made = create_uffd(&memory.process, UffdFeatures::Faults, Keep::InQemu)?;
            let context = FaultContext::new(made);
            context.register(&memory.mappings)?;
            context
        }
    };
    discard_in_qemu(&memory.process, &memory.mappings, Some(&context))
}

/// Takes it away, if it is up. Who stands still at it goes on.
pub(super) fn lift(vm: &VmRecord) -> Result<(), MemoryError> {
    let memory = Memory::of(vm)?;
    let contexts = uffds_in(&memory.process)?
        .into_iter()
        .map(|fd| Ok(FaultContext::new(reopen_uffd(&memory.process, fd)?)))
        .collect::<Result<Vec<_>, MemoryError>>()?;
    // All first, so that no thread stands still that the closing may need.
    contexts.iter().try_for_each(|context| context.unregister(&memory.mappings))?;
    contexts.iter().try_for_each(|context| close_in_qemu(&memory.process, context.to_remote()?))
}
