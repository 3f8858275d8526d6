//! Running system calls in a thread of another process.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::code::{self, Code};
use super::stopped::StoppedThread;
use super::threads;
use crate::error::{MemoryError, Result};
use crate::process::Process;

/// How long one thread gets to stop before the next is tried. One that sleeps or runs stops in microseconds; one
/// that waits for a disk, or for a page that we have yet to serve, does not.
const STOP_TIMEOUT: Duration = Duration::from_millis(30);
/// How long the search for a thread may take altogether.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one injected call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often to look whether the stopped thread still exists.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// How long to wait for another thread of ours that has the process stopped.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);
/// Results at or above this (as unsigned) are errors.
const MAX_ERRNO: i64 = 4095;

/// One stopped thread of another process, in which system calls can be run. All other threads keep running.
///
/// Dropping it puts the thread back exactly where it was: registers, signal mask, pending signals, and the system
/// call it was in, which goes on with the remaining time.
///
/// A thread of our own does the tracing, because the kernel ties a tracee to the thread that seized it, and because
/// ending that thread is the only way to let go of a tracee that has not stopped. So an `Injector` may be moved
/// between threads.
///
/// While one exists, nothing else in this program may wait for the process by `waitpid(-1)`, or for its stops; wait
/// for the end of a QEMU by its pidfd.
#[derive(Debug)]
pub struct Injector {
    pid: u32,
    tid: u32,
    safe: bool,
    calls: Option<Sender<Call>>,
    tracer: Option<JoinHandle<Result<()>>>,
    late: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Call {
    nr: i64,
    args: [u64; 6],
    deadline: Instant,
    reply: Sender<Result<i64>>,
}

impl Injector {
    /// Finds out ahead of time what [`attach`](Self::attach) would find out first, without stopping anything: for callers whose guest
    /// stands still when they attach. What is found in a library is remembered for all processes that have it.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`]; [`MemoryError::NoSyscallInstruction`]; [`MemoryError::Proc`].
    pub fn prepare(process: &Process) -> Result<()> {
        find(process).map(drop)
    }

    /// Stops one thread of the process, the best suited that can be stopped.
    ///
    /// Takes about 0.2 ms, and stops the thread for as long as the value lives. See `threads.rs` for the choice.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`]; [`MemoryError::AlreadyTraced`] under a debugger;
    /// [`MemoryError::NoThreadStops`] after 2 s; [`MemoryError::NotX86_64`]; [`MemoryError::NoSyscallInstruction`];
    /// [`MemoryError::Ptrace`] with `EPERM` without the rights (the same user, or `CAP_SYS_PTRACE`).
    pub fn attach(process: &Process) -> Result<Self> {
        Self::attach_to(process, &threads::candidates(process)?)
    }

    /// Stops the first of these threads that can be stopped.
    pub(super) fn attach_to(process: &Process, tids: &[u32]) -> Result<Self> {
        let (memory, code) = find(process)?;
        let tids = tids.to_vec();

        let (ready, wait_ready) = mpsc::channel();
        let (calls, receive_calls) = mpsc::channel();
        let late = Arc::new(AtomicBool::new(false));
        let (pid, flag) = (process.pid(), Arc::clone(&late));
        let turn = Turn::wait(pid);
        let tracer = thread::Builder::new()
            .name("vmove-attach".to_owned())
            .spawn(move || {
                let _turn = turn;
                trace(pid, &tids, code, &memory, &ready, &receive_calls, &flag)
            })
            .map_err(|source| MemoryError::system("Starting the tracer thread", source))?;

        match wait_ready.recv() {
            Ok((tid, safe)) => Ok(Self { pid, tid, safe, calls: Some(calls), tracer: Some(tracer), late }),
            Err(_) => Err(match tracer.join() {
                Ok(Err(error)) if process.alive() => error,
                Ok(Err(_)) => MemoryError::ProcessGone { pid },
                _ => MemoryError::system("Tracing", io::Error::other("the tracer thread ended early")),
            }),
        }
    }

    /// Runs a system call in the thread and returns its result.
    ///
    /// Signals of the thread are blocked during the call.
    ///
    /// # Errors
    /// [`MemoryError::Remote`] with the call's own error; [`MemoryError::InjectionTimeout`] if it takes longer than
    /// 10 s (the thread is put back when the call returns); [`MemoryError::ProcessGone`].
    pub fn syscall(&mut self, nr: i64, args: [u64; 6]) -> Result<u64> {
        let wait = self.start(nr, args)?;
        loop {
            if let Some(result) = self.poll(&wait, nr, Duration::from_millis(100))? {
                return Ok(result);
            }
        }
    }

