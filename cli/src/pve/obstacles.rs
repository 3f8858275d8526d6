//! What stands in the way on this node.

use serde_json::Value;
use vmove_client::Client;
use vmove_pve::{Section, Vm};

use super::host::Lacks;
use super::qemu::{self, Qemu};
use super::{cluster, host};
use crate::failure::Failure;

/// What the node itself lacks.
pub fn of_host(lacks: &Lacks) -> Vec<String> {
    let mut found = lacks.lacks.clone();
    if !lacks.made.is_empty() {
        let all = lacks.made.join(", ");
        found.push(format!("this node has no {all}: `vmove-pve host` makes that"));
    }
    found
}

/// All that keeps a running VM of this node from moving to another.
pub async fn of_move(client: &Client, vm: &Vm, node: &str) -> Result<Vec<String>, Failure> {
    let vmid = vm.vmid();
    let mut found: Vec<String> = of_host(&host::lacks());
    let obstacles = cluster::read_cluster()?.obstacles(vmid, vm.config(), Some(node));
    found.extend(obstacles.iter().map(ToString::to_string));
    for section in [Section::Main, Section::Pending] {
        if let Some(other) = vm.copied_from(section)? {
            found.push(format!(
                "args: they name monitor and memory of VM {other}, from which VM {vmid} was cloned or restored: end it at once if it runs (`qm stop {vmid}`), then `vmove-pve enable {vmid}`"
            ));
            break;
        }
    }
    let Some(qemu) = Qemu::of(vmid) else {
        found.push(format!("VM {vmid} does not run: `qm migrate {vmid} {node}` moves its configuration"));
        return Ok(found);
    };
    if !qemu.is_enabled(vmid) {
        let enabled = vm.is_enabled(Section::Pending)?;
        let before = if enabled { "" } else { "`vmove-pve enable` and " };
        found.push(format!(
            "the QEMU of VM {vmid} was started without what vmove needs: {before}`qm shutdown {vmid}; qm start {vmid}` give it that"
        ));
        return Ok(found);
    }
    let status = qemu::status(vmid).await?;
    if status != "running" {
        found.push(format!("VM {vmid} is {status}: resume it first (`qm resume {vmid}`)"));
    }
    let seen = client.vms().await?;
    if !seen.vms.iter().any(|one| one.name == vmid.name()) {
        found.push(format!(
            "vmoved does not see VM {vmid}: is another client at {}, or was its memory file removed? Start the VM anew (`qm shutdown {vmid}; qm start {vmid}`)",
            vmid.monitor().display()
        ));
    }
    Ok(found)
}

/// What an answer of the other node says is in the way.
pub fn told(answer: &Value, node: &str) -> Option<String> {
    let why = answer.get("error")?.as_str()?;
    Some(format!("{node}: {why}"))
}
