//! Directories that hold RAM files: tmpfs that gives huge pages to who asks for them, or hugetlbfs.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{major, minor, statvfs};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::error::{MemoryError, Result};
use crate::ram::RamFile;
use vmove_types::Backing;

use crate::units::ByteLen;

/// Of the directory: others may pass to a file that they were given, and list nothing.
const MODE: u32 = 0o711;
const PASSAGE: u32 = 0o011;

static PREPARING: Mutex<()> = Mutex::new(());

/// A directory on a file system of the right kind.
#[derive(Debug)]
pub struct MemoryDir {
    path: PathBuf,
    backing: Backing,
}

impl MemoryDir {
    /// Makes the directory if it is missing, and mounts tmpfs `huge=advise` or hugetlbfs on it unless it is on such a
    /// file system already. A QEMU of another user may pass through it to files that belong to that user. The mount stays when the value is dropped: guests live there.
    ///
    /// tmpfs that gives huge pages without being asked (`huge=always`, `huge=within_size`) will do as well.
    ///
    /// # Errors
    /// [`MemoryError::WrongMount`] if it holds files and is on something else; [`MemoryError::Path`] with `EPERM`
    /// without the right to mount; [`MemoryError::Unsupported`] if the kernel has no pages of this size.
    pub fn prepare(path: &Path, backing: Backing) -> Result<Self> {
        let error = |what| move |source: io::Error| MemoryError::path(what, path, source);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(MODE)
            .create(path)
            .map_err(error("Creating the directory"))?;
        let path = path.canonicalize().map_err(error("Finding the directory"))?;
        if backing != Backing::Thp && !sysfs_dir(backing).exists() {
            return Err(MemoryError::Unsupported {
                feature: "huge pages of that size",
                consequence: "no guest can have such memory",
            });
        }
        // Another thread may be about to mount on it: what was found before that would be wrong, or two mounts lie on each other.
        let _one_at_a_time = PREPARING.lock().unwrap_or_else(PoisonError::into_inner);
        let found = filesystem_of(&path)?;
        if !found.suits(backing) {
            let empty = fs::read_dir(&path).map_err(error("Reading the directory"))?.next().is_none();
            if !empty || found.mounted_here(&path) {
                let wanted = wanted_mount(backing);
                return Err(MemoryError::WrongMount { path, found: found.to_string(), wanted });
            }
            mount_on(&path, backing)?;
        }
        let mode = fs::metadata(&path).map_err(error("Looking at the directory"))?.mode() & 0o7777;
        if mode & PASSAGE != PASSAGE {
            let passable = fs::Permissions::from_mode(mode | PASSAGE);
            fs::set_permissions(&path, passable).map_err(error("Changing the mode of the directory"))?;
        }
        Ok(Self { path, backing })
    }

    /// The directory, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its kind.
    #[must_use]
    pub const fn backing(&self) -> Backing {
        self.backing
    }

    /// Creates a RAM file of `len` bytes, all of it a hole, readable and writable for its owner only.
    ///
    /// # Errors
    /// [`MemoryError::NotEnoughMemory`] if less than `len` is free; [`MemoryError::Path`], also if the file exists, if
    /// `name` is not a plain file name, or if `len` is not a multiple of [`Backing::page_bytes`].
    pub fn create_ram_file(&self, name: &str, len: ByteLen) -> Result<RamFile> {
        self.check_ram_file(name, len)?;
        let free = self.free()?;
        if len > free {
            return Err(MemoryError::NotEnoughMemory {
                kind: self.backing.name(),
                needed: len.0,
                available: free.0,
                hint: match self.backing {
                    Backing::Thp => "",
                    Backing::Hugetlb2M | Backing::Hugetlb1G => "; reserve more with vm.nr_hugepages",
                },
            });
        }
        self.make_ram_file(name, len)
    }

    /// As [`Self::create_ram_file`], for who has seen to it that there is memory for what the file will hold. It may be longer than that.
    ///
    /// # Errors
    /// Those of [`Self::create_ram_file`] but the first.
    pub fn create_promised_ram_file(&self, name: &str, len: ByteLen) -> Result<RamFile> {
        self.check_ram_file(name, len)?;
        self.make_ram_file(name, len)
    }

