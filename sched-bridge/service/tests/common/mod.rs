//! A `vbridged` of a test.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use test_servers::killed_with_this_thread;

/// However busy the machine is, what must happen has happened by then.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A bridge with a store of its own. Killed when dropped, and with the test.
pub struct Vbridged {
    process: Child,
    folder: tempfile::TempDir,
}

impl Vbridged {
    /// Starts it with further arguments, and waits until it answers.
    pub fn start(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = format!("redb:{}", folder.path().join("state.redb").display());
        let process = killed_with_this_thread(Path::new(env!("CARGO_BIN_EXE_vbridged")))
            .args(["--store", &store, "--control"])
            .arg(folder.path().join("c.sock"))
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut bridge = Self { process, folder };
        let start = Instant::now();
        while UnixStream::connect(bridge.socket()).is_err() {
            assert!(bridge.process.try_wait().unwrap().is_none(), "vbridged has ended: {}", bridge.log());
            assert!(start.elapsed() < DEADLINE, "vbridged does not answer: {}", bridge.log());
            std::thread::sleep(Duration::from_millis(25));
        }
        bridge
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("c.sock")
    }

    /// What it has written to standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

impl Drop for Vbridged {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
