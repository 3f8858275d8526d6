//! The second way to freeze a guest, where its memory cannot be mapped again: it is write-protected while the guest stands still,
//! and copied to the template while the guest runs.
//!
//! ```text
//!                 guest runs                 guest stands still                     guest runs
//! journal  Begun ------------- Stopping ------------------------- Keeping ------------------------------ Frozen ---
//!          template's files    STOP, device state saved,  memory   RESUME; writers wait for the copy      the copy is whole,
//!          made, empty         drained                    write-   of what they write; the rest is        nothing is protected
//!                                                         protected  copied meanwhile
//! ```
//!
//! The guest keeps its RAM file, shared, all along. So there is nothing to undo when this ends early: protection goes with our
//! descriptor ([`Keeper`]), and half a template is removed.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmove_fabric::ThreadOptions;
use vmove_memory::{ByteLen, KeepFailure, Keeper, Kept, PageSize, RamFile, collapse, huge_mapped};
use vmove_node::blocking::spawn_blocking;
use vmove_node::journal::Journal;
use vmove_qmp::inspect::{self, DeviceKind};
use vmove_types::time::ms;

use super::{Freeze, Stopped, note, stop_and_go};
use crate::CloneError;
use crate::check::{GuestRam, LOCKED, Way};
use crate::error::blocking;
use crate::record::{ForkPhase, ForkRecord};
use vmove_types::fork_report::FreezeReport;

/// How often it is told how far the copy has come.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);
const PAGES_OF_MIB: u64 = 256;

/// Stops the guest, saves its device state, protects its memory, lets it go on and copies its memory as it was.
pub(super) async fn freeze_by_copy(
    order: &Freeze<'_>,
    ram: &Arc<GuestRam>,
    journal: &mut Journal<ForkRecord>,
    on_kept: impl Fn(Kept) + Send,
) -> Result<(Stopped, FreezeReport), CloneError> {
    let (held, paths) = (Arc::clone(ram), journal.record().files.clone());
    let limit = order.copy_limit.map(ByteLen);
    let serving = blocking(move || {
        let stores = paths.iter().map(|file| RamFile::open(&file.template)).collect::<Result<Vec<_>, _>>()?;
        let keeper = Keeper::new(&held.process, &held.mappings, &held.files, &stores, limit)?;
        Serving::start(keeper, held)
    })
    .await?;
    let keeper = Arc::clone(&serving.keeper);
    let stopped = stop_and_go(order, journal, move || Ok(keeper.protect()?), ForkPhase::Keeping).await?;
    let resumed = Instant::now();
    let keeper = Arc::clone(&serving.keeper);
    let copying = blocking(move || Ok(keeper.copy_rest()));
    tokio::pin!(copying);
    let copied = loop {
        tokio::select! {
            copied = &mut copying => break copied?,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => on_kept(serving.keeper.kept()),
        }
    };
    let kept = copied.map_err(|why| given_up(order, serving.keeper.kept(), why))?;
    on_kept(kept);
    let whole_ms = ms(resumed.elapsed());
    nothing_was_discarded(order, kept).await?;
    note(journal, |r| r.phase = ForkPhase::Frozen)?;
    serving.finish();
    let report = FreezeReport {
        way: Way::WriteProtected.word().to_owned(),
        why: Some(LOCKED.to_owned()),
        pages_by_faults: kept.by_faults,
        pages_by_copy: kept.by_copy,
        kept_bytes: kept.stored.0,
        whole_ms,
    };
    Ok((stopped, report))
}

/// A balloon that was plugged in meanwhile may have given back what was not copied yet: one that QEMU punches out of the file is
/// told of too late.
async fn nothing_was_discarded(order: &Freeze<'_>, kept: Kept) -> Result<(), CloneError> {
    let pid = order.vm.pid.unsigned_abs();
    let Ok(facts) = inspect::facts(order.client, pid, None).await else {
        // It has ended: then it gives back nothing more.
        return Ok(());
    };
    let discards = |kind| matches!(kind, DeviceKind::Balloon | DeviceKind::VirtioMem);
    match facts.devices.iter().find(|device| discards(device.kind)) {
        None => Ok(()),
        Some(device) => {
            let why =
                format!("device {} ({}) was plugged in, which gives memory back", device.id, device.driver);
            Err(given_up(order, kept, KeepFailure::Other(why)))
        }
    }
}

fn given_up(order: &Freeze<'_>, kept: Kept, why: KeepFailure) -> CloneError {
    let hint = match why {
        KeepFailure::Full => "Free memory on this host, then fork it again",
        KeepFailure::Limit(_) => {
            "Raise copy-limit-mib in [fork], or fork it when less of its memory is in use"
        }
        KeepFailure::Discarded(_) => "Detach what gives memory back (device_del), then fork it again",
        _ => "Fork it again; if it comes to the same, see the log of vmoved",
    };
    CloneError::NotKept {
        vm: order.vm.name.clone(),
        kept: (kept.by_faults + kept.by_copy) / PAGES_OF_MIB,
        of: kept.pages / PAGES_OF_MIB,
        stored: kept.stored.0 >> 20,
        why,
        hint,
    }
}

/// A keeper with the thread that answers writers. Dropping it lifts all protection.
struct Serving {
    keeper: Arc<Keeper>,
    thread: Option<JoinHandle<()>>,
    ram: Arc<GuestRam>,
    /// QEMU mapped it by huge pages, as far as the kernel tells.
    huge: bool,
}

impl Serving {
    fn start(keeper: Keeper, ram: Arc<GuestRam>) -> Result<Self, CloneError> {
        let keeper = Arc::new(keeper);
        let at_work = Arc::clone(&keeper);
        let thread = ThreadOptions::urgent("vmove-keep").spawn(move |_| at_work.serve());
        let thread = thread.map_err(|e| CloneError::Task(format!("no thread to answer writers: {e}")))?;
        let huge = |m: &vmove_memory::QemuMapping| {
            huge_mapped(&ram.process, m.hva, m.len).is_ok_and(|found| found.0 >= m.len.0 / 2)
        };
        let huge = ram.mappings.iter().any(huge);
        Ok(Self { keeper, thread: Some(thread), ram, huge })
    }

    /// Protection has taken huge mappings apart: brings them back, while whoever waits for the template goes on.
    fn finish(self) {
        let (ram, huge) = (Arc::clone(&self.ram), self.huge);
        drop(self);
        if !huge {
            return;
        }
        spawn_blocking(move || {
            for mapping in ram.mappings.iter().filter(|m| m.page_size == PageSize::Base4K) {
                if let Err(error) = collapse(&ram.process, mapping.hva, mapping.len) {
                    tracing::debug!(%error, "guest memory keeps 4 KiB mappings");
                }
            }
        });
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.keeper.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
