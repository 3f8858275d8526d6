//! Guests that work on a disk, and what is said of disks.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_qmp::confine::QemuUser;

use crate::daemon::{Node, NodeOptions};
use crate::forks::at_once;
use crate::guest::{Guest, VIRTIO, failures};
use crate::monitor::Monitor;
use crate::sandbox::Sandbox;
use crate::scene::{NAME, STEP_TIMEOUT, Scene, memory_mib, steady, vmove};

/// A guest that works on a disk, on so many MiB of it.
#[must_use]
pub fn task(disk_mib: u32) -> Config {
    Config {
        working_set_mib: 8,
        rate: Rate::PagesPerSecond(500),
        verify: 2_000,
        disk_mib,
        ..Config::default()
    }
}

/// Fails without QEMU's tool.
///
/// # Errors
/// When it is not there.
pub fn qemu_img() -> Result<()> {
    Command::new("qemu-img").arg("--version").output().context("qemu-img is not installed")?;
    Ok(())
}

/// Makes an image of 64 MiB.
///
/// # Errors
/// What `qemu-img` says.
pub fn create(image: &Path, format: &str) -> Result<()> {
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(image).arg("64M").status()?;
    ensure!(made.success(), "qemu-img ended with {made}");
    for_qemu(image)
}

/// Gives a disk to the user as whom daemons start QEMUs.
///
/// # Errors
/// When there is no such user, or this is not root.
pub fn for_qemu(image: &Path) -> Result<()> {
    let user = QemuUser::usual()?;
    std::os::unix::fs::chown(image, Some(user.uid), Some(user.gid))?;
    Ok(())
}

