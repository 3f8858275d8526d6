//! The few `ptrace(2)` requests that are needed, as safe functions.
//!
//! Rules that every `unsafe` block here relies on:
//!
//! 1. **Buffers.** A request that reads or writes memory of ours gets a pointer to a live value of the exact type
//!    and size the kernel expects, borrowed for the call.
//! 2. **Effects elsewhere.** Everything else a request does, it does to another process: that can spoil the process,
//!    but not our memory. Who may call what, and when, is the business of `stopped.rs`.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::mem;
use std::ptr;

use crate::error::{MemoryError, Result};

pub(super) use libc::user_regs_struct as Regs;

pub(super) const ERESTARTSYS: i64 = -512;
pub(super) const ERESTARTNOINTR: i64 = -513;
pub(super) const ERESTARTNOHAND: i64 = -514;
pub(super) const ERESTART_RESTARTBLOCK: i64 = -516;

/// `PTRACE_EVENT_STOP` in bits 16.. of a wait status.
const EVENT_STOP: i32 = libc::PTRACE_EVENT_STOP;
/// `PTRACE_O_TRACESYSGOOD` marks a system-call stop by this bit in the signal number.
const SYSCALL_BIT: i32 = 0x80;
const NT_X86_XSTATE: usize = 0x202;
const SIGSET_BYTES: usize = 8;

/// Why a tracee stopped, from its wait status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// `PTRACE_INTERRUPT`, or a stop of the whole process, took effect, on the way out of the kernel where signals
    /// are delivered and interrupted system calls are made to restart.
    Event,
    /// At the entry or at the exit of a system call.
    Syscall,
    /// A signal is about to be delivered.
    Signal(i32),
}

/// What became of a tracee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    Stopped(Stop),
    /// Ended: the thread or all of its process.
    Ended,
    /// Nothing yet.
    Running,
}

pub(super) fn seize(tid: u32) -> Result<()> {
    request(libc::PTRACE_SEIZE, "SEIZE", tid, 0, libc::PTRACE_O_TRACESYSGOOD as usize)
}

pub(super) fn interrupt(tid: u32) -> Result<()> {
    request(libc::PTRACE_INTERRUPT, "INTERRUPT", tid, 0, 0)
}

/// Lets it run until the next stop, delivering `signal` if not 0.
pub(super) fn cont(tid: u32, signal: i32) -> Result<()> {
    request(libc::PTRACE_CONT, "CONT", tid, 0, as_data(signal))
}

/// As [`cont`], stopping also at the next entry to or exit from a system call.
pub(super) fn cont_to_syscall(tid: u32, signal: i32) -> Result<()> {
    request(libc::PTRACE_SYSCALL, "SYSCALL", tid, 0, as_data(signal))
}

pub(super) fn detach(tid: u32) -> Result<()> {
    request(libc::PTRACE_DETACH, "DETACH", tid, 0, 0)
}

pub(super) fn regs(tid: u32) -> Result<Regs> {
    // SAFETY: rule 1: all-zero is a valid value of this plain struct of integers.
    let mut regs: Regs = unsafe { mem::zeroed() };
    request(libc::PTRACE_GETREGS, "GETREGS", tid, 0, ptr::from_mut(&mut regs) as usize)?;
    Ok(regs)
}

pub(super) fn set_regs(tid: u32, regs: &Regs) -> Result<()> {
    request(libc::PTRACE_SETREGS, "SETREGS", tid, 0, ptr::from_ref(regs) as usize)
}

/// Its signal mask; for a thread in a call that swapped it for the time of the call, the one from before.
pub(super) fn signal_mask(tid: u32) -> Result<u64> {
    let mut mask = 0_u64;
    request(libc::PTRACE_GETSIGMASK, "GETSIGMASK", tid, SIGSET_BYTES, ptr::from_mut(&mut mask) as usize)?;
    Ok(mask)
}

