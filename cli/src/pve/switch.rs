//! The switch, at the source: QEMU sends its devices to the QEMU that waits, and the guest stops.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use vmove_pve::Vmid;
use vmove_types::proxmox::MONITORS;

use super::failed;
use super::qemu::{EVENTS, Monitor};
use crate::failure::Failure;

/// QEMU sends devices only, so its own limit for memory (128 MiB/s) would do nothing but lengthen the pause.
const BYTES_PER_S: u64 = 1 << 40;
/// By what vmoved sees that the guest has stopped, and that nothing in QEMU writes its memory any more.
const FOLLOWED: [&str; 2] = [EVENTS, "pause-before-switchover"];
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// For the other node to have all that QEMU has sent.
const RELAY_TIMEOUT: Duration = Duration::from_secs(30);
/// For QEMU to have called a migration off.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(20);

/// A socket of this node, which is gone when this is dropped.
#[derive(Debug)]
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Has QEMU send the guest through `relay`, a command that takes the state on its standard input. Returns when all was sent: the guest stands still.
pub async fn send(monitor: &Monitor, vmid: Vmid, mut relay: Command) -> Result<(), Failure> {
    let socket = Socket(Path::new(MONITORS).join(format!("{vmid}.state")));
    let _ = std::fs::remove_file(&socket.0);
    let listener = UnixListener::bind(&socket.0)?;
    std::fs::set_permissions(&socket.0, std::fs::Permissions::from_mode(0o600))?;
    monitor.set(&FOLLOWED, true).await?;
    monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": BYTES_PER_S })).await?;
    monitor.ask("migrate", json!({ "uri": format!("unix:{}", socket.0.display()) })).await?;
    let (state, _) = listener.accept().await?;
    let mut relay = started(&mut relay, state)?;
    loop {
        let told = monitor.ask("query-migrate", json!({})).await?;
        match told["status"].as_str().unwrap_or_default() {
            "completed" => return passed_on(relay).await,
            "pre-switchover" => {
                monitor.ask("migrate-continue", json!({ "state": "pre-switchover" })).await?;
            }
            "failed" | "cancelled" => return Err(failed(why(&told, &mut relay).await)),
            _ => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    }
}

/// QEMU writes into the pipe of the relay itself.
fn started(relay: &mut Command, state: UnixStream) -> Result<Child, Failure> {
    let state = state.into_std()?;
    state.set_nonblocking(false)?;
    let child = relay.stdin(std::os::fd::OwnedFd::from(state)).stdout(Stdio::null()).stderr(Stdio::piped());
    child.spawn().map_err(|error| failed(format!("the other node could not be reached: {error}")))
}

/// QEMU has written all; the other node must have all of it, too, before the guest is that node's.
async fn passed_on(mut relay: Child) -> Result<(), Failure> {
    match tokio::time::timeout(RELAY_TIMEOUT, relay.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => {
            Err(failed(format!("the state of devices did not reach the other node ({status})")))
        }
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(failed(format!(
            "the state of devices did not reach the other node within {} s",
            RELAY_TIMEOUT.as_secs()
        ))),
    }
}

async fn why(told: &Value, relay: &mut Child) -> String {
    let mut text = format!("QEMU's migration {}", told["status"].as_str().unwrap_or_default());
    if let Some(error) = told["error-desc"].as_str() {
        text = format!("{text}: {error}");
    }
    if let Some(mut stderr) = relay.stderr.take() {
        let mut said = String::new();
        let read = tokio::io::AsyncReadExt::read_to_string(&mut stderr, &mut said);
        if tokio::time::timeout(Duration::from_secs(2), read).await.is_ok() && !said.trim().is_empty() {
            text = format!("{text} ({})", said.trim());
        }
    }
    text
}

/// Calls a migration off, and has the guest run here again. The QEMU at the destination has ended, or was never told to let the guest run.
pub async fn take_back(vmid: Vmid) -> Result<(), Failure> {
    let monitor = Monitor::connect(vmid).await?;
    monitor.ask("migrate_cancel", json!({})).await?;
    let ended = async {
        loop {
            let told = monitor.ask("query-migrate", json!({})).await?;
            if !matches!(
                told["status"].as_str(),
                Some("active" | "device" | "setup" | "pre-switchover" | "cancelling")
            ) {
                return monitor.status().await;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    let status = tokio::time::timeout(CANCEL_TIMEOUT, ended).await;
    if status.map_err(|_| failed("QEMU does not call its migration off"))?? != "running" {
        monitor.ask("cont", json!({})).await?;
    }
    monitor.set(&FOLLOWED, false).await
}
