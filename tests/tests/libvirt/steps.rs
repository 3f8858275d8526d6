//! A migration that stands still at a step of its order (docs/libvirt.md), so that something can be done to it there.
//!
//! Two hooks of ours, before and after that of vmove, hold libvirt where it waits for a hook. After that a daemon is stopped by a signal: libvirt's at the
//! source, without which a guest that stands still is not sent; its at the destination, without which a guest that has arrived does not run; vmove's at the
//! source, without which pages stay missing. What happens between is seen by a third monitor of each QEMU.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_tests::guest::Guest;
use vmove_tests::libvirt::{Arm, DOMAIN, Host, Pair, UUID};
use vmove_tests::monitor::Monitor;

/// For a step to be reached.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Migrations that may go by unheld.
const TRIES: usize = 5;
/// How long a migration that is held is watched, to see that it does stand still.
const SETTLES: Duration = Duration::from_millis(100);
/// Rounds take longer.
const INTO_ROUNDS: Duration = Duration::from_millis(250);

/// Where a migration is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// libvirt has started the destination's QEMU; vmove's hook was not called yet.
    BeforeHook,
    /// vmove's hook is at work: memory is sent in rounds. Nothing is held here, the step takes its time.
    Rounds,
    /// vmove's hook has returned, libvirt has not been told.
    Returned,
    /// The guest stands still, its state was not sent.
    Stopped,
    /// All was sent and loaded, the guest runs nowhere.
    Sent,
    /// The guest runs at the destination, and the source sends no page that it lacks.
    Runs,
    /// libvirt has ended the source's QEMU. Nothing is held.
    Ended,
}

/// A hook that libvirt calls beside vmove's, in the order of their names.
#[derive(Debug, Clone, Copy)]
enum Gate {
    Before,
    After,
}

impl Gate {
    const fn name(self) -> &'static str {
        match self {
            Self::Before => "0-before",
            Self::After => "zz-after",
        }
    }

    fn file(self, host: &Host, what: &str) -> PathBuf {
        host.folder().join(format!("{what}-{}", self.name()))
    }

    fn install(self, host: &Host) -> Result<()> {
        let path = host.folder().join("etc/hooks/qemu.d").join(self.name());
        let [hold, reached, fails] = ["hold", "reached", "fails"].map(|what| self.file(host, what));
        let text = format!(
            "#!/bin/sh\ncat >/dev/null\n[ \"$2 $3\" = 'started begin' ] || exit 0\n: >'{}'\nwhile [ -e '{}' ]; do sleep 0.01; done\n\
             [ ! -e '{}' ] || {{ echo 'a hook of the host refuses' >&2; exit 1; }}\n",
            reached.display(),
            hold.display(),
            fails.display()
        );
        std::fs::write(&path, text)?;
        Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?)
    }
}

/// Puts the hooks onto both hosts, and a third monitor into the domain, which counts at its next start.
fn prepare(pair: &Pair) -> Result<()> {
    for host in &pair.hosts {
        std::fs::create_dir_all(host.folder().join("etc/hooks/qemu.d"))?;
        Gate::Before.install(host)?;
        Gate::After.install(host)?;
    }
    let monitor = format!(
        "<qemu:arg value='-qmp'/><qemu:arg value='unix:{},server=on,wait=off'/></qemu:commandline>",
        watched_at().display()
    );
    pair.define_changed(0, |xml| xml.replace("</qemu:commandline>", &monitor))
}

/// Two hosts, and a guest on the first whose migrations can be held.
pub fn hosts(guest: &Guest) -> Pair {
    let pair = Pair::new(guest, Arm::Enabled).expect("two hosts");
    prepare(&pair).expect("hooks and a third monitor");
    pair.hosts[0].virsh(&["start", DOMAIN]).expect("started");
    pair.hosts[0].beacon().expect("it runs");
    pair
}

/// In vmove's folder, into which any QEMU may write; vmove looks at names that end with `.qmp`.
fn watched_at() -> PathBuf {
    Path::new("/run/libvirt/vmove").join(format!("{UUID}.watched"))
}

/// What QEMU of a host says from now on.
pub fn watch(host: &Host) -> Result<Monitor> {
    Monitor::connect(&host.file(&watched_at()))
}

/// A migration that is held.
#[derive(Debug)]
pub struct Held {
    /// `virsh migrate`.
    migration: Option<Child>,
    gate: Option<PathBuf>,
    stopped: Vec<i32>,
}

impl Held {
    /// Has it go on, as far as what was killed lets it.
    pub fn let_go(&mut self) {
        for pid in self.stopped.drain(..) {
            // It may be what was killed.
            let _ = kill(Pid::from_raw(pid), Signal::SIGCONT);
        }
        if let Some(gate) = self.gate.take() {
            let _ = std::fs::remove_file(gate);
        }
    }

    /// What virsh has said.
    pub fn ended(mut self) -> Result<Output> {
        self.let_go();
        let migration = self.migration.take().context("virsh")?;
        Ok(migration.wait_with_output()?)
    }

