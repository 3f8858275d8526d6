//! Threads of a process are kept on processors.

use std::io;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cpus::Cpus;

pub(crate) fn cpu_set(cpus: &Cpus) -> CpuSet {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().map(|cpu| cpu as usize).filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    set
}

/// Processors on which a thread may run; those of the calling thread without one.
///
/// # Errors
/// There is no such thread.
pub fn of(thread: Option<u32>) -> io::Result<Cpus> {
    let set = sched_getaffinity(thread.map(pid).transpose()?)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .filter_map(|cpu| u32::try_from(cpu).ok())
        .collect())
}

/// Keeps one thread on these processors.
///
/// # Errors
/// The kernel's: the thread has ended, or none of the processors is there.
pub fn keep(thread: u32, cpus: &Cpus) -> io::Result<()> {
    Ok(sched_setaffinity(Some(pid(thread)?), &cpu_set(cpus))?)
}

/// Keeps all threads of a process on these processors, but some. Threads that it starts later are where the ones that start them are.
///
/// # Errors
/// The process cannot be read, or a thread refuses that still runs.
pub fn keep_process(process: u32, cpus: &Cpus, but: &[u32]) -> io::Result<()> {
    // A thread that was started while the others were moved has the old set: a second look finds it.
    for _ in 0..2 {
        for thread in threads(process)?.into_iter().filter(|thread| !but.contains(thread)) {
            match keep(thread, cpus) {
                Err(error) if error.raw_os_error() != Some(rustix::io::Errno::SRCH.raw_os_error()) => {
                    return Err(error);
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// The threads of a process.
///
/// # Errors
/// There is no such process.
pub fn threads(process: u32) -> io::Result<Vec<u32>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

fn pid(thread: u32) -> io::Result<Pid> {
    let number = i32::try_from(thread).map_err(io::Error::other)?;
    Pid::from_raw(number).ok_or_else(|| io::Error::other("there is no thread 0"))
}
