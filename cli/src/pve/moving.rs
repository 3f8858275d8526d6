//! `vmove-pve move`, at the node that has the VM.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::task::JoinHandle;
use vmove_client::Client;
use vmove_pve::{Vm, Vmid};
use vmove_types::problem::{Exit, chain};
use vmove_types::progress::{Outcome, Progress};
use vmove_types::proxmox::MONITORS;
use vmove_types::units::format_ms;

use super::qemu::{Monitor, Qemu};
use super::receive::{ended, qm, remove_memory};
use super::{cluster, failed, obstacles, refused, remote, switch, unknown};
use crate::args::pve::{MoveArgs, Remote};
use crate::failure::Failure;
use crate::output::{End, note, say, say_json};
use crate::vmove::bar::Bar;

const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// For the other node to let the guest run, or to say why not.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);
/// For its last words.
const LAST_TIMEOUT: Duration = Duration::from_secs(40);

/// What was, or would be, done.
#[derive(Debug, Serialize)]
struct Told {
    vmid: u32,
    from: String,
    to: String,
    /// What is in the way: nothing was begun then.
    lacks: Vec<String>,
    /// Whether the guest runs on the other node.
    done: bool,
    /// What `vmoved` tells of the migration.
    #[serde(skip_serializing_if = "Option::is_none")]
    migration: Option<Box<Progress>>,
}

/// The file that says to which node a VM is on its way, for `vmove-pve recover`.
pub fn note_path(vmid: Vmid) -> PathBuf {
    PathBuf::from(format!("{MONITORS}/{vmid}.move"))
}

/// A move of one VM.
struct Move<'a> {
    vmid: Vmid,
    node: &'a str,
    remote: &'a Remote,
    /// What `receive` on the other node is told of the VM.
    words: Vec<String>,
}

/// Moves a VM.
pub async fn move_vm(client: &Client, args: &MoveArgs, json: bool) -> Result<Exit, End> {
    let vm = cluster::own_vm(args.vmid)?;
    let from = cluster::this_node();
    if args.node == from || !cluster::has_node(&args.node) {
        return Err(refused(format!(
            "Expected another node of the cluster, found {:?}: see /etc/pve/nodes",
            args.node
        ))
        .into());
    }
    vm.not_locked().map_err(Failure::from)?;
    let mut lacks = obstacles::of_move(client, &vm, &args.node).await?;
    let mut told = Told {
        vmid: args.vmid.number(),
        from,
        to: args.node.clone(),
        lacks: Vec::new(),
        done: false,
        migration: None,
    };
    if lacks.is_empty() {
        let moving = Move::of(&vm, args).await?;
        lacks.extend(moving.refused_there().await?);
        if lacks.is_empty() && !args.check {
            told.migration = moving.carry(client, json).await?;
            told.done = true;
        }
    }
    told.lacks = lacks;
    show(&told, args.check, json)
}

fn show(told: &Told, check: bool, json: bool) -> Result<Exit, End> {
    let ended = if told.lacks.is_empty() { Exit::Done } else { Exit::Refused };
    if json {
        say_json(told)?;
        return Ok(ended);
    }
    let mut out: Vec<String> = told.lacks.iter().map(|what| format!("lacks: {what}")).collect();
    out.push(match &told.migration {
        _ if check && told.lacks.is_empty() => {
            format!("VM {} can move to {}; nothing was changed (--check)", told.vmid, told.to)
        }
        _ if !told.done => "nothing was changed".to_owned(),
        Some(progress) => format!("VM {} runs on {}{}", told.vmid, told.to, pause(progress)),
        None => format!(
            "VM {} runs on {}; vmoved does not tell how long that took: see `vmove history`",
            told.vmid, told.to
        ),
    });
    say(&out.join("\n"))?;
    Ok(ended)
}

fn pause(progress: &Progress) -> String {
    match &progress.outcome {
        Outcome::Done { report } => format!(
            ": it stood still for {}, and all of it was there after {} (report: `vmove report {}`)",
            format_ms(report.downtime_ms),
            format_ms(report.total_ms),
            progress.id
        ),
        _ => format!("; its memory does not come whole yet: see `vmove status {}`", progress.id),
    }
}

