//! Guests that have booted before: each once in a test run, and taken up from files afterwards.
//!
//! Under emulation a guest takes seconds to boot, and most tests want only one that is at work. Its RAM and its device state are saved when
//! the first test needs it, as QEMU's own migration does that (`x-ignore-shared`), and later ones begin with these: the same command line,
//! the same daemon, the same beacon. The files are in the folder that `VMOVE_BOOTED` names, which `./run test` makes for a run and deletes;
//! without it, every guest boots.

use std::collections::hash_map::DefaultHasher;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use serde_json::json;

use crate::beacon::data_ranges;
use crate::daemon::{Node, Vm};
use crate::guest::{Guest, StockQemu, System};
use crate::monitor::Monitor;
use crate::places::{self, Qemu};
use crate::process::ram_in;
use crate::sandbox::Sandbox;

/// Monitor of a QEMU that waits for its guest, in its working directory. The other one is the daemon's.
const MONITOR: &str = "booted.sock";
/// Where it listens for the state of its guest.
const STATE: &str = "state.sock";
/// What `vmove run` calls the RAM of a guest with nothing but `-m`.
const RAM_ID: &str = "vmove-ram0";
/// The guest's disk, in the folder of one that has booted.
const DISK: &str = "disk";
/// For QEMU to write or read a device state.
const TIMEOUT: Duration = Duration::from_secs(30);

/// As [`Node::run_guest`], without booting where the same guest has booted before in this test run.
///
/// # Errors
/// When it does not start or does not get to work.
pub fn run(node: &Node, name: &str, memory: &str, guest: &Guest) -> Result<Vm> {
    run_from(places::booted_guests().as_deref(), node, name, memory, guest)
}

/// As [`run`], with the folder of guests that have booted.
///
/// # Errors
/// As [`run`].
pub fn run_from(folder: Option<&Path>, node: &Node, name: &str, memory: &str, guest: &Guest) -> Result<Vm> {
    let Some(booted) = Booted::of(folder, guest, memory)? else {
        return node.run_guest(name, memory, guest);
    };
    if let Some(image) = &guest.disk {
        std::fs::copy(booted.folder.join(DISK), image).context("the guest's disk cannot be copied")?;
    }
    let line = booted.waiting(guest).command_line("{vmdir}/serial.log")?;
    let mut arguments = vec!["run", "--name", name, "--memory", memory, "--"];
    arguments.extend(line.iter().map(String::as_str));
    node.ask(&arguments)?;
    booted.take_up(&node.vm(name)?)?;
    node.vm(name)
}

/// The program that starts the guest in `folder`.
fn program_of(folder: &Path) -> PathBuf {
    let key = folder.file_name().unwrap_or_default().to_string_lossy();
    places::programs_of_booted(folder.parent().unwrap_or(folder)).join(format!("qemu-system-{key}"))
}

/// A guest that has booted.
#[derive(Debug)]
struct Booted {
    folder: PathBuf,
    bytes: u64,
}

impl Booted {
    /// The saved `guest`; boots it first if this is the first to ask in this run. Nothing if guests are to boot, or this one has a device
    /// or memory with a state of its own.
    ///
    /// # Errors
    /// When it does not boot, or cannot be saved.
    fn of(folder: Option<&Path>, guest: &Guest, memory: &str) -> Result<Option<Self>> {
        let plain = guest.disk.is_some() || guest.extra.is_empty() && guest.modules.is_empty();
        // Its folder is vmove's, which boots it.
        let plain = plain && !guest.extra.iter().any(|argument| argument.contains("{vmdir}"));
        // The payload boots as fast as a guest is taken up.
        let plain = plain && guest.system == System::Linux;
        let Some(all) = folder.filter(|_| plain && guest.used_mib == 0 && memory == "thp") else {
            return Ok(None);
        };
        // Another program may be one that a test has made, or another one for everybody who looks for it.
        let known = [Qemu::under_test(), Qemu::V7_2.path(), Qemu::V10_0.path(), Qemu::Testing.path()];
        if !known.into_iter().flatten().any(|program| program == guest.qemu) {
            return Ok(None);
        }
        std::fs::create_dir_all(all)?;
        let folder = all.join(key(guest)?);
        let lock = File::create(folder.with_extension("lock"))?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
        if !folder.exists() {
            save(guest, &folder).context("a guest could not be booted and saved")?;
        }
        Ok(Some(Self { folder, bytes: guest.bytes() }))
    }

    /// The guest as it is to be given to `vmove run`: its QEMU waits for what [`Booted::take_up`] brings.
    #[must_use]
    fn waiting(&self, guest: &Guest) -> Guest {
        Guest { qemu: program_of(&self.folder), ..guest.clone() }
    }

