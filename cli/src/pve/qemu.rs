//! The QEMU that Proxmox VE has started for a VM on this node: its process, and the monitor that Proxmox VE uses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmove_pve::{PID_FILES, Vmid};
use vmove_qmp::{Client, QmpError};
use vmove_types::problem::{Code, chain};

use crate::failure::Failure;

/// Proxmox VE asks by the same monitor, for moments. Only one client is served at a time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// The file with its process id.
fn pid_file(vmid: Vmid) -> PathBuf {
    PathBuf::from(format!("{PID_FILES}/{vmid}.pid"))
}

/// Where its QEMU expects the state of devices when it was started for a migration.
pub fn state_socket(vmid: Vmid) -> PathBuf {
    PathBuf::from(format!("/run/qemu-server/{vmid}.migrate"))
}

/// By what vmoved follows a migration, on either side.
pub const EVENTS: &str = "events";

/// A QEMU that runs.
#[derive(Debug)]
pub struct Qemu {
    pid: Pid,
    /// Words of its command line.
    words: Vec<String>,
}

impl Qemu {
    /// The QEMU of a VM, as Proxmox VE itself finds it: by the file with its process id, which its command line must name.
    pub fn of(vmid: Vmid) -> Option<Self> {
        let file = pid_file(vmid);
        let pid: i32 = std::fs::read_to_string(&file).ok()?.trim().parse().ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let pid = Pid::from_raw(pid)?;
        let words: Vec<String> =
            line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let named = words.windows(2).any(|pair| pair[0] == "-pidfile" && Path::new(&pair[1]) == file);
        named.then_some(Self { pid, words })
    }

    /// Whether it has the monitor for vmove: it was started after the VM was enabled.
    pub fn is_enabled(&self, vmid: Vmid) -> bool {
        let start = format!("unix:{},", vmid.monitor().display());
        self.words.iter().any(|word| word.starts_with(&start))
    }

    /// Whether its process has not ended.
    pub fn lives(&self) -> bool {
        let words = std::fs::read(format!("/proc/{}/cmdline", self.pid.as_raw_nonzero())).unwrap_or_default();
        // Of one that ends nothing is left but its number, which may be another's by now.
        let same = words.split(|byte| *byte == 0).zip(&self.words).all(|(now, then)| now == then.as_bytes());
        !words.is_empty() && same
    }

    /// Ends it at once.
    pub fn kill(&self) {
        let _ = kill_process(self.pid, Signal::KILL);
    }

    /// What it was given for an option.
    pub fn option(&self, name: &str) -> Option<&str> {
        let pair = self.words.windows(2).find(|pair| pair[0] == name)?;
        Some(pair[1].as_str())
    }
}

/// The monitor that Proxmox VE uses. Dropped, it is free for Proxmox VE again.
#[derive(Debug)]
pub struct Monitor {
    client: Client,
    path: PathBuf,
}

impl Monitor {
    /// Connects.
    pub async fn connect(vmid: Vmid) -> Result<Self, Failure> {
        let path = PathBuf::from(format!("{PID_FILES}/{vmid}.qmp"));
        let client =
            Client::connect(&path, ANSWER_TIMEOUT).await.map_err(|error| no_answer(&path, &error))?;
        Ok(Self { client, path })
    }

    /// One command, and its answer.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, Failure> {
        let answer = self.client.execute_raw(command, arguments, ANSWER_TIMEOUT).await;
        answer.map_err(|error| self.refused(&error))
    }

    /// QEMU's run state, such as `running`.
    pub async fn status(&self) -> Result<String, Failure> {
        self.client.run_state(ANSWER_TIMEOUT).await.map_err(|error| self.refused(&error))
    }

    fn refused(&self, error: &QmpError) -> Failure {
        if error.is_refusal() {
            return Failure::new(Code::QmpFailed, chain(error));
        }
        no_answer(&self.path, error)
    }

    /// Turns capabilities of migrations on or off; others stay as they are.
    pub async fn set(&self, capabilities: &[&str], on: bool) -> Result<(), Failure> {
        let all: Vec<Value> =
            capabilities.iter().map(|name| json!({ "capability": name, "state": on })).collect();
        self.ask("migrate-set-capabilities", json!({ "capabilities": all })).await.map(drop)
    }

    /// The machine type as QEMU has it, which the destination must have too: an alias such as `pc` may mean another one there.
    pub async fn machine(&self) -> Result<String, Failure> {
        let all = self.ask("query-machines", json!({})).await?;
        // QEMU of Proxmox VE marks it, and tells its own revision.
        let current = all.as_array().into_iter().flatten().find(|one| one["is-current"] == true);
        if let Some(name) = current.and_then(|one| one["name"].as_str()) {
            let revision = current.and_then(|one| one["pve-version"].as_str());
            return Ok(revision.map_or_else(|| name.to_owned(), |revision| format!("{name}+{revision}")));
        }
        let kind = self.ask("qom-get", json!({ "path": "/machine", "property": "type" })).await?;
        Ok(kind.as_str().unwrap_or_default().trim_end_matches("-machine").to_owned())
    }

    /// The UUID by which nodes know the VM.
    pub async fn uuid(&self) -> Result<String, Failure> {
        let answer = self.ask("query-uuid", json!({})).await?;
        Ok(answer["UUID"].as_str().unwrap_or_default().to_owned())
    }
}

/// QEMU's run state by a connection of its own.
pub async fn status(vmid: Vmid) -> Result<String, Failure> {
    Monitor::connect(vmid).await?.status().await
}

fn no_answer(path: &Path, found: &QmpError) -> Failure {
    Failure::new(
        Code::QmpFailed,
        format!(
            "Expected an answer of QEMU at {}, found: {}; does the VM run (`qm status`)?",
            path.display(),
            chain(found)
        ),
    )
}
