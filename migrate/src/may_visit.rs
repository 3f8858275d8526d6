//! Whether a guest of this node can be on a visit elsewhere, from which it comes home.

use std::path::Path;

use crate::engine_error::EngineError;
use crate::node::Node;
use vmove_node::record::VmRecord;
use vmove_types::Backing;
use vmove_types::spec::{MigrationSpec, Visit};

/// Whether a guest of this node could be on a visit elsewhere with these options.
pub(crate) fn in_the_way(node: &Node, vm: &VmRecord, spec: &MigrationSpec) -> Result<(), EngineError> {
    let spec =
        MigrationSpec { visit: Visit::Go, reads_bytes: None, reads_near_bytes_per_s: None, ..spec.clone() };
    spec.validate().map_err(EngineError::BadSpec)?;
    if vm.backing != Backing::Thp {
        return Err(EngineError::BadSpec(format!(
            "visit: expected memory that goes by pages of 4 KiB ({}), found {}, of which a touch brings a whole page; move the guest for good",
            Backing::Thp.name(),
            vm.backing.name()
        )));
    }
    if !vm.devices.is_empty() {
        let why =
            "visit: expected a guest that owns no devices of this node, found some; migrate it for good";
        return Err(EngineError::BadSpec(why.to_owned()));
    }
    can_come_home(node, vm)
}

/// The way home gives RAM files another name in this node's folder for guest memory.
fn can_come_home(node: &Node, vm: &VmRecord) -> Result<(), EngineError> {
    let folder = node.layout(&vm.name, vm.backing).memory_dir;
    let look = |path: &Path, source| EngineError::Io { path: path.to_owned(), source };
    match vm.ram_elsewhere_than(&folder, look)? {
        None => Ok(()),
        Some(elsewhere) => Err(EngineError::BadSpec(format!(
            "visit: expected RAM files on the file system of {}, where the guest's memory is to be when it comes home, found {}; migrate it for good",
            folder.display(),
            elsewhere.display()
        ))),
    }
}
