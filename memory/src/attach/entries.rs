//! Page-table entries that QEMU has for guest RAM: dropped at a destination, and made again where memory is locked.

use super::{Injector, MappingHints};
use crate::error::{MemoryError, Result};
use crate::pagemap::{Pagemap, Present};
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::sys::madvise_nothing;
use crate::uffd::{EventBatch, FaultContext};
use crate::units::{ByteLen, Hva};

/// How often page-table entries that came back are dropped again.
const DISCARDS: u32 = 8;
/// As `MADV_DONTNEED`, for memory that may be locked. Linux 5.18.
const MADV_DONTNEED_LOCKED: i32 = 24;
/// Dropped by one call: a call must end within 10 s, whatever the size of the guest.
const DROPPED_AT_ONCE: u64 = 1 << 30;
/// Filled by one call: so long, some milliseconds, one thread of QEMU is held.
const FILLED_AT_ONCE: u64 = 64 << 20;

/// Drops every page-table entry QEMU has for the mappings, so that each page faults on its next touch, and checks that
/// none is left. The files keep their bytes.
///
/// Locked memory stays locked: the entries come back as pages are mapped.
///
/// Do this with the mappings registered and `context` given: then no entry can come back unseen. Events are read
/// meanwhile (a discard waits for that) and dropped, and at the end all waiting threads are woken, to fault again. So
/// no other thread may be reading events, and the guest must not be running.
///
/// # Errors
/// [`MemoryError::StillMapped`] if entries keep coming back; [`MemoryError::Unsupported`] for locked memory before Linux
/// 5.18; [`MemoryError::Remote`]; those of [`Injector::attach`].
pub fn discard_in_qemu(
    process: &Process,
    mappings: &[QemuMapping],
    context: Option<&FaultContext>,
) -> Result<()> {
    let mut pagemap = Pagemap::open(process)?;
    let mut events = EventBatch::new(64);
    let mut left = Present::default();
    for _ in 0..DISCARDS {
        let mut injector = Injector::attach(process)?;
        for mapping in mappings {
            for (hva, len) in pieces(mapping, DROPPED_AT_ONCE) {
                drop_entries(&mut injector, hva, len, || match context {
                    Some(context) => context.read_events(&mut events).map(drop),
                    None => Ok(()),
                })
                .map_err(|error| perhaps_locked(process, mapping, error))?;
            }
        }
        injector.release()?;
        left = count_mapped(&mut pagemap, mappings)?;
        if left.pages == 0 {
            return context.map_or(Ok(()), |c| mappings.iter().try_for_each(|m| c.wake(m.hva, m.len)));
        }
    }
    still_mapped(left, DISCARDS)
}

fn drop_entries(
    injector: &mut Injector,
    hva: Hva,
    len: ByteLen,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut advise = |advice: i32| {
        let args = [hva.0, len.0, u64::try_from(advice).unwrap_or(0), 0, 0, 0];
        injector.syscall_while(libc::SYS_madvise, args, &mut meanwhile).map(drop)
    };
    match advise(MADV_DONTNEED_LOCKED) {
        // A kernel that does not know it. It refuses the other for locked memory.
        Err(error) if is_invalid(&error) => advise(libc::MADV_DONTNEED),
        done => done,
    }
}

fn is_invalid(error: &MemoryError) -> bool {
    matches!(error, MemoryError::Remote { source, .. } if source.raw_os_error() == Some(libc::EINVAL))
}

/// What it means that entries cannot be dropped.
fn perhaps_locked(process: &Process, mapping: &QemuMapping, error: MemoryError) -> MemoryError {
    let locked =
        is_invalid(&error) && MappingHints::read(process, mapping.hva).is_ok_and(|hints| hints.locked);
    if locked { LOCKED_STAYS } else { error }
}

const LOCKED_STAYS: MemoryError = MemoryError::Unsupported {
    feature: "MADV_DONTNEED_LOCKED, which came with Linux 5.18",
    consequence: "pages of locked guest memory cannot be fetched when they are touched: leave -overcommit mem-lock=on out of the \
                  guest's command line, or choose a node with a newer kernel",
};

/// Whether [`discard_in_qemu`] can drop entries of locked memory on this kernel.
///
/// # Errors
/// [`MemoryError::Unsupported`], which says what to do; [`MemoryError::System`].
pub fn drops_locked() -> Result<()> {
    match madvise_nothing(MADV_DONTNEED_LOCKED) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(LOCKED_STAYS),
        other => other.map_err(|source| MemoryError::system("madvise", source)),
    }
}

/// Gives the process a page-table entry for all of these locked mappings again, as it had them when it locked its memory: none of
/// their pages is touched for the first time later. Holes of the files get memory. A thread of the process is held for some
/// milliseconds at a time; call it when no fault must be served any more.
///
/// # Errors
/// [`MemoryError::Remote`], those of [`Injector::attach`].
pub fn fill_locked_in_qemu(process: &Process, mappings: &[QemuMapping]) -> Result<()> {
    for mapping in mappings {
        let at_once = FILLED_AT_ONCE.max(mapping.page_size.bytes());
        for (hva, len) in pieces(mapping, at_once) {
            let mut injector = Injector::attach(process)?;
            injector.syscall(libc::SYS_mlock, [hva.0, len.0, 0, 0, 0, 0])?;
            injector.release()?;
        }
    }
    Ok(())
}

/// A mapping in pieces of at most `step` bytes.
fn pieces(mapping: &QemuMapping, step: u64) -> impl Iterator<Item = (Hva, ByteLen)> {
    let (start, len) = (mapping.hva.0, mapping.len.0);
    (0..len.div_ceil(step)).map(move |i| (Hva(start + i * step), ByteLen(step.min(len - i * step))))
}

/// Checks that QEMU has no page-table entry for the mappings, as [`discard_in_qemu`] does by itself.
///
/// # Errors
/// [`MemoryError::StillMapped`].
pub fn none_mapped(process: &Process, mappings: &[QemuMapping]) -> Result<()> {
    still_mapped(count_mapped(&mut Pagemap::open(process)?, mappings)?, 0)
}

fn count_mapped(pagemap: &mut Pagemap, mappings: &[QemuMapping]) -> Result<Present> {
    let mut all = Present::default();
    for mapping in mappings {
        let present = pagemap.present(mapping.hva, mapping.len)?;
        all.pages += present.pages;
        all.first = all.first.or(present.first);
    }
    Ok(all)
}

fn still_mapped(left: Present, rounds: u32) -> Result<()> {
    match left.first {
        Some(first) => Err(MemoryError::StillMapped { pages: left.pages, first, rounds }),
        None => Ok(()),
    }
}
