//! What a daemon keeps of a VM.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_types::Backing;
use vmove_types::device::VmDevice;
use vmove_types::vm::LABEL;

/// One named file behind a part of guest RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamFileRecord {
    /// QEMU's id of the memory backend.
    pub id: String,
    /// Where the file is on this node.
    pub path: PathBuf,
    /// Length in bytes.
    pub size: u64,
}

/// Everything a daemon must know of a VM to find it again after a restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// Name, unique on the node.
    pub name: String,
    /// Process id of QEMU.
    pub pid: i32,
    /// Start time of that process in clock ticks since boot (field 22 of `/proc/PID/stat`): guards against reuse of the id. Written
    /// with the [boot](crate::boot).
    #[serde(with = "crate::boot")]
    pub pid_start: u64,
    /// QMP socket that belongs to the daemon.
    pub qmp_socket: PathBuf,
    /// Runtime folder: QEMU's working folder on this node, logs, sockets.
    pub vm_dir: PathBuf,
    /// What its memory is made of.
    pub backing: Backing,
    /// The command line as the operator gave it, before anything was added: the destination's is derived from it.
    pub command_line: Vec<String>,
    /// Environment variables it was started with, beside the daemon's own: its start at another node needs them too.
    #[serde(default)]
    pub environment: Vec<(String, String)>,
    /// Its RAM files.
    pub ram: Vec<RamFileRecord>,
    /// Disk images that were made for this VM alone and are removed when it ends here: overlays of a forked child.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overlays: Vec<PathBuf>,
    /// Devices of its node that it has, or is to get again; which of them it has now the node's [claims](crate::devices) tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<VmDevice>,
    /// True if somebody else started this QEMU: it is never killed without a migration that succeeded.
    pub adopted: bool,
    /// Session that brought or is bringing it, if any.
    #[serde(default)]
    pub session: Option<String>,
    /// UUID of the libvirt domain whose QEMU this is: libvirt alone starts, resumes and ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<String>,
}

impl VmRecord {
    /// Its labels: `VMOVE_LABEL_team=ml` is `team` with the value `ml`.
    #[must_use]
    pub fn labels(&self) -> BTreeMap<String, String> {
        let label =
            |(key, value): &(String, String)| Some((key.strip_prefix(LABEL)?.to_owned(), value.clone()));
        self.environment.iter().filter_map(label).collect()
    }

    /// The first RAM file that is on another file system than `folder`, so that it can have no second name there; `None` if all can.
    ///
    /// # Errors
    /// What `error` makes of the path that cannot be looked at, and the reason.
    pub fn ram_elsewhere_than<E>(
        &self,
        folder: &Path,
        error: impl Fn(&Path, io::Error) -> E,
    ) -> Result<Option<&Path>, E> {
        let system = |path: &Path| path.metadata().map(|meta| meta.dev()).map_err(|why| error(path, why));
        let wanted = system(folder)?;
        for ram in &self.ram {
            if system(&ram.path)? != wanted {
                return Ok(Some(&ram.path));
            }
        }
        Ok(None)
    }
}
