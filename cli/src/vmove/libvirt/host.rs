//! What a host needs: the hook, a folder for monitors, guest memory on tmpfs or hugetlbfs.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::Path;

use vmove_libvirt::{QemuConf, SOCKETS};

use crate::mounts::not_on_huge_pages;

/// What libvirt calls.
pub const HOOK: &str = "/etc/libvirt/hooks/qemu.d/vmove";
const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";

/// The settings of libvirt's QEMU driver.
pub fn qemu_conf() -> QemuConf {
    QemuConf::read(&std::fs::read_to_string(QEMU_CONF).unwrap_or_default())
}

/// Makes the folder in which QEMUs make their monitors, as whatever user libvirt runs them.
pub fn make_socket_folder() -> io::Result<()> {
    let path = Path::new(SOCKETS);
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    match ids(&passwd, qemu_conf().user()) {
        Some((user, group)) => chown(path, Some(user), Some(group)),
        None => Err(io::Error::other(format!(
            "there is no user {:?}, as whom {QEMU_CONF} runs QEMUs",
            qemu_conf().user()
        ))),
    }
}

/// Numbers of a user and of its group.
fn ids(passwd: &str, user: &str) -> Option<(u32, u32)> {
    if let Ok(number) = user.parse() {
        return Some((number, number));
    }
    let line = passwd.lines().find(|line| line.split(':').next() == Some(user))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// The text of the hook, for this program and this `vmoved`.
pub fn hook_text(control: &Path) -> io::Result<String> {
    let program = std::env::current_exe()?;
    let control = if control == Path::new(vmove_types::node::DEFAULT_CONTROL) {
        String::new()
    } else {
        format!(" --control '{}'", control.display())
    };
    Ok(format!("#!/bin/sh\nexec '{}'{control} libvirt hook \"$@\"\n", program.display()))
}

/// Whether the hook is there.
pub fn has_hook() -> bool {
    Path::new(HOOK).exists()
}

/// Installs it.
pub fn install_hook(text: &str) -> io::Result<()> {
    let path = Path::new(HOOK);
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

/// What is wrong with the place of guest memory, and what to do; nothing if it is on tmpfs with huge pages, or on hugetlbfs.
pub fn memory_problem() -> Option<String> {
    let dir = qemu_conf().memory_backing_dir().to_owned();
    not_on_huge_pages(&dir).map(|found| {
        format!(
            "memory_backing_dir of {QEMU_CONF} is {}, on {found}: guest memory must be on tmpfs with huge=advise, or on hugetlbfs. For instance\n\
             \x20   mount: tmpfs /var/lib/vmove/libvirt tmpfs huge=advise,mode=0755,size=90% 0 0   (in /etc/fstab)\n\
             \x20   {QEMU_CONF}: memory_backing_dir = \"/var/lib/vmove/libvirt\"\n\
             and restart libvirtd (or virtqemud)",
            dir.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_a_name_or_a_number() {
        let passwd = "root:x:0:0::/:\nlibvirt-qemu:x:64055:104::/:\n";
        assert_eq!(ids(passwd, "libvirt-qemu"), Some((64055, 104)));
        assert_eq!(ids(passwd, "7"), Some((7, 7)));
        assert_eq!(ids(passwd, "nobody"), None);
    }
}
