//! Shares of GPUs and remote GPUs belong to one lease at most, whoever asks, and wherever VMs go.

use std::sync::Arc;

use sched_bridge::model::{
    Assignment, ClusterName, Device, DeviceAddress, DeviceKind, Granted, Node, PciAddress, VmName,
};
use sched_bridge::place::{Alternative, ClusterRequest, DeviceFilter, DeviceNeed, VmGroup};
use vmove_bridge_types::plan::{PlanRequest, PlanState};
use vmove_bridge_types::requests::StartVm;

use crate::bridge::{BridgeError, GrantRequest, Wanted};
use crate::clock::Clock;
use crate::driver::VmDriver;
use crate::executor::{Limits, run};
use crate::planner::make_plan;
use crate::quota::Quota;
use crate::store::{Embedded, Store};
use crate::testing::{FakeDriver, ManualClock, TestBridge, exactly, id, name, node, two_leaves};
use crate::vms;

const REMOTE: &str = "remote:10.0.0.9:8308/0";

fn address(text: &str) -> DeviceAddress {
    text.parse().unwrap()
}

/// A node with two GPUs, of which the first has two slices; it lists a remote GPU.
fn divided(text: &str) -> Node {
    let mut node = node(text, 2);
    let gpu: PciAddress = "0000:00:00.0".parse().unwrap();
    let id = "10de:20b0".parse().unwrap();
    for gpu_instance in 1..3 {
        let address = DeviceAddress::Slice { gpu, gpu_instance, compute_instance: 0 };
        let mut slice = Device::new(address, DeviceKind::MigSlice, id);
        slice.parent = Some(gpu);
        node.devices.push(slice);
    }
    node.devices.push(Device::new(address(REMOTE), DeviceKind::RemoteGpu, id));
    node
}

/// A request for `vms` VMs with one device of a kind each.
fn one_each(id: &str, vms: u32, kind: DeviceKind) -> GrantRequest {
    let devices = vec![DeviceNeed { count: 1, filter: DeviceFilter::kind(kind) }];
    let alternatives = vec![Alternative { vcpus: 1, devices, ..Alternative::default() }];
    let group = VmGroup { name: "vm".to_owned(), count: vms, alternatives };
    let cluster = ClusterRequest::new(ClusterName::new(id).unwrap(), vec![group]);
    GrantRequest { wanted: Wanted::Cluster(Box::new(cluster)), ..exactly(id, Vec::new()) }
}

fn holding(vm: &str, node: &str, device: &str, kind: DeviceKind) -> Assignment {
    let devices = vec![Granted { address: address(device), kind }];
    Assignment { vm: VmName::new(vm).unwrap(), node: name(node), devices, shares: Vec::new() }
}

#[tokio::test]
async fn of_requests_at_once_for_the_last_slice_one_gets_it() {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(&folder.path().join("state.redb")).unwrap());
    let bridge = || TestBridge::over(Arc::clone(&store), ManualClock::new() as Arc<dyn Clock>);
    let (one, other) = (bridge(), bridge());
    for bridge in [&one, &other] {
        bridge.wait_until_current(std::time::Duration::from_secs(30)).await.unwrap();
    }
    one.put_node(divided("n0")).await.unwrap();
    one.put_node(divided("n1")).await.unwrap();
    one.put_topology(&two_leaves(&["n0", "n1"], &[])).await.unwrap();
    one.grant(one_each("most", 3, DeviceKind::MigSlice)).await.unwrap();
    for (kind, what) in [(DeviceKind::MigSlice, "slice"), (DeviceKind::RemoteGpu, "remote")] {
        // Two of one node for the slice, and of different nodes for the remote GPU: no node's guard tells of it.
        let ask = async |bridge: &TestBridge, by: &str, not: &str| {
            let mut request = one_each(&format!("{what}-{by}"), 1, kind);
            if let (Wanted::Cluster(cluster), DeviceKind::RemoteGpu) = (&mut request.wanted, kind) {
                cluster.not_nodes.insert(name(not));
            }
            bridge.grant(request).await
        };
        let (a, b) = tokio::join!(ask(&one, "a", "n0"), ask(&other, "b", "n1"));
        assert_eq!([&a, &b].iter().filter(|answer| answer.is_ok()).count(), 1, "{what}: {a:?} {b:?}");
        let refused = [a, b].into_iter().find_map(Result::err).unwrap();
        assert!(matches!(refused, BridgeError::Place(_)), "{refused}");
    }
}

