//! A Slurm cluster of many node names on this machine: `slurm-lab.sh`.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::packages::{Missing, program, unpacked};
use crate::ports::{BLOCK, Ports};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/slurm-lab.sh");
/// Within it a job that was cancelled has ended.
const JOB_END_TIMEOUT: Duration = Duration::from_secs(60);
const JOB_END_INTERVAL: Duration = Duration::from_millis(50);

/// One of Slurm's commands failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{command}: {message}")]
pub struct SlurmFailed {
    command: String,
    message: String,
}

/// A Slurm cluster. Ended when dropped, or when this process is killed.
#[derive(Debug)]
pub struct SlurmCluster {
    folder: PathBuf,
    ports: Ports,
    /// Ends everything when its standard input does. In a session of its own: what ends this process does not end it.
    guard: Option<Child>,
}

impl SlurmCluster {
    /// Starts one of `nodes` nodes with 8 CPUs and 8 GPUs each, with `per_leaf` nodes below a leaf switch and `per_spine` leaf switches
    /// below a spine switch.
    ///
    /// # Errors
    /// Slurm or munge is not installed, or this is not root.
    ///
    /// # Panics
    /// If it does not start, or with more than 199 nodes.
    pub fn start(nodes: u32, per_leaf: u32, per_spine: u32) -> Result<Self, Missing> {
        Self::start_with(nodes, per_leaf, per_spine, "")
    }

    /// The same with further lines of `slurm.conf`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn start_with(nodes: u32, per_leaf: u32, per_spine: u32, lines: &str) -> Result<Self, Missing> {
        if !rustix::process::geteuid().is_root() {
            return Err(Missing("Slurm's daemons start jobs only as root"));
        }
        if program("slurmctld-wlm").or_else(|| program("slurmctld")).is_none() || program("munged").is_none()
        {
            return Err(Missing("slurmctld or munged is missing; ./run setup gets them"));
        }
        assert!(nodes < u32::from(BLOCK), "{nodes} nodes do not fit into a block of {BLOCK} ports");
        let folder = tempfile::tempdir().expect("a folder").keep();
        let mut cluster = Self { folder, ports: Ports::take(), guard: None };
        let script = cluster.script(&["guard", &cluster.folder()]);
        let mut guard = Command::new("setsid");
        guard.arg(script.get_program()).args(script.get_args());
        guard.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        cluster.guard = Some(guard.spawn().expect("setsid runs"));
        let started = cluster
            .script(&["start", &cluster.folder(), &nodes.to_string(), "8"])
            .envs([("LEAF", per_leaf.to_string()), ("SPINE", per_spine.to_string())])
            .env("EXTRA", lines)
            .output()
            .expect("the script runs");
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
        Ok(cluster)
    }

    /// Folder with everything that belongs to this cluster.
    #[must_use]
    pub fn folder(&self) -> String {
        self.folder.to_string_lossy().into_owned()
    }

    fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(SCRIPT);
        command.args(arguments).env("PORTS", self.ports.first.to_string()).stdin(Stdio::null());
        if unpacked().join("usr/sbin/munged").exists() {
            command.env("VMOVE_SLURM", unpacked().canonicalize().unwrap_or_else(|_| unpacked()));
        }
        command
    }

    /// Environment with which Slurm's commands find this cluster.
    ///
    /// # Panics
    /// If the unpacked packages vanish meanwhile.
    #[must_use]
    pub fn environment(&self) -> Vec<(String, String)> {
        let mut environment = vec![("SLURM_CONF".to_owned(), format!("{}/slurm.conf", self.folder()))];
        if unpacked().join("usr/sbin/munged").exists() {
            let root = unpacked().canonicalize().expect("it is there");
            let lib = root.join("usr/lib/x86_64-linux-gnu");
            environment.push(("LD_LIBRARY_PATH".into(), format!("{0}:{0}/slurm-wlm", lib.display())));
            let path = std::env::var("PATH").unwrap_or_default();
            environment.push(("PATH".into(), format!("{}:{path}", root.join("usr/bin").display())));
        }
        environment
    }

    /// Runs one of Slurm's commands; gives its standard output.
    ///
    /// # Errors
    /// It cannot be run, or ends with an error.
    pub fn run(&self, words: &[&str]) -> Result<String, SlurmFailed> {
        let failed = |message: String| SlurmFailed { command: words.join(" "), message };
        let command = program(words[0]).unwrap_or_else(|| words[0].into());
        let output = Command::new(command)
            .args(&words[1..])
            .envs(self.environment())
            .stdin(Stdio::null())
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Cancels the jobs of a name, if there are any, and waits until their nodes are free.
    ///
    /// # Errors
    /// Slurm does not answer, or a job does not end.
    pub fn cancel(&self, job_name: &str) -> Result<(), SlurmFailed> {
        self.run(&["scancel", "--name", job_name])?;
        self.wait_for_end(&["squeue", "-h", "-n", job_name])
    }

    /// Cancels all jobs, and waits until all nodes are free.
    ///
    /// # Errors
    /// Slurm does not answer, or a job does not end.
    pub fn cancel_all(&self) -> Result<(), SlurmFailed> {
        self.run(&["scancel", "-u", "root"])?;
        self.wait_for_end(&["squeue", "-h"])
    }

    fn wait_for_end(&self, list_jobs: &[&str]) -> Result<(), SlurmFailed> {
        let deadline = Instant::now() + JOB_END_TIMEOUT;
        loop {
            let left = self.run(list_jobs)?;
            if left.trim().is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let message = format!("jobs are left after {JOB_END_TIMEOUT:?}: {left}");
                return Err(SlurmFailed { command: "scancel".to_owned(), message });
            }
            std::thread::sleep(JOB_END_INTERVAL);
        }
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}
