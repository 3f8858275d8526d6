//! `vmove-pve receive` and `relay`: what `vmove-pve move` runs on the node to which a VM moves.
//!
//! It says one JSON object on a line for each step, and hears one word on a line. When nobody speaks to it any more, the place of the configuration
//! decides: here, the guest is let run; elsewhere, its QEMU here is ended.

use std::io::BufRead as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;
use vmove_client::Client;
use vmove_pve::Vmid;
use vmove_types::libvirt::DomainOperation;
use vmove_types::problem::{Code, Exit};
use vmove_types::proxmox::ProxmoxArrival;

use super::obstacles;
use super::qemu::{self, EVENTS, Monitor, Qemu};
use super::{cluster, failed, host, refused};
use crate::args::pve::ReceiveArgs;
use crate::failure::Failure;
use crate::output::{End, note, say_json};

/// For a QEMU that is told to end; one whose memory nobody brings any more may hang, and is killed then.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Says a step to `vmove-pve move`.
fn tell(step: &str, more: Value) -> Result<(), End> {
    let mut said = json!({ "step": step });
    if let (Some(said), Value::Object(more)) = (said.as_object_mut(), more) {
        said.extend(more);
    }
    say_json(&said)
}

fn refuse(why: &Failure) -> Result<Exit, End> {
    tell("failed", json!({ "error": why.message }))?;
    Ok(Exit::Failed)
}

/// Has a guest come.
pub async fn receive(client: &Client, args: &ReceiveArgs) -> Result<Exit, End> {
    let mut words = Words::heard();
    if args.finish {
        return settle(args, &mut words).await;
    }
    if let Err(why) = ready(client, args).await {
        return refuse(&why);
    }
    if args.check {
        tell("checked", json!({}))?;
        return Ok(Exit::Done);
    }
    if let Err(why) = start(args).await {
        // Half a start may have left a QEMU.
        end_qemu(args).await;
        return refuse(&why);
    }
    tell("started", json!({}))?;
    let started = arrival(args, DomainOperation::Started);
    let come = client.expect_proxmox_guest(&started);
    let answered = tokio::select! {
        answered = come => answered.map_err(Failure::from),
        _ = words.next() => Err(failed("it was called off")),
    };
    let migration = answered.and_then(|done| {
        done.migration
            .ok_or_else(|| failed("QEMU does not wait for a guest: has `qm start` begun another one?"))
    });
    match migration {
        Ok(migration) => tell("ready", json!({ "migration": migration }))?,
        Err(why) => {
            end_qemu(args).await;
            return refuse(&why);
        }
    }
    settle(args, &mut words).await
}

/// All that can be known before there is a QEMU.
async fn ready(client: &Client, args: &ReceiveArgs) -> Result<(), Failure> {
    let lacks = obstacles::of_host(&host::lacks());
    if !lacks.is_empty() {
        return Err(refused(lacks.join("; ")));
    }
    if Qemu::of(args.vmid).is_some() {
        return Err(refused(format!(
            "a QEMU of VM {} runs here already: see `qm status {0}` there",
            args.vmid
        )));
    }
    client.expect_proxmox_guest(&arrival(args, DomainOperation::Migrate)).await?;
    Ok(())
}

fn arrival(args: &ReceiveArgs, operation: DomainOperation) -> ProxmoxArrival {
    ProxmoxArrival { operation, vmid: args.vmid.number(), uuid: args.uuid.clone() }
}

/// Has Proxmox VE start a QEMU that waits, as `qm migrate` does.
async fn start(args: &ReceiveArgs) -> Result<(), Failure> {
    let vmid = args.vmid.to_string();
    let mut words = vec!["start", &vmid, "--skiplock", "--migratedfrom", &args.from];
    words.extend(["--migration_type", "secure", "--stateuri", "unix"]);
    words.extend(args.machine.iter().flat_map(|machine| ["--machine", machine.as_str()]));
    words.extend(args.force_cpu.iter().flat_map(|model| ["--force-cpu", model.as_str()]));
    let said = qm(&words).await?;
    let wanted = format!("migration listens on unix:{}", qemu::state_socket(args.vmid).display());
    if said.lines().any(|line| line.trim() == wanted) {
        return Monitor::connect(args.vmid).await?.set(&[EVENTS], true).await;
    }
    Err(failed(format!("Expected `qm start` to say {wanted:?}, found: {}", said.trim())))
}

/// Waits for the word that the guest may run, and lets it run.
async fn settle(args: &ReceiveArgs, words: &mut Words) -> Result<Exit, End> {
    let may_run = if args.finish {
        is_ours(args.vmid)
    } else {
        match words.next().await {
            Some(word) if word == "resume" => true,
            Some(_) => false,
            None => is_ours(args.vmid),
        }
    };
    if !may_run {
        if end_qemu(args).await {
            tell("ended", json!({}))?;
        } else {
            tell("failed", json!({ "error": "the QEMU here does not end" }))?;
        }
        return Ok(Exit::Failed);
    }
    if let Err(why) = run(args.vmid).await {
        return give_back(args, words, &why).await;
    }
    tell("runs", json!({}))?;
    if let Err(why) = quiet(args.vmid).await {
        note(&format!("vmove-pve: {}", why.message));
    }
    // Whoever has gone away would have said the same.
    let _ = words.next().await;
    match qm(&["unlock", &args.vmid.to_string()]).await {
        Ok(_) => tell("unlocked", json!({}))?,
        Err(why) => tell("failed", json!({ "error": why.message }))?,
    }
    Ok(Exit::Done)
}

