//! Why a disk was not moved.

use std::path::PathBuf;

use vmove_node::blocking::TaskFailed;
use vmove_node::peer::SessionId;
use vmove_node::store::VmStoreError;
use vmove_qmp::QmpError;
use vmove_qmp::cmdline::CommandLineError;
use vmove_types::check::Blocker;

/// Why a disk did not get another image. The guest has the old one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoveDiskError {
    /// Unknown VM, or its record cannot be used.
    #[error(transparent)]
    Vm(#[from] VmStoreError),
    /// The VM is in a migration.
    #[error("{vm:?} is in migration {session}: wait for its end, or `vmove cancel {session}`")]
    InMigration {
        /// The VM.
        vm: String,
        /// The migration.
        session: SessionId,
    },
    /// The daemon does not know yet what an earlier process left.
    #[error("vmoved has just started, and looks for what was left: try again in a moment")]
    Starting,
    /// A disk of this VM gets another image already.
    #[error(
        "Disk {disk} of {vm:?} is on its way to another image: wait for its end, or `vmove move-disk {vm} {disk} --cancel`"
    )]
    Moving {
        /// The VM.
        vm: String,
        /// The disk.
        disk: String,
    },
    /// It does not.
    #[error("Disk {disk} of {vm:?} does not move: `vmove disks {vm}` shows what moves, and what has")]
    NotMoving {
        /// The VM.
        vm: String,
        /// The disk, as asked for.
        disk: String,
    },
    /// The guest is getting the new image, or has it.
    #[error(
        "Disk {disk} of {vm:?} is being given its new image, and can no longer be called off: move it back instead"
    )]
    TooLate {
        /// The VM.
        vm: String,
        /// The disk.
        disk: String,
    },
    /// libvirt's guests have their disks from libvirt.
    #[error(
        "{0:?} belongs to libvirt, which must know where its disks are: use `virsh blockcopy {0} DISK DEST --pivot`"
    )]
    Libvirt(String),
    /// No path for an image.
    #[error(
        "{0:?} cannot be the path of an image: expected an absolute path, without control characters and braces"
    )]
    BadPath(String),
    /// What is in the way.
    #[error("Disk {disk} cannot be moved:{}", listed(.blockers))]
    Refused {
        /// The disk.
        disk: String,
        /// All that is in the way.
        blockers: Vec<Blocker>,
    },
    /// Its command line.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// A file of the state folder, or the new image.
    #[error("Could not {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// QEMU does not open the image, or does not copy into it.
    #[error("QEMU does not take {} as the image of disk {disk}; it must be able to read and write there{user}", path.display())]
    NotOpened {
        /// The disk.
        disk: String,
        /// The new image.
        path: PathBuf,
        /// As whom QEMU runs, for people; may be empty.
        user: String,
        /// QEMU's answer.
        #[source]
        source: Box<QmpError>,
    },
    /// QEMU's monitor.
    #[error("The monitor of the guest's QEMU does not answer")]
    Monitor(#[from] QmpError),
    /// A bug.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

fn listed(blockers: &[Blocker]) -> String {
    blockers.iter().map(|blocker| format!("\n  {}", blocker.message)).collect()
}