#[tokio::test]
async fn a_gpu_and_its_slice_are_not_in_two_leases() {
    let bridge = TestBridge::empty().await;
    bridge.put_node(divided("n0")).await.unwrap();
    let (gpu, slice) = ("0000:00:00.0", "0000:00:00.0/gi2/ci0");
    let whole = || exactly("whole", vec![holding("a", "n0", gpu, DeviceKind::Gpu)]);
    let share = || exactly("share", vec![holding("b", "n0", slice, DeviceKind::MigSlice)]);
    bridge.grant(share()).await.unwrap();
    let refused = bridge.grant(whole()).await.unwrap_err();
    assert!(
        matches!(refused, BridgeError::Taken(_)) && refused.to_string().contains("as a whole"),
        "{refused}"
    );
    // Only the GPU that is not divided is placed as a whole.
    let refused = bridge.grant(one_each("gpus", 2, DeviceKind::Gpu)).await.unwrap_err();
    assert!(refused.to_string().contains("1 of 2 VMs would fit"), "{refused}");
    bridge.release(&id("share")).await.unwrap();
    bridge.grant(whole()).await.unwrap();
    let refused = bridge.grant(share()).await.unwrap_err();
    assert!(matches!(refused, BridgeError::Taken(_)), "{refused}");
    let refused = bridge.grant(one_each("slices", 1, DeviceKind::MigSlice)).await.unwrap_err();
    assert!(refused.to_string().contains("needs 1 MIG slice, has 0 free of 2"), "{refused}");
}

/// What counts for shares and remote GPUs goes by their kind.
#[tokio::test]
async fn a_device_is_not_leased_under_the_name_of_another_kind() {
    let bridge = TestBridge::empty().await;
    bridge.put_node(divided("n0")).await.unwrap();
    for (device, kind) in [(REMOTE, DeviceKind::Gpu), ("0000:00:00.0/gi2/ci0", DeviceKind::Gpu)] {
        let asked = exactly("other", vec![holding("a", "n0", device, kind)]);
        let refused = bridge.grant(asked).await.unwrap_err();
        assert!(refused.to_string().contains("of kind Gpu: it is"), "{refused}");
    }
}

#[tokio::test]
async fn shares_have_quotas_and_accounts_of_their_own() {
    let bridge = TestBridge::empty().await;
    bridge.put_node(divided("n0")).await.unwrap();
    let quota = Some(Quota { gpus: Some(0), gpu_shares: Some(1), remote_gpus: Some(1), ..Quota::default() });
    let ask = |id: &str, vms, kind| GrantRequest { quota: quota.clone(), ..one_each(id, vms, kind) };
    let refused = bridge.grant(ask("two", 2, DeviceKind::MigSlice)).await.unwrap_err().to_string();
    assert!(refused.contains("limit 1 vGPUs and MIG slices, used 0, asked 2"), "{refused}");
    bridge.grant(ask("slice", 1, DeviceKind::MigSlice)).await.unwrap();
    bridge.grant(ask("remote", 1, DeviceKind::RemoteGpu)).await.unwrap();
    bridge.manual_clock.pass(1000);
    let of = async |lease: &str| bridge.release(&id(lease)).await.unwrap().usage;
    let (slice, remote) = (of("slice").await, of("remote").await);
    assert_eq!((slice.gpu_ms, slice.gpu_share_ms, slice.remote_gpu_ms), (0, 1000, 0));
    assert_eq!((remote.gpu_ms, remote.gpu_share_ms, remote.remote_gpu_ms), (0, 0, 1000));
}

