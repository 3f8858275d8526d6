//! A folder for one test, and a guard that removes everything that belongs to the test.
//!
//! QEMU outlives the daemon that started it, on purpose; so killing a test's child processes is not enough. Every process of a test
//! has the path of the sandbox in its command line or working directory, and the path is unique. Dropping the sandbox ends exactly
//! these processes, unmounts what is mounted below the folder, returns huge pages and deletes the folder.
//!
//! A test that is killed leaves its sandbox behind. The next sandbox to be made removes those whose owner is gone.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid};

use crate::huge_pages_turn::Turn;

const PREFIX: &str = "vmt-";
/// Page sizes of the machine's pools of huge pages that a sandbox can enlarge.
const HUGE_SIZES: [u64; 2] = [2 << 20, 1 << 30];
/// If this variable is set, the folders of tests (logs, state) are kept; their processes and mounts are not.
const KEEP: &str = "VMOVE_KEEP";

/// See the [module](self).
#[derive(Debug)]
pub struct Sandbox {
    // Short: the path of a Unix socket has at most 107 bytes.
    path: PathBuf,
    keep: bool,
    /// Its turn at the machine's huge pages; it ends after they have been returned.
    turn: OnceLock<Turn>,
}

impl Sandbox {
    /// Makes an empty sandbox. Before that, removes the sandboxes of dead owners.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn new() -> Result<Self> {
        let base = std::env::temp_dir();
        sweep(&base);
        let pid = std::process::id();
        for number in 0..10_000 {
            let path = base.join(format!("{PREFIX}{pid}-{number}"));
            match fs::create_dir(&path) {
                Ok(()) => {
                    return Ok(Self { path, keep: std::env::var_os(KEEP).is_some(), turn: OnceLock::new() });
                }
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("could not make {}", path.display())),
            }
        }
        bail!("10,000 sandboxes of this process are in {}", base.display())
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a folder in the sandbox.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("could not make {}", path.display()))?;
        Ok(path)
    }

    /// Keeps the folder for its logs when the sandbox is dropped. Processes and mounts are removed nevertheless.
    pub const fn keep(&mut self) {
        self.keep = true;
    }

    /// Mounts a tmpfs that uses 2 MiB pages where the user of a file asks for them.
    ///
    /// # Errors
    /// When mounting is not permitted.
    pub fn mount_thp(&self, name: &str) -> Result<PathBuf> {
        self.mount(name, "tmpfs", "huge=advise,size=100%")
    }

    /// Mounts a hugetlbfs of 2 MiB pages and adds `bytes` of them to the machine's pool.
    ///
    /// # Errors
    /// When mounting is not permitted, or the machine does not have that much contiguous memory.
    pub fn mount_hugetlb(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        self.reserve_huge_pages(2 << 20, bytes)?;
        self.mount(name, "hugetlbfs", "pagesize=2M")
    }

    /// Mounts a tmpfs of `bytes`, which can be filled. Guest memory may be on it, too.
    ///
    /// # Errors
    /// When mounting is not permitted.
    pub fn mount_small(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        self.mount(name, "tmpfs", &format!("mode=0700,huge=advise,size={bytes}"))
    }

    /// Mount points below the folder, the innermost first.
    #[must_use]
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(&self.path)
    }

    fn mount(&self, name: &str, kind: &str, options: &str) -> Result<PathBuf> {
        let path = self.folder(name)?;
        mount(Some(kind), &path, Some(kind), MsFlags::empty(), Some(options))
            .with_context(|| format!("could not mount {kind} ({options}) on {}", path.display()))?;
        Ok(path)
    }

    /// Adds `bytes` to the machine's pool of pages of `size` bytes (2 MiB, 1 GiB), until the sandbox is dropped. First waits for a test
    /// that is [alone](Self::reserve_huge_pages_alone).
    ///
    /// # Errors
    /// When the machine does not have that much contiguous memory, or has no pool of this page size.
    pub fn reserve_huge_pages(&self, size: u64, bytes: u64) -> Result<()> {
        self.take_turn(Turn::beside_others)?;
        self.enlarge_pool(size, bytes)
    }

    /// The same for a test that takes all huge pages there are: no other sandbox has any, nor returns any, until this one is dropped. First
    /// waits for those that have some.
    ///
    /// # Errors
    /// As above.
    pub fn reserve_huge_pages_alone(&self, size: u64, bytes: u64) -> Result<()> {
        self.take_turn(Turn::alone)?;
        self.enlarge_pool(size, bytes)
    }

    fn take_turn(&self, take: fn() -> Result<Turn>) -> Result<()> {
        if self.turn.get().is_none() {
            let _ = self.turn.set(take()?);
        }
        Ok(())
    }

    fn enlarge_pool(&self, size: u64, bytes: u64) -> Result<()> {
        let pages = i64::try_from(bytes.div_ceil(size))?;
        let note = self.path.join(huge_pages_note(size));
        let before = fs::read_to_string(&note).ok().and_then(|t| t.parse::<i64>().ok()).unwrap_or(0);
        // Noted first: if too many pages are returned, the next request corrects that; pages that are never returned are lost.
        fs::write(&note, (before + pages).to_string())?;
        let got = change_huge_pages(size, pages)?;
        if got < pages {
            fs::write(&note, (before + got).to_string())?;
            let mib = size >> 20;
            bail!(
                "the machine gave {got} of {pages} huge pages of {mib} MiB; free memory is too little or too scattered"
            );
        }
        Ok(())
    }

    /// Processes that belong to this sandbox.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        processes_of(&self.path)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        clean(&self.path, self.keep);
    }
}