    /// Stops a daemon until it is let go.
    pub fn stop(&mut self, pid: i32) -> Result<()> {
        kill(Pid::from_raw(pid), Signal::SIGSTOP)?;
        self.stopped.push(pid);
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.let_go();
        if let Some(migration) = &mut self.migration {
            let _ = migration.kill();
            let _ = migration.wait();
        }
    }
}

/// Has the hook after vmove's, or before, end badly in the next migration to this host.
pub fn hook_fails(host: &Host, step: Step, fails: bool) -> Result<()> {
    let gate = if step == Step::BeforeHook { Gate::Before } else { Gate::After };
    let file = gate.file(host, "fails");
    if fails { Ok(std::fs::write(file, "")?) } else { Ok(std::fs::remove_file(file)?) }
}

/// Begins a migration from this host, with these options of virsh, and holds it at the step. One that went by unheld has moved the guest: then another one
/// is begun from where it is.
pub fn hold(pair: &Pair, from: &mut usize, step: Step, options: &[&str]) -> Result<Held> {
    for _ in 0..TRIES {
        if let Some(held) = try_to_hold(pair, *from, step, options)? {
            return Ok(held);
        }
        *from = 1 - *from;
        pair.sound_at(*from)?;
    }
    anyhow::bail!("{TRIES} migrations went by {step:?}")
}

fn try_to_hold(pair: &Pair, from: usize, step: Step, options: &[&str]) -> Result<Option<Held>> {
    let (here, there) = (&pair.hosts[from], &pair.hosts[1 - from]);
    for gate in [Gate::Before, Gate::After] {
        let _ = std::fs::remove_file(gate.file(there, "reached"));
    }
    let gate = match step {
        Step::BeforeHook => Some(Gate::Before.file(there, "hold")),
        Step::Rounds | Step::Returned => Some(Gate::After.file(there, "hold")),
        _ => None,
    };
    if let Some(gate) = &gate {
        std::fs::write(gate, "")?;
    }
    // Before it begins, so that no event is missed.
    let source = Monitor::connect(&here.file(&watched_at()))?;
    let mut command = pair.migration(from, options);
    let migration = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut held = Held { migration: Some(migration), gate, stopped: Vec::new() };
    if reach(&mut held, (here, there), &source, step).with_context(|| format!("{step:?}"))? {
        return Ok(Some(held));
    }
    let output = held.ended()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(None)
}

/// Whether it is held there.
fn reach(held: &mut Held, (here, there): (&Host, &Host), source: &Monitor, step: Step) -> Result<bool> {
    match step {
        Step::BeforeHook => return wait_for_file(&Gate::Before.file(there, "reached")).map(|()| true),
        Step::Returned => return wait_for_file(&Gate::After.file(there, "reached")).map(|()| true),
        Step::Rounds => {
            wait_for_file(&Gate::Before.file(there, "reached"))?;
            std::thread::sleep(INTO_ROUNDS);
            let returned = Gate::After.file(there, "reached").exists();
            ensure!(!returned, "expected rounds that take more than {INTO_ROUNDS:?}: the hook has returned");
            return Ok(true);
        }
        _ => {}
    }
    wait_for_status(source, "setup")?;
    match step {
        Step::Stopped => {
            held.stop(here.libvirtd()?)?;
            wait_for_status(source, "pre-switchover")?;
            std::thread::sleep(SETTLES);
            // On a busy machine libvirt may be quicker than its stop.
            return Ok(source.event("MIGRATION", |event| event.data["status"] == "device").is_none());
        }
        Step::Sent => {
            held.stop(there.libvirtd()?)?;
            let arriving = Monitor::connect(&there.file(&watched_at()))?;
            wait_for_status(source, "completed")?;
            std::thread::sleep(SETTLES);
            ensure!(arriving.count("RESUME") == 0, "expected a guest that runs nowhere");
            ensure!(source.count("RESUME") == 0, "expected a guest that runs nowhere");
        }
        _ => {
            let arriving = Monitor::connect(&there.file(&watched_at()))?;
            arriving.wait("RESUME", STEP_TIMEOUT, |_| true)?;
            if step == Step::Runs {
                held.stop(here.node.pid().context("no vmoved")?)?;
            } else {
                let deadline = Instant::now() + STEP_TIMEOUT;
                while here.qemu().is_some() {
                    ensure!(Instant::now() < deadline, "libvirt does not end the source's QEMU");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
    Ok(true)
}

fn wait_for_status(monitor: &Monitor, status: &str) -> Result<()> {
    let reached = monitor.wait("MIGRATION", STEP_TIMEOUT, |event| event.data["status"] == status);
    reached.map(drop).with_context(|| format!("waiting for {status}"))
}

fn wait_for_file(path: &Path) -> Result<()> {
    let deadline = Instant::now() + STEP_TIMEOUT;
    while !path.exists() {
        ensure!(Instant::now() < deadline, "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
