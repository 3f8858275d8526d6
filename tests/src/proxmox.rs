//! Two nodes of a cluster of Proxmox VE on this machine, each in namespaces of its own and with a `vmoved` in them, and a VM whose guest checks its
//! memory. There is no Proxmox VE: the test plays its part by `tests/scripts/proxmox-qm.py`, with real QEMUs that have the options of Proxmox VE.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vmove_guest::config::Config;

use crate::beacon::{self, BeaconPage};
use crate::daemon::{Node, NodeOptions};
use crate::guest::{BOOT_TIMEOUT, Guest};
use crate::monitor::Monitor;
use crate::own_namespaces::{entering, executable, made, scripts};
use crate::places;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

/// Number of the VM.
pub const VMID: &str = "100";
/// Its UUID.
const UUID: &str = "7b10d7af-b932-4c66-b2c3-3996152ec465";
/// For a guest to do some work.
const WORK_TIMEOUT: Duration = Duration::from_secs(60);
/// A disk of the VM would be here: a storage that both nodes see, and one that they do not.
const STORAGES: &str = "nfs: filer\n\tserver 10.0.0.9\n\texport /x\n\ndir: local\n\tpath /var/lib/vz\n";

/// Checks that two nodes can be made here.
///
/// # Errors
/// What is missing.
pub fn ready() -> Result<()> {
    places::root()?;
    places::guest_initrd()?;
    for program in ["vmoved", "vmove", "vmove-pve"] {
        places::product(program)?;
    }
    let kinds = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    ensure!(kinds.contains("overlay"), "this kernel has no overlayfs, over which a node gets its own /etc");
    ensure!(
        Path::new("/usr/bin/python3").exists(),
        "there is no /usr/bin/python3, in which the test's qm is written"
    );
    Ok(())
}

/// A node.
#[derive(Debug)]
pub struct Host {
    /// Its `vmoved`.
    pub node: Node,
    name: &'static str,
    folder: PathBuf,
    holder: Guarded,
}

impl Host {
    fn start(sandbox: &Sandbox, name: &'static str, cluster: &Path, qemu: &Path) -> Result<Self> {
        let folder = sandbox.folder(&format!("host-{name}"))?;
        let ready = |command: &mut Command| {
            command.arg(&folder).arg(name).arg(cluster);
        };
        let holder = made("proxmox-host.sh", ready, &format!("node {name} was not made"))?;
        let bin = sandbox.folder(&format!("bin-{name}"))?;
        let vmoved = entering(&holder, &places::product("vmoved")?, bin.join("vmoved"))?;
        let qm = format!(
            "#!/bin/sh\nVMOVE_PVE_QEMU='{}' exec '{}' \"$@\"\n",
            qemu.display(),
            scripts().join("proxmox-qm.py").display()
        );
        executable(bin.join("qm"), &qm)?;
        let options = NodeOptions { program: Some(vmoved), ..NodeOptions::default() };
        Ok(Self { node: Node::prepare(sandbox, name, options)?, name, folder, holder })
    }

    /// What precedes a command that runs on the node.
    fn entry(&self) -> Result<Vec<String>> {
        let product = places::product("vmove-pve")?;
        let programs = product.parent().unwrap_or(&product).display().to_string();
        let own = self.folder.with_file_name(format!("bin-{}", self.name)).display().to_string();
        let words =
            ["nsenter", "-t", &self.holder.pid().to_string(), "-m", "-u", "--", "env"].map(str::to_owned);
        let path = format!("PATH={own}:{programs}:{}", std::env::var("PATH")?);
        Ok(words
            .into_iter()
            .chain([path, format!("VMOVE_CONTROL={}", self.node.control().display())])
            .collect())
    }

