//! One thread of the target, stopped and used. Lives on the tracer thread only: the kernel ties a tracee to the
//! thread that seized it.
//!
//! How the interrupted system call survives. The first stop is where the kernel, on its way back to the program,
//! delivers signals and rewinds interrupted calls. The registers are saved there, with the call's number and its
//! "restart me" result. After the injected calls the thread is brought to a stop *at that same place* once more,
//! the saved registers are put back, and the kernel goes on as if nothing had been in between: it delivers what
//! signals have come, and restarts the call, or lets it end with EINTR, as the program is entitled to. Were the
//! registers put back anywhere else, the program would be handed the kernel's internal "restart me" number.
//!
//! Signals are blocked meanwhile, so that they stay queued rather than pass through our hands.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::code::{self, Code};
use super::frame;
use super::ptrace::{self, Regs, Stop, Waited};
use super::threads;
use crate::error::{MemoryError, Result};

/// `cs` of 64-bit user code.
const USER_CS: u64 = 0x33;
const TRAP_FLAG: u64 = 0x100;
/// All but SIGKILL and SIGSTOP, which the kernel takes out itself.
const ALL_SIGNALS: u64 = u64::MAX;
/// How often to look for a stop before sleeping in between. A stop takes a few microseconds.
const SPINS: u32 = 100;

/// A stopped thread, with what it needs to go on.
pub(super) struct StoppedThread {
    tid: u32,
    saved: Regs,
    mask: u64,
    code: Code,
    frame_at: Option<u64>,
    /// False while the thread still stands where it was first stopped.
    moved: bool,
    released: bool,
}

impl StoppedThread {
    /// Makes `tid` a tracee of the calling thread and asks it to stop. It is let go at the latest when that thread ends.
    pub fn seize(tid: u32) -> Result<()> {
        ptrace::seize(tid)?;
        ptrace::interrupt(tid)
    }

    /// Takes a seized thread once it has stopped; `None` if it has not by `deadline`.
    pub fn take(tid: u32, code: Code, memory: &File, deadline: Instant) -> Result<Option<Self>> {
        if !run_to_event(tid, deadline)? {
            return Ok(None);
        }
        let mut saved = ptrace::regs(tid)?;
        if saved.cs != USER_CS {
            ptrace::detach(tid)?;
            return Err(MemoryError::NotX86_64 { tid, cs: saved.cs });
        }
        // The process may have started another program since the code was found.
        if !code::is_there(code, memory) {
            ptrace::detach(tid)?;
            return Err(MemoryError::NoSyscallInstruction { pid: tid });
        }
        if waits_forever_with_eintr(&saved) {
            saved.rax = ptrace::unsigned(ptrace::ERESTARTNOHAND);
        }
        let mask = ptrace::signal_mask(tid)?;
        let frame_at = write_frame(tid, &saved, mask, code, memory);
        Ok(Some(Self { tid, saved, mask, code, frame_at, moved: false, released: false }))
    }

    /// The thread.
    pub const fn tid(&self) -> u32 {
        self.tid
    }

    /// True if our death during a call would leave the thread unharmed.
    pub const fn cleans_up_after_itself(&self) -> bool {
        self.frame_at.is_some()
    }

    /// Runs one system call to its end. Sets `late` if that takes longer than until `deadline`, and keeps waiting,
    /// since there is no way back before the call returns.
    pub fn syscall(&mut self, nr: i64, args: [u64; 6], deadline: Instant, late: &AtomicBool) -> Result<i64> {
        let [rdi, rsi, rdx, r10, r8, r9] = args;
        let regs = Regs {
            rip: self.code.syscall,
            rsp: self.frame_at.unwrap_or(self.saved.rsp),
            eflags: self.saved.eflags & !TRAP_FLAG,
            rax: ptrace::unsigned(nr),
            // Not in a system call: the kernel must not rewind to one from here.
            orig_rax: u64::MAX,
            ..Regs { rdi, rsi, rdx, r10, r8, r9, ..self.saved }
        };
        // Registers first: should we die between the two, the other order would leave the thread deaf to signals.
        ptrace::set_regs(self.tid, &regs)?;
        checkpoint(1);
        if !self.moved {
            ptrace::set_signal_mask(self.tid, ALL_SIGNALS)?;
        }
        self.moved = true;
        checkpoint(2);
        self.run_to_syscall_stop(deadline, late)?;
        checkpoint(3);
        self.run_to_syscall_stop(deadline, late)?;
        checkpoint(4);
        Ok(ptrace::signed(ptrace::regs(self.tid)?.rax))
    }

    /// Fails if the thread has ended.
    pub fn check(&mut self) -> Result<()> {
        if ptrace::poll(self.tid)? != Waited::Ended {
            return Ok(());
        }
        self.released = true;
        Err(ended(self.tid))
    }

    /// Puts everything back and lets the thread go.
    pub fn release(mut self) -> Result<()> {
        self.restore()
    }

