//! Two hosts of libvirt on this machine, each in namespaces of its own and with a `vmoved` in them, and a domain whose guest checks its memory.
//!
//! `virsh` of one reaches the libvirtd of the other by its socket, and QEMUs reach each other by the loopback interface.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_guest::config::Config;

use crate::beacon::{self, BeaconPage};
use crate::daemon::{Node, NodeOptions};
use crate::disks;
use crate::guest::{BOOT_TIMEOUT, Guest};
use crate::own_namespaces::{entering, made};
use crate::places;
use crate::process::{Guarded, reap_left_behind};
use crate::sandbox::Sandbox;

/// Name of the domain.
pub const DOMAIN: &str = "web";
/// And its UUID.
pub const UUID: &str = "6f0f5d4e-3c1a-4d0b-9d59-0a1b2c3d4e5f";
/// For whatever libvirt does beside a migration.
const LIBVIRT_TIMEOUT: &str = "60";
/// For a guest to do some work.
const WORK_TIMEOUT: Duration = Duration::from_secs(60);

/// Checks that two hosts can be made here.
///
/// # Errors
/// What is missing.
pub fn ready() -> Result<()> {
    places::root()?;
    places::guest_initrd()?;
    places::product("vmoved")?;
    places::product("vmove")?;
    places::libvirt()?;
    let kinds = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    ensure!(kinds.contains("overlay"), "this kernel has no overlayfs, over which libvirt is put into /usr");
    Ok(())
}

/// What is set on both hosts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// Further lines of `qemu.conf`.
    pub qemu_conf: &'static str,
    /// `memory_backing_dir` is on hugetlbfs, not on tmpfs.
    pub huge_pages: bool,
}

/// A host.
#[derive(Debug)]
pub struct Host {
    /// Its `vmoved`.
    pub node: Node,
    folder: PathBuf,
    holder: Guarded,
}

impl Host {
    fn start(sandbox: &Sandbox, name: &str, uuid: &str, settings: Settings) -> Result<Self> {
        let folder = sandbox.folder(&format!("host-{name}"))?;
        // QEMU runs as a user who must reach its memory.
        std::fs::set_permissions(sandbox.path(), std::fs::Permissions::from_mode(0o755))?;
        let libvirt = places::libvirt()?;
        let ready = |command: &mut Command| {
            command.arg(&folder).args([name, uuid]).env("VMOVE_LIBVIRT", libvirt);
            command.env("VMOVE_QEMU_CONF", settings.qemu_conf);
            command.env("VMOVE_MEMORY", if settings.huge_pages { "hugetlbfs" } else { "tmpfs" });
        };
        let holder = made("libvirt-host.sh", ready, &format!("libvirtd of host {name} does not answer"))?;
        let program = entering(&holder, &places::product("vmoved")?, folder.join("vmoved"))?;
        let options = NodeOptions { program: Some(program), ..NodeOptions::default() };
        Ok(Self { node: Node::prepare(sandbox, name, options)?, folder, holder })
    }

