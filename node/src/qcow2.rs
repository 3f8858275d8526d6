//! An empty qcow2 image, written without asking any QEMU: overlays of children are made before there is one that could, and images of
//! guests on their way here are opened by theirs as it starts. After `docs/interop/qcow2.txt` of QEMU, version 3.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Clusters of 64 KiB, as QEMU makes them by default.
pub const CLUSTER_BITS: u32 = 16;
/// The cluster sizes that are written, as powers of two: 64 KiB to 2 MiB.
const POSSIBLE_BITS: std::ops::RangeInclusive<u32> = CLUSTER_BITS..=21;
/// Length of the header of version 3 without optional fields.
const HEADER: u32 = 104;
/// The first bytes of an image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Header extension: format of the backing file.
pub const BACKING_FORMAT: u32 = 0xe279_2aca;
/// The format's limit.
const MAX_NAME: usize = 1023;

/// An image that holds nothing of its own.
#[derive(Debug, Clone, Copy)]
pub struct Empty<'a> {
    /// Size that a guest sees, in bytes.
    pub size: u64,
    /// Cluster size in bytes: a power of two from 64 KiB to 2 MiB. Another is replaced by 64 KiB.
    pub cluster_bytes: u64,
    /// What shows through until it is written, and its format.
    pub backing: Option<(&'a Path, &'a str)>,
}

impl<'a> Empty<'a> {
    /// An image of `size` bytes that shows `backing`, an image of `format`.
    #[must_use]
    pub const fn over(size: u64, backing: &'a Path, format: &'a str) -> Self {
        Self { size, cluster_bytes: 1 << CLUSTER_BITS, backing: Some((backing, format)) }
    }

    /// Writes it. `path` must not be there.
    ///
    /// # Errors
    /// The kernel's answer; `InvalidInput` if the backing file's name is too long, or the image too large.
    pub fn create(&self, path: &Path) -> io::Result<()> {
        let (head, length) = self.image()?;
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(path)?;
        let written = file.write_all(&head).and_then(|()| file.set_len(length));
        written.inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    /// Writes it over the beginning of a block device.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn write_over(&self, device: &Path) -> io::Result<()> {
        let (head, length) = self.image()?;
        let mut file = File::options().write(true).open(device)?;
        file.write_all(&head)?;
        let left = length.saturating_sub(head.len() as u64);
        io::copy(&mut io::repeat(0).take(left), &mut file)?;
        file.sync_all()
    }

    fn cluster_bits(&self) -> u32 {
        let bits = self.cluster_bytes.trailing_zeros();
        if self.cluster_bytes.is_power_of_two() && POSSIBLE_BITS.contains(&bits) {
            bits
        } else {
            CLUSTER_BITS
        }
    }

    /// The first bytes of an image, and the length of its file. What follows is zeros.
    fn image(&self) -> io::Result<(Vec<u8>, u64)> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let (name, format) = match self.backing {
            Some((path, format)) => (path.as_os_str().as_bytes(), format),
            None => (&[][..], ""),
        };
        if name.len() > MAX_NAME {
            return Err(invalid(format!(
                "the path of the image below it has {} bytes, {MAX_NAME} are possible",
                name.len()
            )));
        }
        let bits = self.cluster_bits();
        let cluster = 1_u64 << bits;
        // What one entry of the L1 table covers: a cluster of entries of 8 bytes, a cluster each.
        let l1_entries = self.size.div_ceil(cluster * cluster / 8).max(1);
        let l1_clusters = (l1_entries * 8).div_ceil(cluster);
        // Header, refcount table, refcount block, L1 table. A refcount block of 16-bit counts covers half a cluster of them.
        let clusters = 3 + l1_clusters;
        let l1_entries = u32::try_from(l1_entries).ok().filter(|_| clusters <= cluster / 2);
        let l1_entries =
            l1_entries.ok_or_else(|| invalid(format!("an image of {} bytes is too large", self.size)))?;
        let extension = if name.is_empty() { 0 } else { 8 + format.len().next_multiple_of(8) };
        // Behind the header: the extension, and one that ends them.
        let name_at = HEADER as usize + extension + 8;
        let padded = |head: &mut Vec<u8>, clusters: u64| {
            head.resize(usize::try_from(clusters << bits).unwrap_or_default(), 0);
        };

        let mut head = Vec::with_capacity(3 << bits);
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&3_u32.to_be_bytes());
        head.extend_from_slice(&(if name.is_empty() { 0 } else { name_at as u64 }).to_be_bytes());
        head.extend_from_slice(&u32::try_from(name.len()).unwrap_or_default().to_be_bytes());
        head.extend_from_slice(&bits.to_be_bytes());
        head.extend_from_slice(&self.size.to_be_bytes());
        // No encryption.
        head.extend_from_slice(&0_u32.to_be_bytes());
        head.extend_from_slice(&l1_entries.to_be_bytes());
        head.extend_from_slice(&(3 * cluster).to_be_bytes());
        head.extend_from_slice(&cluster.to_be_bytes());
        // One cluster of refcount table; no snapshots.
        head.extend_from_slice(&1_u32.to_be_bytes());
        head.extend_from_slice(&0_u32.to_be_bytes());
        head.extend_from_slice(&0_u64.to_be_bytes());
        // No incompatible, compatible, or autoclear features.
        head.extend_from_slice(&[0; 24]);
        // Refcounts of 1 << 4 bits.
        head.extend_from_slice(&4_u32.to_be_bytes());
        head.extend_from_slice(&HEADER.to_be_bytes());
        if !name.is_empty() {
            head.extend_from_slice(&BACKING_FORMAT.to_be_bytes());
            head.extend_from_slice(&u32::try_from(format.len()).unwrap_or_default().to_be_bytes());
            head.extend_from_slice(format.as_bytes());
        }
        head.resize(name_at, 0);
        head.extend_from_slice(name);

        padded(&mut head, 1);
        head.extend_from_slice(&(2 * cluster).to_be_bytes());
        padded(&mut head, 2);
        for _ in 0..clusters {
            head.extend_from_slice(&1_u16.to_be_bytes());
        }
        Ok((head, clusters * cluster))
    }
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
            Empty::over(size, &base, "raw").create(&over).unwrap();
            Empty::over(size, &base, "raw").create(&over).unwrap_err();
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
        let name = "x".repeat(2000);
        let error = Empty::over(512, Path::new(&name), "raw").create(&dir.path().join("over")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(!dir.path().join("over").exists());
    }

    #[test]
    fn qemu_takes_it_for_an_image_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        for (size, cluster_bytes) in
            [(512, 65536), (700 << 20, 2 << 20), ((5_u64 << 40) + 512, 1 << 16), (1 << 20, 512)]
        {
            let path = dir.path().join(format!("image-{size}"));
            Empty { size, cluster_bytes, backing: None }.create(&path).unwrap();
            let path = path.to_str().unwrap();
            let said = need!(qemu_img(&["info", "--output=json", path]));
            let info: serde_json::Value = serde_json::from_str(&said).unwrap();
            assert_eq!((&info["virtual-size"], &info["format"]), (&size.into(), &"qcow2".into()));
            assert_eq!(info["cluster-size"], cluster_bytes.max(1 << CLUSTER_BITS));
            assert_eq!(info.get("backing-filename"), None);
            need!(qemu_img(&["check", path]));
        }
    }
}