    /// Brings RAM and device state into a QEMU that waits, and lets the guest go on.
    ///
    /// # Errors
    /// When QEMU does not take them.
    fn take_up(&self, vm: &Vm) -> Result<()> {
        self.fill(vm.pid)?;
        let monitor = Monitor::connect(&vm.dir.join(MONITOR))?;
        monitor.enable(&["x-ignore-shared"])?;
        // Behind its filter QEMU starts no program that could read the file.
        monitor.run("migrate-incoming", json!({ "uri": format!("unix:{STATE}") }))?;
        let mut state = File::open(self.folder.join("state"))?;
        std::io::copy(&mut state, &mut UnixStream::connect(vm.dir.join(STATE))?)?;
        // It was saved while it stood still, and so it is loaded.
        ended(&monitor, "load")?;
        monitor.run("cont", json!({})).map(drop)
    }

    /// Writes the RAM through QEMU's mapping, as the guest did when it booted: on huge pages where it has them, and no hole is filled.
    fn fill(&self, pid: i32) -> Result<()> {
        let start = ram_in(pid, self.bytes)?;
        let from = File::open(self.folder.join("ram"))?;
        let memory = File::options().write(true).open(format!("/proc/{pid}/mem"))?;
        let mut chunk = vec![0; 1 << 20];
        for (mut at, end) in data_ranges(&from, self.bytes) {
            while at < end {
                let wanted = usize::try_from(end - at).unwrap_or(chunk.len()).min(chunk.len());
                from.read_exact_at(&mut chunk[..wanted], at)?;
                memory.write_all_at(&chunk[..wanted], start + at)?;
                at += wanted as u64;
            }
        }
        Ok(())
    }
}

/// Tells guests apart that would boot to something else.
fn key(guest: &Guest) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    // Wherever its disk is.
    for word in &with_disk_at(guest, Path::new(DISK)).command_line("")? {
        // Measured by each process anew, and the same but for the last digits.
        let of_this_process = |part: &&str| part.starts_with("tsc_early_khz=");
        word.split(' ').filter(|part| !of_this_process(part)).for_each(|part| part.hash(&mut hasher));
        // Programs and images that were made anew.
        if let Ok(meta) = std::fs::metadata(word) {
            (meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
        }
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// The guest with its disk in another file.
fn with_disk_at(guest: &Guest, new: &Path) -> Guest {
    let Some(old) = &guest.disk else { return guest.clone() };
    let (from, to) = (old.display().to_string(), new.display().to_string());
    let extra = guest.extra.iter().map(|word| word.replace(&from, &to)).collect();
    Guest { extra, disk: Some(new.to_owned()), ..guest.clone() }
}

/// Boots a guest and leaves it in `folder`, all of it or nothing.
fn save(guest: &Guest, folder: &Path) -> Result<()> {
    let sandbox = Sandbox::new()?;
    let memory = sandbox.mount_thp("memory")?;
    let ram = memory.join("ram");
    let disk = sandbox.path().join(DISK);
    if let Some(image) = &guest.disk {
        std::fs::copy(image, &disk)?;
    }
    let guest = &with_disk_at(guest, &disk);
    let mut qemu = StockQemu::start_with_ram_id(guest, &sandbox.folder("qemu")?, &ram, RAM_ID, &[])?;
    qemu.wait_monitor()?;
    qemu.wait_running()?;
    let monitor = Monitor::connect(qemu.qmp())?;
    monitor.run("stop", json!({}))?;
    monitor.enable(&["x-ignore-shared"])?;
    let new = folder.with_extension("new");
    // Of a process that was killed.
    let _ = std::fs::remove_dir_all(&new);
    std::fs::create_dir_all(&new)?;
    let state = new.join("state");
    monitor.run("migrate", json!({ "uri": format!("exec:cat >'{}'", state.display()) }))?;
    ended(&monitor, "save")?;
    copy_data(&ram, &new.join("ram"))?;
    if guest.disk.is_some() {
        // QEMU has written all of it: the migration has ended.
        std::fs::copy(&disk, new.join(DISK))?;
    }
    // A destination gets its own `-incoming`, and who asks for the version has no memory.
    let script = format!(
        "#!/bin/sh\ncase \" $* \" in\n    *' -incoming '*) ;;\n    \
         *mem-path=*) exec '{0}' \"$@\" -incoming defer -qmp unix:{MONITOR},server=on,wait=off ;;\nesac\nexec '{0}' \"$@\"\n",
        guest.qemu.display()
    );
    let program = program_of(folder);
    program.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    std::fs::write(&program, script)?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    std::fs::rename(&new, folder)?;
    Ok(())
}

/// Waits until QEMU has saved or loaded its state.
fn ended(monitor: &Monitor, what: &str) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let found = monitor.run("query-migrate", json!({}))?;
        match found["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed") => bail!("QEMU does not {what} its state: {found}"),
            _ => ensure!(Instant::now() < deadline, "QEMU does not end to {what} its state: {found}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Copies a file, and leaves its holes.
fn copy_data(from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (File::open(from)?, File::create_new(to)?);
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut chunk = vec![0; 1 << 20];
    for (mut at, end) in data_ranges(&from, length) {
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(chunk.len()).min(chunk.len());
            from.read_exact_at(&mut chunk[..wanted], at)?;
            // Most of a huge page may be zero.
            for (number, page) in chunk[..wanted].chunks(4096).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    to.write_all_at(page, at + number as u64 * 4096)?;
                }
            }
            at += wanted as u64;
        }
    }
    Ok(())
}
