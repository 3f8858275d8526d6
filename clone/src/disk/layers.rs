//! The files that an image is made of, as its headers name them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use vmove_node::qcow2::{BACKING_FORMAT, MAGIC};

/// More are a circle.
const MOST: usize = 256;
/// The header, its extensions and the name are in the first cluster.
const HEAD: u64 = 64 << 10;
/// Incompatible feature: the data is in another file.
const DATA_FILE: u64 = 4;

/// An image and what is below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layers {
    /// Files, from the image down, by the names that QEMU opens them by.
    pub files: Vec<PathBuf>,
    /// What is below the last of them and is no raw or qcow2 file, as it is named.
    pub other: Option<String>,
}

/// Follows the backing files of an image of `format`, `raw` or `qcow2`; with `None` it is what its header says, as for QEMU.
///
/// # Errors
/// The kernel's answer, for the first file that cannot be read; `InvalidData` for one that can be no image.
pub fn layers(image: &Path, format: Option<&str>) -> io::Result<Layers> {
    let mut found = Layers { files: vec![image.to_owned()], other: None };
    let (mut file, mut format) = (image.to_owned(), format.map(str::to_owned));
    while found.files.len() < MOST {
        match format.as_deref() {
            Some("raw") => return Ok(found),
            Some("qcow2") | None => {}
            Some(other) => {
                found.other = Some(format!("an image of format {other}"));
                return Ok(found);
            }
        }
        let Some(below) = below(&file)? else { return Ok(found) };
        let Some(name) = below.name else {
            found.other = Some(format!("the data file of {}", file.display()));
            return Ok(found);
        };
        let first = name.split(|byte| *byte == b'/').next().unwrap_or_default();
        if first.contains(&b':') {
            found.other = Some(String::from_utf8_lossy(&name).into_owned());
            return Ok(found);
        }
        // A relative name is that of a file beside the one that names it.
        file = file.parent().unwrap_or_else(|| Path::new("/")).join(OsStr::from_bytes(&name));
        format = below.format;
        found.files.push(file.clone());
    }
    found.other = Some("more images than can be followed".to_owned());
    Ok(found)
}

/// What a qcow2 file names.
struct Below {
    /// None: the file holds no data of its own.
    name: Option<Vec<u8>>,
    format: Option<String>,
}

/// What an image names as below it; `None` for nothing, and for one that is not qcow2.
fn below(file: &Path) -> io::Result<Option<Below>> {
    let mut head = Vec::new();
    let Some(image) = open(file)? else { return Ok(None) };
    image.take(HEAD).read_to_end(&mut head)?;
    named(file, &head)
}

/// The same, of the first bytes of `file`.
fn named(file: &Path, head: &[u8]) -> io::Result<Option<Below>> {
    let word = |at: usize| head.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    let long = |at: usize| Some((u64::from(word(at)?) << 32) | u64::from(word(at + 4)?));
    let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is cut short", file.display()));
    if head.get(..4) != Some(&MAGIC[..]) {
        return Ok(None);
    }
    let version = word(4).ok_or_else(bad)?;
    let (name_at, name_len) = (long(8).ok_or_else(bad)?, word(16).ok_or_else(bad)? as usize);
    if version > 2 && long(72).ok_or_else(bad)? & DATA_FILE != 0 {
        return Ok(Some(Below { name: None, format: None }));
    }
    if name_at == 0 {
        return Ok(None);
    }
    let name_at = usize::try_from(name_at).map_err(|_| bad())?;
    let name = name_at.checked_add(name_len).and_then(|end| head.get(name_at..end)).ok_or_else(bad)?;
    let mut at = if version > 2 { word(100).ok_or_else(bad)? as usize } else { 72 };
    let mut format = None;
    while let (Some(kind), Some(len)) = (word(at), word(at + 4)) {
        let len = len as usize;
        if kind == 0 || at >= name_at {
            break;
        }
        if kind == BACKING_FORMAT {
            let text = head.get(at + 8..at + 8 + len).ok_or_else(bad)?;
            format = Some(String::from_utf8_lossy(text).into_owned());
        }
        at += 8 + len.next_multiple_of(8);
    }
    Ok(Some(Below { name: Some(name.to_vec()), format }))
}

