//! Devices given to VMs and taken back: in order, refused, and with the program killed at every step.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use common::{IGB, Kernel, Killed, MADE_UP, driver};
use tempfile::TempDir;
use vmove_devices::ledger::Step;
use vmove_devices::vf::Setting;
use vmove_devices::{Cause, DeviceRequest, Identity, Ledger};

const NOW: Duration = Duration::ZERO;

struct Node {
    root: TempDir,
    kernel: Kernel,
}

impl Node {
    fn new(tree: &str) -> Self {
        let root = vmove_skip::tree::expand(tree, |_| false);
        let kernel = Kernel::new(root.path());
        Self { root, kernel }
    }

    fn journal(&self) -> PathBuf {
        self.root.path().join("devices.journal")
    }

    /// A new life of the program.
    fn ledger(&self) -> Ledger {
        Ledger::open(&self.journal(), self.kernel.sys(), Box::new(self.kernel.clone())).unwrap()
    }

    fn driver(&self, device: &str) -> Option<String> {
        driver(self.root.path(), device)
    }

    fn named(&self, device: &str) -> String {
        let path = self.root.path().join("sys/bus/pci/devices").join(device).join("driver_override");
        std::fs::read_to_string(path).unwrap()
    }
}

fn request(text: &str) -> DeviceRequest {
    text.parse().unwrap()
}

const VF: &str = "0000:01:10.2";
const NET: &str = "net0=0000:01:10.2,mac=52:54:00:12:34:56,vlan=7,trust=on";

#[test]
fn a_function_is_given_with_its_addresses_and_comes_back() {
    let node = Node::new(IGB);
    let mut ledger = node.ledger();
    let claim = ledger.take("a", &request(NET)).unwrap();
    assert_eq!((claim.step, node.driver(VF).as_deref()), (Step::Held, Some("vfio-pci")));
    assert_eq!(node.named(VF), "vfio-pci");
    assert_eq!(node.kernel.function("eth1", 1), request(NET).identity);
    // Again: nothing changes. Another VM, another role: refused.
    assert_eq!(ledger.take("a", &request(NET)).unwrap(), claim);
    let error = ledger.take("b", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::Taken { vm, .. } if vm == "a"), "{error}");
    let error = ledger.take("a", &request("net0=0000:01:10.0")).unwrap_err();
    assert!(matches!(&error.cause, Cause::RoleTaken { .. }), "{error}");
    // A new life knows it, and keeps it as long as the VM lives.
    drop(ledger);
    let mut ledger = node.ledger();
    assert_eq!(ledger.recover(|vm| vm == "a", NOW).len(), 0);
    assert_eq!(ledger.claims(), [claim]);
    ledger.give_back("a", "net0", NOW).unwrap();
    assert_eq!((node.driver(VF).as_deref(), node.named(VF).as_str()), (Some("igbvf"), "(null)"));
    assert_eq!(node.kernel.function("eth1", 1), Identity::default());
    assert!(ledger.claims().is_empty());
    ledger.give_back("a", "net0", NOW).unwrap();
    // VMs that have ended give theirs back.
    ledger.take("b", &request(NET)).unwrap();
    drop(ledger);
    let mut ledger = node.ledger();
    assert_eq!(ledger.recover(|_| false, NOW).len(), 0);
    assert_eq!((node.driver(VF).as_deref(), ledger.claims().len()), (Some("igbvf"), 0));
}

/// Runs `act` with the program killed before its `step`-th act; whether it was.
fn killed(node: &Node, step: usize, act: impl FnOnce(&mut Ledger)) -> bool {
    let mut ledger = node.ledger();
    node.kernel.kill_at(Some(step));
    let result = catch_unwind(AssertUnwindSafe(|| act(&mut ledger)));
    node.kernel.kill_at(None);
    result.is_err_and(|payload| payload.is::<Killed>())
}

#[test]
fn a_kill_at_any_step_neither_loses_nor_doubles_a_device() {
    // The panics are the kills.
    std::panic::set_hook(Box::new(|info| {
        if !info.payload().is::<Killed>() {
            eprintln!("{info}");
        }
    }));
    let mut kills = 0;
    for step in 0.. {
        let node = Node::new(IGB);
        if !killed(&node, step, |ledger| drop(ledger.take("a", &request(NET)).unwrap())) {
            break;
        }
        kills += 1;
        let mut ledger = node.ledger();
        assert_eq!(ledger.claims().len(), 1, "killed at {step}: it was written down before");
        assert_eq!(ledger.recover(|_| true, NOW).len(), 0);
        assert_eq!(
            (node.driver(VF).as_deref(), node.named(VF).as_str()),
            (Some("igbvf"), "(null)"),
            "{step}"
        );
        assert_eq!(node.kernel.function("eth1", 1), Identity::default(), "killed at {step}");
        assert!(ledger.claims().is_empty());
        ledger.take("b", &request(NET)).unwrap();
    }
    assert!(kills >= 6, "{kills}");
    for step in 0.. {
        let node = Node::new(IGB);
        node.ledger().take("a", &request(NET)).unwrap();
        let done = !killed(&node, step, |ledger| ledger.give_back("a", "net0", NOW).unwrap());
        let mut ledger = node.ledger();
        assert_eq!(ledger.claims().len(), usize::from(!done), "killed at {step}");
        assert_eq!(ledger.recover(|_| true, NOW).len(), 0, "killed at {step}");
        assert_eq!(
            (node.driver(VF).as_deref(), node.named(VF).as_str()),
            (Some("igbvf"), "(null)"),
            "{step}"
        );
        assert_eq!(node.kernel.function("eth1", 1), Identity::default(), "killed at {step}");
        assert!(ledger.claims().is_empty());
        if done {
            break;
        }
    }
}

