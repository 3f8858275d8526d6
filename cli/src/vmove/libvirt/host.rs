//! What a host needs: the hook, a folder for monitors, guest memory on tmpfs or hugetlbfs.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use vmove_libvirt::{QemuConf, SOCKETS};

/// What libvirt calls.
pub const HOOK: &str = "/etc/libvirt/hooks/qemu.d/vmove";
const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";
/// Modes of `huge=` in which a mapping that asks for huge pages gets them.
const HUGE: [&str; 3] = ["huge=advise", "huge=within_size", "huge=always"];

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
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let found = mount_of(&mounts, &dir);
    let good = found.as_ref().is_some_and(|(kind, options)| is_good(kind, options));
    (!good).then(|| {
        let found = found.map_or_else(|| "nothing".to_owned(), |(kind, options)| format!("{kind} ({options})"));
        format!(
            "memory_backing_dir of {QEMU_CONF} is {}, on {found}: guest memory must be on tmpfs with huge=advise, or on hugetlbfs. For instance\n\
             \x20   mount: tmpfs /var/lib/vmove/libvirt tmpfs huge=advise,mode=0755,size=90% 0 0   (in /etc/fstab)\n\
             \x20   {QEMU_CONF}: memory_backing_dir = \"/var/lib/vmove/libvirt\"\n\
             and restart libvirtd (or virtqemud)",
            dir.display()
        )
    })
}

/// Whether guest memory can be on such a mount.
fn is_good(kind: &str, options: &str) -> bool {
    kind == "hugetlbfs" || kind == "tmpfs" && options.split(',').any(|option| HUGE.contains(&option))
}

/// Kind and options of the mount on which a folder is, also one that is not there yet.
fn mount_of(mountinfo: &str, dir: &Path) -> Option<(String, String)> {
    let mut found: Option<(PathBuf, (String, String))> = None;
    for line in mountinfo.lines() {
        let (before, after) = line.split_once(" - ")?;
        let at = PathBuf::from(before.split(' ').nth(4)?.replace("\\040", " "));
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1)?);
        // Of two mounts at one place the later one counts.
        let nearer =
            found.as_ref().is_none_or(|(known, _)| at.components().count() >= known.components().count());
        if dir.starts_with(&at) && nearer {
            found = Some((at, (kind.to_owned(), options.to_owned())));
        }
    }
    found.map(|(_, found)| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_counts() {
        let info =
            "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / /mem rw shared:1 - tmpfs tmpfs rw,huge=advise\n";
        let kind = |dir: &str| mount_of(info, Path::new(dir)).unwrap().0;
        assert_eq!(kind("/mem/libvirt"), "tmpfs");
        assert_eq!(kind("/memory"), "ext4");
    }

    #[test]
    fn memory_is_on_huge_pages_of_either_kind() {
        assert!(is_good("tmpfs", "rw,huge=advise") && is_good("hugetlbfs", "rw,pagesize=2M"));
        assert!(!is_good("tmpfs", "rw") && !is_good("ext4", "rw"));
    }

    #[test]
    fn a_user_is_a_name_or_a_number() {
        let passwd = "root:x:0:0::/:\nlibvirt-qemu:x:64055:104::/:\n";
        assert_eq!(ids(passwd, "libvirt-qemu"), Some((64055, 104)));
        assert_eq!(ids(passwd, "7"), Some((7, 7)));
        assert_eq!(ids(passwd, "nobody"), None);
    }
}