    /// As [`Self::syscall`], for a call that waits for something that we must do: runs `meanwhile` again and again
    /// until the call returns.
    ///
    /// # Errors
    /// As [`Self::syscall`], and those of `meanwhile`.
    pub fn syscall_while(
        &mut self,
        nr: i64,
        args: [u64; 6],
        mut meanwhile: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        let wait = self.start(nr, args)?;
        loop {
            meanwhile()?;
            if let Some(result) = self.poll(&wait, nr, Duration::from_micros(50))? {
                return Ok(result);
            }
        }
    }

    /// The stopped thread.
    #[must_use]
    pub const fn thread(&self) -> u32 {
        self.tid
    }

    /// True if our death in the middle of a call would leave the process unharmed. It nearly always would; not where
    /// no signal-return code was found, or the thread uses a shadow stack.
    #[must_use]
    pub const fn survives_our_death(&self) -> bool {
        self.safe
    }

    /// Puts the thread back, as dropping does, and says whether that worked.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`] if the process ended meanwhile; [`MemoryError::Ptrace`].
    pub fn release(mut self) -> Result<()> {
        self.end()
    }

    fn start(&self, nr: i64, args: [u64; 6]) -> Result<Receiver<Result<i64>>> {
        let (reply, wait) = mpsc::channel();
        let call = Call { nr, args, deadline: Instant::now() + CALL_TIMEOUT, reply };
        let sent = self.calls.as_ref().map(|calls| calls.send(call));
        match sent {
            Some(Ok(())) => Ok(wait),
            _ => Err(MemoryError::ProcessGone { pid: self.pid }),
        }
    }

