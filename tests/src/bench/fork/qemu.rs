//! The same with QEMU alone, by the two existing recipes.
//!
//! **Saved, copied, loaded**: QEMU writes all memory into a file. The file is copied for each child, as if each child ran on a host of
//! its own. Each child loads its copy. **VM templating** is the recipe of QEMU's documentation: RAM is in a shared file, the device
//! state contains no RAM (`x-ignore-shared`), and children map the file privately. The guest must stay stopped as long as there are
//! children, because it would write to their memory.
//!
//! The conditions favour QEMU: files are in memory, copies are made and loaded in parallel, no child runs before all are loaded, and
//! the hypervisor, if there is one, has not taken the memory back (see [`super::super::ballast`]).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use super::ms;
use crate::bench::ballast::Ballast;
use crate::guest::{Guest, StockQemu};
use crate::monitor::Monitor;
use crate::process::Guarded;
use crate::sandbox::Sandbox;

/// Memory of a guest besides its working set and cold pages, in MiB.
const KERNEL_MIB: u64 = 150;
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// A way to make many guests from one without vmove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// All memory is written to a file, and each child loads a copy of the file.
    SaveCopyLoad,
    /// Children map the guest's RAM file privately.
    Templating,
}

impl Recipe {
    /// The name in tables.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::SaveCopyLoad => "QEMU: saved, copied, loaded",
            Self::Templating => "QEMU: VM templating",
        }
    }

    const fn folder(self) -> &'static str {
        match self {
            Self::SaveCopyLoad => "whole",
            Self::Templating => "template",
        }
    }

    const fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::SaveCopyLoad => &["events"],
            Self::Templating => &["events", "x-ignore-shared"],
        }
    }

    /// Arguments for the RAM of a child of `guest`, with the template in `ram`.
    fn backend(self, guest: &Guest, ram: &Path) -> String {
        let size = guest.memory_mib;
        match self {
            Self::SaveCopyLoad => format!("memory-backend-ram,id=vmram,size={size}M"),
            Self::Templating => {
                let ram = ram.display();
                format!("memory-backend-file,id=vmram,share=off,size={size}M,mem-path={ram}")
            }
        }
    }

    /// Memory for one child while it is loaded, in MiB: its own, and its copy of the file.
    fn child_mib(self, guest: &Guest) -> u64 {
        match self {
            Self::SaveCopyLoad => 2 * state_mib(guest),
            Self::Templating => 64,
        }
    }

    /// Memory for a guest, its saved state and its children, in MiB.
    #[must_use]
    pub fn needed_mib(self, guest: &Guest, children: usize) -> u64 {
        2 * state_mib(guest) + self.child_mib(guest) * children as u64
    }
}

/// Memory that a guest has in use, in MiB.
fn state_mib(guest: &Guest) -> u64 {
    KERNEL_MIB + u64::from(guest.config.working_set_mib + guest.config.cold_mib)
}

/// The times of one recipe for a number of children, in milliseconds, with one figure for each round.
#[derive(Debug, Clone, Serialize)]
pub struct QemuForks {
    /// The recipe.
    pub recipe: Recipe,
    /// The guest's memory, in MiB.
    pub memory_mib: u32,
    /// Children.
    pub children: usize,
    /// From the request until the last child executed guest code.
    pub all_running_ms: Vec<f64>,
    /// The guest's pause. With [`Recipe::Templating`]: until its state was saved; it stays stopped after that.
    pub stopped_ms: Vec<f64>,
    /// From the request until the last copy was complete.
    pub copied_ms: Vec<f64>,
    /// Size of the saved file, in bytes.
    pub state_bytes: u64,
}

/// Boots a guest and makes children of it, several rounds for each number in `counts`.
///
/// # Errors
/// When QEMU fails.
pub fn forks(
    recipe: Recipe,
    sandbox: &Sandbox,
    guest: &Guest,
    counts: &[usize],
    rounds: usize,
) -> Result<Vec<QemuForks>> {
    let memory = sandbox.mount_thp(&format!("qemu-{}", recipe.folder()))?;
    let mut parent = StockQemu::start(guest, &sandbox.folder(recipe.folder())?, &memory.join("parent"), &[])?;
    parent.wait_running()?;
    let measure = |&children: &usize| -> Result<QemuForks> {
        let mut forks = QemuForks {
            recipe,
            memory_mib: guest.memory_mib,
            children,
            all_running_ms: Vec::new(),
            stopped_ms: Vec::new(),
            copied_ms: Vec::new(),
            state_bytes: 0,
        };
        (0..rounds).try_for_each(|_| forks.round(&parent, guest, &memory))?;
        Ok(forks)
    };
    counts.iter().map(measure).collect()
}

