//! The daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sched_bridge::model::NodeName;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::api::{App, router};
use crate::bridge::Bridge;
use crate::clock::SystemClock;
use crate::config::{Arguments, Config};
use crate::plan::mover::{CommandMover, Mover};

/// Runs `vbridged` with the arguments of this process.
#[must_use]
pub fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("VBRIDGE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let started = Config::load(Arguments::parse()).and_then(|config| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(serve(config))
    });
    match started {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vbridged: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let control = listen(&config.control)
        .with_context(|| format!("could not listen on {}", config.control.display()))?;
    let tcp = match config.listen {
        Some(address) => {
            Some(TcpListener::bind(address).await.with_context(|| format!("could not listen on {address}"))?)
        }
        None => None,
    };
    let bridge = Bridge::new(config.store, Arc::new(SystemClock::new()));
    let watched: Vec<NodeName> = config.daemons.keys().cloned().collect();
    let mover: Arc<dyn Mover> = Arc::new(CommandMover::new(config.command, config.options, config.daemons));
    tokio::spawn(Arc::clone(&bridge).follow());
    tokio::spawn(Arc::clone(&bridge).keep_sweeping());
    if let Some(every) = config.look {
        tokio::spawn(look(Arc::clone(&bridge), Arc::clone(&mover), watched, every));
    }
    if let Some(retention) = config.retention {
        tokio::spawn(Arc::clone(&bridge).keep_forgetting(retention));
    }
    let slurm = config.slurm;
    if let Some(slurm) = slurm.clone() {
        tokio::spawn(slurm.forever(Arc::clone(&bridge), Arc::clone(&mover), config.limits));
    }
    let app = |token| {
        let (bridge, mover, slurm) = (Arc::clone(&bridge), Arc::clone(&mover), slurm.clone());
        Arc::new(App { bridge, mover, limits: config.limits, slurm, token })
    };
    tracing::info!(store = bridge.store().name(), control = %config.control.display(), "listening");
    // The mode of the socket says who may use it: no token there.
    let local = axum::serve(control, router(app(None)));
    let served = async {
        match tcp {
            Some(tcp) => {
                tokio::try_join!(local, axum::serve(tcp, router(app(config.token.clone())))).map(|_| ())
            }
            None => local.await,
        }
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        ended = served => ended?,
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    let _ = std::fs::remove_file(&config.control);
    // Whatever was asked and not committed is asked again, with the same id.
    Ok(())
}

/// Looks at the VMs of each node, so that the end of a VM gives back what it had.
async fn look(bridge: Arc<Bridge>, mover: Arc<dyn Mover>, nodes: Vec<NodeName>, every: Duration) {
    let mut before: BTreeMap<NodeName, BTreeSet<String>> = BTreeMap::new();
    loop {
        tokio::time::sleep(every).await;
        for node in &nodes {
            // A daemon that does not answer says nothing about its VMs.
            let Ok(listed) = mover.list(node).await else { continue };
            let there: BTreeSet<String> =
                listed.into_iter().filter(|(_, vm)| !vm.ended).map(|(name, _)| name).collect();
            // Gone is what two looks in a row have not found: a daemon that was just started may not know all its VMs yet.
            let either =
                before.get(node).map_or_else(|| there.clone(), |last| last.union(&there).cloned().collect());
            before.insert(node.clone(), there);
            match bridge.vms_seen(node, &either).await {
                Ok(gone) if !gone.is_empty() => {
                    let gone: Vec<&str> = gone.iter().map(sched_bridge::model::VmName::as_str).collect();
                    tracing::info!(%node, vms = gone.join(" "), "VMs have ended; what they had is free");
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%node, %error, "the end of VMs could not be written down"),
            }
        }
    }
}

/// A listening Unix socket that only our own user may connect to, at no moment anyone else: Linux gives the name the mode of the
/// socket's own inode. One that a killed daemon left behind is replaced.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)?;
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(io::Error::new(io::ErrorKind::AddrInUse, "another vbridged answers there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}