    fn poll(&self, wait: &Receiver<Result<i64>>, nr: i64, timeout: Duration) -> Result<Option<u64>> {
        match wait.recv_timeout(timeout) {
            Ok(Ok(result)) if (-MAX_ERRNO..0).contains(&result) => {
                let errno = i32::try_from(-result).unwrap_or(libc::EINVAL);
                let source = io::Error::from_raw_os_error(errno);
                Err(MemoryError::Remote { what: call_name(nr), pid: self.pid, source })
            }
            Ok(Ok(result)) => Ok(Some(super::ptrace::unsigned(result))),
            Ok(Err(MemoryError::Ptrace { source, .. })) if source.raw_os_error() == Some(libc::ESRCH) => {
                Err(MemoryError::ProcessGone { pid: self.pid })
            }
            Ok(Err(error)) => Err(error),
            Err(mpsc::RecvTimeoutError::Timeout) if self.late.load(Ordering::Acquire) => {
                let waited_ms = u64::try_from(CALL_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
                Err(MemoryError::InjectionTimeout { tid: self.tid, nr, waited_ms })
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(MemoryError::ProcessGone { pid: self.pid }),
        }
    }

    fn end(&mut self) -> Result<()> {
        self.calls = None;
        let Some(tracer) = self.tracer.take() else { return Ok(()) };
        if self.late.load(Ordering::Acquire) {
            // It restores the thread when the call returns; nobody should wait for that.
            return Ok(());
        }
        match tracer.join() {
            Ok(Err(MemoryError::Ptrace { source, .. })) if source.raw_os_error() == Some(libc::ESRCH) => {
                Err(MemoryError::ProcessGone { pid: self.pid })
            }
            Ok(result) => result,
            Err(_) => Err(MemoryError::system("Tracing", io::Error::other("the tracer thread panicked"))),
        }
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(pid = self.pid, %error, "letting go of a process");
        }
    }
}

/// The right to trace a process: a process can have one tracer, and work on one guest may overlap (what a move leaves to be done, and
/// a fork right after it).
struct Turn(u32);

static TRACED: (Mutex<BTreeSet<u32>>, Condvar) = (Mutex::new(BTreeSet::new()), Condvar::new());

impl Turn {
    /// Waits for the others. After [`TURN_TIMEOUT`] it proceeds, so that the kernel's error shows the obstacle.
    fn wait(pid: u32) -> Self {
        let (traced, freed) = &TRACED;
        let all = traced.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = freed.wait_timeout_while(all, TURN_TIMEOUT, |all| all.contains(&pid));
        waited.unwrap_or_else(PoisonError::into_inner).0.insert(pid);
        Self(pid)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (traced, freed) = &TRACED;
        traced.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        freed.notify_all();
    }
}

/// Opens the memory of the process and finds instructions to use. A process that is just being started may have none.
fn find(process: &Process) -> Result<(File, Code)> {
    let path = process.path("mem");
    let mut attempts = 0;
    loop {
        // Again each time: what is opened is the address space of the program that runs now.
        let memory = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(memory) => memory,
            Err(source) if process.alive() => return Err(MemoryError::Proc { path, source }),
            Err(_) => return Err(MemoryError::ProcessGone { pid: process.pid() }),
        };
        attempts += 1;
        match code::find(process, &process.maps()?, &memory) {
            Err(MemoryError::NoSyscallInstruction { .. }) if attempts < 50 => {
                thread::sleep(Duration::from_millis(2));
            }
            result => return Ok((memory, result?)),
        }
    }
}

/// The tracer thread: stops one of `tids`, says so, makes the calls, puts the thread back.
fn trace(
    pid: u32,
    tids: &[u32],
    code: Code,
    memory: &File,
    ready: &Sender<(u32, bool)>,
    calls: &Receiver<Call>,
    late: &AtomicBool,
) -> Result<()> {
    let mut thread = stop_one(pid, tids, code, memory)?;
    if !thread.cleans_up_after_itself() {
        tracing::warn!(pid, "no way to make an injected call clean up after itself");
    }
    if ready.send((thread.tid(), thread.cleans_up_after_itself())).is_err() {
        return thread.release();
    }
    loop {
        match calls.recv_timeout(ALIVE_CHECK_INTERVAL) {
            Ok(call) => {
                // A failed send means that the caller gave up waiting; the next receive then ends the loop.
                let _ = call.reply.send(thread.syscall(call.nr, call.args, call.deadline, late));
            }
            // A tracee that was killed must be taken note of, or its process stays a zombie that nobody can reap.
            Err(mpsc::RecvTimeoutError::Timeout) => thread.check()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return thread.release(),
        }
    }
}

fn stop_one(pid: u32, tids: &[u32], code: Code, memory: &File) -> Result<StoppedThread> {
    let begin = Instant::now();
    let mut late: Vec<u32> = Vec::new();
    let mut refused = None;
    for &tid in tids {
        let deadline = Instant::now() + STOP_TIMEOUT;
        match StoppedThread::seize(tid).and_then(|()| StoppedThread::take(tid, code, memory, deadline)) {
            Ok(Some(thread)) => return Ok(thread),
            Ok(None) => late.push(tid),
            // This thread has ended, or is traced, or we lack the rights.
            Err(error @ MemoryError::Ptrace { .. }) => {
                if let Some(tracer) = threads::tracer_of(tid) {
                    return Err(MemoryError::AlreadyTraced { pid, tracer });
                }
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
        if begin.elapsed() > SEARCH_TIMEOUT {
            break;
        }
    }
    // None was quick. On a machine with too much to do, any of them may still come.
    while !late.is_empty() && begin.elapsed() < SEARCH_TIMEOUT {
        for &tid in &late {
            if let Ok(Some(thread)) = StoppedThread::take(tid, code, memory, Instant::now()) {
                return Ok(thread);
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    if let Some(error) = refused.filter(|_| late.is_empty()) {
        return Err(error);
    }
    let waited_ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
    Err(MemoryError::NoThreadStops { pid, threads: tids.len(), waited_ms })
}

const fn call_name(nr: i64) -> &'static str {
    match nr {
        libc::SYS_userfaultfd => "userfaultfd",
        libc::SYS_madvise => "madvise",
        libc::SYS_close => "close",
        libc::SYS_ioctl => "ioctl",
        libc::SYS_mmap => "mmap",
        libc::SYS_mremap => "mremap",
        libc::SYS_munmap => "munmap",
        libc::SYS_mlock => "mlock",
        libc::SYS_dup3 => "dup3",
        libc::SYS_socketpair => "socketpair",
        libc::SYS_recvmsg => "recvmsg",
        libc::SYS_getpid => "getpid",
        _ => "An injected system call",
    }
}
