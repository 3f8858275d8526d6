//! Starts and stops the VMs of a lease through the daemons of their nodes: all of them or none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sched_bridge::model::{Assignment, Granted, NodeName, NumaShare, VmName};
use tokio::task::JoinSet;
use vmove_bridge_types::requests::{StartVm, StartedVm};
use vmove_grant::{Grant, GrantedDevice, GrantedShare};

use crate::bridge::{Bridge, BridgeError};
use crate::driver::{ListedVm, NotStarted, VmDriver};
use crate::lease::{Lease, LeaseId, instead_of_start};

/// Why VMs were not started or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// There is no such lease, or the store does not answer.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// The lease has no such VM.
    #[error("lease {id} has no VM {vm}: expected one of {vms}")]
    NotInLease {
        /// The lease.
        id: LeaseId,
        /// The requested VM.
        vm: VmName,
        /// The VMs of the lease.
        vms: String,
    },
    /// Its lease has a share of a GPU for the VM, and no daemon starts a VM with one.
    #[error("VM {vm} is not started: {why}; {instead}")]
    Stays {
        /// The VM.
        vm: VmName,
        /// Why it could not move.
        why: &'static str,
        /// What can be done with the lease.
        instead: &'static str,
    },
    /// A VM did not start. Those that this request had started were stopped.
    #[error("{reasons}; the VMs that this request had started were stopped")]
    Refused {
        /// The error of each VM.
        reasons: String,
        /// Why each did not start.
        failed: BTreeMap<VmName, String>,
    },
    /// VMs that should have stopped may still run. The lease must not be released yet.
    #[error(
        "{reasons}: these VMs may still run; do not release the lease before `vmove list` on their nodes shows that they do not"
    )]
    StillRunning {
        /// The error of each VM.
        reasons: String,
        /// Why each did not start; empty if it was to be stopped.
        failed: BTreeMap<VmName, String>,
    },
}

/// Starts VMs of a lease. Those that run already are left as they are, so that a request can be repeated.
///
/// # Errors
/// A VM does not start, or the lease ends meanwhile: then the VMs that this call has started are stopped.
pub async fn start(
    bridge: &Bridge,
    driver: &Arc<dyn VmDriver>,
    id: &LeaseId,
    vms: &[StartVm],
) -> Result<Vec<StartedVm>, StartError> {
    // Now a whole time to live remains.
    let lease = bridge.renew(id).await?;
    let homes = homes(&lease, vms.iter().map(|vm| &vm.vm))?;
    for (vm, home) in &homes {
        if let Some(kind) = home.devices.iter().map(|device| device.kind).find(|kind| kind.stays().is_some())
        {
            let (why, instead) = (kind.stays().unwrap_or_default(), instead_of_start(kind));
            return Err(StartError::Stays { vm: vm.clone(), why, instead });
        }
    }
    let running = running(driver, homes.values().map(|home| &home.node))
        .await
        .map_err(|reasons| StartError::Refused { reasons, failed: BTreeMap::new() })?;
    let (mut started, mut begun, mut work) = (Vec::new(), Vec::new(), JoinSet::new());
    for vm in vms {
        let home = &homes[&vm.vm];
        let again = running.contains(&(home.node.clone(), vm.vm.to_string()));
        started.push(StartedVm { vm: vm.vm.clone(), node: home.node.clone(), again });
        if !again {
            let (driver, node, vm) = (Arc::clone(driver), home.node.clone(), filled_in(vm, home));
            let grant = grant_of(&lease, home);
            work.spawn(async move {
                let answer = driver.start(&node, &vm, &grant).await;
                let why = answer.map_err(|error| {
                    let reason = format!("VM {} does not start on node {node}: {error}", vm.vm);
                    (reason, matches!(error, NotStarted::Unknown(_)))
                });
                ((vm.vm, node), why.err())
            });
        }
    }
    let (mut reasons, mut failed, mut may_start_later) = (Vec::new(), BTreeMap::new(), false);
    for (place, why) in work.join_all().await {
        if let Some((reason, unknown)) = &why {
            reasons.push(reason.clone());
            failed.insert(place.0.clone(), reason.clone());
            may_start_later |= *unknown;
        }
        // What its node refused was not started here: it may be another request's.
        let refused = matches!(why, Some((_, false)));
        begun.extend((!refused).then_some(place));
    }
    // If the lease has ended, others may have its resources by now. From here on it is kept by its VMs.
    if reasons.is_empty()
        && let Err(error) = bridge.mark_running(id, &places(&started), true).await
    {
        reasons.push(error.to_string());
    }
    if reasons.is_empty() {
        for vm in started.iter().filter(|vm| !vm.again) {
            tracing::info!(lease = %id, vm = %vm.vm, node = %vm.node, "the VM is started");
        }
        return Ok(started);
    }
    let reasons = reasons.join("; ");
    match stop_all(driver, begun).await {
        Ok(()) if may_start_later => Err(StartError::StillRunning { reasons, failed }),
        Ok(()) => Err(StartError::Refused { reasons, failed }),
        Err(not_stopped) => {
            Err(StartError::StillRunning { reasons: format!("{reasons}; {not_stopped}"), failed })
        }
    }
}

