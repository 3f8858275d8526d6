//! What tests of several modules need: a bridge over a file, clocks that they set, and a driver whose VMs exist only in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use sched_bridge::model::{
    Assignment, ClusterName, Device, DeviceKind, Granted, MemoryMib, Node, NodeName, NumaId, NumaShare,
    PciAddress, VmName,
};
use sched_bridge::place::{Alternative, ClusterRequest, DeviceFilter, DeviceNeed, VmGroup};
use sched_bridge::topology::Topology;
use serde_json::json;
use tempfile::TempDir;

use crate::bridge::{Bridge, GrantRequest, Wanted};
use crate::clock::{Clock, Stamp};
use crate::driver::{
    Forked, ForkedChild, ListedVm, MigrationEnd, NotStarted, Reach, Restored, Saved, Snapshots, VmDriver,
    VmMove, WantedChild,
};
use crate::lease::LeaseId;
use crate::store::{Embedded, Store};
use vmove_bridge_types::requests::StartVm;
use vmove_grant::{Grant, GrantedDevice};

/// However busy the machine is, what must happen has happened by then.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Clocks that a test sets as it likes.
#[derive(Debug)]
pub struct ManualClock(Mutex<(u64, Stamp)>);

impl ManualClock {
    /// Clocks of a machine that was just booted, at a time of day of 10^12 ms.
    pub fn new() -> Arc<Self> {
        let stamp = Stamp { boot_id: "first".to_owned(), boot_ms: 0, wall_ms: 1_000_000_000_000 };
        Arc::new(Self(Mutex::new((0, stamp))))
    }

    /// Lets time pass, on all clocks. Unit: milliseconds.
    pub fn pass(&self, ms: u64) {
        self.change(|monotonic, stamp| {
            *monotonic += ms;
            stamp.boot_ms += ms;
            stamp.wall_ms += ms;
        });
    }

    /// Changes the clocks: monotonic, and the others.
    pub fn change(&self, change: impl FnOnce(&mut u64, &mut Stamp)) {
        let (monotonic, stamp) = &mut *self.0.lock().unwrap();
        change(monotonic, stamp);
    }
}

impl Clock for ManualClock {
    fn monotonic_ms(&self) -> u64 {
        self.0.lock().unwrap().0
    }

    fn stamp(&self) -> Stamp {
        self.0.lock().unwrap().1.clone()
    }
}

/// A bridge, and the task that keeps its view current. Dropping it is like killing the bridge.
pub struct TestBridge {
    bridge: Arc<Bridge>,
    _follower: AbortOnDrop,
    /// Its clocks, unless it was made with others.
    pub manual_clock: Arc<ManualClock>,
    _folder: Option<TempDir>,
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl TestBridge {
    /// A bridge over an empty store of its own.
    pub async fn empty() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bridge = Self::in_folder(folder.path(), ManualClock::new()).await;
        Self { _folder: Some(folder), ..bridge }
    }

    /// A bridge over the store in a folder, which an earlier bridge may have used.
    pub async fn in_folder(folder: &Path, clock: Arc<ManualClock>) -> Self {
        let path = folder.join("state.redb");
        // The tasks of a bridge that was just dropped close the file when they end.
        let mut opened = Embedded::open(&path);
        let start = std::time::Instant::now();
        while opened.is_err() && start.elapsed() < DEADLINE {
            tokio::time::sleep(Duration::from_millis(50)).await;
            opened = Embedded::open(&path);
        }
        let bridge = Self::over(Arc::new(opened.unwrap()), Arc::clone(&clock) as Arc<dyn Clock>);
        bridge.wait_until_current(DEADLINE).await.unwrap();
        Self { manual_clock: clock, ..bridge }
    }