    /// A command in its namespaces.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holder.pid().to_string(), "-m", "-u", "--", program]).stdin(Stdio::null());
        command
    }

    /// Runs `virsh` with these arguments; what it said.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String> {
        let output = self.virsh_output(arguments)?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "virsh {}: {}", arguments.join(" "), said(&output.stderr));
        Ok(said(&output.stdout))
    }

    fn virsh_output(&self, arguments: &[&str]) -> Result<Output> {
        let words = [&[LIBVIRT_TIMEOUT, "virsh", "-q", "-c", "qemu:///system"], arguments].concat();
        Ok(self.command("timeout").args(words).output()?)
    }

    /// Runs `vmove` in its namespaces, for what looks at the host's files.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn vmove(&self, arguments: &[&str]) -> Result<Output> {
        let vmove = places::product("vmove")?;
        let mut command = self.command(&vmove.to_string_lossy());
        Ok(command.arg("--control").arg(self.node.control()).args(arguments).output()?)
    }

    /// What libvirt says of the domain, such as `running`; nothing if it is not there.
    ///
    /// # Errors
    /// When libvirtd does not answer.
    pub fn state(&self) -> Result<Option<String>> {
        let output = self.virsh_output(&["domstate", DOMAIN])?;
        let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.success() {
            true => Ok(Some(state)),
            false if said.contains("failed to get domain") => Ok(None),
            false => bail!("{said}"),
        }
    }

    /// Whether the guest runs here.
    ///
    /// # Errors
    /// When libvirtd does not answer.
    pub fn runs(&self) -> Result<bool> {
        Ok(self.state()?.as_deref() == Some("running"))
    }

    /// Process id of the domain's QEMU.
    #[must_use]
    pub fn qemu(&self) -> Option<i32> {
        let pid = std::fs::read_to_string(self.folder.join(format!("run/qemu/{DOMAIN}.pid"))).ok()?;
        let pid: i32 = pid.trim().parse().ok()?;
        Path::new(&format!("/proc/{pid}")).exists().then_some(pid)
    }

    /// Process id of its libvirtd.
    ///
    /// # Errors
    /// When there is none.
    pub fn libvirtd(&self) -> Result<i32> {
        let pid = std::fs::read_to_string(self.folder.join("libvirtd.pid"))?;
        Ok(pid.trim().parse()?)
    }

    /// Its folder: what the host writes is below it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Ends libvirtd, and starts it again.
    ///
    /// # Errors
    /// When it does not answer again.
    pub fn restart_libvirtd(&self, signal: Signal) -> Result<()> {
        self.end_libvirtd(signal)?;
        self.start_libvirtd()
    }

    /// Ends libvirtd.
    ///
    /// # Errors
    /// When it does not end.
    pub fn end_libvirtd(&self, signal: Signal) -> Result<()> {
        let pid = self.libvirtd()?;
        kill(Pid::from_raw(pid), signal)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while Path::new(&format!("/proc/{pid}")).exists() {
            ensure!(Instant::now() < deadline, "libvirtd does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts libvirtd, which was ended.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn start_libvirtd(&self) -> Result<()> {
        // No `exec`: a child of ours by that name would be taken for one that was left behind.
        let daemon =
            format!("ulimit -n 4096; libvirtd -d -p '{}'; exit", self.folder.join("libvirtd.pid").display());
        let status = self.command("sh").args(["-c", &daemon]).status()?;
        ensure!(status.success(), "libvirtd does not start");
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.virsh(&["list"]).is_err() {
            ensure!(Instant::now() < deadline, "libvirtd does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// What the guest has said on this host since it was first here.
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.folder.join(format!("log/qemu/{DOMAIN}-serial.log"))).unwrap_or_default()
    }

    /// A file of the host, by which it can be read from outside.
    #[must_use]
    pub fn file(&self, path: &Path) -> PathBuf {
        let inside = path.strip_prefix("/").unwrap_or(path);
        PathBuf::from(format!("/proc/{}/root", self.holder.pid())).join(inside)
    }

    /// The beacon of the guest that is here.
    ///
    /// # Errors
    /// When there is none.
    pub fn beacon(&self) -> Result<BeaconPage> {
        let memory = self.file(&self.folder.join("mem"));
        Ok(beacon::wait_running(|| beacon::ram_files(&memory), BOOT_TIMEOUT)?.1)
    }

    /// Second names of RAM files: there are some only while a migration is at work.
    #[must_use]
    pub fn kept_memory(&self) -> Vec<PathBuf> {
        let memory = beacon::ram_files(&self.file(&self.folder.join("mem")));
        let kept = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".vmove-"))
        };
        memory.into_iter().filter(kept).collect()
    }

    /// Whether QEMU here would leave guest memory out of a file that it saves; nothing if there is no QEMU.
    ///
    /// # Errors
    /// When it does not say.
    pub fn skips_memory(&self) -> Result<Option<bool>> {
        if self.qemu().is_none() {
            return Ok(None);
        }
        let asked = ["qemu-monitor-command", DOMAIN, "--hmp", "info migrate_capabilities"];
        let said = self.virsh(&asked)?;
        let line = said.lines().find(|line| line.starts_with("x-ignore-shared"));
        Ok(Some(line.context("no x-ignore-shared")?.trim().ends_with("on")))
    }

    /// The log of libvirtd and of the domain's QEMU, for an error message.
    #[must_use]
    pub fn logs(&self) -> String {
        let end = |path: PathBuf| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        let qemu = end(self.folder.join(format!("log/qemu/{DOMAIN}.log")));
        format!(
            "libvirtd:\n{}\nQEMU:\n{qemu}\nvmoved:\n{}",
            end(self.folder.join("libvirtd.log")),
            self.node.log()
        )
    }
}

