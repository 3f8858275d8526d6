//! `vmove cluster`.

use sched_bridge::model::{ClusterName, NodeName};
use serde_json::json;
use vmove_bridge_types::cluster::{
    CheckpointInfo, CheckpointList, CheckpointRequest, ClusterForked, ClusterHops, ClusterInfo, ClusterList,
    ClusterRestored, ForkClusterRequest, ResizeRequest, Resized, RestoreClusterRequest,
};
use vmove_bridge_types::lease::LeaseId;
use vmove_bridge_types::plan::PlanRequest;
use vmove_bridge_types::requests::{StartAll, StopVms};
use vmove_client::bridge::Bridge;
use vmove_types::units::{format_bytes, format_ms, number_of};

use super::input::bridge;
use super::{ids, place, plan, show};
use crate::args::cluster::{
    Checkpoint, ClusterAction, ClusterArgs, Forget, Fork, List, Move, One, Resize, Restore,
};
use crate::failure::Failure;
use crate::output::{End, fields, note, say_either, table};
use crate::waiting::Wait;

pub async fn run(args: ClusterArgs, json: bool) -> Result<(), End> {
    match args.action {
        ClusterAction::Start(args) => place::start(*args, json).await,
        ClusterAction::List(List { at, holder }) => {
            say_either(&bridge(&at)?.clusters(holder.as_deref()).await?, json, list)
        }
        ClusterAction::Status(cluster) => {
            let (bridge, id) = found(&cluster).await?;
            say_either(&bridge.cluster(&id).await?, json, status)
        }
        ClusterAction::Stop(args) => stop(args, json).await,
        ClusterAction::Move(args) => relocate(args, json).await,
        ClusterAction::Fork(args) => fork(args, json).await,
        ClusterAction::Resize(args) => resize(args, json).await,
        ClusterAction::Checkpoint(args) => checkpoint(args, json).await,
        ClusterAction::Checkpoints(args) => {
            say_either(&bridge(&args.at)?.checkpoints().await?, json, checkpoints)
        }
        ClusterAction::Restore(args) => restore(args, json).await,
        ClusterAction::Forget(Forget { at, name }) => {
            bridge(&at)?.remove_checkpoint(&name).await?;
            say_either(&json!({ "removed": name }), json, |_| format!("checkpoint {name} is removed"))
        }
    }
}

/// The bridge, and the whole id of the cluster's lease.
async fn found(cluster: &One) -> Result<(Bridge, String), Failure> {
    let bridge = bridge(&cluster.at)?;
    let id = ids::of_lease(&bridge, &cluster.id).await?;
    Ok((bridge, id))
}

async fn stop(cluster: One, json: bool) -> Result<(), End> {
    let (bridge, id) = found(&cluster).await?;
    let left = format!("VMs of {id} are still being stopped: `vmove cluster stop {id}` goes on with that");
    let wait = Wait::of_vmove(json, format!("VMs of {id} are stopped"), left);
    let stopped = wait.answer(bridge.stop_vms(&id, &StopVms { vms: Vec::new() })).await?;
    let record = bridge.release_lease(&id).await?;
    let told = json!({ "stopped": stopped.vms, "record": record });
    say_either(&told, json, |_| {
        let (one, many) = (format!("VM of {id} is stopped"), format!("VMs of {id} are stopped"));
        format!("{}, and its lease is given back", number_of(stopped.vms.len() as u64, &one, &many))
    })
}

async fn relocate(args: Move, json: bool) -> Result<(), End> {
    let (bridge, id) = found(&args.cluster).await?;
    let cluster = bridge.lease(&id).await?.cluster.to_string();
    let mut plan = bridge.make_plan(&PlanRequest::Relocate { cluster, away: args.away }).await?;
    if !args.what_if {
        let id = plan.id.to_string();
        plan = plan::running(&id, json).answer(bridge.run_plan(&id)).await?;
    }
    show::ran(&plan, json)
}

async fn fork(args: Fork, json: bool) -> Result<(), End> {
    let (bridge, id) = found(&args.cluster).await?;
    let request = ForkClusterRequest {
        name: ClusterName::new(args.name).map_err(Failure::bad_request)?,
        id: args.new_id.map(|id| id.parse()).transpose().map_err(Failure::bad_request)?,
        only: None,
        each_alone: args.each_alone,
    };
    let name = &request.name;
    let left = format!(
        "the fork of {id} goes on: `vmove cluster list` shows {name}, `vmove cluster stop` with its id ends it"
    );
    let wait = Wait::of_vmove(json, format!("{id} is forked to {name}"), left);
    let done = wait.answer(bridge.fork_cluster(&id, &request)).await?;
    say_either(&done, json, forked)?;
    done.notes.iter().for_each(|text| note(&format!("vmove: {text}")));
    Ok(())
}

async fn resize(args: Resize, json: bool) -> Result<(), End> {
    let (bridge, id) = found(&args.cluster).await?;
    let otherwise = args.template.is_some() || !args.command_line.is_empty();
    let start = otherwise.then(|| StartAll {
        command_line: args.command_line,
        template: args.template,
        fields: args.field.into_iter().collect(),
        memory: args.memory,
    });
    let request = ResizeRequest { group: args.group, count: args.count, start };
    let left = format!("{id} is still being resized: `vmove cluster status {id}` shows its VMs");
    let wait = Wait::of_vmove(json, format!("{id} is resized"), left);
    say_either(&wait.answer(bridge.resize_cluster(&id, &request)).await?, json, resized)
}

