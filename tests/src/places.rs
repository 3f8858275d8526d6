//! Paths of the programs and images that tests use.
//!
//! An environment variable may name each of them. Without it, the path is that to which `./run setup` or `./run build` writes.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// A QEMU that tests run against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qemu {
    /// Debian 12's. `VMOVE_QEMU_7_2`.
    V7_2,
    /// Debian 12 backports'. `VMOVE_QEMU_10_0`.
    V10_0,
    /// The newest that Debian has, in its testing suite. `VMOVE_QEMU_TESTING`.
    Testing,
}

impl Qemu {
    /// The QEMU under test: the program that `VMOVE_QEMU` names, else 10.0.
    ///
    /// # Errors
    /// When it does not exist; the error says what to do.
    pub fn under_test() -> Result<PathBuf> {
        match std::env::var_os("VMOVE_QEMU").filter(|v| !v.is_empty()) {
            Some(path) => exists(Path::new(&path)),
            None => Self::V10_0.path(),
        }
    }

    /// The program.
    ///
    /// # Errors
    /// When it does not exist; the error says what to do.
    pub fn path(self) -> Result<PathBuf> {
        match self {
            Self::V7_2 => place("VMOVE_QEMU_7_2", "qemu-7.2/usr/bin/qemu-system-x86_64"),
            Self::V10_0 => place("VMOVE_QEMU_10_0", "qemu-10.0/usr/bin/qemu-system-x86_64"),
            Self::Testing => place("VMOVE_QEMU_TESTING", "qemu-testing/usr/bin/qemu-system-x86_64"),
        }
    }
}

/// The guest's kernel.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn guest_kernel() -> Result<PathBuf> {
    place("VMOVE_GUEST_KERNEL", "kernel/vmlinux")
}

/// The guest's initramfs.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn guest_initrd() -> Result<PathBuf> {
    place("VMOVE_GUEST_INITRD", "guest/initrd.img")
}

/// The image of a disk with Debian, PostgreSQL, SQLite and fio, which `./run soak --databases` makes.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn debian_disk() -> Result<PathBuf> {
    place_made_by("./run soak --databases", "VMOVE_DEBIAN_DISK", "databases/disk.raw")
}

/// The program with which a guest's shell scripts fork their machine, linked statically.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn fork_program() -> Result<PathBuf> {
    place("VMOVE_FORK_PROGRAM", "guest/vmove-fork")
}

/// A busybox that needs no libraries.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn busybox() -> Result<PathBuf> {
    place("VMOVE_BUSYBOX", "busybox/bin/busybox")
}

/// The folder whose `bin` has `ssh` and `ssh-keygen`, and whose `sbin` has `sshd`.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn ssh() -> Result<PathBuf> {
    let folder = place("VMOVE_SSH", "ssh/usr")?;
    exists(&folder.join("sbin/sshd")).map(|_| folder)
}

/// The folder whose `usr` has libvirt, as it is put over `/usr`.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn libvirt() -> Result<PathBuf> {
    let folder = place("VMOVE_LIBVIRT", "libvirt")?;
    exists(&folder.join("usr/sbin/libvirtd")).map(|_| folder)
}

/// Chromium without a window.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn chromium() -> Result<PathBuf> {
    place("VMOVE_CHROMIUM", "chromium/usr/lib/chromium/chromium-headless-shell")
        .map_err(|error| error.context("'./run test page' unpacks a Chromium"))
}

/// Prometheus' tool that checks metrics and rules.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn promtool() -> Result<PathBuf> {
    place("VMOVE_PROMTOOL", "prometheus/usr/bin/promtool")
}

/// The Python that has an emulator of Redfish (sushy-tools).
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn redfish_python() -> Result<PathBuf> {
    // Not resolved: a virtual environment is known by the path of its Python.
    let cache = std::env::var_os("VMOVE_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache"), PathBuf::from);
    let python = cache.join("redfish/bin/python3");
    if !python.is_file() {
        bail!("{} is not there; './run setup' installs sushy-tools", python.display());
    }
    Ok(python)
}

/// The program `name` (`vmoved` or `vmove`) that was built: in the folder `VMOVE_BIN_DIR`, or else in that of the running program.
///
/// # Errors
/// When it does not exist; the error says what to do.
pub fn product(name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("VMOVE_BIN_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => {
            let program = std::env::current_exe()?;
            // Test programs are in the subfolder `deps`.
            program
                .ancestors()
                .skip(1)
                .find(|folder| folder.file_name() != Some(OsStr::new("deps")))
                .unwrap_or(Path::new("."))
                .to_owned()
        }
    };
    let path = folder.join(name);
    if !path.is_file() {
        bail!(
            "{} is not there; build it in the same profile with 'cargo build -p vmove-daemon -p vmove-cli -p vmove-bridge -p vmove-adapter'",
            path.display()
        );
    }
    Ok(path)
}

fn place(variable: &str, in_cache: &str) -> Result<PathBuf> {
    place_made_by("./run build", variable, in_cache)
}

fn place_made_by(command: &str, variable: &str, in_cache: &str) -> Result<PathBuf> {
    match std::env::var_os(variable).filter(|v| !v.is_empty()) {
        Some(path) => exists_made_by(command, Path::new(&path)),
        None => {
            let cache = std::env::var_os("VMOVE_CACHE")
                .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache"), PathBuf::from);
            exists_made_by(command, &cache.join(in_cache))
        }
    }
}

fn exists(path: &Path) -> Result<PathBuf> {
    exists_made_by("./run build", path)
}

fn exists_made_by(command: &str, path: &Path) -> Result<PathBuf> {
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(e) => bail!("{} is not there ({e}); '{command}' makes it", path.display()),
    }
}

/// Fails unless this process is root, which attaching to QEMU and mounting need.
///
/// # Errors
/// When it is not.
pub fn root() -> Result<()> {
    vmove_skip::root().map_err(anyhow::Error::msg)
}

/// Folder of guests that have booted in this test run, if `VMOVE_BOOTED` names one.
#[must_use]
pub fn booted_guests() -> Option<PathBuf> {
    std::env::var_os("VMOVE_BOOTED").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// Folder of the programs that take up the guests in `booted`.
#[must_use]
pub fn programs_of_booted(booted: &Path) -> PathBuf {
    booted.join("bin")
}

/// `PATH` of a daemon, which starts the QEMUs in it for other nodes: those under test, and those that take up the guests in `booted`.
#[must_use]
pub fn path_with(booted: Option<&Path>) -> OsString {
    let path = vmove_skip::path_with_qemus();
    let all = booted.map(programs_of_booted).into_iter().chain(std::env::split_paths(&path));
    // A folder with a colon in its name cannot be in it.
    std::env::join_paths(all).unwrap_or(path)
}
