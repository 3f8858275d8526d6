//! Disks as QEMU has them.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Ask, text};
use crate::QmpError;

/// One block node that reaches outside QEMU: a file, a device, a network image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BlockFact {
    /// Node name in QEMU.
    pub node: String,
    /// Block driver, such as `file`, `host_device`, `nbd`, `rbd`.
    pub driver: String,
    /// File or URI.
    pub file: String,
    /// Whether it bypasses the page cache (`cache.direct=on`).
    pub direct_io: bool,
    /// Whether the guest can only read it.
    pub read_only: bool,
    /// Type of the file system that holds the file, such as `nfs` or `ext4`; `None` where there is no file.
    pub fs: Option<String>,
    /// Whether the destination can be expected to see the same bytes; `None` where only the operator knows (a block
    /// device may be local or a SAN's).
    pub shared: Option<bool>,
}

impl BlockFact {
    /// Whether it comes from a server through a socket of this host, which no other host has.
    #[must_use]
    pub fn by_socket(&self) -> bool {
        self.file.starts_with(NBD_SOCKET)
    }
}

/// What QEMU calls an image behind a Unix socket.
const NBD_SOCKET: &str = "nbd+unix:";

/// File systems that several hosts see.
const SHARED_FS: &[&str] =
    &["nfs", "nfs4", "ceph", "cifs", "smb3", "gfs2", "ocfs2", "lustre", "gpfs", "afs", "9p"];

/// Drivers that reach a server.
const NETWORK: &[&str] =
    &["nbd", "rbd", "iscsi", "ssh", "gluster", "http", "https", "ftp", "ftps", "nfs", "nvme"];

pub(super) async fn facts(ask: &Ask<'_>, pid: u32) -> Result<Vec<BlockFact>, QmpError> {
    let reply = ask.with("query-named-block-nodes", json!({ "flat": true })).await?;
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    let entries = reply.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(entries.iter().filter_map(|entry| fact(entry, &mounts)).collect())
}

fn fact(entry: &Value, mounts: &str) -> Option<BlockFact> {
    let driver = text(entry, "drv")?;
    let is_file = driver == "file";
    let is_device = matches!(driver.as_str(), "host_device" | "host_cdrom");
    if !is_file && !is_device && !NETWORK.contains(&driver.as_str()) {
        // A format or filter on top of another node.
        return None;
    }
    let file = text(entry, "file").unwrap_or_default();
    let read_only = entry.get("ro").and_then(Value::as_bool).unwrap_or(false);
    let fs = is_file.then(|| fs_of(&file, mounts)).flatten();
    let shared = match &fs {
        Some(fs) => Some(SHARED_FS.contains(&fs.as_str()) || fs.starts_with("fuse.")),
        None if is_device || is_file => None,
        // A server's socket on this host.
        None if file.starts_with(NBD_SOCKET) => Some(false),
        None => Some(true),
    };
    Some(BlockFact {
        node: text(entry, "node-name").unwrap_or_default(),
        direct_io: entry.pointer("/cache/direct").and_then(Value::as_bool).unwrap_or(false),
        driver,
        file,
        read_only,
        fs,
        shared,
    })
}

/// Type of the file system that holds `file`, by the longest mount point that is its prefix.
fn fs_of(file: &str, mountinfo: &str) -> Option<String> {
    let mut best: Option<(usize, &str)> = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(point) = left.split(' ').nth(4) else { continue };
        // Blanks in mount points are written as octal.
        let point = point.replace("\\040", " ");
        let fits = std::path::Path::new(file).starts_with(&point);
        // Later lines lie over earlier ones.
        if fits && best.is_none_or(|(length, _)| point.len() >= length) {
            best = right.split(' ').next().map(|fs| (point.len(), fs));
        }
    }
    best.map(|(_, fs)| fs.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:25 / /srv/vm\\040images rw - nfs4 host:/x rw
31 22 0:26 / /srv/local rw shared:3 - xfs /dev/sdb rw
";

    #[test]
    fn file_system_is_that_of_the_longest_mount_point() {
        assert_eq!(fs_of("/srv/vm images/a.img", MOUNTS).as_deref(), Some("nfs4"));
        assert_eq!(fs_of("/srv/local/a.img", MOUNTS).as_deref(), Some("xfs"));
        assert_eq!(fs_of("/srv/localfoo/a.img", MOUNTS).as_deref(), Some("ext4"));
    }

    #[test]
    fn formats_are_not_disks_and_servers_are_shared() {
        let format = json!({"drv": "qcow2", "node-name": "a", "file": "/x", "ro": false});
        assert_eq!(fact(&format, MOUNTS), None);
        let nbd =
            json!({"drv": "nbd", "node-name": "b", "file": "nbd://h", "ro": true, "cache": {"direct": true}});
        let nbd = fact(&nbd, MOUNTS).unwrap();
        assert_eq!((nbd.shared, nbd.direct_io, nbd.read_only), (Some(true), true, true));
        let socket =
            json!({"drv": "nbd", "node-name": "e", "file": "nbd+unix:///disk?socket=/run/x", "ro": true});
        assert!(fact(&socket, MOUNTS).is_some_and(|fact| fact.shared == Some(false) && fact.by_socket()));
        let device = json!({"drv": "host_device", "node-name": "c", "file": "/dev/sdz", "ro": false});
        assert_eq!(fact(&device, MOUNTS).unwrap().shared, None);
        let local = json!({"drv": "file", "node-name": "d", "file": "/srv/local/x", "ro": false});
        assert_eq!(fact(&local, MOUNTS).unwrap().shared, Some(false));
    }
}
