//! An empty qcow2 image over a backing file, written without asking any QEMU: children's overlays are made before there is one
//! that could, and the backing file may be in use. After `docs/interop/qcow2.txt` of QEMU, version 3.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::CloneError;

const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Length of the header of version 3 without optional fields.
const HEADER: u32 = 104;
/// What one entry of the L1 table covers: a cluster of entries of 8 bytes, a cluster each.
const PER_L1: u64 = CLUSTER * CLUSTER / 8;
pub(super) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Header extension: format of the backing file.
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
/// The format's limit.
const MAX_NAME: usize = 1023;
/// A refcount block of 16-bit counts covers so many clusters.
const PER_BLOCK: u64 = CLUSTER / 2;

/// Writes a new image of `size` bytes that shows `backing`, an image of `format`, until it is written. `path` must not be there.
///
/// # Errors
/// [`CloneError::Io`].
pub fn create(path: &Path, size: u64, backing: &Path, format: &str) -> Result<(), CloneError> {
    let failed = || CloneError::io("write", path);
    let (head, length) = image(size, backing, format).map_err(failed())?;
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(path).map_err(CloneError::io("create", path))?;
    let written = file.write_all(&head).and_then(|()| file.set_len(length));
    written.map_err(|error| {
        let _ = std::fs::remove_file(path);
        failed()(error)
    })
}

/// The first bytes of an image, and the length of its file. What follows is zeros.
fn image(size: u64, backing: &Path, format: &str) -> io::Result<(Vec<u8>, u64)> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
    let name = backing.as_os_str().as_bytes();
    if name.len() > MAX_NAME {
        return Err(invalid(format!(
            "the path of the image below it has {} bytes, {MAX_NAME} are possible",
            name.len()
        )));
    }
    let l1_entries = size.div_ceil(PER_L1).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER);
    // Header, refcount table, refcount block, L1 table.
    let clusters = 3 + l1_clusters;
    let l1_entries = u32::try_from(l1_entries).ok().filter(|_| clusters <= PER_BLOCK);
    let l1_entries = l1_entries.ok_or_else(|| invalid(format!("an image of {size} bytes is too large")))?;
    let extension = 8 + format.len().next_multiple_of(8);
    // Behind the header: the extension, and one that ends them.
    let name_at = HEADER as usize + extension + 8;

    let mut head = Vec::with_capacity(3 * (1 << CLUSTER_BITS));
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&3_u32.to_be_bytes());
    head.extend_from_slice(&(name_at as u64).to_be_bytes());
    head.extend_from_slice(&u32::try_from(name.len()).unwrap_or_default().to_be_bytes());
    head.extend_from_slice(&CLUSTER_BITS.to_be_bytes());
    head.extend_from_slice(&size.to_be_bytes());
    // No encryption.
    head.extend_from_slice(&0_u32.to_be_bytes());
    head.extend_from_slice(&l1_entries.to_be_bytes());
    head.extend_from_slice(&(3 * CLUSTER).to_be_bytes());
    head.extend_from_slice(&CLUSTER.to_be_bytes());
    // One cluster of refcount table; no snapshots.
    head.extend_from_slice(&1_u32.to_be_bytes());
    head.extend_from_slice(&0_u32.to_be_bytes());
    head.extend_from_slice(&0_u64.to_be_bytes());
    // No incompatible, compatible, or autoclear features.
    head.extend_from_slice(&[0; 24]);
    // Refcounts of 1 << 4 bits.
    head.extend_from_slice(&4_u32.to_be_bytes());
    head.extend_from_slice(&HEADER.to_be_bytes());
    head.extend_from_slice(&BACKING_FORMAT.to_be_bytes());
    head.extend_from_slice(&u32::try_from(format.len()).unwrap_or_default().to_be_bytes());
    head.extend_from_slice(format.as_bytes());
    head.resize(HEADER as usize + extension + 8, 0);
    head.extend_from_slice(name);

    head.resize(1 << CLUSTER_BITS, 0);
    head.extend_from_slice(&(2 * CLUSTER).to_be_bytes());
    head.resize(2 << CLUSTER_BITS, 0);
    for _ in 0..clusters {
        head.extend_from_slice(&1_u16.to_be_bytes());
    }
    Ok((head, clusters * CLUSTER))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use vmove_skip::need;

    use super::*;

    /// QEMU's own tool; an error where it is not installed.
    fn qemu_img(arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("qemu-img").args(arguments).output();
        let output = output.map_err(|error| format!("qemu-img (package qemu-utils): {error}"))?;
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    #[test]
    fn qemu_takes_it_for_an_overlay() {
        let dir = tempfile::tempdir().unwrap();
        // Longer than the tables of one cluster, not a multiple of a cluster; and nearly nothing.
        for size in [512, 700 << 20, (5_u64 << 40) + 512] {
            let (base, over) = (dir.path().join("a base, é"), dir.path().join(format!("over-{size}")));
            File::create(&base).and_then(|f| f.set_len(size)).unwrap();
            create(&over, size, &base, "raw").unwrap();
            create(&over, size, &base, "raw").unwrap_err();
            let over = over.to_str().unwrap();
            let said = need!(qemu_img(&["info", "--output=json", over]));
            let info: serde_json::Value = serde_json::from_str(&said).unwrap();
            assert_eq!(info["virtual-size"], size);
            assert_eq!(info["format"], "qcow2");
            assert_eq!(info["backing-filename-format"], "raw");
            assert_eq!(info["backing-filename"], base.to_str().unwrap());
            let said = need!(qemu_img(&["check", "--output=json", over]));
            let check: serde_json::Value = serde_json::from_str(&said).unwrap();
            assert_eq!(
                (&check["check-errors"], &check["leaks"]),
                (&0.into(), &serde_json::Value::Null),
                "{check}"
            );
        }
    }

    #[test]
    fn a_name_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = create(&dir.path().join("over"), 512, Path::new(&"x".repeat(2000)), "raw").unwrap_err();
        assert!(matches!(error, CloneError::Io { .. }), "{error}");
        assert!(!dir.path().join("over").exists());
    }
}