/// Removes the sandboxes of this process without dropping them, for a program that exits on a signal.
pub fn clean_up_mine() {
    clean_up_of(std::process::id());
}

/// Removes the sandboxes of process `pid`, which must not use them any more.
pub fn clean_up_of(pid: u32) {
    let mine = format!("{PREFIX}{pid}-");
    for (path, name) in sandboxes(&std::env::temp_dir()) {
        if name.starts_with(&mine) {
            clean(&path, false);
        }
    }
}

fn sweep(base: &Path) {
    for (path, name) in sandboxes(base) {
        let owner = name[PREFIX.len()..].split('-').next().and_then(|pid| pid.parse().ok());
        if owner.is_some_and(|pid: i32| !Path::new(&format!("/proc/{pid}")).exists())
            && !path.join(".kept").exists()
        {
            eprintln!("removing {} of a test that was killed", path.display());
            clean(&path, false);
        }
    }
}

fn sandboxes(base: &Path) -> Vec<(PathBuf, String)> {
    let Ok(entries) = fs::read_dir(base) else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|e| Some((e.path(), e.file_name().into_string().ok()?)))
        .filter(|(_, name)| name.starts_with(PREFIX))
        .collect()
}

fn clean(path: &Path, keep: bool) {
    kill_all(path);
    for mount_point in mounts_below(path) {
        // Lazily, because a process that is stuck in the kernel may still use it.
        if umount2(&mount_point, MntFlags::empty()).is_err() {
            let _ = umount2(&mount_point, MntFlags::MNT_DETACH);
        }
    }
    HUGE_SIZES.into_iter().for_each(|size| give_back_huge_pages(path, size));
    if keep {
        let _ = fs::write(path.join(".kept"), "");
    } else if let Err(e) = fs::remove_dir_all(path) {
        eprintln!("could not delete {}: {e}", path.display());
    }
}

fn give_back_huge_pages(path: &Path, size: u64) {
    let note = path.join(huge_pages_note(size));
    let Some(pages) = fs::read_to_string(&note).ok().and_then(|t| t.parse::<i64>().ok()) else { return };
    let _ = fs::remove_file(note);
    if let Err(e) = change_huge_pages(size, -pages) {
        eprintln!("could not give {pages} huge pages of {} MiB back: {e:#}", size >> 20);
    }
}

fn kill_all(path: &Path) {
    let deadline = Instant::now() + Duration::from_secs(10);
    // Repeated: a daemon may have started another process before it was killed.
    loop {
        let pids = processes_of(path);
        if pids.is_empty() {
            return;
        }
        for pid in &pids {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        if Instant::now() > deadline {
            eprintln!("processes {pids:?} of {} do not end", path.display());
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Processes whose command line or working directory contains a path in `folder`. Zombies have neither.
fn processes_of(folder: &Path) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut wanted = folder.as_os_str().as_bytes().to_vec();
    wanted.push(b'/');
    let me = getpid().as_raw();
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != me)
        .filter(|pid| {
            let named = fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.windows(wanted.len()).any(|w| w == wanted));
            named || fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
        })
        .collect()
}

/// A QEMU whose working directory is in `folder`.
#[must_use]
pub fn qemu_in(folder: &Path) -> Option<i32> {
    processes_of(folder).into_iter().find(|pid| {
        fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|exe| exe.file_name().is_some_and(|name| name.as_bytes().starts_with(b"qemu-system")))
    })
}

/// Mount points below `folder`, the innermost first.
fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(table) = fs::read_to_string("/proc/self/mounts") else { return Vec::new() };
    let mut found: Vec<PathBuf> = table
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .map(|escaped| PathBuf::from(OsStr::new(&escaped.replace("\\040", " "))))
        .filter(|path| path.starts_with(folder))
        .collect();
    found.reverse();
    found
}

