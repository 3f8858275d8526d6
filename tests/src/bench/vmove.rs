//! vmove's modes, between two daemons on loopback TCP, by the same commands that users run.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use super::ballast::Ballast;
use super::cpu::Role;
use super::mover::{Backing, FaultTimes, Mode, Movable, Moved};
use crate::beacon::{self, BeaconPage};
use crate::daemon::{Node, NodeOptions, Vm};
use crate::guest::Guest;
use crate::pki::Pki;
use crate::sampler::now;
use crate::sandbox::Sandbox;

const NAME: &str = "guest";

struct VmoveMove {
    mode: Mode,
    a: Node,
    b: Node,
    vm: Vm,
    console_after: Mutex<String>,
    /// The folder of the sandbox. The folder in which a QEMU runs shows to which node it belongs.
    sandbox: PathBuf,
    /// Read by the daemons.
    _pki: Option<Pki>,
}

/// Boots a guest with `vmove run` on the first of two nodes.
///
/// # Errors
/// When daemons or guest do not start.
pub fn boot(mode: Mode, backing: Backing, guest: &Guest, sandbox: &Sandbox) -> Result<Box<dyn Movable>> {
    if backing == Backing::Hugetlb2M {
        // The daemons mount hugetlbfs themselves, but the pool must have the pages for both nodes.
        sandbox.reserve_huge_pages(2 << 20, 2 * guest.bytes())?;
        Ballast::warm_huge_pages(2 * guest.bytes())?;
    }
    let pki = mode.is_encrypted().then(|| Pki::new(&[Ipv4Addr::LOCALHOST.into()])).transpose()?;
    let extra = pki.as_ref().map(Pki::flags).unwrap_or_default();
    let (a, b) = Node::pair(sandbox, &NodeOptions { extra, ..NodeOptions::default() })?;
    let mut guest = guest.clone();
    guest.extra.extend(["-name".to_owned(), "{name},debug-threads=on".to_owned()]);
    let vm = a.run_guest(NAME, backing.name(), &guest)?;
    let sandbox = sandbox.path().to_owned();
    Ok(Box::new(VmoveMove { mode, a, b, vm, console_after: Mutex::default(), sandbox, _pki: pki }))
}

impl Movable for VmoveMove {
    fn beacon(&self) -> Result<BeaconPage> {
        self.vm.beacon()
    }

    fn ram(&self) -> Vec<PathBuf> {
        self.vm.ram_files()
    }

    fn destination_ram(&self) -> Box<dyn FnMut() -> Option<PathBuf> + Send> {
        let memory = self.b.memory();
        Box::new(move || beacon::ram_files(&memory).into_iter().next())
    }

    fn processes(&self) -> Box<dyn FnMut() -> Vec<(i32, Role)> + Send> {
        let daemons = [(self.a.pid(), Role::SourceDaemon), (self.b.pid(), Role::DestinationDaemon)];
        let source = self.vm.pid;
        let there = self.b.folder().to_owned();
        let known: Arc<Mutex<Option<i32>>> = Arc::default();
        Box::new(move || {
            let mut all: Vec<_> = daemons.iter().filter_map(|(pid, role)| Some(((*pid)?, *role))).collect();
            all.push((source, Role::SourceQemu));
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            // Looking through all processes is dear: done until it is found.
            *known = known.or_else(|| crate::sandbox::qemu_in(&there));
            all.extend(known.map(|pid| (pid, Role::DestinationQemu)));
            all
        })
    }

    fn migrate(&mut self) -> Result<Moved> {
        let mode = match self.mode {
            Mode::VmovePrecopy => "precopy",
            Mode::VmovePostcopy | Mode::VmovePostcopyTls => "postcopy",
            Mode::VmoveHybrid | Mode::VmoveHybridTls => "hybrid",
            _ => "auto",
        };
        let requested = now();
        let report = self.a.migrate(NAME, self.b.name(), &["--mode", mode])?;
        let answered = now();
        if let Ok(vm) = self.b.vm(NAME) {
            *self.console_after.lock().unwrap_or_else(PoisonError::into_inner) = vm.console();
        }
        // The report counts from the daemon's taking of the request; the command's own start and end come on top here.
        let setup = nanoseconds(report.setup_ms);
        let resumed = report
            .phases
            .iter()
            .find(|phase| phase.name == "fetch" || phase.name == "postcopy")
            .map(|phase| requested + nanoseconds(phase.start_ms));
        Ok(Moved {
            requested,
            began: requested + setup,
            ended: answered,
            resumed,
            downtime_ms: report.downtime_ms,
            wire_bytes: report.bytes_sent,
            faults: (report.faults.count > 0).then_some(FaultTimes {
                count: report.faults.count,
                p50_us: report.faults.p50_us,
                p99_us: report.faults.p99_us,
                max_us: report.faults.max_us,
            }),
            scan_us_per_gib: (report.scan_us_per_gib > 0.0).then_some(report.scan_us_per_gib),
            note: format!("{} over {}: {}", report.mode, report.fabric, report.mode_reason),
        })
    }

    fn console(&self) -> String {
        self.vm.console() + &self.console_after.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for VmoveMove {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("logs were in {}", self.sandbox.display());
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "milliseconds of a migration")]
fn nanoseconds(milliseconds: f64) -> u64 {
    (milliseconds.max(0.0) * 1e6) as u64
}
