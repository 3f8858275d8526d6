//! Memory directories, huge pages and RAM files for tests, given back afterwards.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mount::{MountPropagationFlags, mount_change};

use super::Target;
use crate::{Backing, ByteLen, MemoryDir, PageSize, Process, QemuMapping, RamFile, find_mappings};

const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// A mounted memory directory. Unmounted on drop; huge pages are given back.
pub struct Dir {
    dir: Option<MemoryDir>,
    _huge_pages: Option<HugePages>,
    _temp: tempfile::TempDir,
}

/// Reserved 2 MiB pages. One test at a time.
struct HugePages {
    before: u64,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl HugePages {
    fn reserve(pages: u64) -> Result<Self, String> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let read = || fs::read_to_string(NR_HUGEPAGES).ok()?.trim().parse::<u64>().ok();
        let before = read().ok_or("no huge pages on this kernel")?;
        let pages = Self { before, _one_at_a_time: guard }.grown_by(pages)?;
        Ok(pages)
    }

    fn grown_by(self, pages: u64) -> Result<Self, String> {
        fs::write(NR_HUGEPAGES, (self.before + pages).to_string()).map_err(|error| error.to_string())?;
        let now = fs::read_to_string(NR_HUGEPAGES).unwrap_or_default();
        // On failure the value is dropped, which gives back what there is.
        if now.trim().parse() == Ok(self.before + pages) {
            Ok(self)
        } else {
            Err(format!("only {} huge pages", now.trim()))
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(NR_HUGEPAGES, self.before.to_string());
    }
}

/// Gives this thread, and the processes it starts, mounts of their own, which vanish with them: also if a test is killed.
pub fn own_mounts() -> Result<(), String> {
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if DONE.get() {
        return Ok(());
    }
    // SAFETY: changes what this thread sees of the file system.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(format!("unshare: {}", std::io::Error::last_os_error()));
    }
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|error| format!("mount: {error}"))?;
    DONE.set(true);
    Ok(())
}

impl Dir {
    /// A directory that can hold `mib` MiB, or what this machine lacks for it.
    pub fn new(backing: Backing, mib: u64) -> Result<Self, String> {
        own_mounts()?;
        let huge_pages = match backing {
            Backing::Thp if !fs::exists(TRANSPARENT).unwrap_or(false) => {
                return Err("this kernel has no transparent huge pages".to_owned());
            }
            Backing::Thp => None,
            Backing::Hugetlb2M => Some(HugePages::reserve(mib / 2)?),
            Backing::Hugetlb1G => return Err("no test uses 1 GiB pages".to_owned()),
        };
        let temp = tempfile::tempdir().map_err(|error| error.to_string())?;
        let dir = MemoryDir::prepare(&temp.path().join("memory"), backing).expect("nothing is lacking");
        let dir = Self { dir: Some(dir), _huge_pages: huge_pages, _temp: temp };
        match dir.dir.as_ref().map(MemoryDir::free) {
            Some(Ok(free)) if free >= ByteLen::mib(mib) => Ok(dir),
            free => Err(format!("{mib} MiB needed, free: {free:?} (is something else using huge pages?)")),
        }
    }

    pub fn file(&self, name: &str, mib: u64) -> RamFile {
        self.dir.as_ref().expect("mounted").create_ram_file(name, ByteLen::mib(mib)).expect("RAM file")
    }

    pub fn path(&self) -> PathBuf {
        self.dir.as_ref().expect("mounted").path().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        let path = dir.path().to_owned();
        if dir.unmount().is_err() {
            // A child that is ending may still hold it.
            let _ = rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// Runs a test on both backings, as far as they can be had.
pub fn on_both(mib: u64, test: impl Fn(&Dir)) {
    for backing in [Backing::Thp, Backing::Hugetlb2M] {
        match Dir::new(backing, mib) {
            Ok(dir) => test(&dir),
            Err(why) => vmove_skip::skip!(part = format_args!("on {backing}"), "{why}"),
        }
    }
}

/// A child that has RAM files mapped.
pub struct Guest {
    pub target: Target,
    pub process: Process,
    pub files: Vec<RamFile>,
    pub mappings: Vec<QemuMapping>,
}

impl Guest {
    /// A child that maps these files, in order.
    pub fn start(files: Vec<RamFile>) -> Self {
        Self::start_with("map", files)
    }

    /// As [`Self::start`], with the command that maps a file.
    pub fn start_with(map: &str, files: Vec<RamFile>) -> Self {
        let mut target = Target::start("obey");
        for file in &files {
            target.ask(&format!("{map} {}", file.path().display()));
        }
        let process = Process::open(target.pid()).expect("child");
        let mappings = find_mappings(&process, &files.iter().collect::<Vec<_>>()).expect("mapped");
        Self { target, process, files, mappings }
    }

    pub fn page(&self) -> PageSize {
        self.files[0].page_size()
    }

    /// What the child reads at a byte offset of file 0.
    pub fn reads(&mut self, offset: u64) -> u64 {
        self.target.ask(&format!("read 0 {offset}")).parse().expect("a number")
    }

    pub fn writes(&mut self, offset: u64, value: u64) {
        assert_eq!(self.target.ask(&format!("write 0 {offset} {value}")), "ok");
    }
}

/// Eight bytes of a RAM file.
pub fn peek(map: &crate::Mapping, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    map.copy_out(crate::FileOffset(offset), &mut bytes).expect("in range");
    u64::from_ne_bytes(bytes)
}

pub fn poke(map: &crate::Mapping, offset: u64, value: u64) {
    map.copy_in(crate::FileOffset(offset), &value.to_ne_bytes()).expect("in range");
}