/// File in a sandbox that enlarged a pool: by how many pages of this size.
fn huge_pages_note(size: u64) -> String {
    format!("huge-pages-{}", size >> 20)
}

/// A file of the kernel about a pool. `name`: `nr_hugepages` is all of its pages, `surplus_hugepages` those that go when nobody uses them any more.
fn pool(size: u64, name: &str) -> PathBuf {
    format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", size >> 10).into()
}

fn read_pool(size: u64, name: &str) -> Result<i64> {
    let file = pool(size, name);
    let text =
        fs::read_to_string(&file).with_context(|| format!("no pool of such pages: {}", file.display()))?;
    Ok(text.trim().parse()?)
}

/// Pages that stay in the pool. What a QEMU that is ending still uses of pages that were given back is there, too, and goes by itself: who counted it
/// would leave it in the pool for good.
fn lasting_pages(size: u64) -> Result<i64> {
    loop {
        let surplus = read_pool(size, "surplus_hugepages")?;
        let all = read_pool(size, "nr_hugepages")?;
        if read_pool(size, "surplus_hugepages")? == surplus {
            return Ok(all - surplus);
        }
    }
}

/// Changes the machine's pool of huge pages of this size. Returns by how much the kernel did change it.
fn change_huge_pages(size: u64, change: i64) -> Result<i64> {
    // Without the lock, two tests at once would lose one of the changes.
    let lock = fs::File::create(std::env::temp_dir().join("vmove-huge-pages.lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, e)| e)?;
    let before = lasting_pages(size)?;
    fs::write(pool(size, "nr_hugepages"), (before + change).max(0).to_string())
        .context("could not change the huge page pool")?;
    Ok(lasting_pages(size)? - before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn dropping_ends_processes_and_deletes_the_folder() {
        let sandbox = Sandbox::new().expect("a sandbox");
        let path = sandbox.path().to_owned();
        let inside = sandbox.folder("in side").expect("a folder");
        let mut by_cwd = Command::new("sleep").arg("100").current_dir(&inside).spawn().expect("sleep starts");
        let mut other = Command::new("sleep").arg("100").spawn().expect("sleep starts");
        assert_eq!(sandbox.processes(), [i32::try_from(by_cwd.id()).expect("a pid")]);
        // Reaped here, as an init process would.
        let reaper = std::thread::spawn(move || by_cwd.wait().expect("waits"));
        drop(sandbox);
        assert!(!reaper.join().expect("joins").success());
        assert!(!path.exists());
        assert!(other.try_wait().expect("waits").is_none(), "a process of someone else was killed");
        other.kill().expect("kills");
        other.wait().expect("waits");
    }

    #[test]
    fn mounts_and_huge_pages_are_given_back() {
        vmove_skip::need!(crate::places::root());
        let pool = || lasting_pages(2 << 20).expect("reads");
        let before = pool();
        let sandbox = Sandbox::new().expect("a sandbox");
        let path = sandbox.path().to_owned();
        let thp = vmove_skip::need!(sandbox.mount_thp("thp"));
        let huge = vmove_skip::need!(sandbox.mount_hugetlb("huge", 8 << 20));
        assert_eq!(pool(), before + 4);
        fs::write(thp.join("file"), "x").expect("writes");
        assert_eq!(mounts_below(&path), [huge, thp]);
        drop(sandbox);
        assert!(mounts_below(&path).is_empty());
        assert!(!path.exists());
        assert_eq!(pool(), before);
    }

    #[test]
    fn huge_pages_that_are_in_use_when_they_are_given_back_do_not_stay_for_good() {
        vmove_skip::need!(crate::places::root());
        let first = Sandbox::new().expect("a sandbox");
        let huge = vmove_skip::need!(first.mount_hugetlb("huge", 8 << 20));
        let before = lasting_pages(2 << 20).expect("reads") - 4;
        // As a QEMU that has not ended yet: it keeps its pages after the sandbox has gone.
        let file = fs::File::create(huge.join("memory")).expect("a file");
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 8 << 20).expect("four pages");
        drop(first);
        assert_eq!(lasting_pages(2 << 20).expect("reads"), before);
        let second = Sandbox::new().expect("a sandbox");
        second.reserve_huge_pages(2 << 20, 4 << 20).expect("two pages");
        drop(file);
        assert_eq!(lasting_pages(2 << 20).expect("reads"), before + 2);
        drop(second);
        assert_eq!(lasting_pages(2 << 20).expect("reads"), before);
    }
}
