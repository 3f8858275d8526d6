//! What else a host may have: huge pages, RDMA, devices for guests, networks of guests, forks.

use vmove_devices::{Sys, report};
use vmove_memory::{Backing, Keeper};
use vmove_pve::MEMORY;
use vmove_qmp::inspect::find_program;
use vmove_types::doctor::{Area, Finding, FindingState};
use vmove_types::problem::chain;
use vmove_types::proxmox::MONITORS;

use super::host::Host;
use crate::config::{FabricChoice, RdmaConfig};

/// `CAP_NET_RAW`, by which packet sockets can be opened.
const NET_RAW: u64 = 1 << 13;

/// Reserved huge pages.
pub fn huge_pages(host: &Host) -> Vec<Finding> {
    [Backing::Hugetlb2M, Backing::Hugetlb1G].into_iter().map(|backing| pool(host, backing)).collect()
}

fn pool(host: &Host, backing: Backing) -> Finding {
    let (area, topic, bytes) = (Area::HugePages, backing.name(), backing.page_bytes());
    let folder = format!("sys/kernel/mm/hugepages/hugepages-{}kB", bytes >> 10);
    let expected = format!("reserved pages, for guests with --memory {topic}; --memory thp needs none");
    let mend = match backing {
        Backing::Hugetlb1G => {
            "hugepagesz=1G hugepages=N in the kernel's parameters, and start the host again"
        }
        _ => "sysctl vm.nr_hugepages=N, N being the memory of such guests in MiB / 2; also in /etc/sysctl.d",
    };
    let Some(all) = host.number(&format!("{folder}/nr_hugepages")) else {
        return Finding::wrong(
            area,
            topic,
            FindingState::Missing,
            format!("no /{folder}: neither kernel nor processor have pages of this size"),
            expected,
            mend,
        );
    };
    let count = |name: &str| host.number(&format!("{folder}/{name}")).unwrap_or(0);
    let left = count("free_hugepages").saturating_sub(count("resv_hugepages"));
    let found = format!("{left} of {all} pages of {} MiB are free", bytes >> 20);
    let state = match (all, left) {
        (0, _) => FindingState::Missing,
        (_, 0) => FindingState::Limited,
        _ => return Finding::ok(area, topic, found),
    };
    Finding::wrong(area, topic, state, found, expected, mend)
}

/// What `vmove-pve` needs, on a node of Proxmox VE.
pub fn proxmox(host: &Host) -> Vec<Finding> {
    if !host.exists("etc/pve") {
        return Vec::new();
    }
    let wrong = |topic: &str, state, found: String, expected: &str, mend: String| {
        Finding::wrong(Area::Moving, topic, state, found, expected, mend)
    };
    let absent = |path: &&str| !host.exists(path.trim_start_matches('/'));
    let lacks: Vec<&str> = [MONITORS, MEMORY].into_iter().filter(absent).collect();
    let mut found = vec![if lacks.is_empty() {
        Finding::ok(Area::Moving, "proxmox-folders", format!("{MONITORS} and {MEMORY}"))
    } else {
        wrong(
            "proxmox-folders",
            FindingState::Missing,
            format!("no {}", lacks.join(", no ")),
            "folders for monitors and guest memory of VMs that vmove-pve moves",
            "vmove-pve host, which also names what else is missing (vmove-pve host --check)".to_owned(),
        )
    }];
    let clones = crate::server::proxmox::clones();
    found.extend(clones.iter().map(|(vmid, of)| {
        wrong(
            "proxmox-clone",
            FindingState::Limited,
            format!("args of VM {vmid} name monitor and memory of VM {of}, from which it was cloned"),
            "each VM with its own: two with one memory destroy each other",
            format!("vmove-pve enable {vmid}, before it is started"),
        )
    }));
    found
}

/// The device that migrations would take, as vmoved chooses it.
pub fn rdma(host: &Host, fabric: FabricChoice, config: &RdmaConfig) -> Vec<Finding> {
    let wrong = |topic: &str, state, found: String, expected: &str, mend: &str| {
        Finding::wrong(Area::Rdma, topic, state, found, expected, mend)
    };
    let mut found = Vec::new();
    if matches!(fabric, FabricChoice::Tcp | FabricChoice::Local) {
        found.push(wrong(
            "fabric",
            FindingState::Limited,
            "the configuration asks for another fabric".to_owned(),
            "fabric = \"auto\", which takes RDMA if both nodes have it",
            "remove fabric from vmoved.toml",
        ));
    }
    #[cfg(not(feature = "verbs"))]
    {
        let _ = (host, config);
        found.push(wrong(
            "device",
            FindingState::Missing,
            "this vmoved was built without RDMA".to_owned(),
            "the feature verbs",
            "cargo build --release -p vmove-daemon",
        ));
    }
    #[cfg(feature = "verbs")]
    found.extend(device(host, config));
    found
}

