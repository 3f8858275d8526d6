//! Memory in the place of that with which a QEMU was started.

use vmove_memory::{
    Injector, MappingHints, MemoryError, Process, RamFile, Replacement, Sharing, descriptors_of,
    find_mappings, replace_in_qemu,
};
use vmove_node::blocking::spawn_blocking;
use vmove_qmp::QmpError;
use vmove_qmp::client::Client;

use std::time::Duration;

/// QEMU has just been started, and its main loop does nothing else.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a QEMU does not have the memory that it was to be given.
#[derive(Debug, thiserror::Error)]
pub enum TakeHomeError {
    /// It does not take descriptors.
    #[error("QEMU did not take a descriptor of it")]
    Descriptor(#[from] QmpError),
    /// It could not be mapped in QEMU.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The file could not be given its name.
    #[error("The RAM file could not be renamed")]
    Rename(#[source] std::io::Error),
    /// It is not one that a guest comes home to: libvirt's, or one of a simulation.
    #[error("This QEMU takes no other memory than it was started with")]
    Unable,
    /// A bug, or the daemon ends.
    #[error("A task ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

/// Replaces `stand_ins` in a QEMU whose guest does not run by the files `home`, block by block: its mappings, and its descriptors, by which it
/// gives memory back.
pub(super) async fn replace(
    client: &Client,
    pid: u32,
    stand_ins: &[RamFile],
    home: &[&RamFile],
) -> Result<(), TakeHomeError> {
    let process = Process::open(pid)?;
    let mappings = find_mappings(&process, &stand_ins.iter().collect::<Vec<_>>())?;
    let hints =
        mappings.iter().map(|at| MappingHints::read(&process, at.hva)).collect::<Result<Vec<_>, _>>()?;
    let (mut entries, mut descriptors) = (Vec::new(), Vec::new());
    for (stand_in, file) in stand_ins.iter().zip(home) {
        let entry = client.add_fd(None, file.fd(), DESCRIPTOR_TIMEOUT).await?;
        let held = descriptors_of(&process, stand_in.identity())?;
        descriptors.extend(held.into_iter().map(|old| (entry.fd, old)));
        entries.push(entry);
    }
    let replacement = |(at, hints): (&vmove_memory::QemuMapping, &MappingHints)| Replacement {
        at: *at,
        fd_in_qemu: entries[at.file_index].fd,
        sharing: Sharing::Shared,
        hints: hints.clone(),
    };
    let replacements: Vec<_> = mappings.iter().zip(&hints).map(replacement).collect();
    spawn_blocking(move || {
        Injector::prepare(&process)?;
        replace_in_qemu(&process, &replacements, &descriptors)
    })
    .await??;
    for entry in entries {
        client.remove_fd(entry).await?;
    }
    Ok(())
}