    fn check_ram_file(&self, name: &str, len: ByteLen) -> Result<()> {
        let path = self.path.join(name);
        let invalid = |text: &str| {
            let source = io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
            MemoryError::path("Creating the RAM file", &path, source)
        };
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(invalid("expected a plain file name"));
        }
        if len.0 == 0 || !len.0.is_multiple_of(self.backing.page_bytes()) {
            return Err(invalid("the length must be a multiple of the page size"));
        }
        Ok(())
    }

    fn make_ram_file(&self, name: &str, len: ByteLen) -> Result<RamFile> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|source| MemoryError::path("Creating the RAM file", &path, source))?;
        file.set_len(len.0)
            .map_err(|source| MemoryError::path("Creating the RAM file", &path, source))
            .and_then(|()| RamFile::from_fd(file.into(), &path))
            .inspect_err(|_| drop(fs::remove_file(&path)))
    }

    /// Memory that files here can still take, in bytes: huge pages that are neither used nor promised, or what the
    /// host can make available without swapping, and never more than the mount allows.
    ///
    /// # Errors
    /// [`MemoryError::Proc`], [`MemoryError::Path`].
    pub fn free(&self) -> Result<ByteLen> {
        let vfs = statvfs(&self.path).map_err(|source| MemoryError::path("statvfs", &self.path, source))?;
        // hugetlbfs without a size limit says 0 blocks of 0.
        let mount_free = if vfs.f_blocks == 0 { u64::MAX } else { vfs.f_bfree.saturating_mul(vfs.f_frsize) };
        let host_free = match self.backing {
            Backing::Thp => read_number(Path::new("/proc/meminfo"), "MemAvailable:")?.saturating_mul(1024),
            Backing::Hugetlb2M | Backing::Hugetlb1G => {
                let dir = sysfs_dir(self.backing);
                let free = read_number(&dir.join("free_hugepages"), "")?;
                let promised = read_number(&dir.join("resv_hugepages"), "")?;
                free.saturating_sub(promised).saturating_mul(self.backing.page_bytes())
            }
        };
        Ok(ByteLen(mount_free.min(host_free)))
    }

    /// Unmounts the directory.
    ///
    /// # Errors
    /// [`MemoryError::Path`] with `EBUSY` while files there are in use, with `EINVAL` if nothing is mounted on it.
    pub fn unmount(self) -> Result<()> {
        unmount(&self.path, UnmountFlags::empty())
            .map_err(|source| MemoryError::path("Unmounting", &self.path, source))
    }
}

fn mount_on(path: &Path, backing: Backing) -> Result<()> {
    let (kind, options) = mount_arguments(backing);
    let options = CString::new(options).unwrap_or_default();
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("vmove", path, kind, flags, options.as_c_str())
        .map_err(|source| MemoryError::path("Mounting memory on the directory", path, source))
}

const fn mount_arguments(backing: Backing) -> (&'static str, &'static str) {
    match backing {
        // The default limit is half of the memory; what is free is checked where files are made.
        Backing::Thp => ("tmpfs", "huge=advise,size=100%,mode=0711"),
        Backing::Hugetlb2M => ("hugetlbfs", "pagesize=2M,mode=0711"),
        Backing::Hugetlb1G => ("hugetlbfs", "pagesize=1G,mode=0711"),
    }
}

fn wanted_mount(backing: Backing) -> String {
    let (kind, options) = mount_arguments(backing);
    format!("{kind} ({options})")
}

fn sysfs_dir(backing: Backing) -> PathBuf {
    let kib = backing.page_bytes() / 1024;
    PathBuf::from(format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB"))
}

/// The number in a file, behind `label` if that is not empty.
fn read_number(path: &Path, label: &str) -> Result<u64> {
    let error = |source| MemoryError::Proc { path: path.to_owned(), source };
    let text = fs::read_to_string(path).map_err(error)?;
    let line = text.lines().find_map(|line| line.strip_prefix(label));
    line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok())
        .ok_or_else(|| error(io::Error::new(io::ErrorKind::InvalidData, "no number found")))
}

/// One line of `mountinfo`, as far as it is needed.
#[derive(Debug, PartialEq, Eq)]
struct Filesystem {
    mount_point: String,
    kind: String,
    options: String,
}

