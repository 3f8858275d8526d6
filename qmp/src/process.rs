//! QEMU processes: started so that they outlive us, waited for, ended.
//!
//! A QEMU holds a guest; a daemon that restarts must find it alive. So a QEMU gets a session of its own (`setsid(1)`, which
//! `exec`s in place and keeps the process id), its output goes to a file, and dropping a [`QemuProcess`] ends nothing.

use std::{
    ffi::OsString,
    fs::OpenOptions,
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::Arc,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags},
    process::{Pid, PidfdFlags, Signal},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
    time::Instant,
};

use crate::confine::{Confinement, LockedMemory};
use crate::{Client, CommandLine, QmpError, log};

/// Time a QEMU gets to leave after SIGTERM before SIGKILL.
const TERM_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks at a process whose end nobody tells us.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What can go wrong with a QEMU process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// No argument vector.
    #[error(
        "Expected a QEMU command line, found an empty one: give the program first, such as qemu-system-x86_64"
    )]
    NoProgram,
    /// It could not be started.
    #[error(
        "Could not start {program:?} in {folder}: check that QEMU is installed and that setsid, setpriv and prlimit (util-linux) are in PATH"
    )]
    Start {
        /// Program that was to run.
        program: OsString,
        /// Its working directory.
        folder: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Its log file.
    #[error("Could not open the log {path}")]
    Log {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It ended before its monitor answered.
    #[error("QEMU ended before its monitor answered; the end of {log} says:\n{tail}")]
    Died {
        /// Its log file.
        log: PathBuf,
        /// Last lines of the log.
        tail: String,
    },
    /// Its monitor did not answer.
    #[error("QEMU (pid {pid}) did not open its monitor within {waited:?}; the end of {log} says:\n{tail}")]
    NoMonitor {
        /// Its process id.
        pid: u32,
        /// The deadline that passed.
        waited: Duration,
        /// Its log file.
        log: PathBuf,
        /// Last lines of the log.
        tail: String,
        /// Why the last attempt failed.
        #[source]
        source: Box<QmpError>,
    },
    /// There is no such process.
    #[error("No process {pid}: it has ended")]
    NoProcess {
        /// The process id.
        pid: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It does not end.
    #[error(
        "QEMU (pid {pid}) still exists {waited:?} after SIGKILL: it hangs in the kernel, see /proc/{pid}/stack"
    )]
    Unkillable {
        /// Its process id.
        pid: u32,
        /// How long it was waited for.
        waited: Duration,
    },
}

/// A QEMU process. Dropping this ends nothing. Clones name the same process.
#[derive(Clone, Debug)]
pub struct QemuProcess {
    pid: u32,
    /// Names the process also when its id has been reused; readable once it has ended.
    pidfd: Arc<OwnedFd>,
    /// Of a child of ours: turns true when it has been reaped.
    reaped: Option<watch::Receiver<bool>>,
    log: PathBuf,
}

impl QemuProcess {
    /// Starts `argv` in `folder`, standard input from `/dev/null`, output appended to `log`. The process is in a
    /// session of its own, runs with the rights of `confinement`, unless the command line says otherwise, and is not protected from the
    /// out-of-memory killer as we may be ([`oom`](crate::oom)). It inherits no descriptor
    /// of ours that is close-on-exec, as all that Rust opens are. Must be called in a tokio runtime, which reaps it.
    ///
    /// # Errors
    /// [`ProcessError::NoProgram`], [`ProcessError::Log`], [`ProcessError::Start`]. A program that does not exist is
    /// noticed later, by [`QemuProcess::wait_qmp`].
    pub fn spawn(
        argv: &[OsString],
        folder: &Path,
        log: &Path,
        confinement: &Confinement,
    ) -> Result<Self, ProcessError> {
        Self::spawn_in(argv, folder, log, confinement, None)
    }