/// Opens what can hold an image. Anything else is not even opened: a header may name what is armed by that, or waits. `None` for
/// an empty file, as those of `/proc` are, whose reading may change something.
fn open(file: &Path) -> io::Result<Option<File>> {
    let flags = |flags: OFlags| i32::try_from(flags.bits()).unwrap_or_default();
    let place = File::options().read(true).custom_flags(flags(OFlags::PATH)).open(file)?;
    let found = place.metadata()?;
    let kind = found.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let why = format!("{}: expected a file or block device, found another kind", file.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    if kind.is_file() && found.len() == 0 {
        return Ok(None);
    }
    let again = format!("/proc/self/fd/{}", place.as_raw_fd());
    File::options().read(true).custom_flags(flags(OFlags::NONBLOCK)).open(again).map(Some)
}

/// Reads bytes as the first of an image, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn any_head(head: &[u8]) {
    let Ok(Some(below)) = named(Path::new("/image"), head) else { return };
    let within = |len: usize| assert!(len <= head.len(), "{len} bytes of {}", head.len());
    within(below.name.map_or(0, |name| name.len()));
    // Bytes that are no text take three each.
    within(below.format.map_or(0, |format| format.len()) / 3);
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmove_node::qcow2;

    #[test]
    fn images_are_followed_to_the_last_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        File::create(path("raw")).unwrap().set_len(1 << 20).unwrap();
        qcow2::Empty::over(1 << 20, Path::new("raw"), "raw").create(&path("one")).unwrap();
        qcow2::Empty::over(1 << 20, &path("one"), "qcow2").create(&path("two")).unwrap();
        let all = Layers { files: ["two", "one", "raw"].map(path).to_vec(), other: None };
        assert_eq!(layers(&path("two"), Some("qcow2")).unwrap(), all);
        // What a raw image holds is its guest's.
        let raw = Layers { files: vec![path("two")], other: None };
        assert_eq!(layers(&path("two"), Some("raw")).unwrap(), raw);
        for other in [r#"json:{"driver":"raw"}"#, "nbd:host:1"] {
            let over = path(&other[..3]);
            qcow2::Empty::over(1 << 20, Path::new(other), "raw").create(&over).unwrap();
            let found = layers(&over, Some("qcow2")).unwrap();
            assert_eq!(found, Layers { files: vec![over], other: Some(other.to_owned()) });
        }
        qcow2::Empty::over(1 << 20, Path::new("nothing"), "qcow2").create(&path("lost")).unwrap();
        let lost = layers(&path("lost"), Some("qcow2")).unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::NotFound);
        std::fs::write(path("short"), b"QFI\xfb\0\0\0\x03").unwrap();
        assert_eq!(layers(&path("short"), Some("qcow2")).unwrap_err().kind(), io::ErrorKind::InvalidData);
        qcow2::Empty::over(1 << 20, Path::new("circle"), "qcow2").create(&path("circle")).unwrap();
        assert!(layers(&path("circle"), Some("qcow2")).unwrap().other.is_some());
    }

    #[test]
    fn what_is_no_image_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for name in [path("fifo"), path("socket"), dir.path().to_owned(), "/dev/zero".into()] {
            qcow2::Empty::over(1 << 20, &name, "qcow2").create(&path("over")).unwrap();
            // A FIFO that is opened waits for who writes.
            let (over, (said, answer)) = (path("over"), std::sync::mpsc::channel());
            std::thread::spawn(move || said.send(layers(&over, Some("qcow2"))));
            let error = answer.recv_timeout(std::time::Duration::from_secs(10)).unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            assert!(error.to_string().contains(&*name.to_string_lossy()), "{error}");
            std::fs::remove_file(path("over")).unwrap();
        }
    }

    #[test]
    fn an_image_of_no_stated_format_is_what_its_header_says() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        File::create(path("raw")).unwrap().set_len(1 << 20).unwrap();
        qcow2::Empty::over(1 << 20, &path("raw"), "raw").create(&path("over")).unwrap();
        assert_eq!(layers(&path("over"), None).unwrap().files, ["over", "raw"].map(path));
        assert_eq!(layers(&path("raw"), None).unwrap().files, [path("raw")]);
    }
}
