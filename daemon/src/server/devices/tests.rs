//! A registry with a made-up device, and a kernel that binds it to what is asked for.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vmove_node::devices::Devices;
use vmove_node::guest_devices::fit::why_not_in_place;
use vmove_node::migrations::NoMigrations;
use vmove_node::monitors::Monitors;
use vmove_node::registry::{Means, Registry};
use vmove_node::reservations::Reservations;
use vmove_node::starter::Starter;
use vmove_node::store::VmStore;
use vmove_qmp::confine::Confinement;
use vmove_types::problem::Code;
use vmove_types::vm::RunRequest;

use super::*;
use crate::server::grants::Grants;

/// A domain that this machine does not have.
const DEVICE: &str = "ffff:3b:00.0";
const OWN_DRIVER: &str = "nvidia";

struct Node {
    dir: tempfile::TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        // What a VM's memory was made in, if one was started.
        let _ = rustix::mount::unmount(self.path("memory/thp"), rustix::mount::UnmountFlags::DETACH);
    }
}

impl Node {
    /// A node with a GPU in an IOMMU group of its own, a mediated device, and two accelerators that share a group.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let devices = dir.path().join("sys/bus/pci/devices");
        for (name, class, group) in [
            (DEVICE, "0x030200", "7"),
            ("ffff:00:00.0", "0x060000", "7"),
            ("ffff:3c:00.0", "0x120000", "8"),
            ("ffff:3c:00.1", "0x0b4000", "8"),
        ] {
            let device = devices.join(name);
            std::fs::create_dir_all(&device).unwrap();
            for (file, text) in
                [("class", class), ("vendor", "0x10de"), ("device", "0x20b0"), ("driver_override", "(null)")]
            {
                std::fs::write(device.join(file), text).unwrap();
            }
            symlink(format!("/sys/kernel/iommu_groups/{group}"), device.join("iommu_group")).unwrap();
        }
        symlink(format!("/drivers/{OWN_DRIVER}"), devices.join(DEVICE).join("driver")).unwrap();
        std::fs::create_dir_all(dir.path().join("sys/bus/mdev/devices/c8b3")).unwrap();
        std::fs::create_dir_all(dir.path().join("dev/vfio")).unwrap();
        std::fs::create_dir_all(dir.path().join("state")).unwrap();
        std::fs::write(dir.path().join("dev/vfio/7"), "").unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What a daemon of this node has, as it starts.
    fn devices(&self) -> Arc<LedgerDevices> {
        let sys = Sys::with_writer(self.dir.path(), Arc::new(bind));
        LedgerDevices::open_on(&self.path("state"), sys, None).unwrap()
    }

    fn registry(&self, devices: Arc<LedgerDevices>) -> Arc<Registry> {
        let (run, memory) = (self.path("run"), self.path("memory"));
        for folder in [&run, &memory] {
            vmove_node::files::make_private_dir(folder).unwrap();
        }
        Registry::new(
            Arc::new(VmStore::open(&self.path("state/vms")).unwrap()),
            Arc::new(Monitors::default()),
            Arc::new(NoMigrations),
            Means {
                run_dir: run,
                reservations: Reservations::new(memory),
                starter: Starter::plain(),
                devices,
                confinement: Confinement::default(),
                keep_stopped: Duration::MAX,
            },
        )
    }

    fn driver(&self) -> String {
        let link = self.path("sys/bus/pci/devices").join(DEVICE).join("driver");
        std::fs::read_link(link).unwrap().file_name().unwrap().to_str().unwrap().to_owned()
    }
}

/// What a kernel does when this is written.
fn bind(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = path.parent().unwrap();
    match path.file_name().unwrap().to_str().unwrap() {
        "unbind" => std::fs::remove_file(folder),
        "drivers_probe" => {
            let device = folder.join("devices").join(text);
            let named = std::fs::read_to_string(device.join("driver_override"))?;
            let driver = if named.trim().is_empty() { OWN_DRIVER } else { named.trim() };
            symlink(format!("/drivers/{driver}"), device.join("driver"))
        }
        _ => std::fs::write(path, text),
    }
}

fn request() -> DeviceRequest {
    format!("gpu={DEVICE}").parse().unwrap()
}

fn run_request(line: &str, devices: Vec<DeviceRequest>) -> RunRequest {
    RunRequest {
        name: "web".to_owned(),
        memory: "thp".to_owned(),
        command_line: line.split(' ').map(str::to_owned).collect(),
        environment: std::collections::BTreeMap::default(),
        devices,
        grant: None,
        pin: None,
    }
}