#[cfg(feature = "verbs")]
fn device(host: &Host, config: &RdmaConfig) -> Vec<Finding> {
    let area = Area::Rdma;
    let ports = vmove_fabric::verbs::ports();
    let fabric = match crate::server::rdma::Rdma::new(config).fabric() {
        Ok(fabric) => fabric,
        Err(why) => {
            let found = if ports.is_empty() {
                chain(&why)
            } else {
                format!("{}; ports: {}", chain(&why), ports.join("; "))
            };
            let mend = if ports.is_empty() {
                "load the adapter's driver; without an adapter, for a trial: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE"
            } else if !host.exists("dev/infiniband") {
                "modprobe ib_uverbs; in a container, pass /dev/infiniband in"
            } else {
                "ip link set INTERFACE up, and an IP address for it (RoCE); apt-get install ibverbs-providers; [rdma] in vmoved.toml chooses among devices"
            };
            let expected = "an RDMA device with an active port; pages cross by tcp otherwise";
            return vec![Finding::wrong(area, "device", FindingState::Missing, found, expected, mend)];
        }
    };
    let mut found = vec![Finding::ok(
        area,
        "device",
        format!("{}, on {}; ports: {}", fabric.device(), fabric.network(), ports.join("; ")),
    )];
    found.push(if fabric.reads_on_demand() {
        Finding::ok(area, "on-demand", "the device reads memory that is not pinned (ODP)")
    } else {
        Finding::wrong(
            area,
            "on-demand",
            FindingState::Limited,
            "the device reads only memory that is pinned",
            "on-demand paging (ODP); without it, memory that may not be pinned crosses by tcp",
            "leave max-registered out of [rdma], and LimitMEMLOCK=infinity in the unit",
        )
    });
    found
}

/// IOMMU, vfio-pci, and the devices that guests could have.
pub fn passthrough(host: &Host) -> Vec<Finding> {
    let area = Area::Passthrough;
    let groups = host.count("sys/kernel/iommu_groups");
    let iommu = if groups > 0 {
        Finding::ok(area, "iommu", format!("{groups} IOMMU groups"))
    } else {
        Finding::wrong(
            area,
            "iommu",
            FindingState::Missing,
            "no IOMMU is in use",
            "an IOMMU, which keeps a device in its guest",
            "add intel_iommu=on iommu=pt (AMD: iommu=pt) to the kernel's parameters, and switch VT-d or AMD-Vi on in the firmware",
        )
    };
    let driver = if host.exists("sys/bus/pci/drivers/vfio-pci") {
        Finding::ok(area, "vfio-pci", "the driver is loaded")
    } else {
        Finding::wrong(
            area,
            "vfio-pci",
            FindingState::Missing,
            "the driver vfio-pci is not loaded",
            "vfio-pci, which holds devices for guests",
            "modprobe vfio-pci; to have it after each start: echo vfio-pci >/etc/modules-load.d/vfio-pci.conf",
        )
    };
    vec![iommu, driver, devices(host)]
}

fn devices(host: &Host) -> Finding {
    let list = report::list(&Sys::new(host.root()), &[]);
    let free: Vec<String> = list
        .devices
        .iter()
        .filter(|device| device.refused.is_none())
        .map(|device| format!("{} ({})", device.address, device.kind))
        .collect();
    if !free.is_empty() {
        return Finding::ok(Area::Passthrough, "devices", format!("guests can have {}", free.join(", ")));
    }
    let why = list
        .devices
        .iter()
        .find_map(|device| Some(format!("{}: {}", device.address, device.refused.as_ref()?)));
    Finding::wrong(
        Area::Passthrough,
        "devices",
        FindingState::Missing,
        format!(
            "none of {} devices can be given to a guest{}",
            list.devices.len(),
            why.map_or(String::new(), |why| format!(", such as {why}"))
        ),
        "a device in an IOMMU group that can be given to one guest",
        "vmove devices says of each device what is in the way",
    )
}