#[test]
fn what_fails_leaves_the_device_as_it_was() {
    let mac = request(NET).identity.mac.unwrap();
    let untouched = |node: &Node| {
        assert_eq!((node.driver(VF).as_deref(), node.named(VF).as_str()), (Some("igbvf"), "(null)"));
        assert_eq!(node.kernel.function("eth1", 1), Identity::default());
        assert!(node.ledger().claims().is_empty());
    };
    let node = Node::new(IGB);
    node.kernel.refuse(Setting::Mac(mac));
    let error = node.ledger().take("a", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::Refused { netdev, .. } if netdev == "eth1"), "{error}");
    untouched(&node);
    let node = Node::new(IGB);
    node.kernel.deaf();
    let error = node.ledger().take("a", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::NotKept { .. }), "{error}");
    untouched(&node);
    let node = Node::new(IGB);
    node.kernel.without_vfio();
    let error = node.ledger().take("a", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::NotBound { found: None, .. }), "{error}");
    untouched(&node);
    let node = Node::new(IGB);
    std::fs::write(node.root.path().join("sys/class/net/eth1/flags"), "0x1002").unwrap();
    let error = node.ledger().take("a", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::PfDown { .. }), "{error}");
    untouched(&node);
}

#[test]
fn a_device_that_vanishes_is_forgotten() {
    let node = Node::new(IGB);
    let mut ledger = node.ledger();
    ledger.take("a", &request(NET)).unwrap();
    std::fs::remove_file(node.root.path().join("sys/bus/pci/devices").join(VF)).unwrap();
    ledger.give_back("a", "net0", NOW).unwrap();
    assert!(ledger.claims().is_empty());
    let error = ledger.take("a", &request(NET)).unwrap_err();
    assert!(matches!(error.cause, Cause::Absent), "{error}");
}

#[test]
fn whole_devices_and_infiniband() {
    let node = Node::new(MADE_UP);
    let mut ledger = node.ledger();
    // A whole GPU, and one with addresses.
    ledger.take("a", &request("gpu=3c:00.0")).unwrap();
    assert_eq!(node.driver("0000:3c:00.0").as_deref(), Some("vfio-pci"));
    let error = ledger.take("b", &request("phi=81:00.0,mac=52:54:00:12:34:56")).unwrap_err();
    assert!(matches!(error.cause, Cause::NotVirtual), "{error}");
    // No driver had it: none gets it back.
    ledger.take("b", &request("phi=81:00.0")).unwrap();
    ledger.give_back("b", "phi", NOW).unwrap();
    assert_eq!((node.driver("0000:81:00.0"), node.named("0000:81:00.0").as_str()), (None, "(null)"));
    // A variant driver has it already: it keeps it.
    let guids = "ib=17:00.2,node-guid=00:11:22:33:44:55:66:77,port-guid=00:11:22:33:44:55:66:78";
    ledger.take("c", &request(guids)).unwrap();
    assert_eq!(node.driver("0000:17:00.2").as_deref(), Some("mlx5_vfio_pci"));
    assert_eq!(node.kernel.function("ib0", 1), request(guids).identity);
    ledger.give_back("c", "ib", NOW).unwrap();
    assert_eq!(node.driver("0000:17:00.2").as_deref(), Some("mlx5_vfio_pci"));
    assert_eq!(node.kernel.function("ib0", 1), Identity::default());
    // P_Keys: by the host with mlx4, by the subnet manager with mlx5.
    let index = node.root.path().join("sys/class/infiniband/mlx4_0/iov/0000:18:00.1/ports/1/pkey_idx/0");
    ledger.take("d", &request("ib=18:00.1,pkey=0x8001")).unwrap();
    assert_eq!(std::fs::read_to_string(&index).unwrap(), "2");
    ledger.give_back("d", "ib", NOW).unwrap();
    assert_eq!(
        (std::fs::read_to_string(&index).unwrap().as_str(), node.driver("0000:18:00.1").as_deref()),
        ("0", Some("mlx4_core"))
    );
    let error = ledger.take("d", &request("ib=18:00.1,pkey=0x8002")).unwrap_err();
    assert!(matches!(error.cause, Cause::NotInPartition { pkey: 0x8002, .. }), "{error}");
    let error = ledger.take("d", &request("ib=17:00.1,pkey=0x8001")).unwrap_err();
    assert!(matches!(&error.cause, Cause::NoPkey { driver } if driver == "mlx5_core"), "{error}");
    assert!(error.to_string().contains("subnet manager"), "{error}");
    assert_eq!(ledger.claims().len(), 1);
}

