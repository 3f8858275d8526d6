//! Servers that tests start: etcd and a Slurm cluster, from Debian's packages. `./run setup` unpacks them below `.cache`.
//!
//! Public for the tests and the bench of this package; nothing of the product uses it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::http::Endpoint;
use crate::store::{Etcd, Store};

/// Where `./run setup` unpacks Slurm, munge and etcd.
fn unpacked() -> PathBuf {
    let cache = std::env::var_os("VMOVE_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache"), PathBuf::from);
    cache.join("peers")
}

/// A program of the unpacked packages, or else one that is installed.
fn program(name: &str) -> Option<PathBuf> {
    let root = unpacked();
    let places = [root.join("usr/bin"), root.join("usr/sbin")];
    let path = std::env::var_os("PATH").unwrap_or_default();
    places
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Says on standard error that a test did not run. `VMOVE_NO_SKIP` makes it a failure: nothing may be skipped where all is installed.
///
/// # Panics
/// If `VMOVE_NO_SKIP` is set.
pub fn skip(what: &str) {
    let test = std::thread::current().name().unwrap_or("test").to_owned();
    assert!(std::env::var_os("VMOVE_NO_SKIP").is_none(), "{test} would be skipped: {what}");
    eprintln!("SKIP {test}: {what}; ./run setup gets it");
}

/// Consecutive ports that no other test has while this is there, and that the system gives nobody by itself: a server can be started
/// again on them.
#[derive(Debug)]
pub struct Ports {
    /// The first of them.
    pub first: u16,
    _lock: std::fs::File,
}

/// Ports of one block, and how many blocks there are below those that Linux gives out by itself (32768 and up).
const BLOCK: u16 = 200;
const BLOCKS: u16 = 60;

impl Ports {
    /// Takes a block of 200 ports.
    ///
    /// # Panics
    /// If all are taken.
    #[must_use]
    pub fn take() -> Self {
        use rustix::fs::FlockOperation::NonBlockingLockExclusive;
        let start = u16::try_from(std::process::id() % u32::from(BLOCKS)).unwrap_or(0);
        for turn in 0..BLOCKS {
            let first = 20_000 + (start + turn) % BLOCKS * BLOCK;
            let path = std::env::temp_dir().join(format!("vmove-test-ports-{first}"));
            let lock = std::fs::File::options().create(true).truncate(false).write(true).open(path);
            let Ok(lock) = lock else { continue };
            // What a killed test has left may still listen there.
            let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
            if rustix::fs::flock(&lock, NonBlockingLockExclusive).is_ok() && (first..first + BLOCK).all(free)
            {
                return Self { first, _lock: lock };
            }
        }
        panic!("none of {BLOCKS} blocks of ports from 20000 on is free")
    }
}

/// A command that the kernel kills when the thread that starts it ends: nothing is left of a test that is killed.
#[must_use]
pub fn mortal(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// One etcd of one member, with its data in a folder of its own. Killed when dropped, or when the thread that started it ends.
#[derive(Debug)]
pub struct EtcdServer {
    program: PathBuf,
    folder: tempfile::TempDir,
    ports: Ports,
    process: Option<Child>,
}

impl EtcdServer {
    /// Starts one; says so and gives nothing where etcd is not installed.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start_or_skip() -> Option<Self> {
        let Some(program) = program("etcd") else {
            skip("etcd is missing");
            return None;
        };
        let folder = tempfile::tempdir().expect("a folder");
        let mut server = Self { program, folder, ports: Ports::take(), process: None };
        server.run();
        Some(server)
    }

    /// Where it is.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.first)
    }

    /// A store in it.
    #[must_use]
    pub fn store(&self, prefix: &str) -> Etcd {
        let endpoint = Endpoint::Tcp(format!("127.0.0.1:{}", self.ports.first));
        Etcd::new(vec![endpoint], prefix, Duration::from_secs(5))
    }

    /// Starts it (again), with the data it has.
    ///
    /// # Panics
    /// If it does not answer within a minute.
    pub fn run(&mut self) {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.ports.first + 1));
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .expect("a log");
        let child = mortal(&self.program)
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
        let deadline = Instant::now() + Duration::from_secs(60);
        let store = self.store("/ready/");
        // A runtime of its own, on a thread of its own: callers may be in one.
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            while runtime.block_on(store.snapshot()).is_err() {
                assert!(Instant::now() < deadline, "etcd does not answer after a minute");
                std::thread::sleep(Duration::from_millis(50));
            }
        })
        .join()
        .expect("etcd answers");
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

/// A Slurm cluster of many node names on this machine: `lab/slurm-lab.sh`. Ended when dropped, or when this process is killed.
#[derive(Debug)]
pub struct SlurmLab {
    folder: PathBuf,
    ports: Ports,
    /// Ends everything when its standard input does. In a session of its own: what ends this process does not end it.
    guard: Option<Child>,
}

const SLURM_LAB: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/lab/slurm-lab.sh");

impl SlurmLab {
    /// Starts one of `nodes` nodes with 8 GPUs each, below leaves of `leaf` nodes and spines of `spine` leaves; says so and gives
    /// nothing where Slurm is not installed, or without root.
    ///
    /// # Panics
    /// If it does not start, or with more than 199 nodes.
    #[must_use]
    pub fn start_or_skip(nodes: u32, leaf: u32, spine: u32) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip("Slurm's daemons start jobs only as root");
            return None;
        }
        if program("slurmctld-wlm").or_else(|| program("slurmctld")).is_none() || program("munged").is_none()
        {
            skip("slurmctld or munged is missing");
            return None;
        }
        assert!(nodes < u32::from(BLOCK), "{nodes} nodes do not fit into a block of {BLOCK} ports");
        let folder = tempfile::tempdir().expect("a folder").keep();
        let mut lab = Self { folder, ports: Ports::take(), guard: None };
        let script = lab.script(&["guard", &lab.path()]);
        let mut guard = Command::new("setsid");
        guard.arg(script.get_program()).args(script.get_args());
        guard.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        lab.guard = Some(guard.spawn().expect("setsid runs"));
        let out = lab
            .script(&["start", &lab.path(), &nodes.to_string(), "8"])
            .envs([("LEAF", leaf.to_string()), ("SPINE", spine.to_string())])
            .output()
            .expect("the script runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Some(lab)
    }

    fn path(&self) -> String {
        self.folder.to_string_lossy().into_owned()
    }

    fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(SLURM_LAB);
        command.args(arguments).env("PORTS", self.ports.first.to_string()).stdin(Stdio::null());
        if unpacked().join("usr/sbin/munged").exists() {
            command.env("VMOVE_SLURM", unpacked().canonicalize().unwrap_or_else(|_| unpacked()));
        }
        command
    }

    /// Environment with which Slurm's commands find this cluster.
    ///
    /// # Panics
    /// If the script fails.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        let mut environment = vec![("SLURM_CONF".to_owned(), format!("{}/slurm.conf", self.path()))];
        if unpacked().join("usr/sbin/munged").exists() {
            let root = unpacked().canonicalize().expect("it is there");
            let lib = root.join("usr/lib/x86_64-linux-gnu");
            environment.push(("LD_LIBRARY_PATH".into(), format!("{0}:{0}/slurm-wlm", lib.display())));
            let path = std::env::var("PATH").unwrap_or_default();
            environment.push(("PATH".into(), format!("{}:{path}", root.join("usr/bin").display())));
        }
        environment
    }
}

impl Drop for SlurmLab {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}