/// Taps, bridges, and the sockets by which frames follow a guest.
pub fn network(host: &Host) -> Vec<Finding> {
    let area = Area::Network;
    let device = |topic: &str, path: &str, state, what: &str, mend: &str| {
        if host.exists(path) {
            return Finding::ok(area, topic, format!("/{path} is there"));
        }
        Finding::wrong(area, topic, state, format!("no /{path}"), what, mend)
    };
    let capabilities = host.read("proc/self/status").unwrap_or_default();
    let effective = capabilities.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    let frames = if effective & NET_RAW != 0 {
        Finding::ok(area, "frames", "frames that come in a guest's pause can follow it (packet sockets)")
    } else {
        Finding::wrong(
            area,
            "frames",
            FindingState::Limited,
            "packet sockets are not permitted",
            "CAP_NET_RAW: without it, what comes for a guest in its pause is lost, and TCP sends it again",
            "run vmoved as root with CAP_NET_RAW (the unit vmoved.service has it)",
        )
    };
    vec![
        device(
            "tap",
            "dev/net/tun",
            FindingState::Missing,
            "/dev/net/tun, for guests with -netdev tap",
            "modprobe tun",
        ),
        device(
            "vhost",
            "dev/vhost-net",
            FindingState::Limited,
            "/dev/vhost-net, for vhost=on, which is faster",
            "modprobe vhost_net",
        ),
        frames,
        bridges(host),
    ]
}

fn bridges(host: &Host) -> Finding {
    let names = std::fs::read_dir(host.root().join("sys/class/net")).into_iter().flatten().flatten();
    let mut found: Vec<String> = names
        .filter(|entry| entry.path().join("bridge").exists())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    found.sort();
    if !found.is_empty() {
        return Finding::ok(Area::Network, "bridge", format!("bridges: {}", found.join(", ")));
    }
    Finding::wrong(
        Area::Network,
        "bridge",
        FindingState::Limited,
        "no Linux bridge",
        "the bridge, or the Open vSwitch, of the network whose guests come here by taps",
        "ip link add br0 type bridge && ip link set INTERFACE master br0 && ip link set br0 up (Open vSwitch: ovs-vsctl add-br br0)",
    )
}

/// What forks need beside what moving needs.
pub fn forks() -> Vec<Finding> {
    let nbd = if find_program("qemu-nbd").is_some() {
        Finding::ok(Area::Forks, "qemu-nbd", "qemu-nbd is there")
    } else {
        Finding::wrong(
            Area::Forks,
            "qemu-nbd",
            FindingState::Limited,
            "no qemu-nbd in PATH",
            "qemu-nbd, for children on other hosts that do not see the disks of their parent",
            "apt-get install qemu-utils",
        )
    };
    vec![write_protection(), nbd]
}

fn write_protection() -> Finding {
    match Keeper::supported() {
        Ok(()) => Finding::ok(
            Area::Forks,
            "write-protection",
            "a guest can be forked while it writes, and again at once",
        ),
        Err(why) => Finding::wrong(
            Area::Forks,
            "write-protection",
            FindingState::Missing,
            chain(&why),
            "userfaultfd write protection of shared memory (Linux 5.19)",
            "boot a newer kernel",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn pools_that_are_empty_used_up_or_not_there_are_told() {
        let root = tempfile::tempdir().unwrap();
        let states =
            || huge_pages(&Host::at(root.path())).iter().map(|found| found.state).collect::<Vec<_>>();
        assert_eq!(states(), [FindingState::Missing, FindingState::Missing]);
        let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
        for (all, free, promised, state) in [
            ("0", "0", "0", FindingState::Missing),
            ("8", "8", "8", FindingState::Limited),
            ("8", "8", "7", FindingState::Ok),
        ] {
            write(root.path(), &format!("{folder}/nr_hugepages"), all);
            write(root.path(), &format!("{folder}/free_hugepages"), free);
            write(root.path(), &format!("{folder}/resv_hugepages"), promised);
            assert_eq!(states()[0], state, "{all} {free} {promised}");
        }
    }

    #[test]
    fn a_host_without_iommu_driver_and_taps_says_so_and_one_with_them_too() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        let states = || {
            passthrough(&host)
                .into_iter()
                .chain(network(&host))
                .map(|found| (found.topic, found.state))
                .collect::<Vec<_>>()
        };
        assert!(states().iter().all(|(_, state)| *state != FindingState::Ok), "{:?}", states());
        for folder in [
            "sys/kernel/iommu_groups/0",
            "sys/bus/pci/drivers/vfio-pci",
            "sys/class/net/br0/bridge",
            "dev/net/tun",
            "dev/vhost-net",
        ] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        write(root.path(), "proc/self/status", "Name:\tx\nCapEff:\t0000000000002000\n");
        let wrong: Vec<_> = states().into_iter().filter(|(_, state)| *state != FindingState::Ok).collect();
        assert_eq!(wrong, [("devices".to_owned(), FindingState::Missing)]);
    }
}