    /// The same, in a control group (a folder of cgroup 2), if one is given. If it cannot be entered, the process is where we are, and `log`
    /// says so.
    ///
    /// # Errors
    /// As [`QemuProcess::spawn`].
    pub fn spawn_in(
        argv: &[OsString],
        folder: &Path,
        log: &Path,
        confinement: &Confinement,
        group: Option<&Path>,
    ) -> Result<Self, ProcessError> {
        let program = argv.first().ok_or(ProcessError::NoProgram)?;
        // What cannot be read is QEMU's to refuse.
        let line = CommandLine::parse(argv.to_vec()).ok();
        let confinement =
            line.as_ref().map_or_else(|| confinement.clone(), |line| line.confined(confinement));
        let locked = line.map_or(LockedMemory::Usual, |line| line.locked_memory());
        let log_error = |source| ProcessError::Log { path: log.to_owned(), source };
        let out = crate::log::open(OpenOptions::new().create(true).append(true), log).map_err(log_error)?;
        let err = out.try_clone().map_err(log_error)?;
        let failed =
            |source| ProcessError::Start { program: program.clone(), folder: folder.to_owned(), source };
        let child = confinement
            .command("setsid".as_ref(), locked, group)
            .arg("--")
            .args(argv)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(failed)?;
        let pid = child.id();
        let this = Self::watched(pid, Some(child), log).map_err(failed)?;
        let user = confinement.user.as_ref().map_or(0, |user| user.uid);
        tracing::info!(pid, program = ?program, folder = %folder.display(), user, "QEMU started");
        Ok(this)
    }

    /// Takes in a QEMU that someone else started, or that an earlier life of ours did.
    ///
    /// # Errors
    /// [`ProcessError::NoProcess`].
    pub fn adopt(pid: u32, log: &Path) -> Result<Self, ProcessError> {
        Self::watched(pid, None, log).map_err(|source| ProcessError::NoProcess { pid, source })
    }

