//! The NBD client, at a real server.
#![cfg(test)]

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use vmove_qmp::nbd::{ALLOCATION, Nbd, NbdError, ZERO};
use vmove_skip::skip;

const MIB: u64 = 1 << 20;

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn serve(image: &Path, format: &str, socket: &Path) -> Option<Server> {
    let mut command = Command::new("qemu-nbd");
    command.args(["--read-only", "--persistent", "-x", "disk", "-f", format, "-k"]).arg(socket).arg(image);
    let server = Server(command.spawn().ok()?);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !socket.exists() {
        assert!(Instant::now() < deadline, "qemu-nbd does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(server)
}

#[test]
fn what_an_image_holds_is_read_and_its_holes_are_told() {
    let dir = tempfile::tempdir().expect("a folder");
    let (image, socket) = (dir.path().join("disk"), dir.path().join("nbd.sock"));
    let mut content = vec![0; 8 << 20];
    content[3 << 20..5 << 20].fill(7);
    content[(5 << 20) - 1] = 9;
    let file = std::fs::File::create(&image).expect("an image");
    file.set_len(8 * MIB).expect("its length");
    std::os::unix::fs::FileExt::write_all_at(&file, &content[3 << 20..5 << 20], 3 * MIB).expect("written");
    let Some(_server) = serve(&image, "raw", &socket) else {
        skip!("no qemu-nbd");
        return;
    };
    let mut export = Nbd::open(&socket, "disk", ALLOCATION).expect("the export");
    assert_eq!(export.size(), 8 * MIB);
    let mut read = vec![1; 8 << 20];
    export.read(0, &mut read).expect("all of it");
    assert!(read == content, "other bytes than the image has");
    let mut at = 0;
    let mut ranges = Vec::new();
    while at < export.size() {
        let len = u32::try_from(export.size() - at).expect("a length");
        for extent in export.status(at, len).expect("ranges") {
            ranges.push((at, extent.flags & ZERO != 0));
            at += extent.len;
        }
    }
    assert_eq!(ranges, [(0, true), (3 * MIB, false), (5 * MIB, true)]);
    let beyond = export.read(8 * MIB, &mut [0; 512]);
    assert!(matches!(beyond, Err(NbdError::Refused { .. })), "{beyond:?}");
    // The connection is still good after that.
    export.read(5 * MIB - 1, &mut read[..1]).expect("a byte");
    assert_eq!(read[0], 9);
}

#[test]
fn what_a_server_does_not_have_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let (image, socket) = (dir.path().join("disk"), dir.path().join("nbd.sock"));
    std::fs::write(&image, [0; 4096]).expect("an image");
    let gone = Nbd::open(&socket, "disk", ALLOCATION);
    assert!(matches!(gone, Err(NbdError::Io { .. })), "{gone:?}");
    let Some(_server) = serve(&image, "raw", &socket) else {
        skip!("no qemu-nbd");
        return;
    };
    let other = Nbd::open(&socket, "other", ALLOCATION);
    assert!(matches!(other, Err(NbdError::Refused { .. })), "{other:?}");
    let unknown = Nbd::open(&socket, "disk", "qemu:dirty-bitmap:none").expect_err("it has no bitmap");
    assert!(unknown.to_string().contains("qemu:dirty-bitmap:none"), "{unknown}");
}
