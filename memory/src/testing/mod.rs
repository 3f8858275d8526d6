//! A process to experiment on: this test binary, started again with other orders.
//!
//! The child runs the ignored test `testing::child_main` (or `child_main` in an integration test), which does what
//! `VMOVE_TEST_CHILD` says: see [`child`].
#![allow(dead_code, unsafe_code, reason = "shared by several test binaries, each of which uses a part")]

pub mod child;
pub mod counting;
pub mod obey;
pub mod qemu;
pub mod ram;
pub mod registers;
pub mod server;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Words of the status file, which child and parent share.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// Set by the parent: end.
    Stop,
    /// Thread id of the thread under test.
    Tid,
    /// Rounds done.
    Rounds,
    /// System calls that ended with EINTR though no handler had run.
    WrongEintr,
    /// Registers or stack found changed.
    Corrupted,
    /// Results or times that cannot be right.
    Wrong,
    /// Signals handled.
    Signals,
    /// Longest time of a timed call, in microseconds.
    LongestMicros,
    /// System calls that ended with EINTR after a handler had run.
    RightEintr,
}

/// A running child. Killed on drop.
pub struct Target {
    pub child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    status: File,
    _dir: tempfile::TempDir,
}

impl Target {
    /// Starts a child that does `role`, and waits until it is under way.
    pub fn start(role: &str) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let path = dir.path().join("status");
        let status = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .expect("status file");
        status.set_len(4096).expect("status file");
        let mut child = command(child_main(), role, &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // The harness prints lines of its own; ours begin with @.
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, reply)) = line.split_once('@') {
                    let _ = send.send(reply.to_owned());
                }
            }
        });
        let target = Self { stdin: child.stdin.take(), child, lines, status, _dir: dir };
        let deadline = Instant::now() + Duration::from_secs(20);
        while target.word(Word::Tid) == 0 {
            assert!(Instant::now() < deadline, "the child did not start");
            std::thread::sleep(Duration::from_millis(2));
        }
        target
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn tid(&self) -> u32 {
        u32::try_from(self.word(Word::Tid)).expect("a thread id")
    }

    pub fn word(&self, word: Word) -> u64 {
        let mut bytes = [0; 8];
        self.status.read_exact_at(&mut bytes, word as u64 * 8).expect("status");
        u64::from_ne_bytes(bytes)
    }

    pub fn set_word(&self, word: Word, value: u64) {
        self.status.write_all_at(&value.to_ne_bytes(), word as u64 * 8).expect("status");
    }

    /// Sends a line to the child's standard input.
    pub fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("open");
        writeln!(stdin, "{line}").and_then(|()| stdin.flush()).expect("child reads");
    }

    /// Sends raw bytes to the child's standard input.
    pub fn feed(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().expect("open");
        stdin.write_all(bytes).and_then(|()| stdin.flush()).expect("child reads");
    }

    /// The child's next reply, `None` if it says nothing for that long.
    pub fn reply_within(&self, timeout: Duration) -> Option<String> {
        self.lines.recv_timeout(timeout).ok()
    }

    /// Sends a command and waits for its reply.
    pub fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.reply_within(Duration::from_secs(10)).unwrap_or_else(|| panic!("no reply to {line:?}"))
    }

    /// Asks the child to end, and returns whether it did so without complaint.
    pub fn finish(mut self) -> bool {
        self.set_word(Word::Stop, 1);
        self.stdin = None;
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("our child") {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This test binary, to run only the ignored test `name`, which plays `role`.
pub fn command(name: &str, role: &str, status: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("our binary"));
    command
        .args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .env("VMOVE_TEST_CHILD", role)
        .env("VMOVE_TEST_STATUS", status);
    command
}

/// The path of `child_main` in this test binary.
fn child_main() -> &'static str {
    let path = concat!(module_path!(), "::child::child_main");
    path.split_once("::").map_or(path, |(_, rest)| rest)
}
