//! A node in a scratch folder: the real `vmoved`, driven by the real `vmove`.
#![allow(dead_code, reason = "each test program uses its part")]

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub const VMOVED: &str = env!("CARGO_BIN_EXE_vmoved");

/// The command of the same build.
#[track_caller]
pub fn vmove() -> PathBuf {
    let path = Path::new(VMOVED).with_file_name("vmove");
    assert!(path.is_file(), "{} is not there; build it: cargo build -p vmove-cli", path.display());
    path
}

/// What a program ended with.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn of(command: &mut Command) -> Self {
        let output = command.stdin(Stdio::null()).output().unwrap();
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The one JSON object on standard output.
    pub fn json(&self) -> Value {
        let lines: Vec<&str> = self.out.lines().collect();
        assert_eq!(lines.len(), 1, "expected one line of JSON: {self:?}");
        serde_json::from_str(lines[0]).unwrap()
    }

    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }
}

/// A node. Dropped, it takes its daemon, its QEMUs and its mounts with it.
pub struct Node {
    dir: tempfile::TempDir,
    pub listen: SocketAddr,
    extra: Vec<String>,
    environment: Vec<(String, String)>,
    child: Option<Child>,
}

impl Node {
    /// A node without TLS.
    pub fn start() -> Self {
        Self::start_with(&["--insecure"])
    }

    /// A node without TLS whose daemon has these environment variables.
    pub fn start_with_environment(environment: &[(&str, &str)]) -> Self {
        Self::begin(&["--insecure"], environment)
    }

    pub fn start_with(extra: &[&str]) -> Self {
        Self::begin(extra, &[])
    }

    fn begin(extra: &[&str], environment: &[(&str, &str)]) -> Self {
        let dir = tempfile::Builder::new().prefix("vmd").tempdir().unwrap();
        // QEMUs, of a user of their own, pass through it to their files.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
        let mut node = Self {
            dir,
            listen: vmove_skip::free_port(),
            extra: extra.iter().map(|s| (*s).to_owned()).collect(),
            environment: environment
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            child: None,
        };
        node.run();
        node
    }

    pub fn daemon(&self) -> Command {
        let mut command = Command::new(VMOVED);
        command.env("PATH", vmove_skip::path_with_qemus());
        command.args(["--node", "tester", "--listen", &self.listen.to_string()]);
        command.arg("--control").arg(self.control()).arg("--state-dir").arg(self.state());
        command.args(&self.extra).args(vmove_skip::user_of_qemus()).envs(self.environment.iter().cloned());
        command
    }

    /// Starts the daemon and waits until it answers.
    pub fn run(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let child = self.daemon().stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        self.child = Some(child);
        wait("vmoved answers", || UnixStream::connect(self.control()).is_ok());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn control(&self) -> PathBuf {
        self.path("c.sock")
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.as_ref().unwrap().id()).unwrap()
    }

    /// SIGTERM; the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        signal(self.pid(), Signal::TERM);
        self.child.take().unwrap().wait().unwrap().code()
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(vmove());
        command.arg("--control").arg(self.control()).args(args);
        command
    }

    pub fn vmove(&self, args: &[&str]) -> Ended {
        Ended::of(&mut self.command(args))
    }

    /// What `vmove --json` answers, which must succeed.
    #[track_caller]
    pub fn ask(&self, args: &[&str]) -> Value {
        let ended = Ended::of(self.command(&["--json"]).args(args));
        assert_eq!(ended.code, Some(0), "{ended:#?}\n{}", self.log());
        ended.json()
    }

    /// The problem that `vmove --json` ends with.
    #[track_caller]
    pub fn problem(&self, args: &[&str], code: i32) -> Value {
        Ended::of(self.command(&["--json"]).args(args)).expect(code).json()
    }

    /// One request on the control socket: status and body.
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        exchange(UnixStream::connect(self.control()).unwrap(), method, path, body)
    }

    /// One request on the peer port.
    pub fn peer_http(&self, method: &str, path: &str) -> (u16, String) {
        exchange(std::net::TcpStream::connect(self.listen).unwrap(), method, path, "")
    }

    /// Process ids of everything that works in this node's folder.
    pub fn processes(&self) -> Vec<i32> {
        processes_in(self.dir.path())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
        for pid in self.processes() {
            signal(pid, Signal::KILL);
        }
        wait("QEMUs have ended", || self.processes().is_empty());
        for backing in ["thp", "hugetlb-2m", "hugetlb-1g"] {
            let _ = rustix::mount::unmount(
                self.state().join("memory").join(backing),
                rustix::mount::UnmountFlags::DETACH,
            );
        }
    }
}

pub fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

pub fn alive(pid: i32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie has ended.
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn processes_in(dir: &Path) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(dir)) && alive(*pid)
    })
    .collect()
}

/// Waits up to 20 s.
#[track_caller]
pub fn wait(what: &str, mut until: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !until() {
        assert!(Instant::now() < deadline, "waited 20 s in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn exchange(mut stream: impl Read + Write, method: &str, path: &str, body: &str) -> (u16, String) {
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| panic!("no status in {text:?}"));
    (status, body.to_owned())
}

/// An authority and certificates of it.
pub struct Pki {
    dir: tempfile::TempDir,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Pki {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        std::fs::write(dir.path().join("ca.pem"), ca.self_signed(&key).unwrap().pem()).unwrap();
        Self { dir, issuer: rcgen::Issuer::new(ca, key) }
    }

    /// `--tls-*` for a node at 127.0.0.1.
    pub fn flags(&self) -> Vec<String> {
        self.flags_of("node", &[])
    }

    /// The same for a node with this common name, and these DNS names beside its address.
    pub fn flags_of(&self, common: &str, dns: &[&str]) -> Vec<String> {
        let names = std::iter::once(&"127.0.0.1").chain(dns).map(|name| (*name).to_owned());
        let (pem, private) =
            self.issue(common, rcgen::CertificateParams::new(names.collect::<Vec<_>>()).unwrap());
        let text = |path: &Path| path.display().to_string();
        let authority = self.dir.path().join("ca.pem");
        ["--tls-cert", &text(&pem), "--tls-key", &text(&private), "--tls-ca", &text(&authority)]
            .map(str::to_owned)
            .into()
    }

    /// What a client needs that has this common name, for clients only.
    pub fn client(&self, common: &str) -> Shown {
        self.client_as(common, |_| ())
    }

    /// The same, with a certificate that is different.
    pub fn client_as(&self, common: &str, change: impl FnOnce(&mut rcgen::CertificateParams)) -> Shown {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let (cert, key) = self.issue(common, params);
        Shown { ca: self.dir.path().join("ca.pem"), cert, key }
    }

    fn issue(&self, common: &str, mut params: rcgen::CertificateParams) -> (PathBuf, PathBuf) {
        let key = rcgen::KeyPair::generate().unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::CommonName, common);
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let path = |end: &str| self.dir.path().join(format!("{common}.{end}"));
        std::fs::write(path("pem"), cert.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        (path("pem"), path("key"))
    }
}

/// The files of a client with TLS.
#[derive(Debug, Clone)]
pub struct Shown {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Starts a node with certificates of this authority.
pub fn tls_node(pki: &Pki) -> Node {
    let flags = pki.flags();
    Node::start_with(&flags.iter().map(String::as_str).collect::<Vec<_>>())
}
