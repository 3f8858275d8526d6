//! `vmove-pve recover`: after a move that was cut, the guest runs where its configuration is, there alone.

use std::process::Stdio;

use serde_json::{Value, json};
use vmove_pve::Vmid;
use vmove_types::problem::Exit;

use super::moving::{at_work, leave_here, note_path, taken_back};
use super::{cluster, failed, refused, remote, unknown};
use crate::args::pve::RecoverArgs;
use crate::failure::Failure;
use crate::output::{End, say, say_json};

/// Takes up a move of which nobody takes care any more.
pub async fn recover(args: &RecoverArgs, json: bool) -> Result<Exit, End> {
    let vmid = args.vmid;
    let Ok(to) = std::fs::read_to_string(note_path(vmid)) else {
        return Err(refused(format!(
            "No move of VM {vmid} from this node was cut: run this on the node from which it was moved; `qm unlock {vmid}` takes away a lock that somebody else has left"
        ))
        .into());
    };
    let _at_work = at_work(vmid)?;
    let here = cluster::this_node();
    let at = cluster::node_of(vmid)?;
    if at != here && at != to {
        // It ran there, and was moved on. What is left here is an old copy.
        leave_here(vmid, &at).await;
        return told(vmid, &at, &format!("VM {vmid} is on {at}, where it was moved on from {to}"), json);
    }
    // A QEMU that waits there has ended by itself, or ends now: where the configuration is not, nobody lets the guest run.
    let said = settled_there(args, &to, &here).await;
    let at = if at == here || !matches!(&said, Ok(said) if said["step"] == "given-back") {
        at
    } else {
        here.clone()
    };
    if at == here {
        let failure = taken_back(vmid, failed("the move was cut")).await;
        // It is removed when all is as it was.
        if note_path(vmid).exists() {
            return Err(failure.into());
        }
    } else {
        match said? {
            said if said["step"] == "runs" => leave_here(vmid, &at).await,
            said => {
                let why = said["error"].as_str().unwrap_or_default().to_owned();
                return Err(unknown(format!(
                    "VM {vmid} is on {at}, and its guest does not run there: {why}"
                ))
                .into());
            }
        }
    }
    told(vmid, &at, &format!("VM {vmid} runs on {at}"), json)
}

fn told(vmid: Vmid, at: &str, said: &str, json: bool) -> Result<Exit, End> {
    if json {
        say_json(&json!({ "vmid": vmid.number(), "node": at }))?;
    } else {
        say(said)?;
    }
    Ok(Exit::Done)
}

/// Has the other node do what is right there; the last thing that it said.
async fn settled_there(args: &RecoverArgs, to: &str, here: &str) -> Result<Value, Failure> {
    let vmid = args.vmid.to_string();
    let words = ["vmove-pve", "receive", &vmid, "--from", here, "--uuid", "-", "--finish"];
    let mut command = remote::command(&args.remote, to, &words)?;
    let output = command.stdin(Stdio::null()).output().await?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let all: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    // What it says after that is about the lock.
    let runs = all.iter().find(|said| said["step"] == "runs");
    runs.or(all.last()).cloned().ok_or_else(|| {
        unknown(format!(
            "{to} cannot be asked ({}): try again when it can",
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    })
}
