//! Memory of its own for a guest whose memory is private since a fork: its parent, or a child.
//!
//! ```text
//! guest's memory   private, over the template --------------------------------> pieces of it shared --> shared, its own file
//! its RAM file     filled from the template, which never changes (`fill`)       takes the pages that the guest has written
//! ```
//!
//! The guest runs all the while. First the file is filled, which no write of the guest can disturb. Then memory is moved over piece by
//! piece ([`Mover`]): who writes to the piece under work waits for some 0.1 ms. So it takes as long as one copy of what is not
//! zero, however much the guest writes meanwhile. A guest whose disks write to its memory past the page table (direct I/O) is stopped
//! and drained for a few pieces at a time; so is each guest where nothing can stand by for a daemon that is killed in the middle.
//!
//! QEMU's own descriptor names the RAM file all along, so that afterwards everything is as if the guest had never been forked: it can be
//! moved, forked again, and has huge pages. Whatever fails, or whoever dies, in the middle: the guest runs on with all of its memory,
//! some of it private; the next attempt goes on from there.

mod fill;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use vmove_fabric::ThreadOptions;
use vmove_memory::{
    Injector, Moved, Mover, OwnFile, PrivatePart, Process, QemuMapping, RamFile, Standing, descriptors_of,
};
use vmove_node::record::VmRecord;
use vmove_node::registry::Registry;
use vmove_qmp::Client;
use vmove_qmp::inspect::{DeviceKind, VmFacts};
use vmove_types::fork_report::{OwnMemory, RehomeProgress};
use vmove_types::time::{Mono, ms};
use vmove_types::vm::Running;

use self::fill::Frozen;
use crate::CloneError;
use crate::check::{hints_of, open_files};
use crate::error::blocking;

/// `stop` drains the disks.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a guest is stopped at a time, besides what QEMU needs for it.
const STOPPED: Duration = Duration::from_millis(2);

/// What is to be moved, looked at. Nothing is changed yet.
#[derive(Debug)]
pub struct Rehome {
    name: String,
    process: Arc<Process>,
    files: Vec<RamFile>,
    mappings: Vec<QemuMapping>,
    standing: Standing,
    frozen: Vec<Option<Frozen>>,
}

/// How far it is, for whoever looks on.
#[derive(Debug, Default)]
pub struct HowFar {
    bytes: AtomicU64,
    of: AtomicU64,
}

impl HowFar {
    /// Bytes that are done, and bytes in all; these are known once it has begun.
    #[must_use]
    pub fn progress(&self) -> Option<RehomeProgress> {
        let (bytes, of) = (self.bytes.load(Ordering::Relaxed), self.of.load(Ordering::Relaxed));
        (of > 0).then_some(RehomeProgress { bytes, of })
    }

    /// The memory is looked at twice: once to fill the file, once to be moved.
    fn begin(&self, memory: u64) {
        self.of.store(2 * memory, Ordering::Relaxed);
    }

    fn filled_to(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    fn left(&self, left: u64) {
        self.bytes.store(self.of.load(Ordering::Relaxed).saturating_sub(left), Ordering::Relaxed);
    }
}

impl Rehome {
    /// Looks at the guest of `vm`, whose memory was mapped privately at `private`.
    ///
    /// # Errors
    /// [`CloneError`].
    pub async fn look(vm: &VmRecord, private: &[QemuMapping]) -> Result<Self, CloneError> {
        let (vm, mappings) = (vm.clone(), private.to_vec());
        blocking(move || {
            let process = Arc::new(Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)?);
            let files = open_files(&vm)?;
            let standing = Standing::read(&process, &mappings, &files)?;
            let frozen = fill::frozen(&process, &standing)?;
            Ok(Self { name: vm.name, process, files, mappings, standing, frozen })
        })
        .await
    }

