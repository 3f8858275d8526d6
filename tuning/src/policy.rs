//! Where memory is allocated.
//!
//! - What QEMU allocates for itself, and what a child of a fork writes: by the policy of the thread that starts QEMU, which a process inherits
//!   and keeps over `execve` (`set_mempolicy(2)`).
//! - RAM files: by a policy that the file itself keeps (`mbind(2)` on a shared mapping of tmpfs or hugetlbfs;
//!   `Documentation/admin-guide/mm/numa_memory_policy.rst`, "Shared policy"), so that it counts for QEMU, for the daemon's threads that fill the file in a
//!   migration, and for whoever maps it later.
//!
//! Files are bound: their memory comes from these nodes or not at all, and whether they have enough is looked at before ([`choose`](crate::choose)). What a
//! process allocates is on these nodes if they have room: nobody knows how much a child will write, and it must not be ended for it.

use std::fs::File;
use std::io;
use std::marker::PhantomData;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpus::Cpus;
use crate::sys::{self, Mode};
use crate::threads::cpu_set;

/// What the calling thread starts now runs on these processors, and allocates on these NUMA nodes if they have room, until this is dropped.
#[derive(Debug)]
pub struct StartsThere {
    before: Option<CpuSet>,
    bound: bool,
    /// It is the thread's: it must be dropped there.
    _here: PhantomData<*const ()>,
}

impl StartsThere {
    /// On these processors, and with memory of these NUMA nodes (none: of any).
    ///
    /// # Errors
    /// The kernel's: there is no such processor, or no such NUMA node with memory.
    pub fn begin(cpus: &Cpus, nodes: &[u32]) -> io::Result<Self> {
        let mut this = Self { before: None, bound: false, _here: PhantomData };
        if !cpus.is_empty() {
            this.before = Some(sched_getaffinity(None)?);
            sched_setaffinity(None, &cpu_set(cpus))?;
        }
        if !nodes.is_empty() {
            sys::set_mempolicy(Mode::Prefer, nodes)?;
            this.bound = true;
        }
        Ok(this)
    }
}

impl Drop for StartsThere {
    fn drop(&mut self) {
        // What was allowed before is allowed again: neither can fail.
        if let Some(before) = &self.before {
            let _ = sched_setaffinity(None, before);
        }
        if self.bound {
            let _ = sys::set_mempolicy(Mode::Default, &[]);
        }
    }
}

/// From now on pages of this file on tmpfs or hugetlbfs are allocated on these NUMA nodes, whoever touches them first.
///
/// # Errors
/// The kernel's.
pub fn bind_file(file: &File, nodes: &[u32]) -> io::Result<()> {
    sys::bind_file(file, Mode::Bind, nodes)
}

/// From now on pages of this file, and those that somebody writes who maps it privately, are allocated where the thread that touches them wants
/// them. The kernel asks the file before the thread, also for private pages: children that map a bound template would write on its NUMA nodes.
///
/// # Errors
/// The kernel's.
pub fn unbind_file(file: &File) -> io::Result<()> {
    sys::bind_file(file, Mode::Default, &[])
}

/// Moves what a process has on NUMA nodes `from` to those in `to`, also what it shares with others. Tells how many pages stayed, since they are in use
/// by devices or there is no room. Needs `CAP_SYS_NICE`.
///
/// # Errors
/// The kernel's.
pub fn move_memory(pid: u32, from: &[u32], to: &[u32]) -> io::Result<u64> {
    sys::migrate_pages(pid, from, to)
}
