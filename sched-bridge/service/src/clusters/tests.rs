//! Clusters whose VMs exist only in memory: what is left when something fails. With real guests: `tests/tests/clusters/whole.rs`.

use std::sync::Arc;

use sched_bridge::model::{ClusterName, VmName};
use vmove_bridge_types::cluster::{
    CheckpointRequest, ForkClusterRequest, ResizeRequest, RestoreClusterRequest,
};
use vmove_bridge_types::requests::StartAll;
use vmove_grant::GrantedDevice;

use super::*;
use crate::testing::{FakeDriver, TestBridge, id, name, scene};

/// Three VMs, a node each, of six.
async fn running() -> (TestBridge, FakeDriver, Clusters) {
    let (bridge, fake) = scene(3).await;
    let places = bridge.view().unwrap().lease(&id("vc")).unwrap().lease.places();
    bridge.mark_running(&id("vc"), &places, true).await.unwrap();
    let clusters = Clusters { bridge: Arc::clone(&bridge), driver: Arc::new(fake.clone()) };
    (bridge, fake, clusters)
}

fn to(name: &str) -> ForkClusterRequest {
    ForkClusterRequest { name: ClusterName::new(name).unwrap(), id: None, only: None, each_alone: false }
}

fn keep(name: &str) -> CheckpointRequest {
    CheckpointRequest { name: id(name), each_alone: false }
}

fn count(count: u32) -> ResizeRequest {
    ResizeRequest { group: None, count, start: None }
}

fn qemu() -> Option<StartAll> {
    Some(StartAll { command_line: vec!["qemu".to_owned()], ..StartAll::default() })
}

#[tokio::test]
async fn guests_with_devices_stand_still_each_alone_or_not_at_all() {
    let (_bridge, fake, clusters) = running().await;
    let request = CheckpointRequest { each_alone: false, ..keep("c") };
    let gpu = GrantedDevice { role: "gpu0".to_owned(), address: "0000:00:00.0".to_owned() };
    fake.world().devices.insert("vc-vm-1".to_owned(), vec![gpu]);
    let refused = make_checkpoint(&clusters, &id("vc"), &request).await.unwrap_err();
    assert!(refused.to_string().contains("--each-alone"), "{refused}");
    assert!(fake.world().paused.is_empty() && fake.world().templates.is_empty());
    let request = CheckpointRequest { each_alone: true, ..request };
    make_checkpoint(&clusters, &id("vc"), &request).await.unwrap();
    assert_eq!(fake.world().templates.len(), 3);
}

#[tokio::test]
async fn of_a_copy_or_checkpoint_that_fails_nothing_is_left_and_nobody_stands_still() {
    let (bridge, fake, clusters) = running().await;
    fake.world().failing.insert("vc-vm-1".to_owned());
    let failed = fork(&clusters, &id("vc"), &to("copy"), None).await.unwrap_err();
    assert!(failed.to_string().contains("vc-vm-1") && failed.to_string().contains("no memory"), "{failed}");
    let failed = make_checkpoint(&clusters, &id("vc"), &keep("c")).await.unwrap_err();
    assert!(failed.to_string().contains("no space"), "{failed}");
    {
        let world = fake.world();
        assert_eq!(world.running.keys().collect::<Vec<_>>(), ["vc-vm-0", "vc-vm-1", "vc-vm-2"]);
        assert!(world.paused.is_empty() && world.templates.is_empty());
    }
    let view = bridge.view().unwrap();
    assert_eq!((view.leases().len(), view.checkpoints().len()), (1, 0));
    // The whole fleet is taken then: there is no room for another copy.
    fake.world().failing.clear();
    let done = fork(&clusters, &id("vc"), &to("copy"), None).await.unwrap();
    assert_eq!(
        done.members.iter().map(|one| one.vm.as_str()).collect::<Vec<_>>(),
        ["copy-vm-0", "copy-vm-1", "copy-vm-2"]
    );
    let refused = fork(&clusters, &id("vc"), &to("third"), None).await.unwrap_err();
    assert!(matches!(refused, ClusterError::Bridge(BridgeError::Place(_))), "{refused}");
    let taken = fork(&clusters, &id("vc"), &to("copy"), None).await.unwrap_err();
    assert!(taken.to_string().contains("there is a lease copy already"), "{taken}");
    assert_eq!(fake.world().running.len(), 6, "the copy that was there is as it was");
}