    /// Nothing is left to do.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.standing.is_shared() && self.standing.strays.is_empty()
    }

    /// Memory that it takes beside what is there, in bytes.
    ///
    /// # Errors
    /// [`CloneError::Memory`].
    pub fn needed(&self) -> Result<u64, CloneError> {
        fill::needed(&self.standing, &self.frozen)
    }

    /// Moves it: while the guest runs, if there is a program to stand by (see [`Mover::with_standby`]) and no disk with direct I/O. Else the
    /// guest is stopped for a few pieces at a time. `note` writes down whether the guest is to be set running if this daemon ends while it is stopped; it is called whenever
    /// that has changed, before the guest is stopped. Nothing is noted at first. `far` says meanwhile how far it is.
    ///
    /// # Errors
    /// [`CloneError`]; the guest runs on, with memory that is still private, or some of it.
    pub async fn run(
        self,
        registry: &Registry,
        client: &Client,
        facts: &VmFacts,
        standby: Option<&Path>,
        far: &Arc<HowFar>,
        note: impl FnMut(bool) -> Result<(), CloneError> + Send,
    ) -> Result<OwnMemory, CloneError> {
        let begun = Instant::now();
        let discards = |kind| matches!(kind, DeviceKind::Balloon | DeviceKind::VirtioMem);
        if let Some(device) = facts.devices.iter().find(|d| discards(d.kind)) {
            return Err(CloneError::Task(format!(
                "device {} ({}) gives memory back while it is being copied: detach it (device_del) first",
                device.id, device.driver
            )));
        }
        let name = self.name.clone();
        let told = Arc::clone(far);
        let (mover, template_bytes) = blocking(move || self.fill(&told)).await?;
        let filled = begun.elapsed();
        // A page that a disk has pinned changes unseen.
        let mover = match standby.filter(|_| !facts.has_direct_io()) {
            Some(program) => mover.with_standby(program)?,
            None => mover,
        };
        let (moved, pause) = match mover.may_run() {
            true => (urgently(mover, Arc::clone(far), |_| true).await?.moved(), Duration::ZERO),
            false => move_stopped(registry, &name, client, mover, far, note).await?,
        };
        let total = begun.elapsed();
        tracing::debug!(?moved, filled_ms = ms(filled), total_ms = ms(total), "memory of its own");
        Ok(OwnMemory {
            template_bytes,
            own_bytes: moved.own.0,
            waits: moved.waits,
            waited_ms: ms(moved.waited),
            longest_wait_ms: if moved.waits > 0 { ms(moved.longest) } else { 0.0 },
            pause_ms: ms(pause),
            total_ms: ms(total),
        })
    }

    /// Fills the files from the template, and prepares the move.
    fn fill(self, far: &HowFar) -> Result<(Mover, u64), CloneError> {
        Injector::prepare(&self.process)?;
        let hints = hints_of(&self.process, &self.mappings)?;
        let mut own = Vec::new();
        for file in self.files {
            let held = descriptors_of(&self.process, file.identity())?;
            let fd_in_qemu = held.first().copied().ok_or_else(|| {
                CloneError::Task(format!(
                    "QEMU of {:?} holds no descriptor of {}",
                    self.name,
                    file.path().display()
                ))
            })?;
            own.push(OwnFile { mapping: file.map()?, file, fd_in_qemu });
        }
        far.begin(self.standing.private.iter().map(|part| part.len.0).sum());
        let copied = fill::fill(&self.standing, &self.frozen, &own, &|bytes| far.filled_to(bytes))?;
        let mut parts = Vec::new();
        for (part, frozen) in self.standing.private.iter().zip(&self.frozen) {
            let of = self.mappings.iter().position(|m| m.hva <= part.hva && part.hva < m.end());
            let hints = of.map(|index| hints[index].clone()).unwrap_or_default();
            parts.push(PrivatePart { at: *part, hints, filled: frozen.is_some() });
        }
        Ok((Mover::new(self.process, &parts, own, &self.standing.strays)?, copied))
    }
}

/// Runs the mover as long as `go_on` says and something is left, on a thread that is not held up by others: guests wait for it.
async fn urgently(
    mut mover: Mover,
    far: Arc<HowFar>,
    go_on: impl Fn(&Mover) -> bool + Send + 'static,
) -> Result<Mover, CloneError> {
    let (tell, told) = tokio::sync::oneshot::channel();
    let work = move || {
        let done = loop {
            let step = mover.step();
            far.left(mover.left().0);
            match step {
                Ok(true) if go_on(&mover) => {}
                Ok(_) => break Ok(mover),
                Err(error) => break Err(error),
            }
        };
        let _ = tell.send(done);
    };
    let thread = ThreadOptions::urgent("vmove-own").spawn(move |_| work());
    thread.map_err(|e| CloneError::Task(format!("no thread to move memory: {e}")))?;
    told.await.map_err(|e| CloneError::Task(e.to_string())).and_then(|done| Ok(done?))
}

/// A few pieces at a time. A guest that runs is stopped and drained meanwhile.
async fn move_stopped(
    registry: &Registry,
    name: &str,
    client: &Client,
    mut mover: Mover,
    far: &Arc<HowFar>,
    mut note: impl FnMut(bool) -> Result<(), CloneError> + Send,
) -> Result<(Moved, Duration), CloneError> {
    let (mut pause, mut noted) = (Duration::ZERO, false);
    while mover.is_left() {
        // Somebody who pauses the guest meanwhile wants it to stay so.
        let held = registry.hold_running(name).await;
        let runs = runs(client).await?;
        if runs != noted {
            note(runs)?;
            noted = runs;
        }
        let stopped = Mono::now();
        if runs {
            client.set_running(Running::Paused, COMMAND_TIMEOUT).await?;
        }
        let until = Instant::now() + STOPPED;
        let moved = urgently(mover, Arc::clone(far), move |_| Instant::now() < until).await;
        if runs {
            client.set_running(Running::Running, COMMAND_TIMEOUT).await?;
            pause += Mono::now().since(stopped);
        }
        drop(held);
        mover = moved?;
    }
    Ok((mover.moved(), pause))
}

async fn runs(client: &Client) -> Result<bool, CloneError> {
    let status = client.execute_raw("query-status", Value::Null, COMMAND_TIMEOUT).await?;
    Ok(status.get("running").and_then(Value::as_bool) == Some(true))
}