/// Makes a raw disk of so many bytes, all of it a hole.
///
/// # Errors
/// When it cannot be made.
pub fn blank(image: &Path, bytes: u64) -> Result<()> {
    std::fs::File::create(image)?.set_len(bytes)?;
    for_qemu(image)
}

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// A disk by `-drive`.
#[must_use]
pub fn drive(image: &Path, format: &str, more: &str) -> Vec<String> {
    let drive = format!("if=none,id=disk0,format={format},file={}{more}", image.display());
    words(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"])
}

/// A disk by `-blockdev`.
#[must_use]
pub fn node(image: &Path, format: &str) -> Vec<String> {
    let file = format!("driver=file,node-name=file0,filename={}", image.display());
    let disk = format!("driver={format},node-name=disk0,file=file0");
    words(["-blockdev", &file, "-blockdev", &disk, "-device", "virtio-blk-pci,drive=disk0,id=vda"])
}

/// Lines that the guest's disk program has printed: each stands for 64 blocks checked and written.
///
/// # Errors
/// What the guest has found wrong.
pub fn lines(node: &Node, vm: &str) -> Result<usize> {
    lines_in(vm, &node.vm(vm)?.console())
}

fn lines_in(vm: &str, console: &str) -> Result<usize> {
    let failed = failures(console);
    ensure!(failed.is_empty(), "{vm} told of {failed:#?}");
    Ok(console.lines().filter(|line| line.contains("VMOVE-GUEST DISK")).count())
}

/// Waits until a VM has worked on its disk: most of its blocks are checked once more, by chance.
///
/// # Errors
/// When it does not, or what it has found wrong.
pub fn works(node: &Node, vm: &str) -> Result<()> {
    works_by(vm, STEP_TIMEOUT, || Ok(node.vm(vm)?.console()))
}

/// The same, by what the guest has said so far, within some time.
///
/// # Errors
/// When it does not, or what it has found wrong.
pub fn works_by(vm: &str, within: Duration, console: impl Fn() -> Result<String>) -> Result<()> {
    let (first, deadline) = (lines_in(vm, &console()?)?, Instant::now() + within);
    while lines_in(vm, &console()?)? < first + 6 {
        if Instant::now() > deadline {
            bail!("{vm} does not work on its disk: {}", console()?);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// As [`works`], of several at once.
///
/// # Errors
/// Of the first that does not.
pub fn all_work(vms: &[(&Node, &str)]) -> Result<()> {
    at_once(vms, works)
}

/// Overlays of a VM in a folder.
///
/// # Panics
/// When that cannot be listed.
#[must_use]
pub fn overlays(folder: &Path, vm: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a list").flatten();
    let prefix = format!("{vm}.disk0.");
    let is_its = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix));
    entries.map(|entry| entry.path()).filter(is_its).collect()
}

/// A guest with a disk that moves between two nodes, each with a folder for it.
#[derive(Debug)]
pub struct Moved {
    /// The guest and its nodes.
    pub scene: Scene,
    folders: [PathBuf; 2],
    name: String,
}

/// A second monitor of the guest's QEMU, in its folder.
pub const OPERATOR: &str = "operator.sock";
/// Has QEMU listen there.
#[must_use]
pub fn operator() -> [String; 2] {
    ["-qmp".to_owned(), format!("unix:{{vmdir}}/{OPERATOR},server=on,wait=off")]
}

/// The disk's name in QEMU.
pub const DISK: &str = "disk0";
/// Size of the disk: more than the guest works on.
pub const DISK_BYTES: u64 = 64 << 20;

/// A guest that works on [`DISK`] and on its memory.
#[must_use]
pub fn busy() -> Config {
    Config { disk_mib: 32, ..steady() }
}

/// A guest that works on the disk of this image, which these options give it.
///
/// # Errors
/// When there is no QEMU.
pub fn guest_on(image: &Path, options: Vec<String>) -> Result<Guest> {
    let mut guest = Guest::new(memory_mib(&busy()), busy())?;
    guest.modules = VIRTIO.into_iter().chain(["virtio_blk"]).collect();
    guest.extra = options;
    guest.extra.extend(operator());
    guest.disk = Some(image.to_owned());
    Ok(guest)
}

impl Moved {
    /// Starts a guest whose disk has this format, with these further options of its drive.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(format: &str, more: &str) -> Result<Self> {
        Self::start_with(Sandbox::new()?, format, |image| drive(image, format, more))
    }

    /// The same, in a sandbox that was made before, with a disk that these options give it.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_with(
        sandbox: Sandbox,
        format: &str,
        options: impl Fn(&Path) -> Vec<String>,
    ) -> Result<Self> {
        Self::between(&NodeOptions::default(), sandbox, format, options)
    }

    /// The same between nodes with these settings.
    ///
    /// # Errors
    /// When it does not start.
    pub fn between(
        nodes: &NodeOptions,
        sandbox: Sandbox,
        format: &str,
        options: impl Fn(&Path) -> Vec<String>,
    ) -> Result<Self> {
        let (folders, name) = Self::folders(&sandbox, format)?;
        let image = folders[0].join(&name);
        create(&image, format)?;
        let guest = guest_on(&image, options(&image))?;
        let scene = Scene::with_options(sandbox, nodes, "thp", &guest)?;
        Ok(Self { scene, folders, name })
    }

    /// The same, with a proxy between the nodes.
    ///
    /// # Errors
    /// When it does not start.
    pub fn behind_proxy(format: &str) -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let (folders, name) = Self::folders(&sandbox, format)?;
        let image = folders[0].join(&name);
        create(&image, format)?;
        let guest = guest_on(&image, drive(&image, format, ""))?;
        let scene = Scene::behind_proxy_in(sandbox, &guest)?;
        Ok(Self { scene, folders, name })
    }

    /// The same with a guest of the caller's, on a raw image that the caller makes at that path.
    ///
    /// # Errors
    /// When it does not start.
    pub fn with_guest(sandbox: Sandbox, guest: impl FnOnce(&Path) -> Result<Guest>) -> Result<Self> {
        let (folders, name) = Self::folders(&sandbox, "raw")?;
        let image = folders[0].join(&name);
        let guest = guest(&image)?;
        for_qemu(&image)?;
        let scene = Scene::behind_proxy_in(sandbox, &guest)?;
        Ok(Self { scene, folders, name })
    }

    fn folders(sandbox: &Sandbox, format: &str) -> Result<([PathBuf; 2], String)> {
        let folders = [sandbox.folder("disks-a")?, sandbox.folder("disks-b")?];
        folders.iter().try_for_each(|folder| for_qemu(folder))?;
        Ok((folders, format!("guest.{format}")))
    }

    /// Its image at the first node, and at the second.
    #[must_use]
    pub fn images(&self) -> [PathBuf; 2] {
        [self.folders[0].join(&self.name), self.folders[1].join(&self.name)]
    }

    /// The node that has the guest, the other one, and where its image is now and would be there.
    ///
    /// # Errors
    /// When neither has it.
    pub fn sides(&self) -> Result<(&Node, &Node, PathBuf, PathBuf)> {
        let [at_a, at_b] = self.images();
        let (a, b) = (&self.scene.a, &self.scene.b);
        let is_at = |node: &Node| node.vms().is_ok_and(|vms| !vms.is_empty());
        match (is_at(a), is_at(b)) {
            (true, false) => Ok((a, b, at_a, at_b)),
            (false, true) => Ok((b, a, at_b, at_a)),
            other => bail!("expected the guest at one node, found {other:?}"),
        }
    }

    /// The options that have it move with its disk.
    ///
    /// # Errors
    /// As [`Self::sides`].
    pub fn options(&self) -> Result<Vec<String>> {
        let (.., there) = self.sides()?;
        Ok(words(["--disks", "all", "--disk-map", &format!("{DISK}={}", there.display())]))
    }

    /// Begins to move it from the first node to the second with its disk. Returns the migration's ID.
    ///
    /// # Errors
    /// When that is refused.
    pub fn start_move(&self, more: &[&str]) -> Result<String> {
        let options = self.options()?;
        let words: Vec<&str> = options.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.scene.start(&words)
    }

    /// Moves it to the other node with its disk. Returns the report.
    ///
    /// # Errors
    /// When that fails.
    pub fn migrate(&self, more: &[&str]) -> Result<Value> {
        let options = self.options()?;
        let (from, to, ..) = self.sides()?;
        let peer = to.listen().to_string();
        let mut arguments = vec!["migrate", NAME, "--to", &peer];
        arguments.extend(options.iter().map(String::as_str).chain(more.iter().copied()));
        let end = vmove(from, &arguments)?;
        ensure!(end.code == 0, "{} {}\nfrom: {}\nto: {}", end.answer, end.said, from.log(), to.log());
        Ok(end.answer)
    }

    /// Waits until it has worked on its disk, wherever it is, and has found nothing wrong.
    ///
    /// # Errors
    /// When it does not, or has.
    pub fn works(&self) -> Result<()> {
        let (node, ..) = self.sides()?;
        works(node, NAME)
    }

    /// Waits until the newest move of its disk to another image on its node has ended. How that was.
    ///
    /// # Errors
    /// When it does not end in time, or there is none.
    pub fn until_disk_move_ends(&self) -> Result<Value> {
        let (node, ..) = self.sides()?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            // A daemon that has just been started may not answer yet.
            let disks = node.ask(&["disks", NAME]);
            match &disks {
                Ok(disks)
                    if ["moved", "cancelled", "failed"]
                        .iter()
                        .any(|end| disks["moves"][0]["state"] == *end) =>
                {
                    return Ok(disks["moves"][0].clone());
                }
                _ if Instant::now() > deadline => bail!("it does not end: {disks:?}; {}", node.log()),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Files in the folders of disks, by name.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn files(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for folder in &self.folders {
            for entry in std::fs::read_dir(folder)? {
                found.push(entry?.path());
            }
        }
        found.sort();
        Ok(found)
    }

    /// Fails if the QEMU that has the guest has a job, an export or a node of a copy, or half an image is left.
    ///
    /// # Errors
    /// What is left.
    pub fn nothing_left(&self) -> Result<()> {
        let (node, ..) = self.sides()?;
        let half: Vec<_> =
            self.files()?.into_iter().filter(|file| file.to_string_lossy().contains(".coming-")).collect();
        ensure!(half.is_empty(), "half an image is left: {half:?}");
        let dir = node.vm(NAME)?.dir;
        let operator = dir.join(OPERATOR);
        if !operator.exists() {
            return Ok(());
        }
        let monitor = Monitor::connect(&operator)?;
        for (query, what) in [("query-jobs", "jobs"), ("query-block-exports", "exports")] {
            let found = monitor.run(query, Value::Null)?;
            ensure!(found.as_array().is_some_and(Vec::is_empty), "{what} are left: {found}");
        }
        let nodes = monitor.run("query-named-block-nodes", serde_json::json!({ "flat": true }))?;
        let ours = ["vmove-disk", "vmove-verify"];
        ensure!(
            !ours.iter().any(|name| nodes.to_string().contains(name)),
            "nodes or bitmaps are left: {nodes}"
        );
        let socket = dir.join("vmove-verify.sock");
        ensure!(!socket.exists(), "a socket is left: {}", socket.display());
        Ok(())
    }
}