#[tokio::test]
async fn a_cluster_is_resized_as_a_whole() {
    let (bridge, fake, clusters) = running().await;
    let unknown = resize(&clusters, &id("vc"), &count(5), None, None).await.unwrap_err();
    assert!(unknown.to_string().contains("give a template"), "{unknown}");
    assert!(
        resize(&clusters, &id("vc"), &count(0), qemu(), None)
            .await
            .unwrap_err()
            .to_string()
            .contains("cluster stop")
    );
    fake.world().failing.insert("vc-vm-4".to_owned());
    resize(&clusters, &id("vc"), &count(5), qemu(), None).await.unwrap_err();
    assert_eq!(bridge.view().unwrap().lease(&id("vc")).unwrap().lease.held.len(), 3, "all or none");
    fake.world().failing.clear();
    let grown = resize(&clusters, &id("vc"), &count(5), qemu(), None).await.unwrap();
    assert_eq!(grown.added.iter().map(|one| one.vm.as_str()).collect::<Vec<_>>(), ["vc-vm-3", "vc-vm-4"]);
    // Two of five are on the other leaf, and leave first. The next that comes gets the lowest free number.
    let shrunk = resize(&clusters, &id("vc"), &count(3), None, None).await.unwrap();
    assert_eq!(shrunk.removed.iter().map(VmName::as_str).collect::<Vec<_>>(), ["vc-vm-4", "vc-vm-3"]);
    assert_eq!(fake.world().running.keys().collect::<Vec<_>>(), ["vc-vm-0", "vc-vm-1", "vc-vm-2"]);
    let refused = resize(&clusters, &id("vc"), &count(9), qemu(), None).await.unwrap_err();
    assert!(refused.to_string().contains("3 of 6 more VMs fit"), "{refused}");
    let again = resize(&clusters, &id("vc"), &count(4), qemu(), None).await.unwrap();
    assert_eq!(again.added[0].vm.as_str(), "vc-vm-3");
}

/// Whether the VM runs nobody knows when its node has not answered: it keeps its place. Who asks again gets the whole cluster.
#[tokio::test]
async fn a_growth_whose_node_did_not_answer_is_taken_up() {
    let (bridge, fake, clusters) = running().await;
    fake.world().unanswered.insert("vc-vm-4".to_owned());
    let lost = resize(&clusters, &id("vc"), &count(5), qemu(), None).await.unwrap_err();
    assert!(lost.to_string().contains("may still run"), "{lost}");
    let held = |bridge: &TestBridge| bridge.view().unwrap().lease(&id("vc")).unwrap().lease.held.len();
    assert_eq!((held(&bridge), fake.world().running.len()), (5, 3), "those that had started were stopped");
    fake.world().unanswered.clear();
    let done = resize(&clusters, &id("vc"), &count(5), qemu(), None).await.unwrap();
    assert_eq!(done.added.iter().map(|one| one.vm.as_str()).collect::<Vec<_>>(), ["vc-vm-3", "vc-vm-4"]);
    assert_eq!(fake.world().running.len(), 5);
    // Nothing is left to do; and fewer are fewer, whatever runs.
    assert!(resize(&clusters, &id("vc"), &count(5), qemu(), None).await.unwrap().added.is_empty());
    fake.world().unanswered.insert("vc-vm-5".to_owned());
    resize(&clusters, &id("vc"), &count(6), qemu(), None).await.unwrap_err();
    assert_eq!(resize(&clusters, &id("vc"), &count(3), None, None).await.unwrap().removed.len(), 3);
    assert_eq!((held(&bridge), fake.world().running.len()), (3, 3));
}

#[tokio::test]
async fn a_restore_that_was_cut_off_is_taken_up() {
    let (bridge, fake, clusters) = running().await;
    make_checkpoint(&clusters, &id("vc"), &keep("c")).await.unwrap();
    let request = RestoreClusterRequest::default();
    let refused = restore(&clusters, &id("c"), &request, None).await.unwrap_err();
    assert!(matches!(refused, ClusterError::StillRuns(_)), "{refused}");
    fake.world().running.clear();
    // One VM cannot be restored: none is left, nor the lease.
    fake.world().failing.insert("vc-vm-2".to_owned());
    restore(&clusters, &id("c"), &request, None).await.unwrap_err();
    assert!(fake.world().running.is_empty() && bridge.view().unwrap().leases().is_empty());
    fake.world().failing.clear();
    // As after a bridge that was killed when one VM ran: it is placed, and nothing is marked as running.
    let checkpoint = bridge.checkpoint(&id("c")).unwrap();
    bridge.manual_clock.pass(10);
    let granted = bridge.grant(super::restore::again(&checkpoint)).await.unwrap();
    let first = granted.lease.held[0].assignment.clone();
    fake.world().running.insert(first.vm.to_string(), first.node.clone());
    let done = restore(&clusters, &id("c"), &request, None).await.unwrap();
    assert_eq!(done.members.iter().map(|one| one.again).collect::<Vec<_>>(), [true, false, false]);
    assert!(bridge.view().unwrap().lease(&id("vc")).unwrap().lease.runs());
    // A lost node takes no VMs.
    fake.world().running.clear();
    let home = bridge.home("vc", 0);
    let request = RestoreClusterRequest { lost: vec![home.clone()] };
    let done = restore(&clusters, &id("c"), &request, None).await.unwrap();
    assert!(done.members.iter().all(|one| one.node != home), "{done:?}");
    let unknown = RestoreClusterRequest { lost: vec![name("n9")] };
    restore(&clusters, &id("c"), &unknown, None).await.unwrap_err();
}
