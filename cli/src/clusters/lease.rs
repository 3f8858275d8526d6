//! `vmove lease`.

use std::collections::BTreeMap;
use std::time::Duration;

use sched_bridge::model::VmName;
use vmove_bridge_types::lease::Part;
use vmove_bridge_types::requests::{LeaseInfo, StartRequest, StartVm, StopVms};
use vmove_client::bridge::Bridge;
use vmove_types::units::number_of;

use super::input::bridge;
use super::{ids, show};
use crate::args::clusters::{LeaseAction, LeaseArgs};
use crate::failure::Failure;
use crate::output::{End, say_either};
use crate::waiting::Wait;

/// Between two attempts while no bridge answers.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

pub async fn run(args: LeaseArgs, json: bool) -> Result<(), End> {
    let bridge = bridge(&args.at)?;
    let action = with_whole_id(&bridge, args.action).await?;
    match action {
        LeaseAction::List { holder } => {
            say_either(&bridge.leases(holder.as_deref()).await?, json, show::leases)
        }
        LeaseAction::Show { id } => say_either(&bridge.lease(&id).await?, json, show::lease),
        LeaseAction::Renew { id } => say_either(&bridge.renew_lease(&id).await?, json, show::lease),
        LeaseAction::Keep { id } => loop {
            let interval = match bridge.renew_lease(&id).await {
                Ok(lease) => Duration::from_millis(lease.ttl_ms / 3),
                Err(error) => {
                    let failure = Failure::from(error);
                    // The bridge may answer in time again. Only a bridge can say that the lease has ended.
                    if failure.exit_code != 5 {
                        return Err(failure.into());
                    }
                    RETRY_INTERVAL
                }
            };
            tokio::time::sleep(interval).await;
        },
        LeaseAction::Start { id, template, field, vm } => {
            let fields: BTreeMap<String, String> = field.into_iter().collect();
            let vms = if vm.is_empty() { vms_of(&bridge.lease(&id).await?) } else { names(vm)? };
            let one = |vm| StartVm::by_template(vm, template.clone(), fields.clone());
            let request = StartRequest { vms: vms.into_iter().map(one).collect() };
            let left = format!("VMs of {id} are still being started: `vmove cluster status {id}` shows them");
            let wait = Wait::of_vmove(json, format!("VMs of {id} are started"), left);
            let answer = wait.answer(bridge.start_vms(&id, &request)).await?;
            say_either(&answer, json, |answer| show::started(&answer.vms))
        }
        LeaseAction::Stop { id, vm } => {
            let left = format!("VMs of {id} are still being stopped: `vmove cluster status {id}` shows them");
            let wait = Wait::of_vmove(json, format!("VMs of {id} are stopped"), left);
            let stopped = wait.answer(bridge.stop_vms(&id, &StopVms { vms: names(vm)? })).await?;
            say_either(&stopped, json, |stopped| {
                number_of(stopped.vms.len() as u64, "VM is stopped", "VMs are stopped")
            })
        }
        LeaseAction::Release { id } => say_either(&bridge.release_lease(&id).await?, json, |record| {
            format!("released after {:.4} GPU-hours", record.gpu_hours)
        }),
    }
}

/// The action, with the id of the lease that is meant.
async fn with_whole_id(bridge: &Bridge, mut action: LeaseAction) -> Result<LeaseAction, Failure> {
    match &mut action {
        LeaseAction::List { .. } => {}
        LeaseAction::Show { id }
        | LeaseAction::Renew { id }
        | LeaseAction::Keep { id }
        | LeaseAction::Start { id, .. }
        | LeaseAction::Stop { id, .. }
        | LeaseAction::Release { id } => *id = ids::of_lease(bridge, id).await?,
    }
    Ok(action)
}

fn vms_of(lease: &LeaseInfo) -> Vec<VmName> {
    let homes = lease.held.iter().filter(|held| held.part == Part::Home);
    homes.map(|held| held.assignment.vm.clone()).collect()
}

fn names(vms: Vec<String>) -> Result<Vec<VmName>, Failure> {
    vms.into_iter().map(|vm| VmName::new(vm).map_err(Failure::bad_request)).collect()
}