#[test]
fn a_long_journal_is_written_anew() {
    let node = Node::new(MADE_UP);
    let mut ledger = node.ledger();
    let claim = ledger.take("a", &request("gpu=3c:00.0")).unwrap();
    for _ in 0..400 {
        ledger.take("b", &request("phi=81:00.0")).unwrap();
        ledger.give_back("b", "phi", NOW).unwrap();
    }
    drop(ledger);
    let before = std::fs::metadata(node.journal()).unwrap().len();
    let ledger = node.ledger();
    let after = std::fs::metadata(node.journal()).unwrap().len();
    assert!(before > 256 << 10 && after < 1024, "{before} to {after}");
    assert_eq!(ledger.claims(), [claim]);
}

#[test]
fn qemus_user_may_open_the_group_as_long_as_the_vm_has_the_device() {
    use std::os::unix::fs::MetadataExt;
    let node = Node::new(IGB);
    let file = node.root.path().join("dev/vfio/11");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "").unwrap();
    let owner = || std::fs::metadata(&file).map(|meta| (meta.uid(), meta.gid())).unwrap();
    let before = owner();
    // Who runs this may give a file to itself only, unless it is root.
    let user = if before.0 == 0 { (60742, 60742) } else { before };
    // Bound already: the kernel keeps the file when it is given back.
    let device = node.root.path().join("sys/bus/pci/devices").join(VF);
    std::fs::remove_file(device.join("driver")).unwrap();
    std::os::unix::fs::symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
    let mut ledger = node.ledger().for_user(Some(user));
    ledger.take("a", &request(NET)).unwrap();
    assert_eq!(owner(), user);
    // Another life of the program gives it back.
    drop(ledger);
    let mut ledger = node.ledger().for_user(Some(user));
    assert_eq!(ledger.recover(|_| false, NOW).len(), 0);
    assert_eq!((owner(), node.driver(VF).as_deref()), (before, Some("vfio-pci")));
    // Without the file QEMU could not open it: nothing is given.
    std::fs::remove_file(&file).unwrap();
    let error = ledger.take("a", &request(NET)).unwrap_err();
    assert!(matches!(error.cause, Cause::File { .. }), "{error}");
    assert!(ledger.claims().is_empty());
}

#[test]
fn a_device_that_a_foreign_qemu_has_is_noted_and_left_alone() {
    let node = Node::new(IGB);
    let mut ledger = node.ledger();
    let error = ledger.take_in("a", &request(NET)).unwrap_err();
    assert!(matches!(error.cause, Cause::NotBound { .. }), "{error}");
    let device = node.root.path().join("sys/bus/pci/devices").join(VF);
    std::fs::remove_file(device.join("driver")).unwrap();
    std::os::unix::fs::symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
    ledger.take_in("a", &request(NET)).unwrap();
    let error = ledger.take("b", &request(NET)).unwrap_err();
    assert!(matches!(&error.cause, Cause::Taken { vm, .. } if vm == "a"), "{error}");
    ledger.give_back("a", "net0", NOW).unwrap();
    assert_eq!(
        (node.driver(VF).as_deref(), node.kernel.function("eth1", 1)),
        (Some("vfio-pci"), Identity::default())
    );
    ledger.take_in("a", &request(NET)).unwrap();
    ledger.forget("a").unwrap();
    assert!(ledger.claims().is_empty());
}

#[test]
fn a_device_that_somebody_took_off_vfio_is_given_once_more() {
    let node = Node::new(IGB);
    let mut ledger = node.ledger();
    ledger.take("a", &request(NET)).unwrap();
    vmove_devices::bind::unbind(&node.kernel.sys(), VF.parse().unwrap(), Some("igbvf"), None).unwrap();
    assert_eq!(node.driver(VF).as_deref(), Some("igbvf"));
    ledger.take("a", &request(NET)).unwrap();
    assert_eq!(node.driver(VF).as_deref(), Some("vfio-pci"));
    assert_eq!(node.ledger().claims().len(), 1);
    ledger.give_back("a", "net0", NOW).unwrap();
    assert_eq!(node.driver(VF).as_deref(), Some("igbvf"));
}
