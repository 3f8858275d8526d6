//! CPU time and memory of the processes that take part in a move.
//!
//! They are sampled during the whole move, because most of them end with it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::process::{CpuTime, cpu_time, resident_bytes};

/// The role of a process in a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// QEMU at the source.
    SourceQemu,
    /// QEMU at the destination.
    DestinationQemu,
    /// The daemon at the source.
    SourceDaemon,
    /// The daemon at the destination.
    DestinationDaemon,
}

impl Role {
    /// Whether the process is at the source.
    #[must_use]
    pub const fn is_source(self) -> bool {
        matches!(self, Self::SourceQemu | Self::SourceDaemon)
    }

    /// Whether the process belongs to vmove.
    #[must_use]
    pub const fn is_daemon(self) -> bool {
        matches!(self, Self::SourceDaemon | Self::DestinationDaemon)
    }
}

/// Resources that a process has used since the watch began.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    role: Option<Role>,
    first: CpuTime,
    last: CpuTime,
    most_memory: u64,
}

/// Resources that all processes have used since the watch began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Used {
    /// CPU seconds at the source, without those of the guest's virtual CPUs.
    pub source_s: f64,
    /// CPU seconds at the destination, without those of the guest's virtual CPUs.
    pub destination_s: f64,
    /// CPU seconds of the virtual CPUs, on both sides.
    pub vcpus_s: f64,
    /// Peak memory of a daemon, in bytes; 0 without daemons.
    pub daemon_memory: u64,
}

/// Watches processes until it is dropped.
#[derive(Debug)]
pub struct CpuWatch {
    seen: Arc<Mutex<HashMap<i32, Usage>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl CpuWatch {
    /// From now on, watches the processes that `list` returns.
    #[must_use]
    pub fn start(mut list: Box<dyn FnMut() -> Vec<(i32, Role)> + Send>) -> Self {
        let seen: Arc<Mutex<HashMap<i32, Usage>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        look(&mut list, &seen, true);
        let thread = {
            let (seen, stop) = (Arc::clone(&seen), Arc::clone(&stop));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    look(&mut list, &seen, false);
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        };
        Self { seen, stop, thread: Some(thread) }
    }

    /// Resources used so far.
    #[must_use]
    pub fn used(&self) -> Used {
        let mut used = Used::default();
        for usage in self.seen.lock().unwrap_or_else(PoisonError::into_inner).values() {
            let Some(role) = usage.role else { continue };
            let time = usage.last.since(&usage.first);
            used.vcpus_s += time.vcpus;
            if role.is_source() {
                used.source_s += time.rest();
            } else {
                used.destination_s += time.rest();
            }
            if role.is_daemon() {
                used.daemon_memory = used.daemon_memory.max(usage.most_memory);
            }
        }
        used
    }
}

impl Drop for CpuWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(list: &mut dyn FnMut() -> Vec<(i32, Role)>, seen: &Mutex<HashMap<i32, Usage>>, first: bool) {
    for (pid, role) in list() {
        let Some(now) = cpu_time(pid) else { continue };
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        // The time of a process that starts during the move counts from its start.
        let usage = seen.entry(pid).or_insert_with(|| Usage {
            role: Some(role),
            first: if first { now } else { CpuTime::default() },
            ..Usage::default()
        });
        // When a process ends, its virtual CPUs' threads are gone, but their time is still in the sum and would count as that of
        // the migration. So the earlier reading is kept.
        if now.vcpus >= usage.last.vcpus {
            usage.last = now;
        }
        if role.is_daemon() {
            usage.most_memory = usage.most_memory.max(resident_bytes(pid).unwrap_or(0));
        }
    }
}
