//! Runs an operator's program: within a time, in a process group that ends with it, with the end of its output kept.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Of what a program says, so much of the end is kept.
const KEPT: usize = 16 << 10;
/// A program that is told to end may put its things in order for so long.
const GRACE: Duration = Duration::from_secs(1);
/// What it has started may hold its output open for so long after its end.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// A shell ends with these if it cannot start a program: see [`vmove_qmp::oom::command`].
const NOT_STARTED: [i32; 2] = [126, 127];

/// A program that is about to be run.
#[derive(Debug)]
pub struct Program<'a> {
    /// Its path.
    pub path: &'a Path,
    /// Its arguments.
    pub arguments: &'a [String],
    /// Variables beside the daemon's.
    pub environment: Vec<(String, String)>,
    /// For its standard input.
    pub input: Vec<u8>,
    /// It is ended, with all that it has started, when it takes longer.
    pub time_limit: Duration,
}

/// How a program has ended.
#[derive(Debug)]
pub struct Ended {
    /// It ended well.
    pub success: bool,
    /// `exit status: 3`.
    pub status: ExitStatus,
    /// The end of its output: both streams, as they came.
    pub output: Output,
}

/// The end of what a program has said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// At most 16 KiB.
    kept: Vec<u8>,
    /// All of it.
    bytes: u64,
}

impl Output {
    /// Its last line that is not empty, at most 500 characters of it.
    #[must_use]
    pub fn last_line(&self) -> String {
        let text = String::from_utf8_lossy(&self.kept);
        let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        line.chars().filter(|c| !c.is_control()).take(500).collect()
    }

    /// All that was kept.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }

    /// Bytes that were not kept.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.bytes - self.kept.len() as u64
    }

    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.kept.extend_from_slice(bytes);
        let over = self.kept.len().saturating_sub(KEPT);
        self.kept.drain(..over);
    }
}

/// Why a program gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It cannot be started.
    #[error("could not be started ({source}): expected an executable program at {}", path.display())]
    Start {
        /// Its path.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The shell that lowers its protection could not start it.
    #[error("could not be started ({said}): expected an executable program at {}", path.display())]
    NotStarted {
        /// Its path.
        path: PathBuf,
        /// What the shell says.
        said: String,
    },
    /// Its time is up.
    #[error("did not end within {limit:?} and was ended, with all that it had started")]
    TimedOut {
        /// The time.
        limit: Duration,
    },
    /// The hook has none.
    #[error("there is no program to run")]
    NoProgram,
    /// It was killed by somebody else, or crashed.
    #[error("was ended by a signal ({status}): {said}")]
    Killed {
        /// Which one.
        status: ExitStatus,
        /// Its last line.
        said: String,
    },
}

/// A process group that is ended when this is dropped, while its leader is not reaped: its number is nobody else's then.
struct Group(Option<Pid>);

impl Group {
    fn signal(&self, signal: Signal) {
        if let Some(leader) = self.0 {
            // Nobody may be left in it.
            let _ = kill_process_group(leader, signal);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

impl Program<'_> {
    /// Runs it to its end. Dropping the future ends the program.
    ///
    /// # Errors
    /// [`ProgramError`]; a program that ends with an exit code is none, except those by which a shell says that it found no program.
    pub async fn run(self) -> Result<Ended, ProgramError> {
        let started = |source| ProgramError::Start { path: self.path.to_owned(), source };
        let mut command = Command::from(vmove_qmp::oom::command(self.path));
        command.args(self.arguments).envs(self.environment.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        // If this future is dropped, `group` goes before `child`: the leader is not reaped yet, so the number is still its own.
        let mut child = command.spawn().map_err(started)?;
        let leader = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let group = Group(leader);
        let input = tokio::spawn(feed(child.stdin.take(), self.input));
        let (sender, output) = tokio::sync::mpsc::channel(16);
        let readers = [listen(child.stdout.take(), sender.clone()), listen(child.stderr.take(), sender)];
        let output = tokio::spawn(gather(output));
        let in_time = tokio::time::timeout(self.time_limit, ended(leader)).await.is_ok();
        if !in_time {
            group.signal(Signal::TERM);
            let _ = tokio::time::timeout(GRACE, ended(leader)).await;
        }
        drop(group);
        let status = child.wait().await.map_err(started)?;
        input.abort();
        let output = last_words(readers, output).await;
        if !in_time {
            return Err(ProgramError::TimedOut { limit: self.time_limit });
        }
        match status.code() {
            None => Err(ProgramError::Killed { status, said: output.last_line() }),
            Some(code) if NOT_STARTED.contains(&code) => {
                Err(ProgramError::NotStarted { path: self.path.to_owned(), said: output.last_line() })
            }
            Some(code) => Ok(Ended { success: code == 0, status, output }),
        }
    }
}

/// Waits for the end of a process without reaping it.
async fn ended(leader: Option<Pid>) {
    let watched = leader.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    #[expect(
        deprecated,
        reason = "the new way is unsafe for the sake of types that close their descriptor early, which this one does not"
    )]
    let watched = watched.map(|descriptor| AsyncFd::with_interest(descriptor, Interest::READABLE));
    match watched {
        Some(Ok(descriptor)) => drop(descriptor.readable().await),
        // Without it nobody knows: the time limit ends the wait.
        _ => std::future::pending().await,
    }
}

async fn feed(stdin: Option<tokio::process::ChildStdin>, bytes: Vec<u8>) {
    if let Some(mut stdin) = stdin {
        // It need not read what it is told.
        let _ = stdin.write_all(&bytes).await;
    }
}

/// Reads a stream to its end, so that the program never waits for us.
fn listen(
    stream: Option<impl AsyncRead + Unpin + Send + 'static>,
    into: tokio::sync::mpsc::Sender<Vec<u8>>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let Some(mut stream) = stream else { return };
        let mut chunk = vec![0; 8 << 10];
        while let Ok(count @ 1..) = stream.read(&mut chunk).await {
            if into.send(chunk[..count].to_vec()).await.is_err() {
                return;
            }
        }
    })
}