impl Drop for Host {
    /// libvirtd first: it would look after a QEMU that ends. One whose memory is in no file of the sandbox is found by nobody else.
    fn drop(&mut self) {
        for pid in self.libvirtd().into_iter().chain(self.qemu()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// What is done about a domain's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Nothing: it is where libvirt puts it.
    Plain,
    /// It is in shared files, and libvirt moves it.
    InFiles,
    /// It is enabled for vmove.
    Enabled,
}

const IN_FILES: &str = "  <memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>\n";

/// Two hosts, and a domain on one of them.
#[derive(Debug)]
pub struct Pair {
    /// The hosts.
    pub hosts: [Host; 2],
    config: Config,
    sandbox: Sandbox,
}

impl Pair {
    /// Starts two hosts with `vmoved`. The domain is defined on the first; it is not started.
    ///
    /// # Errors
    /// When something does not start.
    pub fn new(guest: &Guest, arm: Arm) -> Result<Self> {
        Self::with(Sandbox::new()?, guest, arm, Settings::default())
    }

    /// The same, in a sandbox that was made before, with these settings.
    ///
    /// # Errors
    /// When something does not start.
    pub fn with(sandbox: Sandbox, guest: &Guest, arm: Arm, settings: Settings) -> Result<Self> {
        reap_left_behind(&["qemu-system-x86", "libvirtd"]);
        let mut a = Host::start(&sandbox, "a", "11111111-1111-4111-8111-111111111111", settings)?;
        let mut b = Host::start(&sandbox, "b", "22222222-2222-4222-8222-222222222222", settings)?;
        let (at_a, at_b) = (a.node.listen(), b.node.listen());
        a.node.add_peer("b", at_b);
        b.node.add_peer("a", at_a);
        a.node.run()?;
        b.node.run()?;
        let xml = sandbox.path().join("domain.xml");
        std::fs::write(&xml, domain(guest, if arm == Arm::InFiles { IN_FILES } else { "" })?)?;
        a.virsh(&["define", &xml.to_string_lossy()])?;
        let pair = Self { hosts: [a, b], config: guest.config.clone(), sandbox };
        if arm == Arm::Enabled {
            for (host, words) in
                pair.hosts.iter().zip([["libvirt", "enable", DOMAIN].as_slice(), &["libvirt", "host"]])
            {
                let output = host.vmove(words)?;
                ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                // It looks for hooks when it starts.
                host.restart_libvirtd(Signal::SIGTERM)?;
            }
        }
        Ok(pair)
    }

    /// As [`Pair::new`], and starts the guest.
    ///
    /// # Errors
    /// When it does not run.
    pub fn running_as(guest: &Guest, arm: Arm) -> Result<Self> {
        let pair = Self::new(guest, arm)?;
        pair.hosts[0].virsh(&["start", DOMAIN])?;
        if arm != Arm::Plain {
            pair.hosts[0].beacon()?;
        }
        Ok(pair)
    }

    /// Waits until the guest has worked on its disk on this host, and has found nothing wrong.
    ///
    /// # Errors
    /// When it does not, or what it has found.
    pub fn works_on_disk_at(&self, at: usize) -> Result<()> {
        disks::works_by(DOMAIN, WORK_TIMEOUT, || Ok(self.hosts[at].console()))
    }

    /// Changes the XML with which the domain starts next, as `virsh edit` does, and defines the result on a host.
    ///
    /// # Errors
    /// When libvirt refuses it.
    pub fn define_changed(&self, at: usize, change: impl FnOnce(&str) -> String) -> Result<()> {
        let xml = self.hosts[0].virsh(&["dumpxml", "--inactive", DOMAIN])?;
        let file = self.path().join("changed.xml");
        std::fs::write(&file, change(&xml))?;
        self.hosts[at].virsh(&["define", &file.to_string_lossy()]).map(drop)
    }

    /// A guest that runs on the first host, and is enabled.
    ///
    /// # Errors
    /// When it does not run.
    pub fn running(guest: &Guest) -> Result<Self> {
        Self::running_as(guest, Arm::Enabled)
    }

    /// The folder of both.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.sandbox.path()
    }

    /// The command that has libvirt migrate the domain.
    #[must_use]
    pub fn migration(&self, from: usize, options: &[&str]) -> Command {
        let to = self.hosts[1 - from].folder.join("run/libvirt-sock");
        let uri = format!("qemu+unix:///system?socket={}", to.display());
        let port = format!("tcp://127.0.0.1:{}", vmove_skip::free_port().port());
        let mut command = self.hosts[from].command("timeout");
        command.args(["120", "virsh", "-q", "-c", "qemu:///system", "migrate", "--live", DOMAIN, &uri]);
        command.args(["--migrateuri", &port]).args(options);
        command
    }

    /// Has libvirt migrate the domain.
    ///
    /// # Errors
    /// When it fails, with what virsh said.
    pub fn migrate(&self, from: usize, options: &[&str]) -> Result<()> {
        let output = self.migration(from, options).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    }

    /// Checks that the guest works on this host alone, has found no error, and that it has gone over all of its memory since; that no QEMU leaves
    /// memory out of files; and that no memory is kept.
    ///
    /// # Errors
    /// What is wrong.
    pub fn sound_at(&self, at: usize) -> Result<()> {
        let pages = u64::from(self.config.working_pages()) + u64::from(self.config.cold_pages());
        self.checked_at(at, pages)
    }

    /// The same, but the guest need not have gone over all of its memory.
    ///
    /// # Errors
    /// What is wrong.
    pub fn alive_at(&self, at: usize) -> Result<()> {
        self.checked_at(at, 0)
    }

    fn checked_at(&self, at: usize, pages: u64) -> Result<()> {
        let (here, there) = (&self.hosts[at], &self.hosts[1 - at]);
        let soon = Instant::now() + WORK_TIMEOUT;
        while !(here.runs()? && there.qemu().is_none()) {
            let states = (here.state()?, there.state()?);
            ensure!(
                Instant::now() < soon,
                "the guest should run at {at} alone, found {states:?}\n{}",
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        self.works_at(at, pages).with_context(|| self.logs())?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while here.skips_memory()? != Some(false)
            || self.hosts.iter().any(|host| !host.kept_memory().is_empty())
        {
            let kept: Vec<_> = self.hosts.iter().map(Host::kept_memory).collect();
            ensure!(
                Instant::now() < deadline,
                "x-ignore-shared {:?}, memory that is kept {kept:?}",
                here.skips_memory()?
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn works_at(&self, at: usize, pages: u64) -> Result<()> {
        let page = self.hosts[at].beacon()?;
        let deadline = Instant::now() + WORK_TIMEOUT;
        let mut first = None;
        loop {
            if let Some(now) = page.read() {
                ensure!(now.errors == 0, "the guest has found wrong memory: {}", now.verdict());
                let before = first.get_or_insert_with(|| now.clone());
                if now.beats > before.beats + 50 && now.verified > before.verified + pages {
                    return Ok(());
                }
            }
            ensure!(Instant::now() < deadline, "the guest stands still: {first:?}, later {:?}", page.read());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// What both hosts have logged.
    #[must_use]
    pub fn logs(&self) -> String {
        self.hosts.iter().map(|host| format!("--- {}\n{}\n", host.node.name(), host.logs())).collect()
    }
}

/// The guest's disk, if it has one, and a card in a network of its own.
fn devices(guest: &Guest) -> String {
    let disk = guest.disk.as_ref().map_or_else(String::new, |image| {
        format!(
            "    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='none'/>
      <source file='{}'/>
      <target dev='vda' bus='virtio'/>
    </disk>
",
            image.display()
        )
    });
    format!(
        "{disk}    <interface type='user'>
      <model type='virtio'/>
      <rom enabled='no'/>
    </interface>
"
    )
}

/// The XML of a domain with this guest, its disk and a network card. `more`: further elements.
///
/// # Errors
/// When a part of the guest is not there.
pub fn domain(guest: &Guest, more: &str) -> Result<String> {
    let line = guest.command_line("/dev/null")?;
    let value = |option: &str| {
        let at = line.iter().position(|word| word == option).with_context(|| format!("no {option}"))?;
        line.get(at + 1).with_context(|| format!("no value of {option}"))
    };
    Ok(format!(
        "<domain type='qemu'>
  <name>{DOMAIN}</name>
  <uuid>{UUID}</uuid>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{append}</cmdline>
  </os>
  <features>
    <acpi/>
  </features>
  <cpu mode='custom' match='exact' check='none'>
    <model>qemu64</model>
  </cpu>
  <devices>
    <emulator>{emulator}</emulator>
    <serial type='file'>
      <source path='/var/log/libvirt/qemu/{DOMAIN}-serial.log'/>
    </serial>
{devices}  </devices>
{more}</domain>
",
        memory = guest.memory_mib,
        vcpus = guest.config.threads,
        kernel = value("-kernel")?,
        initrd = value("-initrd")?,
        append = value("-append")?,
        emulator = guest.qemu.display(),
        devices = devices(guest),
    ))
}
