//! The daemon.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use metrics_exporter_prometheus::PrometheusHandle;
use nix::sys::signal::{SigSet, Signal};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use vmove_grant::SecretKey;
use vmove_http::listener::Bounds;
use vmove_http::socket;
use vmove_http::systemd::{self, NotifyState};

use crate::access::Access;
use crate::api::{App, router};
use crate::bridge::Bridge;
use crate::clock::SystemClock;
use crate::config::{Arguments, Config, grant_key};
use crate::driver::{VmDriver, VmoveCommand};
use crate::instance_types::reload_on_hangup;
use crate::listing::{Listings, keep_listing_vms};
use crate::metrics;
use crate::store::Store;
use crate::store::measured::Measured;

/// Between two removals of old samples from the histograms, without which they would grow.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// How long the first look at the store may hold up the begin.
const FIRST_READ: Duration = Duration::from_secs(2);

/// It ends with this if its settings cannot be used, as `vmoved` does: systemd does not start it again then.
const BAD_SETTINGS: u8 = 2;

/// Runs `vbridged` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let config = match Config::load(Arguments::parse()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("vbridged: {error:#}");
            return ExitCode::from(BAD_SETTINGS);
        }
    };
    vmove_log::start("VBRIDGE_LOG", config.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended =
        runtime.context("could not start worker threads").and_then(|runtime| runtime.block_on(serve(config)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vbridged: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let store = config.store.open()?;
    let key = config.grant_key.as_deref().map(grant_key).transpose()?;
    let metrics = metrics::install().context("could not set up metrics")?;
    if let Some(folder) = config.control.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(|| format!("could not make {}", folder.display()))?;
    }
    let (control, _held) = socket::listen(&config.control)?;
    let tcp = match config.listen {
        Some(address) => Some(bind(address, "--listen").await?),
        None => None,
    };
    let tls = config.tls.clone();
    if tcp.is_some() && config.insecure {
        tracing::warn!(
            tls = tls.is_some(),
            tokens = !config.access.is_open(),
            "--insecure: on a network that is not trusted, others may act here"
        );
    }
    if let Some(address) = config.metrics {
        let (listener, metrics) = (bind(address, "--metrics").await?, metrics.clone());
        tokio::spawn(vmove_http::metrics::serve(listener, move || metrics.render()));
    }
    tokio::spawn(keep_metrics_small(metrics));
    tokio::spawn(reload_on_hangup(Arc::clone(&config.types)));
    let control_path = config.control.clone();
    let access = config.access.clone();
    let app = start_tasks(config, store, key);
    // Requests that come earlier are refused; if the store cannot be reached, all are.
    app.bridge.until_in_touch(FIRST_READ).await;
    tracing::info!(store = app.bridge.store().name(), control = %control_path.display(), "listening");
    // The mode of the socket says who may use it: no token there, and every role.
    let local = axum::serve(control, router(Arc::new(app.clone())));
    if let Some(tcp) = tcp {
        let remote = router(Arc::new(App { access, ..app }));
        tokio::spawn(vmove_http::listener::serve(tcp, tls, remote, Bounds::default()));
    }
    systemd::tell(&[NotifyState::Ready]);
    tokio::spawn(async move { systemd::tell_watchdog(&control_path).await });
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // Who starts us may block them, and we inherit that: SIGTERM would wait for ever.
    SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]).thread_unblock()?;
    tokio::select! {
        ended = async { local.await } => ended?,
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    // Clients repeat requests that were not committed, with the same id.
    Ok(())
}

async fn bind(address: std::net::SocketAddr, option: &str) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.with_context(|| format!("could not listen on {address}: give another {option}"))
}

/// Starts everything that works beside requests: follows the store, sweeps leases, lists VMs, deletes old records, follows Slurm.
fn start_tasks(config: Config, store: Arc<dyn Store>, key: Option<Arc<SecretKey>>) -> App {
    let bridge = Bridge::new(Arc::new(Measured(store)), Arc::new(SystemClock::new()));
    let listings = Arc::new(Listings::default());
    let driver: Arc<dyn VmDriver> = Arc::new(
        VmoveCommand::new(config.command, config.options, config.daemons, config.time_limits).with_key(key),
    );
    tokio::spawn(Arc::clone(&bridge).follow());
    tokio::spawn(Arc::clone(&bridge).keep_sweeping());
    if let Some(interval) = config.list_interval {
        tokio::spawn(keep_listing_vms(
            Arc::clone(&bridge),
            Arc::clone(&driver),
            Arc::clone(&listings),
            interval,
        ));
    }
    if let Some(retention) = config.retention {
        tokio::spawn(Arc::clone(&bridge).keep_deleting_old_records(retention));
    }
    if let Some(slurm) = config.slurm.clone() {
        tokio::spawn(slurm.run(Arc::clone(&bridge), Arc::clone(&driver), config.limits));
    }
    App {
        bridge,
        driver,
        listings,
        limits: config.limits,
        slurm: config.slurm,
        templates: Arc::new(config.templates),
        types: config.types,
        quotas: Arc::new(config.quotas),
        explaining: Arc::new(Semaphore::new(1)),
        access: Access::default(),
    }
}

async fn keep_metrics_small(handle: PrometheusHandle) {
    loop {
        tokio::time::sleep(UPKEEP_INTERVAL).await;
        handle.run_upkeep();
    }
}