async fn gather(mut from: tokio::sync::mpsc::Receiver<Vec<u8>>) -> Output {
    let mut output = Output::default();
    while let Some(bytes) = from.recv().await {
        output.add(&bytes);
    }
    output
}

/// What came until the streams closed, or until nobody waits any longer.
async fn last_words(readers: [JoinHandle<()>; 2], output: JoinHandle<Output>) -> Output {
    let stop: Vec<_> = readers.iter().map(JoinHandle::abort_handle).collect();
    let closed = async {
        for reader in readers {
            let _ = reader.await;
        }
    };
    let _ = tokio::time::timeout(LAST_WORDS, closed).await;
    stop.iter().for_each(tokio::task::AbortHandle::abort);
    output.await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell<'a>(arguments: &'a [String], limit: Duration) -> Program<'a> {
        Program {
            path: Path::new("/bin/sh"),
            arguments,
            environment: vec![("VMOVE_VM".to_owned(), "web".to_owned())],
            input: b"{\"vm\":\"web\"}".to_vec(),
            time_limit: limit,
        }
    }

    fn script(text: &str) -> [String; 2] {
        ["-c".to_owned(), text.to_owned()]
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_program_is_told_and_heard() {
        let arguments = script("echo to stderr >&2; echo \"$VMOVE_VM $(cat)\"; exit 3");
        let ended = shell(&arguments, LONG).run().await.unwrap();
        assert!(!ended.success && ended.status.code() == Some(3));
        assert!(
            ended.output.text().contains("web {\"vm\":\"web\"}") && ended.output.text().contains("to stderr")
        );
    }

    #[tokio::test]
    async fn of_megabytes_the_end_is_kept_and_a_program_that_does_not_read_is_not_waited_for() {
        let arguments = script("head -c 20000000 /dev/zero | tr '\\0' x; echo; echo the end");
        let program = Program { input: vec![b'x'; 1 << 20], ..shell(&arguments, LONG) };
        let ended = program.run().await.unwrap();
        assert!(ended.success);
        assert_eq!(ended.output.last_line(), "the end");
        assert!(ended.output.text().len() <= KEPT && ended.output.left_out() > 19_000_000);
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_ended_with_all_that_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("pids");
        // Neither heeds SIGTERM.
        let text = format!(
            "trap '' TERM; sh -c 'trap \"\" TERM; echo $$ >> {0}; while :; do sleep 1; done' & echo $$ >> {0}; wait",
            told.display()
        );
        let arguments = script(&text);
        let begun = Instant::now();
        let error = shell(&arguments, Duration::from_millis(700)).run().await.unwrap_err();
        assert!(error.to_string().contains("did not end within 700ms"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        let pids = std::fs::read_to_string(&told).unwrap();
        assert_eq!(pids.lines().count(), 2, "{pids}");
        let until = Instant::now() + Duration::from_secs(10);
        while pids.lines().any(alive) {
            assert!(Instant::now() < until, "one of {pids} lives on");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn alive(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    }

    #[tokio::test]
    async fn what_a_program_leaves_behind_is_ended_and_does_not_hold_its_end_up() {
        let begun = Instant::now();
        let arguments = script("sleep 600 & echo $!");
        let ended = shell(&arguments, LONG).run().await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        let pid = ended.output.last_line();
        let until = Instant::now() + Duration::from_secs(10);
        while alive(&pid) {
            assert!(Instant::now() < until, "{pid} lives on");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn a_program_that_is_missing_is_named() {
        let program = Program { path: Path::new("/not/there"), ..shell(&[], LONG) };
        let error = program.run().await.unwrap_err().to_string();
        assert!(error.starts_with("could not be started") && error.contains("/not/there"), "{error}");
    }

    #[tokio::test]
    async fn a_program_that_is_not_waited_for_any_more_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let told = folder.path().join("pid");
        let arguments = script(&format!("echo $$ > {}; sleep 600", told.display()));
        let running = shell(&arguments, LONG).run();
        tokio::time::timeout(Duration::from_secs(2), running).await.unwrap_err();
        let pid = std::fs::read_to_string(&told).unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while alive(pid.trim()) {
            assert!(Instant::now() < until, "{pid} lives on");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
