//! `vmove-pve receive` and `relay`: what `vmove-pve move` runs on the node to which a VM moves.
//!
//! It says one JSON object on a line for each step, and hears one word on a line. When nobody speaks to it any more, the place of the configuration
//! decides: here, the guest is let run; elsewhere, its QEMU here is ended.

use std::io::BufRead as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;
use vmove_client::Client;
use vmove_pve::{MEMORY, Vmid};
use vmove_types::libvirt::DomainOperation;
use vmove_types::problem::{Code, Exit};
use vmove_types::proxmox::{MONITORS, ProxmoxArrival};

use super::obstacles;
use super::qemu::{self, EVENTS, Monitor, Qemu};
use super::{cluster, failed, host, refused};
use crate::args::pve::ReceiveArgs;
use crate::failure::Failure;
use crate::output::{End, note, say_json};

/// For a QEMU that is told to end; one whose memory nobody brings any more may hang, and is killed then.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// For QEMU to have loaded the state of devices that it has been sent.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);
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
    // What an earlier QEMU has left would be taken for memory of this guest.
    remove_memory(args.vmid);
    let _ = std::fs::remove_file(told_path(args.vmid));
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
            // The cluster may not have told this node yet.
            None => cluster::seen_here(args.vmid).await,
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
    match run(args).await {
        Ok(()) => {}
        Err(NotRun::Never(why)) => return give_back(args, words, &why).await,
        Err(NotRun::Perhaps(why)) => return refuse(&why),
    }
    // Whoever does not hear it any more asks `recover`.
    let _ = tell("runs", json!({}));
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

/// Why a guest does not run here.
enum NotRun {
    /// It never has: it can go on at the other node.
    Never(Failure),
    /// It may have run: what it has written to its disks is not in the memory of the other node.
    Perhaps(Failure),
}

/// The file that says that the guest was told to run here, whatever became of who told it.
fn told_path(vmid: Vmid) -> PathBuf {
    PathBuf::from(format!("{MONITORS}/{vmid}.told"))
}

/// Lets the guest run, if its configuration is here.
async fn run(args: &ReceiveArgs) -> Result<(), NotRun> {
    let vmid = args.vmid;
    if !cluster::seen_here(vmid).await {
        return Err(NotRun::Never(failed(format!("the configuration of VM {vmid} has not come here"))));
    }
    let was_told = told_path(vmid).exists();
    // Of a process before this one, and of a node that was started anew, nothing is known.
    let known = !(was_told || args.finish && Qemu::of(vmid).is_none());
    let not_run = |why: String| match known {
        true => NotRun::Never(failed(why)),
        false => perhaps(vmid, &why),
    };
    match settled(vmid, was_told).await.map_err(|why| not_run(why.message))?.as_str() {
        "running" => return Ok(()),
        "paused" | "prelaunch" if known => {}
        status => return Err(perhaps(vmid, &format!("VM {vmid} is {status} here"))),
    }
    std::fs::write(told_path(vmid), "").map_err(|error| NotRun::Never(error.into()))?;
    let resumed = qm(&["resume", &vmid.to_string(), "--skiplock", "--nocheck"]).await;
    match (qemu::status(vmid).await, resumed) {
        (Ok(status), _) if status == "running" => Ok(()),
        // It was refused, and nothing has changed.
        (Ok(status), Err(why)) if status == "paused" || status == "prelaunch" => {
            let _ = std::fs::remove_file(told_path(vmid));
            Err(NotRun::Never(why))
        }
        (Ok(status), _) => Err(perhaps(vmid, &format!("`qm resume` has left VM {vmid} {status}"))),
        (Err(why), _) => Err(perhaps(vmid, &why.message)),
    }
}

fn perhaps(vmid: Vmid, why: &str) -> NotRun {
    NotRun::Perhaps(failed(format!(
        "{why}; it may have run here: see `qm status {vmid}` and `qm resume {vmid}` on this node"
    )))
}

/// Waits until QEMU has loaded what it was sent, and, if the guest was told to run, until it does; its run state then. Before that, `qm resume` would
/// say that the guest runs as soon as it has.
async fn settled(vmid: Vmid, was_told: bool) -> Result<String, Failure> {
    let until = Instant::now() + LOAD_TIMEOUT;
    loop {
        let status = qemu::status(vmid).await?;
        let waits = status == "inmigrate" || was_told && status == "paused";
        if !waits || was_told && Instant::now() > until {
            return Ok(status);
        }
        if Instant::now() > until {
            return Err(failed(format!(
                "QEMU of VM {vmid} has not loaded the state of its devices within {} s",
                LOAD_TIMEOUT.as_secs()
            )));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
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
    // Whoever does not hear it any more finds the configuration there.
    let _ = tell(step, json!({ "error": why.message }));
    if back {
        let _ = words.next().await;
        end_qemu(args).await;
    }
    Ok(Exit::Failed)
}

/// Has the guest here stand still; whether it does.
async fn halted(vmid: Vmid) -> bool {
    let stopped = async {
        let monitor = Monitor::connect(vmid).await?;
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
    // Looked for first: `qm stop` removes the file with its process id, and does not wait for its end.
    let qemu = Qemu::of(args.vmid);
    if let Err(why) = qm(&["stop", &vmid, "--skiplock", "--migratedfrom", &from]).await {
        note(&format!("vmove-pve: {}", why.message));
    }
    ended(qemu).await
}

/// Waits for a QEMU that was told to end, and kills it if it does not. Whether it has ended.
pub async fn ended(qemu: Option<Qemu>) -> bool {
    let Some(qemu) = qemu else { return true };
    for _ in 0..2 {
        let until = Instant::now() + END_TIMEOUT;
        while Instant::now() < until {
            if !qemu.lives() {
                return true;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
        qemu.kill();
    }
    false
}

/// Removes the files of the VM's memory here. A QEMU that still ends keeps what it has mapped.
pub fn remove_memory(vmid: Vmid) {
    let files = std::fs::read_dir(MEMORY).into_iter().flatten().flatten().map(|entry| entry.path());
    let ours = files.filter(|path| Vmid::of_memory(path) == Some(vmid));
    ours.for_each(|path| drop(std::fs::remove_file(path)));
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
