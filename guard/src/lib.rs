//! Mapped files that somebody shortens.
//!
//! Whoever touches a page of a mapping behind the end of its file gets SIGBUS, which ends the process: one guest's file would end the
//! daemon of all guests. In a [guarded](Guard::new) mapping, the handler here marks the mapping as broken, puts a page of zeros where
//! the fault was, and lets the access go on. What was read is worth nothing then, and what was written is lost: **whoever touches a
//! guarded mapping asks [`is_broken`] afterwards**, before anything is done with the bytes. The same happens where a huge page or the
//! memory for a hole cannot be had.
//!
//! System calls (`sendmsg`, `process_vm_readv`) raise no signal: the kernel answers `EFAULT`. But where zeros are already, they succeed:
//! so who makes them asks as well.
//!
//! A mapping that is broken stays so until it is unmapped. SIGBUS from anywhere else, or of a memory error of the hardware, goes to the
//! handler that was there before (that of Rust's runtime).
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Handler.** It is installed once. It does nothing but atomic loads and stores, `mmap`, `sigaction` and `raise`, which are
//!    async-signal-safe, and calls of the handler before it. It allocates nothing, locks nothing and keeps `errno`.
//! 2. **Extent.** A live slot describes one whole mapping of whoever made the [`Guard`], aligned to its pages, which stays mapped as
//!    long as the guard lives and to which nobody holds a Rust reference. So a page of it may be replaced.
//! 3. **Order.** The marks are set before the page is replaced: whoever reads the zeros finds the marks afterwards.
//! 4. **Slots.** What is read of a slot belongs together: its state, which has another value for every guard, is the same before and after
//!    (a sequence lock). Whoever touches a mapping keeps its guard, so the slot of a fault in one does not change meanwhile.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

/// Mappings that can be guarded at a time.
pub const MOST: usize = 1 << 14;

static SLOTS: [Slot; MOST] = [const { Slot::new() }; MOST];
/// Slots from here on were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// How many mappings are broken now.
static BROKEN: AtomicUsize = AtomicUsize::new(0);
/// What was there before our handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// States of a slot: the low bits of a number whose other bits count the guards it has had.
const FREE: usize = 0;
const TAKEN: usize = 1;
const LIVE: usize = 2;
const STATES: usize = 4;

#[derive(Debug)]
struct Slot {
    state: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    broken: AtomicBool,
}

/// A mapping, as its slot described it at one moment.
#[derive(Debug, Clone, Copy)]
struct Extent {
    start: usize,
    end: usize,
    page_bytes: usize,
}