impl<'a> Move<'a> {
    async fn of(vm: &Vm, args: &'a MoveArgs) -> Result<Self, Failure> {
        let monitor = Monitor::connect(vm.vmid()).await?;
        let (uuid, machine) = (monitor.uuid().await?, monitor.machine().await?);
        let mut words = vec!["--from".to_owned(), cluster::this_node(), "--uuid".to_owned(), uuid];
        words.extend(["--machine".to_owned(), machine]);
        // Models of the cluster's own may be changed while a VM runs.
        let model = vm.config().value(vmove_pve::Section::Main, "cpu").unwrap_or_default();
        if (model.contains("custom-") || model.contains("nested-virt"))
            && let Some(model) = Qemu::of(vm.vmid()).as_ref().and_then(|qemu| qemu.option("-cpu"))
        {
            words.extend(["--force-cpu".to_owned(), model.to_owned()]);
        }
        Ok(Self { vmid: vm.vmid(), node: &args.node, remote: &args.remote, words })
    }

    fn command(&self, more: &[&str]) -> Result<tokio::process::Command, Failure> {
        let vmid = self.vmid.to_string();
        let mut words = vec!["vmove-pve", "receive", &vmid];
        words.extend(self.words.iter().map(String::as_str));
        words.extend(more);
        remote::command(self.remote, self.node, &words)
    }

    /// What is in the way on the other node.
    async fn refused_there(&self) -> Result<Option<String>, Failure> {
        let output = self.command(&["--check"])?.stdin(Stdio::null()).output().await?;
        let said = String::from_utf8_lossy(&output.stdout);
        let answer: Value =
            said.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
        if answer["step"] == "checked" {
            return Ok(None);
        }
        Ok(Some(obstacles::told(&answer, self.node).unwrap_or_else(|| {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            format!(
                "{} cannot be asked ({why}): is vmove installed there, and does `ssh root@{0}` work?",
                self.node
            )
        })))
    }

    /// Moves the guest and its configuration. What `vmoved` tells of it, if it does.
    async fn carry(&self, client: &Client, json: bool) -> Result<Option<Box<Progress>>, End> {
        // Held for as long as this process is at work, so that `recover` does not begin beside it.
        let _at_work = at_work(self.vmid)?;
        cluster::change(self.vmid, |vm| Ok(vm.locked()?))?;
        let noted = std::fs::write(note_path(self.vmid), self.node);
        let mut other = Other::silent();
        let bar = Rc::new(if json { Bar::new() } else { Bar::or_lines() });
        let shown = tokio::task::spawn_local(watch(client.clone(), self.vmid, bar.clone()));
        let sent = async {
            noted?;
            tokio::select! {
                sent = self.send(&mut other) => sent,
                _ = tokio::signal::ctrl_c() => Err(failed("it was called off by Ctrl-C")),
            }
        };
        let committed = match sent.await {
            Ok(()) => cluster::hand_over(self.vmid, self.node)
                .map_err(|error| failed(format!("its configuration could not be moved: {error}"))),
            Err(why) => Err(why),
        };
        if let Err(why) = committed {
            bar.clear();
            return Err(self.abort(other, why).await.into());
        }
        let ended = self.commit(other).await;
        if ended.is_err() {
            bar.clear();
        }
        ended?;
        tokio::select! {
            progress = all_there(shown, &bar) => Ok(progress),
            _ = tokio::signal::ctrl_c() => {
                bar.clear();
                note(&format!(
                    "VM {} runs on {}; the rest of its memory goes there: `vmove status` on this node says how far it is",
                    self.vmid, self.node
                ));
                Err(End::Left)
            }
        }
    }

