//! QEMU's own migration modes, between two stock processes over loopback TCP.
//!
//! All parameters have QEMU's defaults, except `max-bandwidth`: its default limits QEMU to 1 Gbit/s (128 MiB/s), so it is set to
//! 100 GB/s on both sides. The defaults are: 300 ms `downtime-limit`, two `multifd` channels, no auto-converge, no compression.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::cpu::Role;
use super::mover::{Backing, Mode, Movable, Moved};
use crate::beacon::BeaconPage;
use crate::guest::{Guest, StockQemu};
use crate::monitor::Monitor;
use crate::pki::Pki;
use crate::sampler::now;
use crate::sandbox::Sandbox;

pub(super) const MAX_BANDWIDTH: u64 = 100_000_000_000;
/// Timeout of a pre-copy. One that takes longer does not end, because the guest writes faster than the link transfers.
const PRECOPY_TIMEOUT: Duration = Duration::from_secs(60);

/// Name of the certificates in QEMU.
const CREDENTIALS: &str = "tls0";

struct QemuMove {
    mode: Mode,
    guest: Guest,
    source: StockQemu,
    monitor: Monitor,
    page: Mutex<Option<BeaconPage>>,
    folder: PathBuf,
    destination_ram: PathBuf,
    pki: Option<Pki>,
    destination: Option<(StockQemu, Monitor)>,
    pids: Arc<Mutex<Vec<(i32, Role)>>>,
}

/// Arguments that give a QEMU what it needs for TLS on this side of the connection.
fn credentials(pki: Option<&Pki>, endpoint: &str) -> Result<Vec<String>> {
    let Some(pki) = pki else { return Ok(Vec::new()) };
    let folder = pki.for_qemu(endpoint)?;
    let object = format!(
        "tls-creds-x509,id={CREDENTIALS},dir={},endpoint={endpoint},verify-peer=on",
        folder.display()
    );
    Ok(vec!["-object".to_owned(), object])
}

/// Boots a guest in a stock QEMU.
///
/// # Errors
/// When it does not start.
pub fn boot(mode: Mode, backing: Backing, guest: &Guest, sandbox: &Sandbox) -> Result<Box<dyn Movable>> {
    let memory = backing.mount(sandbox, "mem", 2 * guest.bytes())?;
    let folder = sandbox.folder("d")?;
    let pki = mode.is_encrypted().then(|| Pki::new(&[Ipv4Addr::LOCALHOST.into()])).transpose()?;
    let credentials = credentials(pki.as_ref(), "client")?;
    let credentials: Vec<_> = credentials.iter().map(String::as_str).collect();
    let mut source = StockQemu::start(guest, &sandbox.folder("s")?, &memory.join("s"), &credentials)?;
    source.wait_monitor()?;
    let monitor = Monitor::connect(source.qmp())?;
    let page = source.wait_running()?;
    let pids = Arc::new(Mutex::new(vec![(source.pid(), Role::SourceQemu)]));
    Ok(Box::new(QemuMove {
        mode,
        guest: guest.clone(),
        source,
        monitor,
        page: Mutex::new(Some(page)),
        folder,
        destination_ram: memory.join("d"),
        pki,
        destination: None,
        pids,
    }))
}