    /// A bridge over a store that may not answer yet.
    pub fn over(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Self {
        let bridge = Bridge::new(store, clock);
        let _follower = AbortOnDrop(tokio::spawn(Arc::clone(&bridge).follow()));
        Self { bridge, _follower, manual_clock: ManualClock::new(), _folder: None }
    }

    /// Publishes nodes with GPUs.
    pub async fn put_nodes(&self, names: &[&str], gpus: u8) {
        for name in names {
            self.put_node(node(name, gpus)).await.unwrap();
        }
    }

    /// Where the lease says that a VM is.
    pub fn home(&self, lease: &str, vm: usize) -> NodeName {
        self.view().unwrap().lease(&id(lease)).unwrap().lease.held[vm].assignment.node.clone()
    }
}

impl Deref for TestBridge {
    type Target = Arc<Bridge>;

    fn deref(&self) -> &Arc<Bridge> {
        &self.bridge
    }
}

pub fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

pub fn id(text: &str) -> LeaseId {
    text.parse().unwrap()
}

/// A node with `gpus` GPUs at 0000:00:NN.0.
pub fn node(text: &str, gpus: u8) -> Node {
    let mut node = Node::plain(name(text), 64, MemoryMib(1 << 20));
    for gpu in 0..gpus {
        let address: PciAddress = format!("0000:00:{gpu:02x}.0").parse().unwrap();
        node.devices.push(Device::new(address, DeviceKind::Gpu, "10de:2330".parse().unwrap()));
    }
    node
}

/// One GPU, one core and 1 GiB for a VM.
pub fn one_gpu(vm: &str, node: &str, gpu: u8) -> Assignment {
    let address = format!("0000:00:{gpu:02x}.0").parse().unwrap();
    let share = NumaShare { numa: NumaId(0), cores: 1, memory: MemoryMib(1024), huge: Default::default() };
    Assignment {
        vm: VmName::new(vm).unwrap(),
        node: name(node),
        devices: vec![Granted { address, kind: DeviceKind::Gpu }],
        shares: vec![share],
    }
}

/// Two leaves of these nodes below one switch.
pub fn two_leaves(first: &[&str], second: &[&str]) -> Topology {
    serde_json::from_value(json!({ "switches": [
        { "name": "l0", "nodes": first }, { "name": "l1", "nodes": second },
        { "name": "s", "switches": ["l0", "l1"] }] }))
    .unwrap()
}

/// A request of alice for resources that she has chosen, with a time to live of 3 s.
pub fn exactly(id: &str, assignments: Vec<Assignment>) -> GrantRequest {
    let wanted = Wanted::Assignments(ClusterName::new(id).unwrap(), assignments);
    GrantRequest {
        id: id.parse().unwrap(),
        holder: "alice".to_owned(),
        wanted,
        ttl_ms: 3000,
        together: false,
        quota: None,
        project: None,
        start: None,
    }
}

/// A request of alice for `vms` VMs with 8 GPUs each, with a time to live of a minute.
pub fn whole_nodes(id: &str, vms: u32) -> GrantRequest {
    let wanted = Wanted::Cluster(Box::new(cluster_of_whole_nodes(id, vms)));
    GrantRequest {
        id: id.parse().unwrap(),
        holder: "alice".to_owned(),
        wanted,
        ttl_ms: 60_000,
        together: false,
        quota: None,
        project: None,
        start: None,
    }
}

/// A cluster of `vms` VMs with 8 GPUs each.
pub fn cluster_of_whole_nodes(name: &str, vms: u32) -> ClusterRequest {
    let gpus = DeviceNeed { count: 8, filter: DeviceFilter::kind(DeviceKind::Gpu) };
    let memory = MemoryMib(1024);
    let needs = Alternative { vcpus: 8, memory, devices: vec![gpus], ..Alternative::default() };
    let group = VmGroup { name: "vm".to_owned(), count: vms, alternatives: vec![needs] };
    ClusterRequest::new(ClusterName::new(name).unwrap(), vec![group])
}

/// A request of alice for `vms` VMs on one node, each with one GPU that the bridge chooses.
pub fn gpus_on(id: &str, node: &str, vms: u32) -> GrantRequest {
    let mut request = cluster_of_whole_nodes(id, vms);
    for needs in request.groups.iter_mut().flat_map(|group| &mut group.alternatives) {
        needs.vcpus = 1;
        needs.devices.iter_mut().for_each(|device| device.count = 1);
    }
    request.groups.iter_mut().for_each(|group| group.name = format!("{id}-{node}"));
    let wanted = Wanted::Cluster(Box::new(request));
    GrantRequest {
        id: id.parse().unwrap(),
        holder: "alice".to_owned(),
        wanted,
        ttl_ms: 60_000,
        together: false,
        quota: None,
        project: None,
        start: None,
    }
}

/// Where VMs run, and which commands fail.
#[derive(Debug, Default)]
pub struct World {
    /// The node of each VM that runs.
    pub running: BTreeMap<String, NodeName>,
    /// VMs whose start or migration fails.
    pub failing: BTreeSet<String>,
    /// VMs whose start is not answered.
    pub unanswered: BTreeSet<String>,
    /// VMs that do not stop.
    pub unstoppable: BTreeSet<String>,
    /// Nodes that never list their VMs.
    pub hanging: BTreeSet<NodeName>,
    /// VMs that stand still.
    pub paused: BTreeSet<String>,
    /// Templates, which all nodes see.
    pub templates: BTreeSet<String>,
    /// Devices of VMs, by their roles.
    pub devices: BTreeMap<String, Vec<GrantedDevice>>,
    migrating: usize,
    /// Most migrations at once so far.
    pub most_migrating: usize,
    /// Migrated VMs, and command lines of started ones.
    pub log: Vec<String>,
}

/// A driver of VMs that exist only in its memory. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct FakeDriver {
    world: Arc<Mutex<World>>,
    migration_time: Duration,
}