    fn restore(&mut self) -> Result<()> {
        if self.released {
            return Ok(());
        }
        self.released = true;
        if self.moved {
            // Back to the place where signals are delivered.
            ptrace::interrupt(self.tid)?;
            ptrace::cont(self.tid, 0)?;
            checkpoint(5);
            let never = Instant::now() + Duration::from_secs(3600);
            run_to_event(self.tid, never)?;
            checkpoint(6);
            ptrace::set_signal_mask(self.tid, self.mask)?;
            checkpoint(7);
        }
        ptrace::set_regs(self.tid, &self.saved)?;
        checkpoint(8);
        ptrace::detach(self.tid)
    }

    fn run_to_syscall_stop(&self, deadline: Instant, late: &AtomicBool) -> Result<()> {
        let mut signal = 0;
        loop {
            ptrace::cont_to_syscall(self.tid, signal)?;
            let stop = loop {
                match wait_until(self.tid, deadline)? {
                    Some(stop) => break stop,
                    None => late.store(true, Ordering::Release),
                }
                if let Some(stop) = wait_until(self.tid, Instant::now() + Duration::from_millis(10))? {
                    break stop;
                }
            };
            match stop {
                Stop::Syscall => return Ok(()),
                // The process is being stopped or continued as a whole; our thread goes on regardless, and joins
                // the others when it is let go.
                Stop::Event => signal = 0,
                Stop::Signal(libc::SIGSTOP) => signal = libc::SIGSTOP,
                // Blocked signals are not delivered; this one was forced, for example by a seccomp filter.
                Stop::Signal(forced) => {
                    return Err(MemoryError::UnexpectedStop { tid: self.tid, status: forced });
                }
            }
        }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            tracing::warn!(tid = self.tid, %error, "could not restore a thread (it may have ended)");
        }
    }
}

/// Lets a seized and interrupted thread go on until it is where signals are delivered. Signals that it was just about
/// to take are given to it. False if the deadline passes first.
fn run_to_event(tid: u32, deadline: Instant) -> Result<bool> {
    loop {
        match wait_until(tid, deadline)? {
            None => return Ok(false),
            Some(Stop::Event) => return Ok(true),
            Some(Stop::Signal(signal)) => ptrace::cont(tid, signal)?,
            Some(Stop::Syscall) => ptrace::cont(tid, 0)?,
        }
    }
}

/// Waits for the next stop; `None` after the deadline.
fn wait_until(tid: u32, deadline: Instant) -> Result<Option<Stop>> {
    let mut looks = 0_u32;
    loop {
        let late = Instant::now() >= deadline;
        let mut found = ptrace::poll(tid)?;
        if found == Waited::Running && (late || looks % 16 == 15) {
            found = ptrace::poll_missed(tid);
        }
        match found {
            Waited::Stopped(stop) => return Ok(Some(stop)),
            Waited::Ended => return Err(ended(tid)),
            Waited::Running if late => return Ok(None),
            Waited::Running if looks < SPINS => thread::yield_now(),
            Waited::Running => thread::sleep(Duration::from_micros(20)),
        }
        looks = looks.saturating_add(1);
    }
}

fn ended(tid: u32) -> MemoryError {
    let source = std::io::Error::from_raw_os_error(libc::ESRCH);
    MemoryError::Ptrace { request: "wait", tid, source }
}

/// True if the thread was in a call that the kernel ends with EINTR on any interruption, even one the program cannot
/// know of, and that has no time limit: starting it over is then exact.
fn waits_forever_with_eintr(regs: &Regs) -> bool {
    if ptrace::signed(regs.rax) != -i64::from(libc::EINTR) {
        return false;
    }
    // A negative timeout of these is an `int`.
    let no_limit = regs.r10 & 0xffff_ffff == 0xffff_ffff;
    match ptrace::signed(regs.orig_rax) {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => no_limit,
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => regs.r10 == 0,
        libc::SYS_rt_sigtimedwait => regs.rdx == 0,
        libc::SYS_semop => true,
        _ => false,
    }
}

/// Puts the frame on the thread's stack; `None` if that is not possible.
fn write_frame(tid: u32, saved: &Regs, mask: u64, code: Code, memory: &File) -> Option<u64> {
    let sigreturn = code.sigreturn.filter(|_| frames_allowed() && !threads::has_shadow_stack(tid))?;
    let xstate = ptrace::xstate(tid).ok()?;
    let frame = frame::build(&frame::restarted(saved), mask, &xstate, sigreturn);
    memory.write_all_at(&frame.bytes, frame.at).ok()?;
    Some(frame.at)
}

/// A place where tests let the tracer die.
#[cfg(any(not(test), loom))]
const fn checkpoint(_number: u32) {}

/// False in tests of what happens without.
#[cfg(any(not(test), loom))]
const fn frames_allowed() -> bool {
    true
}

#[cfg(all(test, not(loom)))]
use super::tests::{checkpoint, frames_allowed};