    /// Holds the process. A child of ours is reaped by a task that sleeps until it ends; that of another costs nothing.
    fn watched(pid: u32, child: Option<Child>, log: &Path) -> io::Result<Self> {
        let pidfd = Arc::new(open_pidfd(pid)?);
        let reaped = child.map(|child| reap(child, &pidfd)).transpose()?;
        Ok(Self { pid, pidfd, reaped, log: log.to_owned() })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its log file.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Whether it has not ended.
    #[must_use]
    pub fn alive(&self) -> bool {
        !readable(&self.pidfd, Some(Duration::ZERO))
    }

    /// Ends when the process has ended and, if it is our child, has been reaped.
    pub async fn exited(&self) {
        if let Some(reaped) = &self.reaped
            && reaped.clone().wait_for(|reaped| *reaped).await.is_ok()
        {
            return;
        }
        // Not our child, or the runtime that was to reap it is gone.
        if let Err(error) = ended(&self.pidfd).await {
            // Out of descriptors, most likely.
            tracing::warn!(pid = self.pid, %error, "looking again and again whether QEMU has ended");
            while self.alive() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }

    /// Connects to its monitor as soon as it is there.
    ///
    /// # Errors
    /// [`ProcessError::Died`] or [`ProcessError::NoMonitor`], both with the end of the log.
    pub async fn wait_qmp(&self, socket: &Path, deadline: Duration) -> Result<Client, ProcessError> {
        let until = Instant::now() + deadline;
        let mut pause = Duration::from_millis(1);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let error = match Client::connect(socket, left.max(Duration::from_millis(10))).await {
                Ok(client) => return Ok(client),
                Err(error) => error,
            };
            if tokio::time::timeout(pause, self.exited()).await.is_ok() {
                return Err(ProcessError::Died { log: self.log.clone(), tail: self.log_tail() });
            }
            if Instant::now() >= until {
                return Err(ProcessError::NoMonitor {
                    pid: self.pid,
                    waited: deadline,
                    log: self.log.clone(),
                    tail: self.log_tail(),
                    source: Box::new(error),
                });
            }
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Asks QEMU to end (`quit`), then SIGTERM, then SIGKILL. `client` is its monitor, if there is one.
    ///
    /// # Errors
    /// [`ProcessError::Unkillable`].
    pub async fn quit(&self, client: Option<&Client>, deadline: Duration) -> Result<(), ProcessError> {
        if let Some(client) = client {
            // The reply may be lost in QEMU's end; whether it ends is all that counts.
            let asked = client.execute_raw("quit", serde_json::Value::Null, deadline).await;
            let refused = matches!(asked, Err(QmpError::Refused { .. }));
            if !refused && tokio::time::timeout(deadline, self.exited()).await.is_ok() {
                return Ok(());
            }
        }
        self.signal(Signal::TERM);
        if tokio::time::timeout(TERM_TIMEOUT, self.exited()).await.is_ok() {
            return Ok(());
        }
        self.kill().await
    }

    /// Ends it at once by SIGKILL.
    ///
    /// # Errors
    /// [`ProcessError::Unkillable`].
    pub async fn kill(&self) -> Result<(), ProcessError> {
        let waited = Duration::from_secs(10);
        self.signal(Signal::KILL);
        tokio::time::timeout(waited, self.exited())
            .await
            .map_err(|_| ProcessError::Unkillable { pid: self.pid, waited })
    }

    /// Sends SIGKILL and does not wait, for places that cannot.
    pub fn kill_now(&self) {
        self.signal(Signal::KILL);
    }

    /// The last lines of its log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        log::tail(&self.log).unwrap_or_else(|error| format!("(log not readable: {error})"))
    }

    fn signal(&self, signal: Signal) {
        // ESRCH: it has ended, which is what is wanted.
        if let Err(error) = rustix::process::pidfd_send_signal(&*self.pidfd, signal) {
            tracing::debug!(pid = self.pid, %error, "could not signal QEMU");
        }
    }
}

/// Where the output of the QEMU of a VM goes, in the VM's folder.
#[must_use]
pub fn log_in(vm_dir: &Path) -> PathBuf {
    vm_dir.join("qemu.log")
}

/// Ends what [`QemuProcess::spawn`] had started in a VM's folder with the log of [`log_in`], by SIGKILL, and waits until it has
/// ended: so is a QEMU found whose id nobody lived to write down. Others that work in the folder, such as a shell, are left
/// alone. Gives the ids of the processes that were ended.
///
/// # Errors
/// [`ProcessError::Unkillable`].
pub async fn end_started_in(vm_dir: &Path) -> Result<Vec<u32>, ProcessError> {
    let log = log_in(vm_dir);
    let mut ended = Vec::new();
    for pid in started_in(vm_dir, &log) {
        // Gone already, or not ours to look at.
        let Ok(process) = QemuProcess::adopt(pid, &log) else { continue };
        // The id may have been reused before the pidfd held it.
        if was_started_in(pid, vm_dir, &log) {
            process.kill().await?;
            ended.push(pid);
        }
    }
    Ok(ended)
}

/// Whether a process works in this folder and writes to the log in it, as one that [`QemuProcess::spawn`] started there.
#[must_use]
pub fn works_in(vm_dir: &Path) -> bool {
    started_in(vm_dir, &log_in(vm_dir)).next().is_some()
}

fn started_in(folder: &Path, log: &Path) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(move |pid| was_started_in(*pid, folder, log))
}

fn was_started_in(pid: u32, folder: &Path, log: &Path) -> bool {
    same_file(format!("/proc/{pid}/cwd"), folder) && same_file(format!("/proc/{pid}/fd/1"), log)
}

/// By what they are, not by how they are named: a symlink may lead there (`/var/run`).
fn same_file(one: impl AsRef<Path>, other: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let of_one = identity(one.as_ref());
    of_one.is_some() && of_one == identity(other)
}

/// Reaps a child when it has ended. Must be called in a runtime.
fn reap(mut child: Child, pidfd: &OwnedFd) -> io::Result<watch::Receiver<bool>> {
    let pidfd = watchable(pidfd)?;
    let (sender, reaped) = watch::channel(false);
    tokio::spawn(async move {
        // An error: the runtime ends. To wait now would hold it up for as long as QEMU lives.
        if pidfd.readable().await.is_ok() {
            // It has ended, so this returns at once.
            let _ = child.wait();
            sender.send_replace(true);
        }
    });
    Ok(reaped)
}

/// Ends when the process has.
async fn ended(pidfd: &OwnedFd) -> io::Result<()> {
    watchable(pidfd)?.readable().await.map(drop)
}

/// A pidfd as the runtime watches it: a descriptor of its own, since each can be watched once only.
#[expect(
    deprecated,
    reason = "the new way is unsafe for the sake of types that close their descriptor early, which this one does not"
)]
fn watchable(pidfd: &OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd.try_clone()?, Interest::READABLE)
}

fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Whether `fd` is readable within `timeout` (`None`: for ever).
fn readable(fd: &OwnedFd, timeout: Option<Duration>) -> bool {
    let timeout = timeout.and_then(|time| rustix::event::Timespec::try_from(time).ok());
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    // EINTR says nothing about the descriptor.
    matches!(rustix::event::poll(&mut fds, timeout.as_ref()), Ok(1..))
}
