//! Hosts of one test: each has a host name and a network of its own, and private `/run`, `/var/lib` and `/etc`, so that programs may be
//! started with nothing but their defaults. `ssh HOST` on one leads to another.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::networks::Networks;
use crate::places;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

/// For so long a host may take to begin.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A host. Everything that runs in it ends when it is dropped.
#[derive(Debug)]
pub struct Host {
    name: String,
    holder: Guarded,
    /// Folder in which commands run.
    folder: PathBuf,
    path: OsString,
}

impl Host {
    /// Makes a host with the network of node `number`.
    ///
    /// # Errors
    /// Without root, or when programs are missing.
    pub fn start(sandbox: &Sandbox, networks: &Networks, number: u8, name: &str) -> Result<Self> {
        let folder = sandbox.folder(name)?;
        let path = path_of(sandbox)?;
        let (etc, ready) =
            (sandbox.path().join(format!("{name}-etc")), sandbox.path().join(format!("{name}-is")));
        let script = format!(
            "set -e; mount -t tmpfs -o mode=0755 run /run; mount -t tmpfs -o mode=0755 lib /var/lib; cp -a /etc '{etc}'; mount --bind '{etc}' /etc; \
             hostname {name}; echo $$ >'{ready}.new'; mv '{ready}.new' '{ready}'; exec sleep infinity",
            etc = etc.display(),
            ready = ready.display()
        );
        let net = format!("--net={}", networks.path(number).display());
        let mut command = Command::new("nsenter");
        command.args([&net, "unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", &script]);
        let holder =
            command.stdin(Stdio::null()).spawn().context("could not run nsenter (package util-linux)")?;
        let mut host = Self { name: name.to_owned(), holder: holder.into(), folder, path };
        let deadline = Instant::now() + START_TIMEOUT;
        while !ready.exists() {
            ensure!(host.holder.ended()?.is_none(), "host {name} cannot be made");
            ensure!(Instant::now() < deadline, "host {name} is not there after {START_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(host)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has it find programs in this folder first.
    ///
    /// # Errors
    /// The folder has a colon in its name.
    pub fn prefer(&mut self, folder: &Path) -> Result<()> {
        let all = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&self.path));
        self.path = std::env::join_paths(all)?;
        Ok(())
    }

    /// Where it looks for programs.
    #[must_use]
    pub fn search_path(&self) -> &Path {
        Path::new(&self.path)
    }

    /// The folder in which its commands run.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command line, for a shell on this host.
    #[must_use]
    pub fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.holder.pid()))
            .args(["--mount", "--uts", "--net", "sh", "-c", line]);
        command.current_dir(&self.folder).env("PATH", &self.path).env("USER", "root").stdin(Stdio::null());
        for variable in ["VBRIDGE", "VMOVE_CONTROL", "VBRIDGE_TOKEN_FILE", "VBRIDGE_CA_FILE"] {
            command.env_remove(variable);
        }
        command
    }

    /// Runs a command line and returns its standard output.
    ///
    /// # Errors
    /// When it fails; the error has what it said.
    pub fn run(&self, line: &str) -> Result<String> {
        let output = self.shell(line).output()?;
        let [out, err] =
            [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        if !output.status.success() {
            bail!("{}: {line}\nended with {}\n{out}{err}", self.name, output.status);
        }
        Ok(out)
    }

    /// Starts a command line that runs on. Its output is appended to the file `log` in the folder.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, line: &str) -> Result<Guarded> {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log"))?;
        let mut command = self.shell(&format!("exec {line}"));
        Ok(command.stdout(log.try_clone()?).stderr(log).spawn()?.into())
    }

    /// What its programs have logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let of = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let (own, test) = (of(self.holder.pid()), of(i32::try_from(std::process::id()).unwrap_or(0)));
        if own.is_none() || own == test {
            return;
        }
        // What runs in network namespaces of its own has mounts of its own, too.
        let _ =
            self.run("for space in $(ip netns list | cut -d' ' -f1); do kill $(ip netns pids $space); done");
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        // The holder itself ends when it is dropped, and with it the last of what is mounted there.
        for pid in pids.filter(|pid| *pid != self.holder.pid() && of(*pid) == own) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The `PATH` of hosts: `ssh`, the programs that were built, QEMU.
fn path_of(sandbox: &Sandbox) -> Result<OsString> {
    let bin = sandbox.folder("bin")?;
    let ssh = bin.join("ssh");
    // As ssh does: options, the host, and a line for its shell.
    let script = format!(
        "#!/bin/sh\nwhile true; do case \"$1\" in -o) shift 2;; --) shift;; *) break;; esac; done\nhost=$1; shift\n\
         [ -e '{0}/'\"$host-is\" ] || {{ echo \"ssh: could not resolve $host\" >&2; exit 255; }}\n\
         exec nsenter --target=\"$(cat '{0}/'\"$host-is\")\" --mount --uts --net sh -c \"$*\"\n",
        sandbox.path().display()
    );
    std::fs::write(&ssh, script)?;
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755))?;
    let mut folders = vec![bin];
    for program in ["vmove", "vmoved", "vbridged"] {
        let program = places::product(program)?;
        folders.extend(program.parent().map(Path::to_owned));
    }
    folders.extend(std::env::split_paths(&places::path_with(None)));
    Ok(std::env::join_paths(folders)?)
}