pub(super) fn set_signal_mask(tid: u32, mask: u64) -> Result<()> {
    request(libc::PTRACE_SETSIGMASK, "SETSIGMASK", tid, SIGSET_BYTES, ptr::from_ref(&mask) as usize)
}

/// Its floating-point and vector registers, in the layout of XSAVE.
pub(super) fn xstate(tid: u32) -> Result<Vec<u8>> {
    let mut area = vec![0_u8; 16 << 10];
    let mut iov = libc::iovec { iov_base: area.as_mut_ptr().cast::<c_void>(), iov_len: area.len() };
    request(libc::PTRACE_GETREGSET, "GETREGSET", tid, NT_X86_XSTATE, ptr::from_mut(&mut iov) as usize)?;
    area.truncate(iov.iov_len);
    Ok(area)
}

/// Looks, without waiting, whether a tracee of the calling thread has stopped or ended.
pub(super) fn poll(tid: u32) -> Result<Waited> {
    let mut status = 0;
    // SAFETY: rule 1.
    let got = unsafe { libc::waitpid(as_pid(tid), &raw mut status, libc::__WALL | libc::WNOHANG) };
    match got {
        0 => Ok(Waited::Running),
        -1 => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ECHILD) => Ok(Waited::Ended),
            source => Err(MemoryError::Ptrace { request: "wait", tid, source }),
        },
        _ => decode(tid, status),
    }
}

/// Like [`poll`], but asks for the stop itself rather than for news of it: if other code of this process waits for
/// its children, it may have been given the news in our place.
pub(super) fn poll_missed(tid: u32) -> Waited {
    // SAFETY: rule 1: all-zero is a valid value of this plain struct.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    match request(libc::PTRACE_GETSIGINFO, "GETSIGINFO", tid, 0, ptr::from_mut(&mut info) as usize) {
        Ok(()) if info.si_code >> 8 == EVENT_STOP => Waited::Stopped(Stop::Event),
        Ok(()) if info.si_code & 0xff == libc::SIGTRAP | SYSCALL_BIT => Waited::Stopped(Stop::Syscall),
        Ok(()) => Waited::Stopped(Stop::Signal(info.si_signo)),
        // In a stop of the whole process there is no siginfo.
        Err(MemoryError::Ptrace { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            Waited::Stopped(Stop::Event)
        }
        Err(_) => Waited::Running,
    }
}

fn decode(tid: u32, status: i32) -> Result<Waited> {
    if !libc::WIFSTOPPED(status) {
        return Ok(Waited::Ended);
    }
    let signal = libc::WSTOPSIG(status);
    Ok(Waited::Stopped(match status >> 16 {
        EVENT_STOP => Stop::Event,
        0 if signal == libc::SIGTRAP | SYSCALL_BIT => Stop::Syscall,
        0 => Stop::Signal(signal),
        _ => return Err(MemoryError::UnexpectedStop { tid, status }),
    }))
}

fn request(request: libc::c_uint, name: &'static str, tid: u32, addr: usize, data: usize) -> Result<()> {
    // SAFETY: rules 1 and 2.
    let result = unsafe { libc::ptrace(request, as_pid(tid), addr as *mut c_void, data as *mut c_void) };
    if result == -1 {
        return Err(MemoryError::Ptrace { request: name, tid, source: io::Error::last_os_error() });
    }
    Ok(())
}

/// A register as the signed number it stands for.
pub(super) const fn signed(register: u64) -> i64 {
    i64::from_ne_bytes(register.to_ne_bytes())
}

/// A signed number as a register holds it.
pub(super) const fn unsigned(number: i64) -> u64 {
    u64::from_ne_bytes(number.to_ne_bytes())
}

#[expect(clippy::cast_possible_wrap, reason = "thread ids are at most 2^22")]
const fn as_pid(tid: u32) -> libc::pid_t {
    tid as libc::pid_t
}

#[expect(clippy::cast_sign_loss, reason = "signal numbers are 0..=64")]
const fn as_data(signal: i32) -> usize {
    signal as usize
}