impl QemuForks {
    fn round(&mut self, parent: &StockQemu, guest: &Guest, memory: &Path) -> Result<()> {
        let whole = self.recipe == Recipe::SaveCopyLoad;
        // The memory that will be touched: the file, and the memory of each child.
        let wanted = self.recipe.needed_mib(guest, self.children) - state_mib(guest);
        drop(whole.then(|| Ballast::take(wanted << 20)).transpose()?);
        let state = memory.join("state");
        let begun = Instant::now();
        let stopped = save(parent, &state, self.recipe)?;
        let clones = Clones::start(guest, memory, self.children, &self.recipe.backend(guest, parent.ram()))?;
        if whole {
            clones.each(|folder| Ok(std::fs::copy(&state, folder.join("state")).map(drop)?))?;
            self.copied_ms.push(ms(begun));
        }
        let source = |folder: &Path| if whole { folder.join("state") } else { state.clone() };
        clones.load(self.recipe, source)?.run()?;
        let running = ms(begun);
        eprintln!(
            "{} x {}: {running:.0} ms, guest stopped for {stopped:.0} ms",
            self.recipe.label(),
            self.children
        );
        self.all_running_ms.push(running);
        self.stopped_ms.push(stopped);
        self.state_bytes = std::fs::metadata(&state)?.len();
        ensure!(self.state_bytes > 0, "expected QEMU's state in {}, found an empty file", state.display());
        clones.end()?;
        if !whole {
            Monitor::connect(parent.qmp())?.run("cont", Value::Null)?;
        }
        Ok(())
    }
}

/// Stops the guest and writes its state to `to`. Then the guest resumes, unless its children map its memory. Returns the pause.
fn save(qemu: &StockQemu, to: &Path, recipe: Recipe) -> Result<f64> {
    let monitor = Monitor::connect(qemu.qmp())?;
    monitor.enable(recipe.capabilities())?;
    monitor.run("migrate-set-parameters", json!({ "max-bandwidth": 1_000_000_000_000_u64 }))?;
    let begun = Instant::now();
    monitor.run("stop", Value::Null)?;
    monitor.run("migrate", json!({ "uri": format!("exec:cat > {}", to.display()) }))?;
    ended(&monitor)?;
    if recipe == Recipe::SaveCopyLoad {
        monitor.run("cont", Value::Null)?;
    }
    Ok(ms(begun))
}

/// Waits until QEMU has saved or loaded.
fn ended(monitor: &Monitor) -> Result<()> {
    let event = monitor.wait("MIGRATION", LOAD_TIMEOUT, |event| {
        event.text("status").is_some_and(|status| status == "completed" || status == "failed")
    })?;
    let status = event.text("status").unwrap_or_default();
    ensure!(
        status == "completed",
        "expected QEMU to save or load, found: {}",
        monitor.run("query-migrate", Value::Null)?
    );
    Ok(())
}

/// QEMUs of one command line, each with a folder of its own; killed when dropped.
struct Clones(Vec<(Guarded, PathBuf)>);

impl Clones {
    fn start(guest: &Guest, memory: &Path, count: usize, backend: &str) -> Result<Self> {
        let line: Vec<String> = guest.command_line("null")?;
        let line: Vec<String> =
            line.into_iter().map(|w| if w == "file:null" { "null".to_owned() } else { w }).collect();
        let mut all = Self(Vec::new());
        for number in 0..count {
            let folder = memory.join(format!("clone-{number}"));
            std::fs::create_dir_all(&folder)?;
            let child = Command::new(&line[0])
                .args(&line[1..])
                .args(["-object", backend, "-machine", "memory-backend=vmram", "-incoming", "defer", "-S"])
                .arg("-qmp")
                .arg(format!("unix:{}/qmp.sock,server=on,wait=off", folder.display()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            all.0.push((child.into(), folder));
        }
        Ok(all)
    }

    /// Does this for all of them at the same time.
    fn each<T: Send>(&self, work: impl Fn(&Path) -> Result<T> + Sync) -> Result<Vec<T>> {
        std::thread::scope(|scope| {
            let work = &work;
            let tasks: Vec<_> = self.0.iter().map(|(_, folder)| scope.spawn(move || work(folder))).collect();
            tasks.into_iter().map(|task| task.join().map_err(|_| anyhow!("a task failed"))?).collect()
        })
    }

    /// Each loads its file.
    fn load(&self, recipe: Recipe, file: impl Fn(&Path) -> PathBuf + Sync) -> Result<Loaded> {
        let load = |folder: &Path| -> Result<Monitor> {
            let monitor = Monitor::connect(&folder.join("qmp.sock"))?;
            monitor.enable(recipe.capabilities())?;
            let uri = format!("exec:cat {}", file(folder).display());
            monitor.run("migrate-incoming", json!({ "uri": uri }))?;
            ended(&monitor)?;
            Ok(monitor)
        };
        Ok(Loaded(self.each(load)?))
    }

    fn end(self) -> Result<()> {
        for (process, folder) in self.0 {
            drop(process);
            std::fs::remove_dir_all(folder)?;
        }
        Ok(())
    }
}

/// Monitors of the QEMUs that have loaded.
struct Loaded(Vec<Monitor>);

impl Loaded {
    /// Lets all of them run, at the same time.
    fn run(self) -> Result<()> {
        let run = |monitor: Monitor| -> Result<()> {
            monitor.run("cont", Value::Null)?;
            monitor.wait("RESUME", Duration::from_secs(60), |_| true).map(drop)
        };
        std::thread::scope(|scope| {
            let tasks: Vec<_> = self.0.into_iter().map(|monitor| scope.spawn(move || run(monitor))).collect();
            tasks.into_iter().try_for_each(|task| task.join().map_err(|_| anyhow!("a task failed"))?)
        })
    }
}