impl QemuMove {
    fn capabilities(&self) -> Vec<&'static str> {
        let mut wanted = vec!["events"];
        match self.mode {
            Mode::QemuMultifd | Mode::QemuMultifdAligned | Mode::QemuMultifdTls => wanted.push("multifd"),
            Mode::QemuPostcopy | Mode::QemuPostcopyAligned | Mode::QemuHybrid | Mode::QemuHybridAligned => {
                wanted.push("postcopy-ram");
            }
            Mode::QemuPreempt | Mode::QemuHybridPreempt => {
                wanted.extend(["postcopy-ram", "postcopy-preempt"]);
            }
            _ => {}
        }
        wanted
    }

    fn prepare(&self, monitor: &Monitor) -> Result<()> {
        monitor.enable(&self.capabilities())?;
        monitor.run("migrate-set-parameters", json!({ "max-bandwidth": MAX_BANDWIDTH }))?;
        if self.pki.is_some() {
            monitor.run("migrate-set-parameters", json!({ "tls-creds": CREDENTIALS }))?;
        }
        Ok(())
    }

    /// Starts the destination, lets it listen, and returns its address.
    fn start_destination(&mut self) -> Result<String> {
        let credentials = credentials(self.pki.as_ref(), "server")?;
        let more: Vec<_> =
            ["-incoming", "defer"].into_iter().chain(credentials.iter().map(String::as_str)).collect();
        let mut qemu = StockQemu::start(&self.guest, &self.folder, &self.destination_ram, &more)?;
        lock(&self.pids).push((qemu.pid(), Role::DestinationQemu));
        qemu.wait_monitor()?;
        let monitor = Monitor::connect(qemu.qmp())?;
        self.prepare(&monitor).context("refused by the destination")?;
        let port = vmove_skip::free_port().port();
        let uri = format!("tcp:127.0.0.1:{port}");
        monitor.run("migrate-incoming", json!({ "uri": uri }))?;
        self.destination = Some((qemu, monitor));
        Ok(uri)
    }

    /// Switches a pre-copy to post-copy at the moment that the mode defines.
    fn switch(&self) -> Result<()> {
        match self.mode {
            Mode::QemuPostcopy | Mode::QemuPostcopyAligned | Mode::QemuPreempt => {
                self.wait_status(&["active"])?;
            }
            Mode::QemuHybrid | Mode::QemuHybridAligned | Mode::QemuHybridPreempt => {
                // Pass 1 is the whole memory. Pass 2 begins with the second scan for dirty pages.
                let pass = |event: &vmove_qmp::Event| event.data["pass"].as_u64() >= Some(2);
                self.monitor.wait("MIGRATION_PASS", PRECOPY_TIMEOUT, pass)?;
            }
            _ => return Ok(()),
        }
        self.monitor.run("migrate-start-postcopy", Value::Null).map(|_| ())
    }

    fn wait_status(&self, wanted: &[&str]) -> Result<Arc<vmove_qmp::Event>> {
        // A post-copy that lost its connection stays paused, because nobody recovers it here.
        let ends = ["completed", "failed", "cancelled", "postcopy-paused"];
        let event = self.monitor.wait("MIGRATION", PRECOPY_TIMEOUT, |event| {
            event.text("status").is_some_and(|status| wanted.contains(&status) || ends.contains(&status))
        });
        match event {
            Ok(event) if event.text("status").is_some_and(|status| wanted.contains(&status)) => Ok(event),
            Ok(_) => {
                let why = self.monitor.run("query-migrate", Value::Null)?;
                bail!(
                    "QEMU's migration failed: {}",
                    why["error-desc"].as_str().unwrap_or("it does not say why")
                )
            }
            Err(e) => {
                let told = self.monitor.run("query-migrate", Value::Null).unwrap_or_default();
                let (status, left) = (&told["status"], &told["ram"]["remaining"]);
                Err(e.context(format!(
                    "given up after {PRECOPY_TIMEOUT:?}, at status {status} with {left} bytes left"
                )))
            }
        }
    }
}

impl Movable for QemuMove {
    fn beacon(&self) -> Result<BeaconPage> {
        lock(&self.page).take().context("the beacon was taken before")
    }

    fn ram(&self) -> Vec<PathBuf> {
        vec![self.source.ram().to_owned()]
    }

    fn destination_ram(&self) -> Box<dyn FnMut() -> Option<PathBuf> + Send> {
        let path = self.destination_ram.clone();
        Box::new(move || path.exists().then(|| path.clone()))
    }

    fn processes(&self) -> Box<dyn FnMut() -> Vec<(i32, Role)> + Send> {
        let pids = Arc::clone(&self.pids);
        Box::new(move || lock(&pids).clone())
    }

    fn migrate(&mut self) -> Result<Moved> {
        let requested = now();
        self.prepare(&self.monitor).context("refused by the source")?;
        let uri = self.start_destination()?;
        let began = now();
        self.monitor.run("migrate", json!({ "uri": uri }))?;
        self.switch()?;
        let completed = self.wait_status(&["completed"])?;
        let (qemu, destination) = self.destination.as_ref().context("a destination")?;
        let resumed = destination
            .wait("RESUME", Duration::from_secs(20), |_| true)
            .with_context(|| format!("the guest did not resume; destination says: {}", qemu.log()))?;
        let loaded = destination
            .wait("MIGRATION", Duration::from_secs(20), |e| e.text("status") == Some("completed"))?;
        let stopped = self.monitor.wait("STOP", Duration::from_secs(1), |_| true)?;
        let told = self.monitor.run("query-migrate", Value::Null)?;
        let ram = |field: &str| told["ram"][field].as_u64().unwrap_or(0);
        Ok(Moved {
            requested,
            began,
            ended: completed.at.0.max(loaded.at.0),
            resumed: Some(resumed.at.0),
            downtime_ms: resumed.qemu_time.since(stopped.qemu_time).as_secs_f64() * 1e3,
            wire_bytes: ram("transferred"),
            faults: None,
            scan_us_per_gib: None,
            note: format!("{} passes, {} page requests", ram("dirty-sync-count"), ram("postcopy-requests")),
        })
    }

    fn console(&self) -> String {
        let there = self.destination.as_ref().map(|(qemu, _)| qemu.console()).unwrap_or_default();
        self.source.console() + &there
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