async fn checkpoint(args: Checkpoint, json: bool) -> Result<(), End> {
    let (bridge, id) = found(&args.cluster).await?;
    let name: LeaseId = args.name.parse().map_err(Failure::bad_request)?;
    let left = format!(
        "checkpoint {name} is still being made: `vmove cluster checkpoints` shows it, `vmove cluster forget {name}` removes it then"
    );
    let wait = Wait::of_vmove(json, format!("checkpoint {name} of {id} is made"), left);
    let request = CheckpointRequest { name, each_alone: args.each_alone };
    let done = wait.answer(bridge.make_checkpoint(&id, &request)).await?;
    say_either(&done, json, kept)?;
    done.notes.iter().for_each(|text| note(&format!("vmove: {text}")));
    Ok(())
}

async fn restore(args: Restore, json: bool) -> Result<(), End> {
    let lost = args.lost.into_iter().map(NodeName::new).collect::<Result<_, _>>();
    let request = RestoreClusterRequest { lost: lost.map_err(Failure::bad_request)? };
    let (bridge, name) = (bridge(&args.at)?, &args.name);
    let left = format!("checkpoint {name} is still being restored: `vmove cluster list` shows its cluster");
    let wait = Wait::of_vmove(json, format!("checkpoint {name} is restored"), left);
    say_either(&wait.answer(bridge.restore_cluster(name, &request)).await?, json, restored)
}

fn hops(hops: ClusterHops) -> String {
    let most = hops.most.map_or_else(|| "not connected".to_owned(), |most| most.to_string());
    format!("{most} at most, {} in all", hops.sum)
}

fn ends(ends_in_ms: Option<u64>) -> String {
    ends_in_ms.map_or_else(|| "with its VMs".to_owned(), |ms| format!("in {} s", ms.div_ceil(1000)))
}

fn list(list: &ClusterList) -> String {
    let rows: Vec<Vec<String>> = list
        .clusters
        .iter()
        .map(|one| {
            let nodes: Vec<&str> = one.nodes.iter().map(NodeName::as_str).collect();
            vec![
                one.id.to_string(),
                one.holder.clone(),
                format!("{}/{}", one.running, one.vms),
                nodes.join(","),
                one.hops.most.map_or_else(|| "-".to_owned(), |most| most.to_string()),
                ends(one.ends_in_ms),
            ]
        })
        .collect();
    table(&["CLUSTER", "HOLDER", "RUNNING", "NODES", "HOPS", "ENDS"], &rows)
}

fn status(info: &ClusterInfo) -> String {
    let summary = &info.summary;
    let or_none = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let mut out = fields(&[
        ("cluster", summary.cluster.to_string()),
        ("lease", summary.id.to_string()),
        ("holder", summary.holder.clone()),
        ("ends", ends(summary.ends_in_ms)),
        ("hops", hops(summary.hops)),
        ("checkpoints", or_none(&info.checkpoints)),
    ]);
    let rows: Vec<Vec<String>> = info
        .members
        .iter()
        .map(|vm| {
            let state = show::word(&vm.state);
            let state = vm.why.as_ref().map_or(state.clone(), |why| format!("{state}: {why}"));
            vec![vm.vm.to_string(), vm.node.to_string(), or_none(&vm.devices), state]
        })
        .collect();
    out.push_str(&table(&["VM", "NODE", "DEVICES", "STATE"], &rows));
    out
}

fn resized(done: &Resized) -> String {
    let mut out = show::started(&done.added);
    done.removed.iter().for_each(|vm| out.push_str(&format!("{vm} is stopped\n")));
    out.push_str(&format!("hops before: {}; now: {}\n", hops(done.before), hops(done.after)));
    out
}

pub fn forked(done: &ClusterForked) -> String {
    let rows: Vec<Vec<String>> = done
        .members
        .iter()
        .map(|member| {
            let of = |mac: &Option<String>| mac.clone().unwrap_or_else(|| "-".to_owned());
            let nics: Vec<String> =
                member.nics.iter().map(|nic| format!("{} -> {}", of(&nic.parents), nic.mac)).collect();
            vec![
                member.parent.to_string(),
                member.parent_node.to_string(),
                format_ms(member.stood_still_ms),
                member.vm.to_string(),
                member.node.to_string(),
                member.network.clone(),
                nics.join(", "),
            ]
        })
        .collect();
    table(&["PARENT", "NODE", "STOOD STILL", "VM", "NODE", "NETWORK", "MAC"], &rows)
}

fn kept(info: &CheckpointInfo) -> String {
    let rows: Vec<Vec<String>> = info
        .members
        .iter()
        .map(|vm| {
            let (still, size) = (format_ms(vm.stood_still_ms), format_bytes(vm.disk_bytes));
            vec![vm.vm.to_string(), vm.node.to_string(), still, size, vm.template.clone()]
        })
        .collect();
    table(&["VM", "NODE", "STOOD STILL", "ON DISK", "TEMPLATE"], &rows)
}

fn checkpoints(list: &CheckpointList) -> String {
    let rows: Vec<Vec<String>> = list
        .checkpoints
        .iter()
        .map(|one| {
            let bytes = one.members.iter().map(|vm| vm.disk_bytes).sum();
            let moment = if one.at_barrier { "all at once" } else { "each alone" };
            vec![
                one.name.to_string(),
                one.id.to_string(),
                one.members.len().to_string(),
                format_bytes(bytes),
                moment.to_owned(),
            ]
        })
        .collect();
    table(&["CHECKPOINT", "CLUSTER", "VMS", "ON DISK", "FROZEN"], &rows)
}

fn restored(done: &ClusterRestored) -> String {
    let rows: Vec<Vec<String>> = done
        .members
        .iter()
        .map(|vm| {
            let network = if vm.again { "ran already".to_owned() } else { vm.network.clone() };
            vec![vm.vm.to_string(), vm.node.to_string(), network]
        })
        .collect();
    table(&["VM", "NODE", "NETWORK"], &rows)
}
