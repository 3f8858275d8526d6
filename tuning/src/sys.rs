//! System calls that no crate wraps.
//!
//! Rules:
//! 1. Pointers given to the kernel are to locals that live across the call and have the size stated.
//! 2. A mapping made here is used by nobody else, is not read or written, and is unmapped once, by its drop.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Words of a set of NUMA nodes: the kernel knows at most 1024 nodes.
const WORDS: usize = 16;
/// Bits that the kernel reads; it reads one less than it is told (`mbind(2)`, notes of `get_nodes` in `mm/mempolicy.c`).
const BITS: libc::c_ulong = 16 * 64 + 1;

/// `MPOL_PREFERRED_MANY` of `linux/mempolicy.h`: libc does not have it.
const PREFERRED_MANY: libc::c_int = 5;

/// How memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As the kernel does without being told.
    Default,
    /// On the node of the processor that touches it.
    Local,
    /// On these nodes, or on others if these have no room (Linux 5.15).
    Prefer,
    /// On these nodes only.
    Bind,
}

impl Mode {
    const fn number(self) -> libc::c_int {
        match self {
            Self::Default => libc::MPOL_DEFAULT,
            Self::Local => libc::MPOL_LOCAL,
            Self::Prefer => PREFERRED_MANY,
            Self::Bind => libc::MPOL_BIND,
        }
    }

    /// The set of nodes as the kernel takes it: none with the default.
    const fn set(self, mask: &[u64; WORDS]) -> (*const u64, libc::c_ulong) {
        match self {
            Self::Default | Self::Local => (std::ptr::null(), 0),
            Self::Prefer | Self::Bind => (mask.as_ptr(), BITS),
        }
    }
}

fn mask(nodes: &[u32]) -> [u64; WORDS] {
    let mut mask = [0; WORDS];
    for node in nodes {
        if let Some(word) = mask.get_mut(*node as usize / 64) {
            *word |= 1 << (node % 64);
        }
    }
    mask
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Where the calling thread, and what it starts, allocates memory from now on: `set_mempolicy(2)`.
pub(crate) fn set_mempolicy(mode: Mode, nodes: &[u32]) -> io::Result<()> {
    let mask = mask(nodes);
    let (pointer, bits) = mode.set(&mask);
    // SAFETY: rule 1: the mask has more bits than the kernel reads of it.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode.number(), pointer, bits) }).map(drop)
}

/// How a thread gets processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scheduling {
    /// With its flag, `SCHED_RESET_ON_FORK`.
    pub policy: libc::c_int,
    /// 0 for threads that share time.
    pub priority: libc::c_int,
}

fn thread_id(thread: u32) -> io::Result<libc::pid_t> {
    // 0 would be the calling thread.
    libc::pid_t::try_from(thread).ok().filter(|id| *id > 0).ok_or_else(|| io::Error::other("no such thread"))
}

/// How a thread gets processors: `sched_getscheduler(2)`.
pub(crate) fn scheduling(thread: u32) -> io::Result<Scheduling> {
    let id = thread_id(thread)?;
    let mut param = libc::sched_param { sched_priority: 0 };
    // SAFETY: takes no pointer.
    let policy = check(i64::from(unsafe { libc::sched_getscheduler(id) }))?;
    // SAFETY: rule 1.
    check(i64::from(unsafe { libc::sched_getparam(id, &raw mut param) }))?;
    let policy = libc::c_int::try_from(policy).map_err(io::Error::other)?;
    Ok(Scheduling { policy, priority: param.sched_priority })
}

/// Changes how a thread gets processors: `sched_setscheduler(2)`.
pub(crate) fn set_scheduling(thread: u32, to: Scheduling) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: to.priority };
    let id = thread_id(thread)?;
    // SAFETY: rule 1.
    check(i64::from(unsafe { libc::sched_setscheduler(id, to.policy, &raw const param) })).map(drop)
}

/// A mapping of a whole file.
struct Mapping {
    address: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn of(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // SAFETY: rule 2: the kernel chooses the address, so nothing is mapped over.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { address, len }) }
    }

    fn bind(&self, mode: Mode, nodes: &[u32]) -> io::Result<()> {
        let mask = mask(nodes);
        let (pointer, bits) = mode.set(&mask);
        let (mode, flags): (libc::c_int, libc::c_uint) = (mode.number(), 0);
        // SAFETY: rules 1 and 2.
        check(unsafe { libc::syscall(libc::SYS_mbind, self.address, self.len, mode, pointer, bits, flags) })
            .map(drop)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: rule 2.
        unsafe { libc::munmap(self.address, self.len) };
    }
}

/// Where the pages of a file on tmpfs or hugetlbfs are allocated, whoever touches them: `mbind(2)` on a shared mapping, which the file itself keeps.
pub(crate) fn bind_file(file: &File, mode: Mode, nodes: &[u32]) -> io::Result<()> {
    if file.metadata()?.len() == 0 {
        return Ok(());
    }
    let mapping = Mapping::of(file)?;
    if mode == Mode::Default {
        // The kernel does nothing if the mapping has the policy already, whatever the file has (`mbind_range` in `mm/mempolicy.c`).
        mapping.bind(Mode::Local, &[])?;
    }
    mapping.bind(mode, nodes)
}

/// Moves what a process has on some NUMA nodes to others, also what it shares: `migrate_pages(2)`. Tells how many pages could not be moved.
pub(crate) fn migrate_pages(pid: u32, from: &[u32], to: &[u32]) -> io::Result<u64> {
    let (from, to) = (mask(from), mask(to));
    // SAFETY: rule 1.
    let left =
        check(unsafe { libc::syscall(libc::SYS_migrate_pages, pid, BITS, from.as_ptr(), to.as_ptr()) })?;
    Ok(u64::try_from(left).unwrap_or_default())
}