impl FakeDriver {
    /// A driver of the same VMs whose migrations take so long.
    pub fn with_migration_time(&self, migration_time: Duration) -> Self {
        Self { world: Arc::clone(&self.world), migration_time }
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    /// Lets the VMs of a lease run where the lease says.
    pub fn start_all(&self, assignments: &[Assignment]) {
        let vms = assignments.iter().map(|own| (own.vm.to_string(), own.node.clone()));
        self.world().running.extend(vms);
    }
}

#[async_trait]
impl VmDriver for FakeDriver {
    fn reach(&self, _: &NodeName) -> Reach {
        Reach::Known
    }

    async fn migrate(&self, from: &NodeName, moves: &[VmMove]) -> Vec<MigrationEnd> {
        let names: Vec<String> = moves.iter().map(|one| one.vm.to_string()).collect();
        {
            let mut world = self.world();
            for vm in &names {
                assert_eq!(world.running.get(vm), Some(from), "{vm} is not on the source of its migration");
            }
            world.migrating += 1;
            world.most_migrating = world.most_migrating.max(world.migrating);
            world.log.push(names.join("+"));
        }
        tokio::time::sleep(self.migration_time).await;
        let mut world = self.world();
        world.migrating -= 1;
        if names.iter().any(|vm| world.failing.contains(vm)) {
            let stayed = MigrationEnd::Stayed("refused: a passthrough device".to_owned());
            return vec![stayed; moves.len()];
        }
        for one in moves {
            world.running.insert(one.vm.to_string(), one.to.clone());
            world.devices.insert(one.vm.to_string(), one.grant.devices.clone());
        }
        vec![MigrationEnd::Arrived { total_ms: 10, downtime_us: 500 }; moves.len()]
    }

    async fn owned(&self, _: &NodeName) -> Result<BTreeMap<String, Vec<GrantedDevice>>, String> {
        Ok(self.world().devices.clone())
    }

    async fn list(&self, node: &NodeName) -> Result<BTreeMap<String, ListedVm>, String> {
        if self.world().hanging.contains(node) {
            std::future::pending::<()>().await;
        }
        let world = self.world();
        let here = world.running.iter().filter(|(_, at)| *at == node);
        Ok(here.map(|(vm, _)| (vm.clone(), ListedVm { migrating: false, ended: false })).collect())
    }

    async fn start(&self, node: &NodeName, vm: &StartVm, _: &Grant) -> Result<(), NotStarted> {
        let mut world = self.world();
        if world.failing.contains(vm.vm.as_str()) {
            return Err(NotStarted::Refused("no such QEMU".to_owned()));
        }
        if world.unanswered.contains(vm.vm.as_str()) {
            return Err(NotStarted::Unknown("no answer".to_owned()));
        }
        world.log.push(vm.command_line.join(" "));
        assert_eq!(world.running.insert(vm.vm.to_string(), node.clone()), None, "{} runs already", vm.vm);
        Ok(())
    }