fn is_ours(vmid: Vmid) -> bool {
    cluster::config_path(&cluster::this_node(), vmid).exists()
}

/// Lets the guest run, if its configuration is here.
async fn run(vmid: Vmid) -> Result<(), Failure> {
    if !cluster::seen_here(vmid).await {
        return Err(failed(format!("the configuration of VM {vmid} has not come here")));
    }
    if qemu::status(vmid).await? == "running" {
        return Ok(());
    }
    let resumed = qm(&["resume", &vmid.to_string(), "--skiplock", "--nocheck"]).await;
    match qemu::status(vmid).await?.as_str() {
        "running" => Ok(()),
        status => {
            Err(resumed.err().unwrap_or_else(|| failed(format!("`qm resume` has left VM {vmid} {status}"))))
        }
    }
}

/// Its QEMU tells of migrations no more, as before.
async fn quiet(vmid: Vmid) -> Result<(), Failure> {
    Monitor::connect(vmid).await?.set(&[EVENTS], false).await
}

/// The guest has not run here, and does not from now on: its configuration goes back. Its QEMU here is ended when the guest runs there again, which
/// vmoved sees as long as both QEMUs stand.
async fn give_back(args: &ReceiveArgs, words: &mut Words, why: &Failure) -> Result<Exit, End> {
    let stands_still = halted(args.vmid).await || end_qemu(args).await;
    let back = stands_still && cluster::hand_over(args.vmid, &args.from).is_ok();
    let step = if back { "given-back" } else { "failed" };
    tell(step, json!({ "error": why.message }))?;
    if back {
        let _ = words.next().await;
        end_qemu(args).await;
    }
    Ok(Exit::Failed)
}

/// Has the guest here stand still; whether it does.
async fn halted(vmid: Vmid) -> bool {
    let stopped = async {
        let mut monitor = Monitor::connect(vmid).await?;
        monitor.ask("stop", json!({})).await?;
        monitor.status().await
    };
    stopped.await.is_ok_and(|status| status != "running")
}

/// Ends the QEMU here, whose guest has not run. Whether it has ended.
async fn end_qemu(args: &ReceiveArgs) -> bool {
    let vmid = args.vmid.to_string();
    // Where the configuration is, since `qm` reads it.
    let from = if is_ours(args.vmid) { cluster::this_node() } else { args.from.clone() };
    if let Err(why) = qm(&["stop", &vmid, "--skiplock", "--migratedfrom", &from]).await {
        note(&format!("vmove-pve: {}", why.message));
    }
    if has_ended(args.vmid).await {
        return true;
    }
    Qemu::of(args.vmid).iter().for_each(Qemu::kill);
    has_ended(args.vmid).await
}

async fn has_ended(vmid: Vmid) -> bool {
    let until = Instant::now() + END_TIMEOUT;
    while Qemu::of(vmid).is_some() {
        if Instant::now() > until {
            return false;
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    true
}

/// Runs `qm` of Proxmox VE; what it said on standard output.
pub async fn qm(words: &[&str]) -> Result<String, Failure> {
    let said = |why: String| Failure::new(Code::QemuFailed, format!("qm {}: {why}", words.join(" ")));
    let output = Command::new("qm").args(words).stdin(std::process::Stdio::null()).output().await;
    let output = output
        .map_err(|error| said(format!("it could not be started ({error}): is this a node of Proxmox VE?")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
    Err(said(text.join(" ").trim().to_owned()))
}

/// What `vmove-pve move` says, word by word.
struct Words(UnboundedReceiver<String>);

impl Words {
    /// Listens. The thread ends with the process: nobody can be made to let go of standard input.
    fn heard() -> Self {
        let (to, words) = unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { break };
                if to.send(line).is_err() {
                    break;
                }
            }
        });
        Self(words)
    }

    /// The next word; nothing when nobody speaks any more. Cancel-safe.
    async fn next(&mut self) -> Option<String> {
        self.0.recv().await
    }
}

/// Passes the state of devices on to the QEMU that waits.
pub fn relay(vmid: Vmid) -> Result<Exit, End> {
    let socket = qemu::state_socket(vmid);
    let to = UnixStream::connect(&socket);
    let mut to = to.map_err(|error| failed(format!("{} cannot be reached: {error}", socket.display())))?;
    std::io::copy(&mut std::io::stdin().lock(), &mut to)?;
    Ok(Exit::Done)
}
