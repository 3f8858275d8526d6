//! Memory of a guest of libvirt's, kept for the destination.
//!
//! libvirt ends QEMU here, and removes its RAM files, as soon as the guest runs at the destination, which may lack pages by then. So each file has a
//! second name for the time of the migration, by which it outlives QEMU and this process.

use std::path::PathBuf;

use vmove_node::disk::Disk;
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;

/// Gives the RAM files of a libvirt domain their second names, and the record these. Others are left as they are.
pub(crate) fn keep_memory(id: SessionId, mut vm: VmRecord) -> std::io::Result<VmRecord> {
    if vm.libvirt.is_none() {
        return Ok(vm);
    }
    let mut made: Vec<PathBuf> = Vec::new();
    for (index, ram) in vm.ram.iter_mut().enumerate() {
        // Beside libvirt's folder of this QEMU, which libvirt removes as a whole.
        let beside = ram.path.parent().and_then(|own| own.parent()).unwrap_or(&ram.path);
        let name = beside.join(format!(".vmove-{id}-{index}"));
        if let Err(error) = std::fs::hard_link(&ram.path, &name) {
            made.iter().for_each(|made| drop(std::fs::remove_file(made)));
            return Err(error);
        }
        made.push(name.clone());
        ram.path = name;
    }
    Ok(vm)
}

/// Removes the second names. The memory is freed when nobody maps it any more.
pub(crate) fn let_memory_go(disk: &dyn Disk, vm: &VmRecord) {
    if vm.libvirt.is_none() {
        return;
    }
    for ram in &vm.ram {
        match disk.remove_file(&ram.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(path = %ram.path.display(), %error, "memory of a guest that has left is not freed");
            }
            _ => {}
        }
    }
}