/// Stops VMs of a lease, all of them if `vms` is empty. Stopping one that does not run succeeds.
///
/// # Errors
/// A VM may still run.
pub async fn stop(
    bridge: &Bridge,
    driver: &Arc<dyn VmDriver>,
    id: &LeaseId,
    vms: &[VmName],
) -> Result<Vec<VmName>, StartError> {
    let lease = Arc::clone(&bridge.view()?.lease(id)?.lease);
    let vms: Vec<VmName> = if vms.is_empty() { lease.vms().cloned().collect() } else { vms.to_vec() };
    let homes = homes(&lease, vms.iter())?;
    let all: Vec<(VmName, NodeName)> = homes.into_iter().map(|(vm, home)| (vm, home.node)).collect();
    stop_all(driver, all.clone()).await.map_err(|reasons| {
        let failed = BTreeMap::new();
        StartError::StillRunning { reasons, failed }
    })?;
    for (vm, node) in &all {
        tracing::info!(lease = %id, %vm, %node, "the VM is stopped");
    }
    // Nothing runs in it: it needs heartbeats again, from now on.
    match bridge.mark_running(id, &all, false).await {
        Ok(_) | Err(BridgeError::UnknownLease(_)) => Ok(vms),
        Err(error) => Err(error.into()),
    }
}

fn places(started: &[StartedVm]) -> Vec<(VmName, NodeName)> {
    started.iter().map(|vm| (vm.vm.clone(), vm.node.clone())).collect()
}

pub(crate) async fn stop_all(driver: &Arc<dyn VmDriver>, vms: Vec<(VmName, NodeName)>) -> Result<(), String> {
    let mut work = JoinSet::new();
    for (vm, node) in vms {
        let driver = Arc::clone(driver);
        work.spawn(async move {
            // A VM that never started cannot be stopped.
            let listed = driver.list(&node).await?;
            if !listed.contains_key(vm.as_str()) {
                return Ok(());
            }
            let stopped = driver.stop(&node, &vm).await;
            stopped.map_err(|reason| format!("VM {vm} does not stop on node {node}: {reason}"))
        });
    }
    let reasons: Vec<String> = work.join_all().await.into_iter().filter_map(Result::err).collect();
    if reasons.is_empty() { Ok(()) } else { Err(reasons.join("; ")) }
}