async fn until_free(devices: &LedgerDevices) {
    for _ in 0..600 {
        if devices.claims().is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("still there after 30 s: {:?}", devices.claims());
}

#[tokio::test]
async fn each_device_is_listed_with_its_owner_or_why_it_cannot_be_given() {
    let node = Node::new();
    let devices = node.devices();
    devices.take("web", &request()).await.unwrap();
    let list = devices.list().await.unwrap();
    let kinds: Vec<&str> = list.devices.iter().map(|device| device.kind.as_str()).collect();
    assert_eq!(
        kinds,
        ["gpu", "processing-accelerator", "co-processor"],
        "an FPGA is no GPU, and bridges are left out"
    );
    let [gpu, fpga, _] = &list.devices[..] else { panic!("{list:?}") };
    assert_eq!(
        gpu.owner.as_ref().map(|owner| (owner.vm.as_str(), owner.role.as_str(), owner.held)),
        Some(("web", "gpu", true))
    );
    assert_eq!((gpu.driver.as_deref(), gpu.refused.as_deref()), (Some("vfio-pci"), None));
    let why = fpga.refused.as_deref().unwrap();
    assert!(why.contains("group 8 also holds ffff:3c:00.1") && why.contains("slot of its own"), "{why}");
    assert!(list.parts[0].refused.contains("could never be moved"), "{list:?}");
    let error = devices.take("other", &request()).await.unwrap_err();
    assert_eq!(error.code(), Code::DeviceUnavailable);
    assert!(error.to_string().contains("VM \"web\" has it as \"gpu\""), "{error}");
}

#[tokio::test]
async fn a_vm_that_does_not_start_gives_its_device_back() {
    let node = Node::new();
    let devices = node.devices();
    let registry = node.registry(devices.clone());
    // It ends at once, and was not there to be looked at before.
    let error = registry.run(run_request("/bin/false -M q35", vec![request()])).await.unwrap_err();
    assert!(error.to_string().contains("ended before its monitor"), "{error}");
    assert_eq!((node.driver().as_str(), devices.claims().len()), (OWN_DRIVER, 0));
    // The same by the command line, and what cannot be unplugged is not even taken.
    let line = format!("/bin/false -M q35 -device vfio-pci,host={DEVICE}");
    let error = registry.run(run_request(&line, Vec::new())).await.unwrap_err();
    assert!(error.to_string().contains("ended before its monitor"), "{error}");
    let error = registry.run(run_request(&format!("{line},bus=pcie.0"), Vec::new())).await.unwrap_err();
    assert_eq!(error.code(), Code::NotMovable);
    assert!(error.to_string().contains("pcie-root-port"), "{error}");
    assert_eq!((node.driver().as_str(), devices.claims().len()), (OWN_DRIVER, 0));
}

#[tokio::test]
async fn a_device_whose_vm_is_no_more_goes_back_after_a_restart() {
    let node = Node::new();
    // A daemon that was killed before its VM had a record.
    node.devices().take("ghost", &request()).await.unwrap();
    assert_eq!(node.driver(), "vfio-pci");
    let devices = node.devices();
    assert_eq!(devices.claims().len(), 1);
    let registry = node.registry(devices.clone());
    let watching = tokio::spawn(registry.clone().supervise());
    until_free(&devices).await;
    assert_eq!(node.driver(), OWN_DRIVER);
    watching.abort();
}

#[tokio::test]
async fn a_name_that_is_being_started_keeps_its_devices() {
    let node = Node::new();
    let devices = node.devices();
    let registry = node.registry(devices.clone());
    let reserved = registry.reserve("web").unwrap();
    devices.take("web", &request()).await.unwrap();
    let watching = tokio::spawn(registry.clone().supervise());
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!((devices.claims().len(), node.driver().as_str()), (1, "vfio-pci"));
    drop(reserved);
    until_free(&devices).await;
    watching.abort();
}

#[tokio::test]
async fn a_device_that_was_taken_in_stays_as_it_is() {
    let node = Node::new();
    let devices = node.devices();
    // Bound to its own driver: no QEMU can have it.
    assert!(devices.take_in("legacy", &request()).await.is_err());
    let link = node.path("sys/bus/pci/devices").join(DEVICE).join("driver");
    std::fs::remove_file(&link).unwrap();
    symlink("/drivers/vfio-pci", &link).unwrap();
    devices.take_in("legacy", &request()).await.unwrap();
    assert!(devices.of_vm("legacy")[0].taken_in);
    devices.give_all_back("legacy", Duration::ZERO).await.unwrap();
    assert_eq!((node.driver().as_str(), devices.claims().len()), ("vfio-pci", 0));
    devices.take_in("legacy", &request()).await.unwrap();
    devices.forget("legacy").await.unwrap();
    assert!(node.devices().claims().is_empty());
}

/// As forks, migrations and starts ask for devices: one that a lease holds for another VM is refused by the lease's name.
#[tokio::test]
async fn what_a_lease_holds_is_given_to_no_other_vm() {
    let node = Node::new();
    let (key, _) = vmove_grant::SecretKey::generate().unwrap();
    let policy = crate::config::GrantPolicy { keys: vec![key.public()], required: false };
    let grants = Grants::open(&policy, "n1", &node.path("state")).unwrap().unwrap();
    let devices = LeasedDevices::beside(node.devices(), Some(&grants));
    let device = vmove_grant::GrantedDevice { role: "gpu".to_owned(), address: DEVICE.to_owned() };
    let grant = vmove_grant::Grant {
        lease: "train-17".to_owned(),
        holder: "alice".to_owned(),
        node: "n1".to_owned(),
        vm: "web".to_owned(),
        serial: 1,
        expires_ms: u64::MAX,
        cores: 1,
        memory_mib: 64,
        huge_2m_mib: 0,
        huge_1g_mib: 0,
        devices: vec![device],
        numa: Vec::new(),
    };
    let entering = RunRequest { grant: Some(key.sign(&grant).unwrap()), ..run_request("qemu -m 64", vec![]) };
    let entered = grants.enter(&entering).unwrap().unwrap();

    let refused = devices.take("web-1", &request()).await.unwrap_err();
    assert_eq!(refused.code(), Code::DeviceUnavailable);
    assert!(refused.to_string().contains("lease train-17 of alice for VM \"web\""), "{refused}");
    let address = DEVICE.parse().unwrap();
    let list = devices.list().await.unwrap();
    let why = why_not_in_place("n1", "", "gpu", address, "10de:20b0", &list).unwrap();
    assert!(why.contains("lease train-17 of alice holds it for VM \"web\""), "{why}");
    assert_eq!(node.driver(), OWN_DRIVER, "nothing was changed");
    devices.take("web", &request()).await.unwrap();
    devices.give_back("web", "gpu", Duration::ZERO).await.unwrap();

    // The VM did not start: its lease's share is free.
    drop(entered);
    devices.take("web-1", &request()).await.unwrap();
}
