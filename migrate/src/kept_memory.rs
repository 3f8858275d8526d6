//! Memory of a guest that outlives its QEMU here.
//!
//! libvirt ends QEMU, and removes its RAM files, as soon as the guest runs at the destination, which may lack pages by then; and a guest that goes for a
//! visit leaves most of its memory at home, where nothing else is left of it. So each file has a second name for that time, by which it outlives QEMU
//! and this process.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vmove_node::disk::{Disk, remove_files};
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;

/// Second names begin so.
const PREFIX: &str = ".vmove-";

/// Gives the RAM files of a libvirt domain their second names, and the record these. Others are left as they are.
pub(crate) fn keep_memory(id: SessionId, vm: VmRecord) -> std::io::Result<VmRecord> {
    if vm.libvirt.is_none() {
        return Ok(vm);
    }
    // Beside libvirt's folder of this QEMU, which libvirt removes as a whole.
    second_names(id, vm, |ram| ram.parent().and_then(Path::parent).unwrap_or(ram).to_owned())
}

/// The same of a guest that goes for a visit, or is on one from now on.
pub(crate) fn keep_memory_at_home(id: SessionId, vm: VmRecord) -> std::io::Result<VmRecord> {
    second_names(id, vm, |ram| ram.parent().unwrap_or(ram).to_owned())
}

fn second_names(
    id: SessionId,
    mut vm: VmRecord,
    folder: impl Fn(&Path) -> PathBuf,
) -> std::io::Result<VmRecord> {
    let mut made: Vec<PathBuf> = Vec::new();
    for (index, ram) in vm.ram.iter_mut().enumerate() {
        let name = folder(&ram.path).join(second_name(id, index));
        if let Err(error) = std::fs::hard_link(&ram.path, &name)
            && !(error.kind() == ErrorKind::AlreadyExists && is_same(&ram.path, &name))
        {
            made.iter().for_each(|made| drop(std::fs::remove_file(made)));
            return Err(error);
        }
        made.push(name.clone());
        ram.path = name;
    }
    Ok(vm)
}

/// Whether both name one file: an earlier attempt has given it the second name.
fn is_same(ram: &Path, name: &Path) -> bool {
    let of = |path: &Path| path.symlink_metadata().map(|meta| (meta.dev(), meta.ino()));
    of(ram).ok().zip(of(name).ok()).is_some_and(|(ram, name)| ram == name)
}

/// Removes second names that were given to the RAM files of a guest at home, and are not noted.
pub(crate) fn remove_names_in_vain(disk: &dyn Disk, id: SessionId, vm: &VmRecord) {
    let names = vm.ram.iter().enumerate();
    remove_files(disk, names.map(|(index, ram)| ram.path.with_file_name(second_name(id, index))));
}

fn second_name(id: SessionId, index: usize) -> String {
    format!("{PREFIX}{id}-{index}")
}

fn is_second_name(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX))
}

/// The session for which a file has this second name.
pub(crate) fn session_of(name: &str) -> Option<SessionId> {
    let (id, _) = name.strip_prefix(PREFIX)?.rsplit_once('-')?;
    id.parse().ok().map(SessionId)
}

/// Whether the guest's memory outlives its QEMU here: that of a guest on a visit, and of one of libvirt's.
#[must_use]
pub fn is_kept(vm: &VmRecord) -> bool {
    !vm.ram.is_empty() && vm.ram.iter().all(|ram| is_second_name(&ram.path))
}

/// Removes the second names, if there are any. The memory is freed when nobody maps it any more.
pub(crate) fn let_memory_go(disk: &dyn Disk, vm: &VmRecord) {
    remove_files(disk, vm.ram.iter().map(|ram| &ram.path).filter(|path| is_second_name(path)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_name_says_whose_it_is() {
        let id = SessionId::random();
        assert_eq!(session_of(&format!("{PREFIX}{id}-12")), Some(id));
        assert_eq!(session_of(&format!("web.{id}-12")), None);
        assert_eq!(session_of(".vmove-x-0"), None);
    }
}