impl Slot {
    const fn new() -> Self {
        Self {
            state: AtomicUsize::new(FREE),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    /// Takes a free slot and describes a mapping in it.
    fn take(&self, extent: Extent) -> bool {
        let free = self.state.load(Ordering::Relaxed);
        if free % STATES != FREE {
            return false;
        }
        let taken = free.wrapping_add(STATES) + TAKEN;
        if self.state.compare_exchange(free, taken, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // Rule 4: who sees one of the values below sees that the slot is taken.
        fence(Ordering::Release);
        self.start.store(extent.start, Ordering::Relaxed);
        self.end.store(extent.end, Ordering::Relaxed);
        self.page_bytes.store(extent.page_bytes, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
        self.state.store(taken - TAKEN + LIVE, Ordering::Release);
        true
    }

    /// Gives back a slot that is live.
    fn free(&self) {
        if self.broken.load(Ordering::Relaxed) {
            BROKEN.fetch_sub(1, Ordering::Relaxed);
        }
        let live = self.state.load(Ordering::Relaxed);
        self.state.store(live - LIVE + FREE, Ordering::Release);
    }

    /// The mapping, if the slot has one.
    fn extent(&self) -> Option<Extent> {
        let before = self.state.load(Ordering::Acquire);
        if before % STATES != LIVE {
            return None;
        }
        let extent = Extent {
            start: self.start.load(Ordering::Relaxed),
            end: self.end.load(Ordering::Relaxed),
            page_bytes: self.page_bytes.load(Ordering::Relaxed),
        };
        // Rule 4.
        fence(Ordering::Acquire);
        (self.state.load(Ordering::Relaxed) == before).then_some(extent)
    }

    fn mark_broken(&self) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            BROKEN.fetch_add(1, Ordering::Release);
        }
    }
}

/// A mapping is guarded as long as this lives. Drop it before the mapping is unmapped.
#[derive(Debug)]
pub struct Guard(&'static Slot);

impl Guard {
    /// Guards a mapping of `len` bytes whose pages have `page_bytes` (4096, or the size of its huge pages).
    ///
    /// # Errors
    /// [`MOST`] mappings are guarded already, or the kernel refuses the handler.
    ///
    /// # Panics
    /// If `base`, `len` or `page_bytes` are not what a mapping can have.
    ///
    /// # Safety
    /// `base..base + len` is one shared mapping of a file, which stays mapped as long as the guard lives. No Rust reference to any of
    /// its bytes is used: their place may be taken by zeros at any time.
    pub unsafe fn new(base: *mut u8, len: usize, page_bytes: usize) -> io::Result<Self> {
        let start = base.expose_provenance();
        assert!(
            page_bytes.is_power_of_two() && start.is_multiple_of(page_bytes),
            "{start:#x} of pages of {page_bytes}"
        );
        let end = start.checked_add(len).expect("a mapping that ends");
        install()?;
        let extent = Extent { start, end, page_bytes };
        let found = SLOTS.iter().enumerate().find(|(_, slot)| slot.take(extent));
        let (index, slot) = found
            .ok_or_else(|| io::Error::other(format!("{MOST} files of guest memory are mapped already")))?;
        USED.fetch_max(index + 1, Ordering::AcqRel);
        Ok(Self(slot))
    }

    /// Whether a page of the mapping could not be had once: the bytes of the mapping are worth nothing.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        fence(Ordering::Acquire);
        self.0.broken.load(Ordering::Relaxed)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// Whether some of these bytes are in a guarded mapping that is broken. To be asked after they were touched. Takes a nanosecond as long
/// as no mapping is broken.
#[inline]
#[must_use]
pub fn is_broken(addr: usize, len: usize) -> bool {
    // Rule 3: what was read before is read before the marks.
    fence(Ordering::Acquire);
    BROKEN.load(Ordering::Acquire) != 0 && any_broken(addr, len)
}

#[cold]
fn any_broken(addr: usize, len: usize) -> bool {
    let end = addr.saturating_add(len);
    used().any(|slot| {
        slot.broken.load(Ordering::Relaxed)
            && slot.extent().is_some_and(|extent| extent.start < end && addr < extent.end)
    })
}

fn used() -> impl Iterator<Item = &'static Slot> {
    SLOTS[..USED.load(Ordering::Acquire).min(MOST)].iter()
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: rule 1: asks only; the kernel fills `before`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) } != 0 {
            return Err(last_errno());
        }
        // SAFETY: filled by the call that succeeded.
        let before = unsafe { before.assume_init() };
        BEFORE.get_or_init(|| before);
        let mut ours = before;
        ours.sa_sigaction = on_sigbus as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        // On the stack that Rust's runtime has made for such handlers: the thread's own may be what is missing.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: rule 1: `ours` is a whole `sigaction`, and the handler has the signature that its flags ask for.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) } != 0 {
            return Err(last_errno());
        }
        Ok(())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: rule 1: with SA_SIGINFO the kernel passes a valid `siginfo_t`.
    let code = unsafe { (*info).si_code };
    if code == libc::BUS_ADRERR {
        // SAFETY: as above.
        let info = unsafe { &*info };
        // SAFETY: with this code the kernel has filled in the address of the fault.
        let addr = unsafe { info.si_addr() }.addr();
        let mut slots = used().filter_map(|slot| Some((slot, slot.extent()?)));
        let found = slots.find(|(_, extent)| (extent.start..extent.end).contains(&addr));
        if found.is_some_and(|(slot, extent)| put_zeros(slot, extent, addr)) {
            return;
        }
    }
    hand_over(signal, info, context);
}

/// Puts zeros in the place of a page. Returns whether it did.
fn put_zeros(slot: &Slot, extent: Extent, addr: usize) -> bool {
    // Rule 3.
    slot.mark_broken();
    let page = ptr::with_exposed_provenance_mut::<c_void>(addr & !(extent.page_bytes - 1));
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: rule 1: the address of the thread's own variable.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: rules 2 and 4: a page of a mapping that was given to us for this, to which there are no references.
    let mapped = unsafe { libc::mmap(page, extent.page_bytes, prot, flags, -1, 0) };
    // SAFETY: as above.
    unsafe { *errno = before };
    mapped != libc::MAP_FAILED
}

/// Calls the handler before ours. Where there is none, what was there is put back: a fault happens again, and ends the process.
fn hand_over(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(before) = BEFORE.get() else { return };
    // By a process: it does not come again by itself.
    // SAFETY: rule 1: with SA_SIGINFO the kernel passes a valid `siginfo_t`.
    let sent = unsafe { (*info).si_code } <= 0;
    match before.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_IGN | libc::SIG_DFL => {
            // SAFETY: rule 1: what the kernel told us was there.
            unsafe { libc::sigaction(signal, before, ptr::null_mut()) };
            if sent {
                // SAFETY: rule 1: delivered when this handler returns.
                unsafe { libc::raise(signal) };
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag, a handler of this signature was installed.
            let handler = unsafe {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(handler)
            };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without that flag, a handler of this signature was installed.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests;