    /// A command on the node.
    ///
    /// # Errors
    /// When nothing is built.
    pub fn command(&self, words: &[&str]) -> Result<Command> {
        let entry = self.entry()?;
        let mut command = Command::new(&entry[0]);
        let remote = format!("{} {{node}}", self.folder.with_file_name("remote").display());
        command.args(&entry[1..]).args(words).env("VMOVE_PVE_REMOTE", remote).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a command on the node; what it said on standard output.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words)?.output()?;
        ensure!(output.status.success(), "{}: {}", words.join(" "), said(&output));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// A file of the node, by which it can be reached from outside.
    #[must_use]
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.holder.pid()))
    }

    /// Has `qm` fail at these commands.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn qm_refuses(&self, commands: &str) -> Result<()> {
        Ok(std::fs::write(self.file("/run/qm-refuses"), commands)?)
    }

    /// Process id of its QEMU of the VM.
    #[must_use]
    pub fn qemu(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.file(&format!("/run/qemu-server/{VMID}.pid"))).ok()?;
        let pid: i32 = text.trim().parse().ok()?;
        Path::new(&format!("/proc/{pid}/exe")).exists().then_some(pid)
    }

    /// Asks the monitor that Proxmox VE uses.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ask_qemu(&self, command: &str) -> Result<Value> {
        Monitor::connect(&self.file(&format!("/run/qemu-server/{VMID}.qmp")))?.run(command, json!({}))
    }

    /// The beacon of the guest that is here.
    ///
    /// # Errors
    /// When there is none.
    pub fn beacon(&self) -> Result<BeaconPage> {
        let memory = self.file("/var/lib/vmove/pve/ram");
        Ok(beacon::wait_running(|| beacon::ram_files(&memory), BOOT_TIMEOUT)?.1)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(pid) = self.qemu() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// What a command said, on both ways.
#[must_use]
pub fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned()).join("\n")
}

/// Two nodes, and a VM on one of them.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes.
    pub hosts: [Host; 2],
    config: Config,
    files: PathBuf,
    sandbox: Sandbox,
}

