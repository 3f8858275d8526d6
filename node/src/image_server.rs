//! Servers of disk images: a `qemu-nbd --read-only` for each. It comes with QEMU, so it reads the same chains of images and opens them with QEMU's
//! own locks: an image that somebody writes is not served.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use vmove_memory::{MemoryError, Process};
use vmove_qmp::QemuProcess;
use vmove_qmp::confine::Confinement;
use vmove_qmp::process::{ProcessError, log_in};
use vmove_types::problem::chain;

use crate::blocking::{TaskFailed, run_blocking};

/// The program.
pub const PROGRAM: &str = "qemu-nbd";
/// The name of an image at its server.
pub const EXPORT: &str = "disk";
/// The option for the socket.
const SOCKET: &str = "--socket=";
/// For a server to open its image.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// Between looks whether it has.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// For a server to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// An image that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Its file.
    pub file: PathBuf,
    /// Its format, such as `raw` or `qcow2`.
    pub format: String,
}

/// Why an image is not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The server failed.
    #[error("{program} of {image} {how}: {last}")]
    Server {
        /// The program.
        program: PathBuf,
        /// The image.
        image: PathBuf,
        /// What it did.
        how: &'static str,
        /// The last line of its log.
        last: String,
    },
    /// Starting a server.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Looking at its process.
    #[error(transparent)]
    Look(#[from] MemoryError),
    /// A task broke off.
    #[error(transparent)]
    Task(#[from] TaskFailed),
}

/// A server: its process id, and when the process was started.
pub type Server = (u32, u64);

/// The program that belongs to a QEMU: beside it, or on the `PATH`.
#[must_use]
pub fn find(qemu: &str) -> Option<PathBuf> {
    let beside = Path::new(qemu).canonicalize().ok().filter(|_| qemu.contains('/'));
    let beside = beside.as_deref().and_then(Path::parent).map(Path::to_owned);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = beside.into_iter().chain(std::env::split_paths(&path)).map(|dir| dir.join(PROGRAM));
    folders.find(|program| program.is_file())
}

/// Whether a server lives.
#[must_use]
pub fn lives((pid, started): Server) -> bool {
    Process::reopen(pid, started).is_ok_and(|process| process.alive())
}

/// Starts a server on `socket`, which is in `dir`, and waits until it answers. It outlives the daemon.
///
/// # Errors
/// [`ServeError`]; then there is no server.
pub async fn start(
    program: &Path,
    image: &Image,
    (dir, socket): (&Path, &Path),
    rights: &Confinement,
) -> Result<Server, ServeError> {
    let _ = std::fs::remove_file(socket);
    let argv = command(program, image, socket);
    let log = log_in(dir);
    let (folder, to, rights) = (dir.to_owned(), log.clone(), rights.clone());
    let spawn = move || QemuProcess::spawn(&argv, &folder, &to, &rights);
    let mut starting = run_blocking(move || spawn().map(Starting::new)).await??;
    let server = Arc::clone(&starting.server);
    let failed = |how: &'static str| {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let last = text.lines().next_back().unwrap_or_default().to_owned();
        ServeError::Server { program: program.to_owned(), image: image.file.clone(), how, last }
    };
    let deadline = tokio::time::Instant::now() + OPEN_TIMEOUT;
    while UnixStream::connect(socket).await.is_err() {
        if tokio::time::timeout(LOOK_INTERVAL, server.exited()).await.is_ok() {
            return Err(failed("ended"));
        }
        if tokio::time::Instant::now() > deadline {
            return Err(failed("does not answer"));
        }
    }
    let started = Process::open(server.pid())?.start_time();
    starting.answers = true;
    Ok((server.pid(), started))
}

/// A server that nobody knows of yet: it ends if nobody waits for it any more, also while it is being started.
#[derive(Debug)]
struct Starting {
    server: Arc<QemuProcess>,
    answers: bool,
}

impl Starting {
    fn new(server: QemuProcess) -> Self {
        Self { server: Arc::new(server), answers: false }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if !self.answers {
            self.server.kill_now();
        }
    }
}

fn command(program: &Path, image: &Image, socket: &Path) -> Vec<OsString> {
    let mut at = OsString::from(SOCKET);
    at.push(socket);
    vec![
        program.as_os_str().to_owned(),
        "--read-only".into(),
        "--persistent".into(),
        // As many readers as there are.
        "--shared=0".into(),
        format!("--format={}", image.format).into(),
        format!("--export-name={EXPORT}").into(),
        at,
        "--".into(),
        image.file.as_os_str().to_owned(),
    ]
}

/// Ends whatever serves on a socket in this folder. Servers leave the folder that they were started in, but not their command line.
pub async fn end_in(dir: &Path) {
    let serves = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let sockets = line.split(|byte| *byte == 0).filter_map(|word| word.strip_prefix(SOCKET.as_bytes()));
        sockets.map(|path| Path::new(OsStr::from_bytes(path))).any(|path| path.parent() == Some(dir))
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for pid in pids.into_iter().filter(|pid| serves(*pid)) {
        // Gone already, or the id has been reused before we held it.
        let Some(server) = QemuProcess::adopt(pid, &log_in(dir)).ok().filter(|_| serves(pid)) else {
            continue;
        };
        if let Err(error) = server.quit(None, END_TIMEOUT).await {
            tracing::error!(pid, why = %chain(&error), "a server of images does not end");
        }
    }
}
