//! Why the destination cannot take the guest, or cannot go on with it.

use std::path::PathBuf;
use std::{fmt, io};

use vmove_fabric::{FabricError, PostError, Remedy, RemoteStatus};
use vmove_memory::MemoryError;
use vmove_node::devices::DevicesError;
use vmove_node::peer::NoCommonFabric;
use vmove_node::store::VmStoreError;
use vmove_qmp::QmpError;
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::process::ProcessError;
use vmove_qmp::switchover::SwitchoverError;
use vmove_types::problem::Problem;

use crate::homes::NotHome;
use crate::ownership::{DestinationState, IllegalStep};
use crate::pending::WireSetError;
use crate::vmm::{FaultsError, NotReady, TakeHomeError};

/// What ends a session, or its work with one source connection. Each message says that it is about the destination.
#[derive(Debug, thiserror::Error)]
pub(super) enum DestinationError {
    #[error("Could not write the journal {} at the destination", path.display())]
    Journal { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Illegal(#[from] IllegalStep),
    #[error("Protocol violation: {message} in state {state}")]
    OutOfOrder { message: &'static str, state: DestinationState },
    #[error("Protocol violation: Abort in state {0}: the guest is ours")]
    AbortTooLate(DestinationState),
    #[error(
        "Protocol violation: the source names pages {start} to {end} of RAM block {block}, which lie outside the guest's memory"
    )]
    PagesOutside { block: u16, start: u64, end: u64 },
    #[error("Protocol violation: the set of pages of RAM block {block} cannot be read")]
    PageSet { block: usize, source: WireSetError },
    #[error("No memory for the guest at the destination")]
    Populate(#[source] PopulateError),
    #[error("{source}. {shortage}")]
    HugePages { shortage: Shortage, source: Box<DestinationError> },
    #[error("QEMU did not start at the destination")]
    Launch(#[source] LaunchError),
    #[error(
        "The destination QEMU may not lock the {mib} MiB of the guest's memory, as it must for a device: vmoved there lacks CAP_SYS_RESOURCE, by which \
         it raises that limit (RLIMIT_MEMLOCK); give it that, or start it with `ulimit -l unlimited` (LimitMEMLOCK=infinity)"
    )]
    LockedMemory { mib: u64, source: io::Error },
    #[error("The destination QEMU did not load the device state; its log says: {log}")]
    DeviceState { log: String, source: DeviceStateError },
    #[error("This daemon was started anew, and the source has not dialled yet")]
    StartedAnew,
    #[error(
        "libvirt has the guest go on at the source, and never had it run here: QEMU at the destination was ended"
    )]
    RunsAtSource,
    #[error("An operator no longer waits for the source")]
    Abandoned,
    #[error("QEMU at the destination has ended; its log says: {log}")]
    QemuEnded { log: String },
    #[error(
        "The guest ended here before its disks had come from {source_node}: {images} here lies over its image at {source_node}, and neither is whole alone. Both are kept: put them \
         together as the guide of disks says (docs/guides/disks.md) before the guest is started again. QEMU's log says: {log}"
    )]
    EndedBeforeDisks { source_node: String, images: String, log: String },
    #[error("The monitor of the destination QEMU does not answer")]
    Monitor(#[source] QmpError),
    #[error("The guest did not resume at the destination")]
    Resume(#[source] QmpError),
    #[error("Could not record the VM at the destination")]
    Record(#[source] VmStoreError),
    #[error("QEMU at the destination, which holds a copy of the guest that never ran, does not end")]
    Kill(#[from] ProcessError),
    #[error("Could not start the page readers at the destination")]
    Readers(#[source] io::Error),
    #[error("Could not end page service in the destination QEMU")]
    EndService(#[source] MemoryError),
    #[error(transparent)]
    Page(#[from] PageError),
    #[error("QEMU at the destination did not end the exports of its disks")]
    EndExports(#[source] QmpError),
    #[error("A task at the destination ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

/// Huge pages of a guest. Unit: MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shortage {
    pub needed: u64,
    /// Of those, what the guest's files have.
    pub here: u64,
    /// What nobody has.
    pub free: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, here, free } = self;
        write!(
            f,
            "Of {needed} MiB of huge pages for the guest {here} MiB are there, and {free} MiB are free: if they have run out, raise \
             vm.nr_hugepages or the bound of the control group (hugetlb.*.max), or wait until others give theirs back"
        )
    }
}

/// Why there is no place for the VM.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmFilesError {
    #[error(
        "No QEMU of libvirt or Proxmox VE waits here for domain {0}: `virsh migrate` or `vmove-pve move` begins such a migration"
    )]
    NotExpected(String),
    #[error("The source's command line cannot be used at the destination")]
    CommandLine(#[from] CommandLineError),
    #[error(transparent)]
    NotHome(#[from] NotHome),
    #[error("Could not give the guest its memory of before the visit ({})", path.display())]
    Kept { path: PathBuf, source: io::Error },
    #[error("Could not make the folder {} at the destination", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("Could not prepare memory for the guest at the destination")]
    Memory(#[from] MemoryError),
    #[error("The command line describes no memory backend {0:?}, which the source has")]
    NoBackend(String),
    #[error("The name of the RAM file {} is not UTF-8", .0.display())]
    FileName(PathBuf),
    #[error("Could not make the image {} for a disk at the destination", path.display())]
    Image { path: PathBuf, source: io::Error },
    #[error("Expected pages of {expected} bytes for {backend} at the destination, found {found}")]
    PageSize { backend: String, expected: u64, found: u64 },
}

/// Why a session cannot begin, or be taken up again, at the destination.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    NoCommonFabric(#[from] NoCommonFabric),
    #[error(transparent)]
    Files(#[from] VmFilesError),
    #[error(transparent)]
    NotAdmitted(Problem),
    #[error("A device could not be taken for the guest at the destination")]
    Devices(#[source] DevicesError),
    #[error("Could not write the journal {} at the destination", path.display())]
    Journal { path: PathBuf, source: io::Error },
    #[error("The journal names no {0}: the session cannot be taken up again")]
    NotInJournal(&'static str),
    #[error("The page maps were never completed: they cannot say which pages are old")]
    PageMapsIncomplete,
    #[error("Could not take the page faults of QEMU at the destination again")]
    Faults(#[from] MemoryError),
    #[error("Could not find QEMU at the destination again")]
    Process(#[from] ProcessError),
}

/// Why QEMU did not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaunchError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error(transparent)]
    NotReady(#[from] NotReady),
    #[error(transparent)]
    Faults(#[from] FaultsError),
    #[error("Its memory could not be made zero")]
    Memory(#[from] MemoryError),
    #[error("It does not let its disks be written by the source")]
    Exports(#[source] QmpError),
    #[error("It could not be given the memory that the guest has left at home")]
    TakeHome(#[from] TakeHomeError),
    #[error(
        "It touched the memory that the guest has left at home before its page faults were taken, and may have written to it: the guest can only stay where it is"
    )]
    TouchedHome,
    #[error("The session ended while it was being started")]
    SessionEnded,
    #[error("A task ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

/// Why QEMU did not load the device state.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceStateError {
    #[error(transparent)]
    Load(#[from] SwitchoverError),
    #[error("A task ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

/// Why memory could not be given its pages ahead.
#[derive(Debug, thiserror::Error)]
pub(super) enum PopulateError {
    #[error("Could not give the RAM file {} its pages", path.display())]
    File { path: PathBuf, source: MemoryError },
    #[error("The set of pages of RAM block {block} that the source has memory for cannot be read")]
    PageSet { block: String, source: WireSetError },
    #[error("Could not start a thread")]
    Thread(#[source] io::Error),
    #[error("The thread ended without a result")]
    Ended,
}

/// Why a page could not be landed here, or mapped into QEMU. Another page connection does not help.
#[derive(Debug, thiserror::Error)]
pub(super) enum PageError {
    /// Of our own file: QEMU has nothing to do with it.
    #[error("Could not write to the guest's RAM file {} at the destination", path.display())]
    File { path: PathBuf, source: MemoryError },
    #[error("Could not map a page into QEMU at the destination")]
    Map(#[source] MemoryError),
    #[error("Could not read the page faults of QEMU at the destination")]
    Events(#[source] MemoryError),
    #[error("QEMU at the destination has gone: its memory is no longer there")]
    QemuGone,
}

/// Why page connections are of no use any more. Others may be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum PagesLost {
    #[error(transparent)]
    Fabric(#[from] FabricError),
    #[error("a read could not be posted")]
    Post(#[from] PostError),
    #[error("the source refused a read: {0}")]
    ReadRefused(String),
    #[error("a page could not be put into its place at the destination: {0}")]
    NotTaken(RemoteStatus),
    #[error("the source named a page of memory that it had not made readable")]
    NotReadable,
    #[error("{0} is not open at the destination (any more)")]
    NotOpen(vmove_fabric::FabricKind),
    #[error("at the destination")]
    Regions(#[from] RegionsError),
}

impl PagesLost {
    /// Why a read did not bring its page.
    pub(super) fn of_read(status: RemoteStatus) -> Self {
        match status {
            RemoteStatus::LocalGone => Self::NotTaken(status),
            other => Self::ReadRefused(other.to_string()),
        }
    }

    /// The same fabric may work again.
    pub(super) fn same_fabric(&self) -> bool {
        match self {
            Self::Fabric(error) => error.remedy() == Remedy::Reconnect,
            Self::Post(_) | Self::ReadRefused(_) | Self::NotTaken(_) | Self::NotReadable => true,
            Self::NotOpen(_) | Self::Regions(_) => false,
        }
    }
}

/// Why the source's memory cannot be read as it says.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegionsError {
    #[error("the source names memory at {0:#x} that the guest does not have")]
    Outside(u64),
    #[error(transparent)]
    Register(#[from] FabricError),
    #[error("a task ended without a result")]
    Task(#[from] tokio::task::JoinError),
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vmove_memory::RamFile;
    use vmove_types::problem::chain;

    use super::*;

    #[test]
    fn an_error_of_our_own_file_says_so_and_blames_no_qemu() {
        let path = Path::new("/nowhere/ram0");
        let source = RamFile::open(path).unwrap_err();
        let told = chain(&DestinationError::from(PageError::File { path: path.to_owned(), source }));
        assert!(told.starts_with("Could not write to the guest's RAM file /nowhere/ram0 at the destination"));
        assert!(told.contains("No such file") && !told.contains("QEMU"), "{told}");
        let gone = chain(&DestinationError::from(PageError::QemuGone));
        assert!(gone.contains("QEMU at the destination has gone"), "{gone}");
    }

    #[test]
    fn states_and_messages_are_told_by_the_names_of_the_protocol() {
        let error = DestinationError::OutOfOrder {
            message: "Round",
            state: crate::ownership::DestinationState::Owner,
        };
        assert_eq!(chain(&error), "Protocol violation: Round in state Owner");
    }
}