    async fn stop(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        let mut world = self.world();
        if world.unstoppable.contains(vm.as_str()) {
            return Err("its monitor does not answer".to_owned());
        }
        assert_eq!(world.running.remove(vm.as_str()).as_ref(), Some(node), "{vm}");
        Ok(())
    }
}

#[async_trait]
impl Snapshots for FakeDriver {
    async fn pause(&self, _: &NodeName, vm: &VmName, _: Duration) -> Result<(), String> {
        self.world().paused.insert(vm.to_string());
        Ok(())
    }

    async fn resume(&self, _: &NodeName, vm: &VmName) -> Result<(), String> {
        self.world().paused.remove(vm.as_str());
        Ok(())
    }

    async fn give_own_memory(&self, _: &NodeName, vm: &VmName) -> Result<(), String> {
        assert!(!self.world().paused.contains(vm.as_str()), "{vm} stands still for longer than it must");
        Ok(())
    }

    async fn fork(&self, from: &NodeName, vm: &VmName, children: &[WantedChild]) -> Result<Forked, String> {
        let mut world = self.world();
        assert_eq!(world.running.get(vm.as_str()), Some(from), "{vm}");
        if world.failing.contains(vm.as_str()) {
            return Err("no memory".to_owned());
        }
        let was_paused = world.paused.remove(vm.as_str());
        world.running.extend(children.iter().map(|child| (child.vm.to_string(), child.node.clone())));
        let ran_on = was_paused.then_some(Duration::from_millis(5));
        let children = vec![ForkedChild::default(); children.len()];
        Ok(Forked { ran_on, stood_still: Duration::ZERO, children, notes: vec![] })
    }

    async fn save(&self, node: &NodeName, vm: &VmName, template: &str) -> Result<Saved, String> {
        let mut world = self.world();
        assert_eq!(world.running.get(vm.as_str()), Some(node), "{vm}");
        if world.failing.contains(vm.as_str()) {
            return Err("no space".to_owned());
        }
        let was_paused = world.paused.remove(vm.as_str());
        world.templates.insert(template.to_owned());
        let ran_on = was_paused.then_some(Duration::from_millis(5));
        Ok(Saved { ran_on, stood_still: Duration::ZERO, disk_bytes: 1, roles: vec![] })
    }

    async fn restore(&self, template: &str, wanted: &WantedChild) -> Result<Restored, String> {
        let WantedChild { node, vm, .. } = wanted;
        let mut world = self.world();
        if world.failing.contains(vm.as_str()) {
            return Err("damaged".to_owned());
        }
        assert!(world.templates.contains(template), "{template}");
        assert_eq!(world.running.insert(vm.to_string(), node.clone()), None, "{vm} runs already");
        Ok(Restored { network: "none".to_owned() })
    }

    async fn templates(&self, _: &NodeName) -> Result<Vec<String>, String> {
        Ok(self.world().templates.iter().cloned().collect())
    }

    async fn remove_template(&self, _: &NodeName, template: &str) -> Result<(), String> {
        self.world().templates.remove(template);
        Ok(())
    }
}

/// Six nodes of 8 GPUs below two leaves; lease `vc` of `vms` VMs, a node each; and the VMs, which run there.
pub async fn scene(vms: u32) -> (TestBridge, FakeDriver) {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n0", "n1", "n2", "n3", "n4", "n5"], 8).await;
    bridge.put_topology(&two_leaves(&["n0", "n1", "n2"], &["n3", "n4", "n5"])).await.unwrap();
    let granted = bridge.grant(whole_nodes("vc", vms)).await.unwrap();
    let driver = FakeDriver::default().with_migration_time(Duration::from_millis(20));
    let assignments: Vec<Assignment> =
        granted.lease.held.iter().map(|held| held.assignment.clone()).collect();
    driver.start_all(&assignments);
    (bridge, driver)
}
