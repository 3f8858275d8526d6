//! Paths and addresses that options may name although they are outside of the VM's own folder.

use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::cmdline::image;

/// Folders for what guests print. Nothing is run from there.
const LOGS: &[&str] = &["/tmp", "/var/log/libvirt", "/var/log/qemu", "/var/log/vmove"];
/// Scripts and helpers that this node has for QEMU: each such file, or what is below such a folder.
const SCRIPTS: &[&str] = &[
    "/etc/qemu",
    "/etc/qemu-ifdown",
    "/etc/qemu-ifup",
    "/usr/lib/qemu",
    "/usr/lib/qemu-server",
    "/usr/libexec/qemu-bridge-helper",
    "/usr/libexec/qemu-server",
];
/// Servers of images. `ssh` is not among them: it would log in elsewhere with the keys of this node's root.
const SERVERS: &[&str] = &[
    "ftp",
    "ftps",
    "gluster",
    "gluster+rdma",
    "gluster+tcp",
    "http",
    "https",
    "iscsi",
    "iser",
    "nbd",
    "nbds",
    "nfs",
];
/// What may follow an image of Ceph: its library also takes options that write files and load libraries.
const CEPH_KEYS: &[&str] =
    &["auth_client_required", "auth_supported", "conf", "id", "key", "keyring", "mon_host"];

/// A path in the VM's own folder, which is also QEMU's working folder.
pub(super) fn in_vm_dir(path: &str) -> bool {
    let inside = match path.strip_prefix("{vmdir}") {
        Some(rest) => rest.starts_with('/'),
        None => !path.is_empty() && !path.starts_with('/'),
    };
    inside && is_plain(path)
}

/// Whether a QEMU may listen on this socket. It removes what it finds there, so this must be nothing, or a socket that an ended QEMU left.
pub(super) fn may_listen(path: &str) -> bool {
    if in_vm_dir(path) {
        return true;
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) => found.file_type().is_socket() && nobody_listens(path),
        Err(error) => path.starts_with('/') && error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// Does not wait for whoever listens.
fn nobody_listens(path: &str) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let tried = socket.and_then(|socket| connect(socket, &SocketAddrUnix::new(path)?));
    tried == Err(Errno::CONNREFUSED)
}

/// Whether a QEMU may write what a guest prints to this file. It truncates what it finds there.
pub(super) fn may_log(path: &str) -> bool {
    let outside = || {
        let file = Path::new(path);
        let folder = file.parent().and_then(|folder| std::fs::canonicalize(folder).ok());
        let is_log = folder.is_some_and(|folder| LOGS.iter().any(|logs| folder.starts_with(logs)));
        is_log && std::fs::symlink_metadata(file).map_or(true, |found| found.is_file())
    };
    in_vm_dir(path) || (path.starts_with('/') && is_plain(path) && outside())
}

/// No script at all, or one of those that this node has for QEMU.
pub(super) fn is_script_of_node(path: &str) -> bool {
    matches!(path, "" | "no") || below(path, SCRIPTS)
}

/// TLS credentials for QEMU.
pub(super) fn are_credentials(path: &str) -> bool {
    in_vm_dir(path) || below(path, &["/etc/pki"])
}

/// Configuration and keys for Ceph.
pub(super) fn is_of_ceph(path: &str) -> bool {
    below(path, &["/etc/ceph"])
}

/// A file, a block device, or an image of a server.
pub(super) fn is_image(file: &str) -> bool {
    if image::is_path(file) {
        return true;
    }
    let Some((kind, rest)) = file.split_once(':') else { return false };
    match kind {
        "rbd" => ceph_options(rest).iter().all(|(key, value)| {
            let is_file = matches!(key.as_str(), "conf" | "keyring");
            CEPH_KEYS.contains(&key.as_str()) && (!is_file || is_of_ceph(value))
        }),
        // One of its options names a file that it writes.
        _ => SERVERS.contains(&kind) && !(kind.starts_with("gluster") && rest.contains("logfile")),
    }
}

/// The options of `pool/image:key=value:key=value`; a backslash takes away the meaning of what follows.
fn ceph_options(text: &str) -> Vec<(String, String)> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match (char, parts.last_mut()) {
            (':', _) => parts.push(String::new()),
            ('\\', Some(part)) => part.extend(chars.next()),
            (char, Some(part)) => part.push(char),
            (_, None) => {}
        }
    }
    let pair = |part: String| {
        part.split_once('=').map_or((part.clone(), String::new()), |(k, v)| (k.into(), v.into()))
    };
    parts.into_iter().skip(1).map(pair).collect()
}

/// Whether a path is one of these, or below one, without a way out by `..`.
fn below(path: &str, those: &[&str]) -> bool {
    is_plain(path) && those.iter().any(|one| PathBuf::from(path).starts_with(one))
}

fn is_plain(path: &str) -> bool {
    !Path::new(path).components().any(|part| part == Component::ParentDir)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_socket_is_taken_where_nothing_is_or_nobody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        assert!(may_listen(&path("new")) && may_listen("{vmdir}/x") && may_listen("x"));
        let listener = UnixListener::bind(path("used")).unwrap();
        assert!(!may_listen(&path("used")), "somebody listens");
        drop(listener);
        // A process that another test starts has it, too, until it runs its program.
        let begin = Instant::now();
        while !may_listen(&path("used")) {
            assert!(begin.elapsed() < Duration::from_secs(5), "left by one that has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink(path("used"), path("link")).unwrap();
        assert!(!may_listen(&path("file")) && !may_listen(&path("link")) && !may_listen(&path("file/x")));
        let _datagrams = std::os::unix::net::UnixDatagram::bind(path("datagrams")).unwrap();
        assert!(!may_listen(&path("datagrams")));
    }

    #[test]
    fn logs_are_written_where_logs_are() {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("old"), "").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("link")).unwrap();
        std::os::unix::fs::symlink("/etc", path("etc")).unwrap();
        for good in [&path("new"), &path("old"), "{vmdir}/log", "log"] {
            assert!(may_log(good), "{good}");
        }
        for bad in
            [&path("link"), &path("etc/new"), &path("no/such"), "/etc/cron.d/x", "/tmp/../etc/x", "../x"]
        {
            assert!(!may_log(bad), "{bad}");
        }
    }

    #[test]
    fn images_of_ceph_bring_no_options_that_reach_further() {
        for good in
            ["rbd:pool/image", "rbd:p/i@snap:id=a:conf=/etc/ceph/x.conf", r"rbd:p/i:mon_host=h\:6789\;g"]
        {
            assert!(is_image(good), "{good}");
        }
        for bad in [
            "rbd:p/i:log_file=/etc/cron.d/x",
            "rbd:p/i:conf=/tmp/x",
            "rbd:p/i:conf=/etc/ceph/../x",
            r"rbd:p/i:i\d=x:plugin_dir=/tmp",
            "rbd:p/i:admin_socket=x",
        ] {
            assert!(!is_image(bad), "{bad}");
        }
    }
}