    /// Everything until the guest stands still, and all that QEMU sends has been sent.
    async fn send(&self, other: &mut Other) -> Result<(), Failure> {
        *other = Other::begun(self.command(&[])?)?;
        other.step("ready").await?;
        let monitor = Monitor::connect(self.vmid).await?;
        let relay = remote::command(self.remote, self.node, &["vmove-pve", "relay", &self.vmid.to_string()])?;
        tokio::select! {
            sent = switch::send(&monitor, self.vmid, relay) => sent,
            why = other.ended() => Err(why),
        }
    }

    /// The configuration is there: the guest may run there, and here no more.
    async fn commit(&self, mut other: Other) -> Result<(), Failure> {
        let next = format!("`vmove-pve recover {}` on this node has it run on the side that can", self.vmid);
        other.say("resume").await;
        match tokio::time::timeout(RUN_TIMEOUT, other.next()).await {
            Ok(Ok(said)) if said["step"] == "runs" => {}
            Ok(Ok(said)) if said["step"] == "given-back" => {
                let why = said["error"].as_str().unwrap_or_default().to_owned();
                let failure = taken_back(self.vmid, failed(format!("{}: {why}", self.node))).await;
                other.say("end").await;
                let _ = tokio::time::timeout(LAST_TIMEOUT, other.until_end()).await;
                return Err(failure);
            }
            other => {
                let why = match other {
                    Ok(Ok(said)) => said["error"].as_str().unwrap_or_default().to_owned(),
                    Ok(Err(why)) => why.message,
                    Err(_) => format!("nothing within {} s", RUN_TIMEOUT.as_secs()),
                };
                return Err(unknown(format!(
                    "VM {} is on {} now, which did not say that the guest runs ({why}): {next}",
                    self.vmid, self.node
                )));
            }
        }
        leave_here(self.vmid, self.node).await;
        other.say("done").await;
        let unlocked = tokio::time::timeout(LAST_TIMEOUT, other.step("unlocked")).await;
        if !matches!(unlocked, Ok(Ok(()))) {
            note(&format!(
                "vmove-pve: VM {} runs on {}, and is still locked: `qm unlock {0}` there",
                self.vmid, self.node
            ));
        }
        Ok(())
    }

    /// The guest stays. First nobody may run it there, then it runs here.
    async fn abort(&self, mut other: Other, why: Failure) -> Failure {
        other.say("abort").await;
        let _ = tokio::time::timeout(LAST_TIMEOUT, other.until_end()).await;
        taken_back(self.vmid, why).await
    }
}

/// Says that somebody moves this VM, or sees to a move of it, until what is returned is dropped.
pub fn at_work(vmid: Vmid) -> Result<File, Failure> {
    let path = PathBuf::from(format!("{MONITORS}/{vmid}.lock"));
    cluster::try_lock(&path).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => refused(format!(
            "A move of VM {vmid} is at work on this node: wait for it, or end it (its process has {} open)",
            path.display()
        )),
        _ => error.into(),
    })
}

/// The guest runs here again, and its configuration is here.
pub async fn taken_back(vmid: Vmid, why: Failure) -> Failure {
    if !cluster::seen_here(vmid).await {
        return unknown(format!(
            "{}; its configuration is not on this node, so the guest does not run here: `vmove-pve recover {vmid}`",
            why.message
        ));
    }
    if let Err(error) = switch::take_back(vmid).await {
        return unknown(format!(
            "{}; VM {vmid} is on this node, and its guest could not be set running ({}): `qm resume {vmid} --skiplock`, `qm unlock {vmid}`",
            why.message, error.message
        ));
    }
    match cluster::change(vmid, |vm| Ok(vm.unlocked())) {
        Ok(()) => {
            let _ = std::fs::remove_file(note_path(vmid));
            Failure { message: format!("{}; VM {vmid} runs on here", why.message), ..why }
        }
        Err(error) => {
            let message = format!(
                "{}; VM {vmid} runs on here, still locked ({}): `qm unlock {vmid}`",
                why.message, error.message
            );
            Failure { message, ..why }
        }
    }
}

