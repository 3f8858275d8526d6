//! etcd.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::packages::{Missing, killed_with_this_thread, program};
use crate::ports::Ports;

/// Tests may run on a machine that is very busy.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// One etcd of one member, with its data in a folder of its own. Killed when dropped, or when the thread that started it ends.
#[derive(Debug)]
pub struct EtcdServer {
    program: PathBuf,
    folder: TempDir,
    ports: Ports,
    process: Option<Child>,
}

impl EtcdServer {
    /// Starts one.
    ///
    /// # Errors
    /// etcd is not installed.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start() -> Result<Self, Missing> {
        let program = program("etcd").ok_or(Missing("etcd is missing; ./run setup gets it"))?;
        let folder = tempfile::tempdir().expect("a folder");
        let mut server = Self { program, folder, ports: Ports::take(), process: None };
        server.restart();
        Ok(server)
    }

    /// `HOST:PORT` for clients.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.ports.first)
    }

    /// URL for clients.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// Starts it on the data it has, if it is not running, and waits until it answers.
    ///
    /// # Panics
    /// If it does not answer within a minute.
    pub fn restart(&mut self) {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.ports.first + 1));
        let log =
            File::options().create(true).append(true).open(self.folder.path().join("log")).expect("a log");
        let child = killed_with_this_thread(&self.program)
            .args(["--name", "lab", "--log-level", "warn", "--logger", "zap"])
            .arg("--data-dir")
            .arg(self.folder.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("lab={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("etcd starts");
        self.process = Some(child);
        let deadline = Instant::now() + START_TIMEOUT;
        while !self.is_healthy() {
            assert!(Instant::now() < deadline, "etcd does not answer after {START_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether it has a leader and serves reads.
    fn is_healthy(&self) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(self.address())?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains(r#""health":"true""#))
    }

    /// Kills it as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.process.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}