/// The node and resources of each VM.
fn homes<'a>(
    lease: &Lease,
    vms: impl Iterator<Item = &'a VmName>,
) -> Result<BTreeMap<VmName, Assignment>, StartError> {
    let home = |vm: &VmName| {
        let held = lease.home(vm).ok_or_else(|| StartError::NotInLease {
            id: lease.id.clone(),
            vm: vm.clone(),
            vms: lease.vms().map(VmName::as_str).collect::<Vec<_>>().join(", "),
        })?;
        Ok((vm.clone(), held.assignment.clone()))
    };
    vms.map(home).collect()
}

/// The VMs that run on these nodes.
pub(crate) async fn running(
    driver: &Arc<dyn VmDriver>,
    nodes: impl Iterator<Item = &NodeName>,
) -> Result<BTreeSet<(NodeName, String)>, String> {
    let mut running = BTreeSet::new();
    for (node, listed) in list_all(driver, nodes.cloned()).await {
        running.extend(listed?.into_iter().filter(|(_, vm)| !vm.ended).map(|(vm, _)| (node.clone(), vm)));
    }
    Ok(running)
}

/// What each of these nodes lists, or why it does not answer.
pub(crate) async fn list_all(
    driver: &Arc<dyn VmDriver>,
    nodes: impl IntoIterator<Item = NodeName>,
) -> BTreeMap<NodeName, Result<BTreeMap<String, ListedVm>, String>> {
    let mut work = JoinSet::new();
    for node in nodes.into_iter().collect::<BTreeSet<_>>() {
        let driver = Arc::clone(driver);
        work.spawn(async move {
            let listed = driver.list(&node).await;
            (node, listed)
        });
    }
    work.join_all().await.into_iter().collect()
}

/// What a VM may have on its node.
pub(crate) fn grant_of(lease: &Lease, home: &Assignment) -> Grant {
    let sum = |of: fn(&NumaShare) -> u64| home.shares.iter().map(of).sum();
    let device = |(number, device): (usize, &Granted)| {
        let kind = serde_json::to_value(device.kind).ok();
        let kind = kind.as_ref().and_then(serde_json::Value::as_str).unwrap_or("device").to_owned();
        GrantedDevice { role: format!("{kind}{number}"), address: device.address.to_string() }
    };
    Grant {
        lease: lease.id.to_string(),
        holder: lease.holder.clone(),
        node: home.node.to_string(),
        vm: home.vm.to_string(),
        serial: 0,
        expires_ms: 0,
        cores: home.cores(),
        memory_mib: sum(|share| share.memory.0),
        huge_2m_mib: sum(|share| share.huge.pages_2m * 2),
        huge_1g_mib: sum(|share| share.huge.pages_1g * 1024),
        // A guest is given what is a PCI function.
        devices: home
            .devices
            .iter()
            .enumerate()
            .filter(|(_, device)| device.address.pci().is_some())
            .map(device)
            .collect(),
        numa: home.shares.iter().map(share_of).collect(),
    }
}

fn share_of(share: &NumaShare) -> GrantedShare {
    let huge = share.huge.pages_2m * 2 + share.huge.pages_1g * 1024;
    GrantedShare { node: share.numa.0.into(), cores: share.cores, memory_mib: share.memory.0 + huge }
}

