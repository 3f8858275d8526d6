//! `/etc/libvirt/qemu.conf`, as far as vmove needs it.

use std::path::{Path, PathBuf};

/// Where libvirt puts memory in files unless told otherwise: on a disk.
const DEFAULT_BACKING: &str = "/var/lib/libvirt/qemu/ram";
/// As whom Debian's libvirt runs QEMU.
const DEFAULT_USER: &str = "libvirt-qemu";

/// The settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QemuConf {
    memory_backing_dir: PathBuf,
    user: String,
}

impl QemuConf {
    /// Reads the text of the file.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let value = |key: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            let found = lines.rfind(|(name, _)| name.trim() == key)?;
            let value = found.1.trim().strip_prefix('"')?;
            Some(value.split('"').next().unwrap_or_default().to_owned())
        };
        let dir = value("memory_backing_dir").unwrap_or_else(|| DEFAULT_BACKING.to_owned());
        let user = value("user").unwrap_or_else(|| DEFAULT_USER.to_owned());
        Self { memory_backing_dir: dir.into(), user: user.trim_start_matches('+').to_owned() }
    }

    /// Where memory in files is.
    #[must_use]
    pub fn memory_backing_dir(&self) -> &Path {
        &self.memory_backing_dir
    }

    /// As whom QEMU runs: a name, or a number.
    #[must_use]
    pub fn user(&self) -> &str {
        &self.user
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_count_and_comments_do_not() {
        let conf = QemuConf::read("#user = \"x\"\nuser = \"+0\"\n memory_backing_dir = \"/mem\" # tmpfs\n");
        assert_eq!(conf.memory_backing_dir(), Path::new("/mem"));
        assert_eq!(conf.user(), "0");
        assert_eq!(QemuConf::read("").user(), DEFAULT_USER);
    }
}