/// The guest runs on the other node: ends its QEMU here.
pub async fn leave_here(vmid: Vmid, node: &str) {
    let qemu = Qemu::of(vmid);
    let stopped = qm(&["stop", &vmid.to_string(), "--skiplock", "--migratedfrom", node]).await;
    if !ended(qemu).await {
        let why = stopped.err().map_or_else(String::new, |why| format!(" ({})", why.message));
        note(&format!(
            "vmove-pve: the QEMU that VM {vmid} has left does not end{why}: `vmove-pve recover {vmid}` tries again"
        ));
        return;
    }
    let _ = std::fs::remove_file(note_path(vmid));
    remove_memory(vmid);
}

/// Shows how the memory of the guest gets across, and what became of it.
async fn watch(client: Client, vmid: Vmid, bar: Rc<Bar>) -> Option<Box<Progress>> {
    let id = loop {
        // Nothing more is to be heard of a VM that has left unseen.
        let vm = client.vms().await.ok()?.vms.into_iter().find(|vm| vm.name == vmid.name())?;
        match vm.migration {
            Some(id) => break id,
            None => tokio::time::sleep(LOOK_INTERVAL).await,
        }
    };
    let mut snapshots = client.follow_migration(&id).await.ok()?;
    let mut last = None;
    while let Ok(Some(progress)) = snapshots.next().await {
        // It writes to standard error, whose reader may be gone.
        let _ = bar.update(&progress);
        last = Some(Box::new(progress));
        if last.as_ref().is_some_and(|progress| progress.outcome.is_end()) {
            break;
        }
    }
    last
}

async fn all_there(shown: JoinHandle<Option<Box<Progress>>>, bar: &Bar) -> Option<Box<Progress>> {
    let progress = shown.await.ok().flatten();
    bar.clear();
    progress
}

/// `vmove-pve receive` on the other node.
struct Other {
    speaks: Option<Speaks>,
}

struct Speaks {
    child: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Other {
    const fn silent() -> Self {
        Self { speaks: None }
    }

    fn begun(mut command: tokio::process::Command) -> Result<Self, Failure> {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child =
            child.map_err(|error| failed(format!("the other node could not be reached: {error}")))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("the other node could not be reached"));
        };
        let from = BufReader::new(from).lines();
        Ok(Self { speaks: Some(Speaks { child, to, from }) })
    }

    /// Says a word. One that is not heard is missed by nobody: the other side then finds its input ended.
    async fn say(&mut self, word: &str) {
        if let Some(speaks) = &mut self.speaks {
            let _ = speaks.to.write_all(format!("{word}\n").as_bytes()).await;
            let _ = speaks.to.flush().await;
        }
    }

    /// The next thing that it says. Cancel-safe.
    async fn next(&mut self) -> Result<Value, Failure> {
        let Some(speaks) = &mut self.speaks else { return Err(failed("the other node was not asked")) };
        match speaks.from.next_line().await {
            Ok(Some(line)) => {
                Ok(serde_json::from_str(&line).unwrap_or_else(|_| json!({ "step": "failed", "error": line })))
            }
            Ok(None) => Err(failed("the connection to the other node ended")),
            Err(error) => Err(failed(format!("the connection to the other node broke: {}", chain(&error)))),
        }
    }

    /// Waits until it has come so far.
    async fn step(&mut self, wanted: &str) -> Result<(), Failure> {
        loop {
            let said = self.next().await?;
            match said["step"].as_str() {
                Some(step) if step == wanted => return Ok(()),
                Some("started") => {}
                _ => {
                    return Err(failed(format!(
                        "the other node: {}",
                        said["error"].as_str().unwrap_or("it ended")
                    )));
                }
            }
        }
    }

    /// Ends when it has given up before it was told anything.
    async fn ended(&mut self) -> Failure {
        match self.next().await {
            Ok(said) => failed(format!("the other node: {}", said["error"].as_str().unwrap_or("it ended"))),
            Err(why) => why,
        }
    }

    async fn until_end(&mut self) {
        while self.next().await.is_ok() {}
        if let Some(speaks) = &mut self.speaks {
            let _ = speaks.child.wait().await;
        }
    }
}