/// Fills in what the lease has for the VM. `{devices}` stays: the driver gives them, by their roles in the grant.
fn filled_in(vm: &StartVm, home: &Assignment) -> StartVm {
    let (vcpus, memory) = (home.cores().to_string(), home.memory().0.to_string());
    // No comma: in an argument of QEMU, that would begin another option.
    let remote: Vec<String> =
        home.remote().map(|device| device.address.to_string().replace("remote:", "")).collect();
    let remote = remote.join(";");
    let fill = |argument: &String| {
        let argument = argument.replace("{vcpus}", &vcpus).replace("{memory_mib}", &memory);
        argument.replace("{remote_gpus}", &remote)
    };
    let command_line = vm.command_line.iter().map(fill).collect();
    StartVm { command_line, ..vm.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{FakeDriver, TestBridge, id, scene};

    fn name(text: &str) -> VmName {
        VmName::new(text).unwrap()
    }

    fn starting(vms: &[&str]) -> Vec<StartVm> {
        let words = ["qemu", "-smp", "{vcpus}", "-m", "{memory_mib}", "{devices}"];
        let one = |vm: &&str| StartVm::by_command_line(name(vm), words.map(str::to_owned).to_vec());
        vms.iter().map(one).collect()
    }

    /// A lease of three VMs, none of which runs.
    async fn leased() -> (TestBridge, FakeDriver, Arc<dyn VmDriver>) {
        let (bridge, fake) = scene(3).await;
        fake.world().running.clear();
        let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
        (bridge, fake, driver)
    }

    const ALL: [&str; 3] = ["vc-vm-0", "vc-vm-1", "vc-vm-2"];

    #[tokio::test]
    async fn all_start_where_they_were_placed_and_once() {
        let (bridge, fake, driver) = leased().await;
        let lease = id("vc");
        let started = start(&bridge, &driver, &lease, &starting(&ALL[..2])).await.unwrap();
        assert!(started.iter().all(|vm| !vm.again), "{started:?}");
        let started = start(&bridge, &driver, &lease, &starting(&ALL)).await.unwrap();
        assert_eq!(started.iter().map(|vm| vm.again).collect::<Vec<_>>(), [true, true, false]);
        let view = bridge.view().unwrap();
        for vm in ALL {
            let home = view.lease(&lease).unwrap().lease.home(&name(vm)).unwrap().assignment.node.clone();
            assert_eq!(fake.world().running[vm], home);
        }
        let line = fake.world().log[0].clone();
        assert_eq!(line, "qemu -smp 8 -m 1024 {devices}");
        // Stopped, and stopped again.
        for _ in 0..2 {
            assert_eq!(stop(&bridge, &driver, &lease, &[]).await.unwrap().len(), 3);
            assert!(fake.world().running.is_empty());
        }
        let other = start(&bridge, &driver, &lease, &starting(&["vc-vm-7"])).await.unwrap_err();
        assert!(other.to_string().contains("expected one of vc-vm-0, vc-vm-1, vc-vm-2"), "{other}");
    }

    #[tokio::test]
    async fn if_one_does_not_start_none_is_left_but_those_that_ran() {
        let (bridge, fake, driver) = leased().await;
        let lease = id("vc");
        start(&bridge, &driver, &lease, &starting(&ALL[..1])).await.unwrap();
        fake.world().failing.insert(ALL[2].to_owned());
        let refused = start(&bridge, &driver, &lease, &starting(&ALL)).await.unwrap_err();
        let StartError::Refused { failed, .. } = &refused else { panic!("{refused}") };
        assert_eq!(failed.keys().collect::<Vec<_>>(), [&name(ALL[2])]);
        assert!(refused.to_string().contains("VM vc-vm-2 does not start"), "{refused}");
        assert_eq!(fake.world().running.keys().collect::<Vec<_>>(), [ALL[0]]);
        // There is no answer to one start: it may run later, so its resources must stay.
        fake.world().failing.clear();
        fake.world().unanswered.insert(ALL[2].to_owned());
        let unknown = start(&bridge, &driver, &lease, &starting(&ALL)).await.unwrap_err();
        assert!(matches!(unknown, StartError::StillRunning { .. }), "{unknown}");
        assert_eq!(fake.world().running.keys().collect::<Vec<_>>(), [ALL[0]]);
        fake.world().unanswered.clear();
        fake.world().failing.insert(ALL[2].to_owned());
        // One that was started cannot be stopped.
        fake.world().unstoppable.insert(ALL[1].to_owned());
        let left = start(&bridge, &driver, &lease, &starting(&ALL)).await.unwrap_err();
        assert!(matches!(left, StartError::StillRunning { .. }), "{left}");
        assert!(left.to_string().contains("VM vc-vm-1 does not stop"), "{left}");
    }
}