impl Filesystem {
    fn suits(&self, backing: Backing) -> bool {
        let has = |option: &str| self.options.split(',').any(|o| o == option);
        match backing {
            Backing::Thp => {
                self.kind == "tmpfs"
                    && ["huge=advise", "huge=always", "huge=within_size"].into_iter().any(has)
            }
            Backing::Hugetlb2M => self.kind == "hugetlbfs" && has("pagesize=2M"),
            Backing::Hugetlb1G => self.kind == "hugetlbfs" && has("pagesize=1024M"),
        }
    }

    fn mounted_here(&self, path: &Path) -> bool {
        Path::new(&self.mount_point) == path
    }
}

impl std::fmt::Display for Filesystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "on {} ({}) mounted at {}", self.kind, self.options, self.mount_point)
    }
}

fn filesystem_of(path: &Path) -> Result<Filesystem> {
    let meta = fs::metadata(path).map_err(|source| MemoryError::path("stat", path, source))?;
    let device = format!("{}:{}", major(meta.dev()), minor(meta.dev()));
    let mounts = Path::new("/proc/thread-self/mountinfo");
    let text =
        fs::read_to_string(mounts).map_err(|source| MemoryError::Proc { path: mounts.to_owned(), source })?;
    // The last is on top.
    find_filesystem(&text, &device).ok_or_else(|| {
        let source = io::Error::new(io::ErrorKind::NotFound, format!("no mount with device {device}"));
        MemoryError::Proc { path: mounts.to_owned(), source }
    })
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 - tmpfs name rw,huge=advise`
fn find_filesystem(mountinfo: &str, device: &str) -> Option<Filesystem> {
    mountinfo.lines().rev().find_map(|line| {
        let (mount, fs) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(2);
        let (dev, mount_point) = (mount.next()?, mount.nth(1)?);
        let mut fs = fs.split(' ');
        (dev == device).then_some(())?;
        Some(Filesystem {
            mount_point: mount_point.replace("\\040", " "),
            kind: fs.next()?.to_owned(),
            options: fs.nth(1)?.to_owned(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_recognised() {
        let text = "22 1 0:20 / /a rw - tmpfs tmpfs rw,huge=advise,size=1k\n\
                    23 1 0:21 / /b\\040c rw shared:1 master:2 - hugetlbfs none rw,pagesize=2M\n\
                    24 1 0:22 / /d rw - tmpfs tmpfs rw\n";
        let a = find_filesystem(text, "0:20").expect("listed");
        assert!(a.suits(Backing::Thp) && !a.suits(Backing::Hugetlb2M));
        let b = find_filesystem(text, "0:21").expect("listed");
        assert!(b.suits(Backing::Hugetlb2M) && !b.suits(Backing::Hugetlb1G));
        assert!(b.mounted_here(Path::new("/b c")));
        assert!(!find_filesystem(text, "0:22").expect("listed").suits(Backing::Thp));
        assert_eq!(find_filesystem(text, "0:99"), None);
    }

    #[test]
    fn a_directory_is_prepared_once_and_found_again() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("memory");
        #[cfg(not(loom))]
        vmove_skip::need!(crate::testing::ram::own_mounts());
        let memory = MemoryDir::prepare(&path, Backing::Thp).expect("who may mount can prepare");
        let ram = memory.create_ram_file("ram0", ByteLen::mib(64)).expect("create");
        assert_eq!(ram.len(), ByteLen::mib(64));
        assert_eq!(ram.allocated_bytes().expect("stat"), ByteLen(0));
        memory.create_ram_file("ram0", ByteLen::mib(2)).expect_err("it exists");
        memory.create_ram_file("../x", ByteLen::mib(2)).expect_err("not a plain name");
        let error = memory.create_ram_file("big", ByteLen(1 << 60)).expect_err("no machine has that");
        assert!(matches!(error, MemoryError::NotEnoughMemory { .. }), "{error}");

        let again = MemoryDir::prepare(&path, Backing::Thp).expect("already mounted");
        assert!(again.path().join("ram0").exists(), "no second mount on top");
        let error = MemoryDir::prepare(&path, Backing::Hugetlb2M).expect_err("it is a tmpfs");
        assert!(matches!(error, MemoryError::WrongMount { .. }), "{error}");
        drop(ram);
        memory.unmount().expect("unmount");
    }
}