impl Cluster {
    /// Starts two nodes with `vmoved`, ready for VMs. The first has the VM, which is not enabled and does not run.
    ///
    /// # Errors
    /// When something does not start.
    pub fn new(guest: &Guest) -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let files = sandbox.folder("pve")?;
        for node in ["a", "b"] {
            std::fs::create_dir_all(files.join(format!("nodes/{node}/qemu-server")))?;
        }
        std::fs::write(files.join("storage.cfg"), STORAGES)?;
        let mut a = Host::start(&sandbox, "a", &files, &guest.qemu)?;
        let mut b = Host::start(&sandbox, "b", &files, &guest.qemu)?;
        let (at_a, at_b) = (a.node.listens_at(), b.node.listens_at());
        a.node.add_peer("b", at_b);
        b.node.add_peer("a", at_a);
        // As ssh does: the last word is a line for a shell.
        let mut cases = String::new();
        for host in [&a, &b] {
            cases.push_str(&format!(
                "{}) shift; exec '{}' sh -c \"$1\" ;;\n",
                host.name,
                host.entry()?.join("' '")
            ));
        }
        let remote = format!("#!/bin/sh\ncase $1 in\n{cases}esac\nexit 255\n");
        executable(sandbox.path().join("remote"), &remote)?;
        a.node.run()?;
        b.node.run()?;
        let cluster = Self { hosts: [a, b], config: guest.config.clone(), files, sandbox };
        std::fs::write(cluster.conf(0), configuration(guest)?)?;
        for host in &cluster.hosts {
            host.run(&["vmove-pve", "host"])?;
        }
        Ok(cluster)
    }

    /// The same; the VM is enabled and runs.
    ///
    /// # Errors
    /// When it does not.
    pub fn running(guest: &Guest) -> Result<Self> {
        let cluster = Self::new(guest)?;
        cluster.hosts[0].run(&["vmove-pve", "enable", VMID])?;
        cluster.hosts[0].run(&["qm", "start", VMID])?;
        cluster.hosts[0].beacon()?;
        Ok(cluster)
    }

    /// The folder of all.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.sandbox.path()
    }

    /// A file of the cluster.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.join(name)
    }

    /// Where a node has the configuration of the VM, if it does.
    #[must_use]
    pub fn conf(&self, at: usize) -> PathBuf {
        self.files.join(format!("nodes/{}/qemu-server/{VMID}.conf", self.hosts[at].name))
    }

    /// The command that moves the VM from a node to the other.
    ///
    /// # Errors
    /// When nothing is built.
    pub fn moving(&self, from: usize, more: &[&str]) -> Result<Command> {
        let words = [&["vmove-pve", "move", VMID, self.hosts[1 - from].name], more].concat();
        self.hosts[from].command(&words)
    }

    /// Moves it; what was said.
    ///
    /// # Errors
    /// When it fails, with what was said.
    pub fn move_from(&self, from: usize) -> Result<String> {
        let output = self.moving(from, &[])?.output()?;
        ensure!(output.status.success(), "{}\n{}", said(&output), self.logs());
        Ok(said(&output))
    }

    /// Has a move refused or fail, with this exit code; what was said.
    ///
    /// # Errors
    /// When it ends otherwise.
    pub fn fails_from(&self, from: usize, code: i32) -> Result<String> {
        let output = self.moving(from, &[])?.output()?;
        ensure!(
            output.status.code() == Some(code),
            "{:?}: {}\n{}",
            output.status,
            said(&output),
            self.logs()
        );
        Ok(said(&output))
    }

    /// Checks that the guest works on this node alone, has found no error and has gone over all of its memory since; that the configuration is here
    /// alone and not locked; that nothing leaves memory out of a snapshot; and that what Proxmox VE expects is here, and nothing there.
    ///
    /// # Errors
    /// What is wrong.
    pub fn sound_at(&self, at: usize) -> Result<()> {
        let (here, there) = (&self.hosts[at], &self.hosts[1 - at]);
        self.until("the guest runs here alone", || {
            Ok(there.qemu().is_none() && here.ask_qemu("query-status")?["status"] == "running")
        })?;
        ensure!(
            self.conf(at).exists() && !self.conf(1 - at).exists(),
            "the configuration is not with the guest"
        );
        let text = std::fs::read_to_string(self.conf(at))?;
        ensure!(!text.contains("lock:"), "a lock is left:\n{text}");
        for kind in ["pid", "qmp", "qga", "vnc"] {
            let path = format!("/run/qemu-server/{VMID}.{kind}");
            ensure!(here.file(&path).exists(), "{} has no {path}", here.name);
            ensure!(!there.file(&path).exists(), "{} still has {path}", there.name);
        }
        self.works_at(at).with_context(|| self.logs())?;
        self.until("nothing is left of a move", || {
            let all = here.ask_qemu("query-migrate-capabilities")?;
            let skips = all
                .as_array()
                .into_iter()
                .flatten()
                .any(|one| one["capability"] == "x-ignore-shared" && one["state"] == true);
            let mut left = Vec::new();
            for host in &self.hosts {
                let entries =
                    [host.file("/var/lib/vmove/pve"), host.file("/run/vmove-pve")].map(std::fs::read_dir);
                let names = entries.into_iter().flatten().flatten().flatten().map(|entry| entry.file_name());
                left.extend(names.filter(|name| {
                    let name = name.to_string_lossy();
                    name.starts_with(".vmove-") || name.ends_with(".move") || name.ends_with(".state")
                }));
            }
            let memory = beacon::ram_files(&there.file("/var/lib/vmove/pve"));
            Ok(!skips && left.is_empty() && memory.is_empty())
        })
    }

    fn works_at(&self, at: usize) -> Result<()> {
        let pages = u64::from(self.config.working_pages()) + u64::from(self.config.cold_pages());
        let page = self.hosts[at].beacon()?;
        let mut first = None;
        self.until("the guest works", || {
            let Some(now) = page.read() else { return Ok(false) };
            ensure!(now.errors == 0, "the guest has found wrong memory: {}", now.verdict());
            let before = first.get_or_insert_with(|| now.clone());
            Ok(now.beats > before.beats + 50 && now.verified > before.verified + pages)
        })
    }

    fn until(&self, what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + WORK_TIMEOUT;
        loop {
            let last = is();
            if matches!(last, Ok(true)) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "expected that {what}, found {last:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What both daemons have logged.
    #[must_use]
    pub fn logs(&self) -> String {
        self.hosts.iter().map(|host| format!("--- {}\n{}\n", host.name, host.node.log())).collect()
    }
}

/// The configuration of a VM with this guest. Its kernel is in `args`, where operators have such things.
fn configuration(guest: &Guest) -> Result<String> {
    let line = guest.command_line("/run/qemu-server/console.log")?;
    let value = |option: &str| {
        let at = line.iter().position(|word| word == option).with_context(|| format!("no {option}"))?;
        line.get(at + 1).with_context(|| format!("no value of {option}"))
    };
    Ok(format!(
        "#A guest that checks its memory%3A\n#see the beacon\nagent: 1\nargs: -accel tcg -kernel {kernel} -initrd {initrd} -append '{append}' -serial {serial}\ncores: {cores}\nide2: none,media=cdrom\nmemory: {memory}\nname: web\nnuma: 0\nostype: l26\nsmbios1: uuid={UUID}\nvmgenid: c773c261-d800-4348-9f5d-167fadd53cf8\n\n[before]\ncores: 1\nmemory: 64\nsnaptime: 1745000001\n",
        kernel = value("-kernel")?,
        initrd = value("-initrd")?,
        append = value("-append")?,
        serial = value("-serial")?,
        cores = guest.config.threads,
        memory = guest.memory_mib,
    ))
}
