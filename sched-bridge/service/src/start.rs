//! Starts the VMs of a lease through the daemons of the nodes that they were placed on: all of them or none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sched_bridge::model::{Assignment, NodeName, VmName};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use utoipa::ToSchema;

use crate::bridge::{Bridge, BridgeError};
use crate::lease::{Lease, LeaseId};
use crate::plan::mover::Mover;

/// How a VM is started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// The VM, one of the lease.
    #[schema(value_type = String)]
    pub vm: VmName,
    /// QEMU and its arguments, as for `vmove run`. `{vcpus}` and `{memory_mib}` stand for what the lease has for this VM; an argument
    /// `{devices}` for `-device vfio-pci,host=ADDRESS` of each of its devices.
    pub command_line: Vec<String>,
    /// Backing of guest memory: `thp` (default), `hugetlb-2m` or `hugetlb-1g`.
    #[serde(default = "thp")]
    pub memory: String,
}

fn thp() -> String {
    "thp".to_owned()
}

/// A VM that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartedVm {
    /// The VM.
    #[schema(value_type = String)]
    pub vm: VmName,
    /// Where.
    #[schema(value_type = String)]
    pub node: NodeName,
    /// It ran already.
    pub again: bool,
}

/// Why VMs do not run, or do not end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No such lease, or the store is away.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// The lease has no such VM.
    #[error("lease {id} has no VM {vm}: expected one of {known}")]
    NotInLease {
        /// The lease.
        id: LeaseId,
        /// What was asked for.
        vm: VmName,
        /// What it has.
        known: String,
    },
    /// A daemon did not start one. Those that had been started were stopped.
    #[error("{reasons}; the VMs that had been started were stopped again")]
    Refused {
        /// Of each VM.
        reasons: String,
    },
    /// VMs that should have ended may still run. What the lease has must not be given to others.
    #[error(
        "{reasons}: these VMs may still run, so the lease is not to be given back; look with `vmove list` on their nodes"
    )]
    Left {
        /// Of each VM.
        reasons: String,
    },
}

/// Starts VMs of a lease. Those that run already are left as they are, so that a request can be repeated.
///
/// # Errors
/// One of them does not start, or the lease ends meanwhile: then none of those that this call started is left.
pub async fn start(
    bridge: &Bridge,
    mover: &Arc<dyn Mover>,
    id: &LeaseId,
    vms: &[StartVm],
) -> Result<Vec<StartedVm>, StartError> {
    // From here on there is a whole time to live.
    let lease = bridge.renew(id).await?;
    let homes = homes(&lease, vms.iter().map(|own| &own.vm))?;
    let there = running(mover, homes.values().map(|home| &home.node))
        .await
        .map_err(|reasons| StartError::Refused { reasons })?;
    let (mut started, mut begun, mut work) = (Vec::new(), Vec::new(), JoinSet::new());
    for own in vms {
        let home = &homes[&own.vm];
        let again = there.contains(&(home.node.clone(), own.vm.to_string()));
        started.push(StartedVm { vm: own.vm.clone(), node: home.node.clone(), again });
        if !again {
            begun.push((own.vm.clone(), home.node.clone()));
            let (mover, node, own) = (Arc::clone(mover), home.node.clone(), filled(own, home));
            work.spawn(async move {
                let ended = mover.start(&node, &own).await;
                ended.map_err(|reason| format!("VM {} does not start on {node}: {reason}", own.vm))
            });
        }
    }
    let ended = work.join_all().await;
    let mut reasons: Vec<String> = ended.into_iter().filter_map(Result::err).collect();
    // What was leased may be somebody else's by now.
    if reasons.is_empty()
        && let Err(error) = bridge.renew(id).await
    {
        reasons.push(error.to_string());
    }
    if reasons.is_empty() {
        return Ok(started);
    }
    let reasons = reasons.join("; ");
    match stop_all(mover, begun).await {
        Ok(()) => Err(StartError::Refused { reasons }),
        Err(left) => Err(StartError::Left { reasons: format!("{reasons}; {left}") }),
    }
}

/// Ends VMs of a lease, all of them if none is named; those that do not run are fine.
///
/// # Errors
/// One of them may still run.
pub async fn stop(
    bridge: &Bridge,
    mover: &Arc<dyn Mover>,
    id: &LeaseId,
    vms: &[VmName],
) -> Result<Vec<VmName>, StartError> {
    let lease = Arc::clone(&bridge.view()?.lease(id)?.lease);
    let vms: Vec<VmName> = if vms.is_empty() { lease.vms().cloned().collect() } else { vms.to_vec() };
    let homes = homes(&lease, vms.iter())?;
    let all = homes.into_iter().map(|(vm, home)| (vm, home.node)).collect();
    stop_all(mover, all).await.map_err(|reasons| StartError::Left { reasons })?;
    Ok(vms)
}

async fn stop_all(mover: &Arc<dyn Mover>, vms: Vec<(VmName, NodeName)>) -> Result<(), String> {
    let mut work = JoinSet::new();
    for (vm, node) in vms {
        let mover = Arc::clone(mover);
        work.spawn(async move {
            // Whether it is there is asked first: what never started cannot be stopped.
            let listed = mover.list(&node).await?;
            if !listed.contains_key(vm.as_str()) {
                return Ok(());
            }
            let ended = mover.stop(&node, &vm).await;
            ended.map_err(|reason| format!("VM {vm} does not end on {node}: {reason}"))
        });
    }
    let left: Vec<String> = work.join_all().await.into_iter().filter_map(Result::err).collect();
    if left.is_empty() { Ok(()) } else { Err(left.join("; ")) }
}

