//! `vfork create --place`: children where the bridge places them.

use sched_bridge::model::{ClusterName, VmName};
use vmove_bridge_types::cluster::{ForkClusterRequest, ForkOne};
use vmove_types::problem::Exit;

use crate::args::bridge::Where;
use crate::clusters::{cluster, input};
use crate::failure::Failure;
use crate::output::{End, note, say_either};
use crate::waiting::Wait;

/// Forks a VM of a cluster into a new cluster of `count` VMs.
pub async fn create(at: &Where, vm: &str, count: u32, name: String, json: bool) -> Result<Exit, End> {
    let vm = VmName::new(vm).map_err(Failure::bad_request)?;
    let name = ClusterName::new(name).map_err(Failure::bad_request)?;
    let bridge = input::bridge(at)?;
    let leases = bridge.leases(None).await?.leases;
    let lease = leases.iter().find(|lease| lease.held.iter().any(|held| held.assignment.vm == vm));
    let lease = lease.ok_or_else(|| {
        Failure::bad_request(format!(
            "no lease has a VM {vm}: a VM that was not started by a lease is forked by --count and --to"
        ))
    })?;
    let request = ForkClusterRequest { name, id: None, only: Some(ForkOne { vm, count }), each_alone: false };
    let (vm, name) =
        (&request.only.as_ref().map(|one| one.vm.to_string()).unwrap_or_default(), &request.name);
    let left = format!(
        "the fork of {vm} goes on: `vmove cluster status {name}` shows the new cluster, `vmove cluster stop {name}` ends it"
    );
    let wait = Wait::of_vfork(json, format!("fork of {vm}, placed by the bridge"), left);
    let done = wait.answer(bridge.fork_cluster(lease.id.as_str(), &request)).await?;
    say_either(&done, json, cluster::forked)?;
    done.notes.iter().for_each(|text| note(&format!("vfork: {text}")));
    Ok(Exit::Done)
}