#[tokio::test]
async fn a_command_line_names_remote_gpus_and_no_vm_starts_with_a_share() {
    let bridge = TestBridge::empty().await;
    let mut node = divided("n0");
    node.devices.push(Device::new(
        address("remote:10.0.0.9:8308/1"),
        DeviceKind::RemoteGpu,
        node.devices[0].id,
    ));
    bridge.put_node(node).await.unwrap();
    let mut far = one_each("far", 1, DeviceKind::RemoteGpu);
    if let Wanted::Cluster(cluster) = &mut far.wanted {
        cluster.groups[0].alternatives[0].devices[0].count = 2;
    }
    bridge.grant(far).await.unwrap();
    bridge.grant(one_each("near", 1, DeviceKind::MigSlice)).await.unwrap();
    let fake = FakeDriver::default();
    let driver: Arc<dyn VmDriver> = Arc::new(fake.clone());
    let start = async |lease: &str, vm: &str| {
        let words = ["qemu", "-fw_cfg", "name=opt/gpus,string={remote_gpus}"].map(str::to_owned);
        let vm = StartVm::by_command_line(VmName::new(vm).unwrap(), words.to_vec());
        vms::start(&bridge, &driver, &id(lease), &[vm]).await
    };
    start("far", "far-vm-0").await.unwrap();
    let line = fake.world().log[0].clone();
    assert_eq!(line, "qemu -fw_cfg name=opt/gpus,string=10.0.0.9:8308/0;10.0.0.9:8308/1");
    let refused = start("near", "near-vm-0").await.unwrap_err().to_string();
    assert!(refused.contains("VM near-vm-0 is not started: its MIG slice"), "{refused}");
    assert!(!fake.world().running.contains_key("near-vm-0"));
}

#[tokio::test]
async fn an_evacuation_moves_what_can_move_and_remote_gpus_stay_the_same_ones() {
    let bridge = TestBridge::empty().await;
    bridge.put_node(divided("n0")).await.unwrap();
    bridge.put_nodes(&["n1"], 2).await;
    bridge.put_topology(&two_leaves(&["n0", "n1"], &[])).await.unwrap();
    let on_n0 = |id: &str, kind| {
        let mut request = one_each(id, 1, kind);
        if let Wanted::Cluster(cluster) = &mut request.wanted {
            cluster.not_nodes.insert(name("n1"));
        }
        request
    };
    let driver = FakeDriver::default();
    for (lease, kind) in [("share", DeviceKind::MigSlice), ("remote", DeviceKind::RemoteGpu)] {
        let granted = bridge.grant(on_n0(lease, kind)).await.unwrap();
        let assignments: Vec<_> = granted.lease.held.iter().map(|held| held.assignment.clone()).collect();
        driver.start_all(&assignments);
        bridge.mark_running(&id(lease), &granted.lease.places(), true).await.unwrap();
    }
    let plan = make_plan(&bridge, &PlanRequest::Evacuate { node: "n0".to_owned() }, &Arc::default()).await;
    let refused = plan.unwrap_err().to_string();
    assert!(refused.contains("remote-vm-0 cannot leave node n0"), "its request allows n0 only: {refused}");
    bridge.release(&id("remote")).await.unwrap();
    driver.world().running.remove("remote-vm-0");
    // On n0 because that has room, on n1 afterwards.
    let granted = bridge.grant(one_each("remote", 1, DeviceKind::RemoteGpu)).await.unwrap();
    let home = granted.lease.held[0].assignment.clone();
    driver.start_all(std::slice::from_ref(&home));
    bridge.mark_running(&id("remote"), &granted.lease.places(), true).await.unwrap();
    let from = home.node.to_string();
    let plan =
        make_plan(&bridge, &PlanRequest::Evacuate { node: from.clone() }, &Arc::default()).await.unwrap();
    assert_eq!(plan.steps.len(), 1, "{plan:?}");
    assert!(plan.steps[0].outages.is_empty(), "a remote GPU is not unplugged: {plan:?}");
    if from == "n0" {
        assert!(plan.notes.join("\n").contains("VM share-vm-0 stays on n0"), "{:?}", plan.notes);
    }
    bridge.put_plan(&plan, None).await.unwrap();
    let driver: Arc<dyn VmDriver> = Arc::new(driver);
    let done = run(&bridge, driver, &plan.id, Limits::default()).await.unwrap();
    assert_eq!(done.state, PlanState::Done, "{done:?}");
    let lease = Arc::clone(&bridge.view().unwrap().lease(&id("remote")).unwrap().lease);
    let now = &lease.held[0].assignment;
    assert!(lease.held.len() == 1 && now.node != home.node, "{lease:?}");
    assert_eq!(now.devices, home.devices);
    let refused = bridge.grant(one_each("other", 1, DeviceKind::RemoteGpu)).await.unwrap_err();
    assert!(refused.to_string().contains("of 1 in the fleet 0 are free"), "{refused}");
}