/// What each VM has at home.
fn homes<'a>(
    lease: &Lease,
    vms: impl Iterator<Item = &'a VmName>,
) -> Result<BTreeMap<VmName, Assignment>, StartError> {
    let home = |vm: &VmName| {
        let held = lease.home(vm).ok_or_else(|| StartError::NotInLease {
            id: lease.id.clone(),
            vm: vm.clone(),
            known: lease.vms().map(VmName::as_str).collect::<Vec<_>>().join(", "),
        })?;
        Ok((vm.clone(), held.assignment.clone()))
    };
    vms.map(home).collect()
}

/// VMs that run on some nodes.
async fn running(
    mover: &Arc<dyn Mover>,
    nodes: impl Iterator<Item = &NodeName>,
) -> Result<BTreeSet<(NodeName, String)>, String> {
    let mut there = BTreeSet::new();
    for node in nodes.collect::<BTreeSet<_>>() {
        let listed = mover.list(node).await?;
        there.extend(listed.into_iter().filter(|(_, vm)| !vm.ended).map(|(vm, _)| (node.clone(), vm)));
    }
    Ok(there)
}

/// A command line with what the lease has for the VM.
fn filled(own: &StartVm, home: &Assignment) -> StartVm {
    let (vcpus, memory) = (home.cores().to_string(), home.memory().0.to_string());
    let mut command_line = Vec::new();
    for argument in &own.command_line {
        if argument == "{devices}" {
            for device in &home.devices {
                command_line.extend(["-device".to_owned(), format!("vfio-pci,host={}", device.address)]);
            }
            continue;
        }
        command_line.push(argument.replace("{vcpus}", &vcpus).replace("{memory_mib}", &memory));
    }
    StartVm { command_line, ..own.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bridge::tests::id;
    use crate::plan::tests::{FakeMover, scene};

    fn name(text: &str) -> VmName {
        VmName::new(text).unwrap()
    }

    fn ask(vms: &[&str]) -> Vec<StartVm> {
        let words = ["qemu", "-smp", "{vcpus}", "-m", "{memory_mib}", "{devices}"];
        let one = |vm: &&str| StartVm {
            vm: name(vm),
            command_line: words.map(str::to_owned).to_vec(),
            memory: "thp".to_owned(),
        };
        vms.iter().map(one).collect()
    }

    /// A lease of three VMs, none of which runs.
    async fn leased(dir: &std::path::Path) -> (crate::bridge::Running, FakeMover, Arc<dyn Mover>) {
        let (running, fake) = scene(dir, 3).await;
        fake.0.lock().unwrap().at.clear();
        let mover: Arc<dyn Mover> = Arc::new(fake.clone());
        (running, fake, mover)
    }

    const ALL: [&str; 3] = ["vc-vm-0", "vc-vm-1", "vc-vm-2"];

    #[tokio::test]
    async fn all_start_where_they_were_placed_and_once() {
        let dir = tempfile::tempdir().unwrap();
        let (running, fake, mover) = leased(dir.path()).await;
        let (bridge, lease) = (&running.0, id("vc"));
        let started = start(bridge, &mover, &lease, &ask(&ALL[..2])).await.unwrap();
        assert!(started.iter().all(|own| !own.again), "{started:?}");
        let started = start(bridge, &mover, &lease, &ask(&ALL)).await.unwrap();
        assert_eq!(started.iter().map(|own| own.again).collect::<Vec<_>>(), [true, true, false]);
        let view = bridge.view().unwrap();
        for vm in ALL {
            let home = view.lease(&lease).unwrap().lease.home(&name(vm)).unwrap().assignment.node.clone();
            assert_eq!(fake.0.lock().unwrap().at[vm], home);
        }
        let line = fake.0.lock().unwrap().log[0].clone();
        assert!(line.starts_with("qemu -smp 8 -m 1024 -device vfio-pci,host="), "{line}");
        assert_eq!(line.matches("-device").count(), 8, "{line}");
        // Ended, and ended again.
        for _ in 0..2 {
            assert_eq!(stop(bridge, &mover, &lease, &[]).await.unwrap().len(), 3);
            assert!(fake.0.lock().unwrap().at.is_empty());
        }
        let other = start(bridge, &mover, &lease, &ask(&["vc-vm-7"])).await.unwrap_err();
        assert!(other.to_string().contains("expected one of vc-vm-0, vc-vm-1, vc-vm-2"), "{other}");
    }

    #[tokio::test]
    async fn if_one_does_not_start_none_is_left_but_those_that_ran() {
        let dir = tempfile::tempdir().unwrap();
        let (running, fake, mover) = leased(dir.path()).await;
        let (bridge, lease) = (&running.0, id("vc"));
        start(bridge, &mover, &lease, &ask(&ALL[..1])).await.unwrap();
        fake.0.lock().unwrap().fail.insert(ALL[2].to_owned());
        let refused = start(bridge, &mover, &lease, &ask(&ALL)).await.unwrap_err();
        assert!(matches!(refused, StartError::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains("VM vc-vm-2 does not start"), "{refused}");
        assert_eq!(fake.0.lock().unwrap().at.keys().collect::<Vec<_>>(), [ALL[0]]);
        // One that was started cannot be stopped: that is said.
        fake.0.lock().unwrap().stuck.insert(ALL[1].to_owned());
        let left = start(bridge, &mover, &lease, &ask(&ALL)).await.unwrap_err();
        assert!(matches!(left, StartError::Left { .. }), "{left}");
        assert!(left.to_string().contains("VM vc-vm-1 does not end"), "{left}");
    }
}
