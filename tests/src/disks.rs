//! Guests that work on a disk, and what is said of disks.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmove_guest::config::{Config, Rate};
use vmove_qmp::confine::QemuUser;

use crate::daemon::Node;
use crate::forks::at_once;
use crate::guest::failures;
use crate::scene::STEP_TIMEOUT;

/// A guest that works on a disk, on so many MiB of it.
#[must_use]
pub fn task(disk_mib: u32) -> Config {
    Config {
        working_set_mib: 8,
        rate: Rate::PagesPerSecond(500),
        verify: 8_000,
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
    let console = node.vm(vm)?.console();
    let failed = failures(&console);
    ensure!(failed.is_empty(), "{vm} told of {failed:#?}");
    Ok(console.lines().filter(|line| line.contains("VMOVE-GUEST DISK")).count())
}

/// Waits until a VM has worked on its disk: most of its blocks are checked once more, by chance.
///
/// # Errors
/// When it does not, or what it has found wrong.
pub fn works(node: &Node, vm: &str) -> Result<()> {
    let (first, deadline) = (lines(node, vm)?, Instant::now() + STEP_TIMEOUT);
    while lines(node, vm)? < first + 6 {
        if Instant::now() > deadline {
            bail!("{vm} does not work on its disk: {}", node.vm(vm)?.console());
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
