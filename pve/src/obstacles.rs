//! What stands in the way of a move, by name, and what to do instead.

use std::fmt;

use crate::config::Entry;
use crate::config::is_switched_on;
use crate::{Config, Section, Storages, Vmid, words};

/// Something that stands in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The key of the configuration, or the file of the cluster.
    pub what: String,
    /// Why.
    pub why: String,
    /// What to do.
    pub instead: String,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.what, self.why, self.instead)
    }
}

/// What the cluster says of all its VMs.
#[derive(Debug, Default, Clone)]
pub struct Cluster {
    /// `storage.cfg`.
    pub storages: Storages,
    /// The text of `ha/resources.cfg`.
    pub ha: String,
    /// The text of `replication.cfg`.
    pub replication: String,
}

impl Cluster {
    /// All that keeps a VM from being enabled or moved to this node.
    #[must_use]
    pub fn obstacles(&self, vmid: Vmid, config: &Config, node: Option<&str>) -> Vec<Obstacle> {
        let mut found = whole(vmid, config);
        for entry in config.entries() {
            if let Some((why, instead)) = self.of_volume(entry, node) {
                found.push(Obstacle {
                    what: place(entry),
                    why,
                    instead: instead.replace("VMID", &vmid.to_string()),
                });
            } else if entry.section == Section::Main
                && let Some((why, instead)) = of_entry(entry)
            {
                let instead = instead.replace("VMID", &vmid.to_string()).replace("KEY", entry.key);
                found.push(Obstacle { what: entry.key.to_owned(), why: why.to_owned(), instead });
            }
        }
        if has_section(&self.ha, "vm", |name| name == vmid.to_string()) {
            found.push(Obstacle {
                what: "/etc/pve/ha/resources.cfg".to_owned(),
                why: "high availability watches this VM, and would start it elsewhere while it moves".to_owned(),
                instead: format!("take it out for the move by `ha-manager remove vm:{vmid}`, or move it by `ha-manager migrate`"),
            });
        }
        if has_section(&self.replication, "local", |name| name.split('-').next() == Some(&vmid.to_string())) {
            found.push(Obstacle {
                what: "/etc/pve/replication.cfg".to_owned(),
                why: "its disks are replicated, and the state of that is not handed over".to_owned(),
                instead: "remove the job for the move by `pvesr delete`, or move it by `qm migrate`"
                    .to_owned(),
            });
        }
        found
    }

    fn of_volume(&self, entry: Entry<'_>, node: Option<&str>) -> Option<(String, String)> {
        if !is_volume(entry.key) {
            return None;
        }
        let first = entry.value.split(',').next().unwrap_or_default();
        let volume = first.strip_prefix("file=").or_else(|| first.strip_prefix("volume=")).unwrap_or(first);
        if volume == "none" {
            return None;
        }
        let Some((storage, _)) = volume.split_once(':').filter(|_| !volume.starts_with('/')) else {
            let instead = match volume {
                "cdrom" => "take it out by `qm set VMID --KEY none,media=cdrom`".replace("KEY", entry.key),
                _ => "put the disk onto a storage of /etc/pve/storage.cfg that all nodes see".to_owned(),
            };
            return Some((format!("{volume} is a device or file of this node"), instead));
        };
        let why = self.storages.why_not_on(storage, node)?;
        let instead = if entry.section == Section::Other {
            "delete the snapshot, or have its disk on a storage that both nodes see".to_owned()
        } else if entry.value.contains("media=cdrom") {
            format!(
                "eject it by `qm set VMID --{} none,media=cdrom`, or have it on a storage that both nodes see",
                entry.key
            )
        } else {
            format!(
                "move the disk by `qm disk move VMID {} STORAGE --delete` first, or move the VM by `qm migrate --with-local-disks`",
                entry.key
            )
        };
        Some((why, instead))
    }
}

fn place(entry: Entry<'_>) -> String {
    let of = match entry.section {
        Section::Main => "",
        Section::Pending => " (pending)",
        Section::Other => " (of a snapshot)",
    };
    format!("{}{of}", entry.key)
}

/// Keys whose values are volumes.
fn is_volume(key: &str) -> bool {
    let kind = key.trim_end_matches(|c: char| c.is_ascii_digit());
    let numbered = ["ide", "sata", "scsi", "virtio", "unused", "efidisk", "tpmstate"];
    key == "vmstate" || (kind != key && numbered.contains(&kind))
}

/// What is in the way of the VM as a whole.
fn whole(vmid: Vmid, config: &Config) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let mut add = |what: &str, why: &str, instead: String| {
        found.push(Obstacle { what: what.to_owned(), why: why.to_owned(), instead });
    };
    if let Some(huge) = config.value(Section::Main, "hugepages") {
        add(
            "hugepages",
            "Proxmox VE gives QEMU a folder for such memory, so that its files have no names and nobody else can open them",
            format!(
                "`qm set {vmid} --delete hugepages --numa 0` (hugepages: {huge} goes): vmove's files get huge pages from tmpfs"
            ),
        );
    }
    if config.is_on("numa") {
        add(
            "numa",
            "QEMU takes either memory for each NUMA node, as Proxmox VE gives it, or memory for the machine",
            format!("`qm set {vmid} --numa 0`, without memory hotplug"),
        );
    }
    // What was told to `qm set` of a VM that runs, and counts from its next start.
    if let Some(huge) = config.value(Section::Pending, "hugepages") {
        add(
            "hugepages (pending)",
            "from its next start on the VM would have memory in files without names",
            format!("`qm set {vmid} --revert hugepages` takes that back (hugepages: {huge})"),
        );
    }
    if config.value(Section::Pending, "numa").is_some_and(is_switched_on) {
        add(
            "numa (pending)",
            "from its next start on the VM would have memory for each NUMA node, which QEMU takes none for the machine beside",
            format!("`qm set {vmid} --revert numa` takes that back"),
        );
    }
    if config.is_on("template") {
        add("template", "a template does not run", "move it by `qm migrate`".to_owned());
    }
    let uuid = config.value(Section::Main, "smbios1").unwrap_or_default();
    if !uuid.split(',').any(|part| part.starts_with("uuid=")) {
        add(
            "smbios1",
            "the VM has no UUID, by which the nodes know it",
            format!("`qm set {vmid} --smbios1 uuid=$(uuidgen)`; the guest sees that"),
        );
    }
    let args = words(config.value(Section::Main, "args").unwrap_or_default()).unwrap_or_default();
    let memory = |pair: &[String]| {
        let other = pair[1].contains("memory-backend") && !pair[1].contains("vmove-ram");
        pair[0] == "-mem-path" || (["-object", "-machine", "-M"].contains(&pair[0].as_str()) && other)
    };
    if args.windows(2).any(memory) {
        add(
            "args",
            "they give the VM memory of another kind",
            format!("take that out of `qm set {vmid} --args`"),
        );
    }
    found
}

/// What is in the way of one entry: why, and what to do.
fn of_entry(entry: Entry<'_>) -> Option<(&'static str, &'static str)> {
    let kind = entry.key.trim_end_matches(|c: char| c.is_ascii_digit());
    let numbered = kind != entry.key;
    Some(match kind {
        "hostpci" => (
            "a device of the host is passed through, which writes guest memory unseen",
            "take it out by `qm set VMID --delete KEY` and start the VM anew",
        ),
        "usb" if numbered && !is_spice(entry.value) => {
            ("a USB device of this node is passed through", "take it out by `qm set VMID --delete KEY`")
        }
        "serial" if numbered && entry.value != "socket" => {
            ("a serial port of this node is passed through", "`qm set VMID --KEY socket`, or take it out")
        }
        "parallel" if numbered => {
            ("a parallel port of this node is passed through", "take it out by `qm set VMID --delete KEY`")
        }
        "virtiofs" => (
            "virtiofsd, a program beside QEMU, writes guest memory unseen",
            "take it out by `qm set VMID --delete KEY` and start the VM anew",
        ),
        "ivshmem" => (
            "its memory is shared with others",
            "take it out by `qm set VMID --delete KEY` and start the VM anew",
        ),
        "tpmstate" => (
            "its TPM is a program beside QEMU (swtpm), whose move with vmove was never tried",
            "move it by `qm migrate`",
        ),
        "amd_sev" | "amd-sev" | "intel-tdx" => (
            "its memory is encrypted: nobody but the guest can read it",
            "move it switched off, by `qm migrate`",
        ),
        "arch" if entry.value != "x86_64" => ("vmove is for x86-64 only", "move it by `qm migrate`"),
        "vga" if entry.value.contains("clipboard=vnc") => (
            "QEMU cannot migrate the clipboard of VNC before 10.1",
            "`qm set VMID --vga std`, or move it by `qm migrate`",
        ),
        _ => return None,
    })
}

fn is_spice(value: &str) -> bool {
    let host = value.split(',').map(|part| part.strip_prefix("host=").unwrap_or(part));
    host.into_iter().any(|part| part.eq_ignore_ascii_case("spice"))
}

/// Whether a file of sections (`kind: name`) has one.
fn has_section(text: &str, kind: &str, is: impl Fn(&str) -> bool) -> bool {
    let heads = text.lines().filter(|line| !line.starts_with([' ', '\t', '#']));
    heads.filter_map(|line| line.split_once(':')).any(|(k, name)| k.trim() == kind && is(name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "boot: order=scsi0\nide2: none,media=cdrom\nmemory: 2048\nname: web\nnet0: virtio=BC:24:11:00:00:01,bridge=vmbr0\nnuma: 0\nscsi0: filer:100/vm-100-disk-0.qcow2,iothread=1,size=8G\nefidisk0: filer:100/vm-100-disk-1.raw,efitype=4m,size=528K\nserial0: socket\nsmbios1: uuid=7b10d7af-b932-4c66-b2c3-3996152ec465\nusb0: spice\n";

    fn cluster() -> Cluster {
        Cluster {
            storages: Storages::read("nfs: filer\n\tserver x\n\tnodes a,b\ndir: local\n\tpath /x\n"),
            ..Cluster::default()
        }
    }

    fn of(text: &str) -> Vec<Obstacle> {
        cluster().obstacles("100".parse().unwrap(), &Config::read(text), Some("b"))
    }

    #[test]
    fn an_ordinary_vm_may_move() {
        assert_eq!(of(GOOD), []);
    }

    #[test]
    fn each_obstacle_is_named_with_a_way_out() {
        let lines = [
            ("hostpci0: 0000:01:00.0", "hostpci0"),
            ("hostpci1: mapping=gpu", "hostpci1"),
            ("usb1: host=1234:5678", "usb1"),
            ("usb2: mapping=stick,usb3=1", "usb2"),
            ("serial1: /dev/ttyS0", "serial1"),
            ("parallel0: /dev/parport0", "parallel0"),
            ("virtiofs0: share", "virtiofs0"),
            ("ivshmem: size=32", "ivshmem"),
            ("tpmstate0: filer:100/vm-100-disk-2.raw,version=v2.0", "tpmstate0"),
            ("amd-sev: type=snp", "amd-sev"),
            ("arch: aarch64", "arch"),
            ("vga: std,clipboard=vnc", "vga"),
            ("template: 1", "template"),
            ("numa: 1", "numa"),
            ("hugepages: 2", "hugepages"),
            ("args: -object memory-backend-memfd,id=x,size=1G", "args"),
            ("scsi1: local:100/vm-100-disk-3.raw,size=1G", "scsi1"),
            ("scsi2: /dev/disk/by-id/x,size=1G", "scsi2"),
            ("unused0: local:100/vm-100-disk-9.raw", "unused0"),
            ("ide0: local:iso/debian.iso,media=cdrom", "ide0"),
            ("ide1: cdrom,media=cdrom", "ide1"),
            ("ide3: local:100/vm-100-cloudinit.qcow2,media=cdrom", "ide3"),
            ("[snap]\nvmstate: local:100/vm-100-state-snap.raw", "vmstate (of a snapshot)"),
            ("[PENDING]\nscsi4: local:100/vm-100-disk-4.raw", "scsi4 (pending)"),
        ];
        for (line, what) in lines {
            let found = of(&format!("{GOOD}{line}\n"));
            let [one] = found.as_slice() else { panic!("{line}: {found:?}") };
            assert_eq!(one.what, what);
            assert!(!one.instead.contains("VMID") && !one.instead.contains("KEY"), "{one}");
        }
        let found = of(&GOOD.replace("smbios1", "other"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].what, "smbios1");
        // A device in a snapshot is not the VM's now.
        assert_eq!(of(&format!("{GOOD}\n[snap]\nhostpci0: 0000:01:00.0\n")), []);
    }

    #[test]
    fn what_the_cluster_does_by_itself_is_in_the_way() {
        let config = Config::read(GOOD);
        let mut cluster = cluster();
        cluster.ha = "vm: 1000\n\tstate started\n\nct: 100\n".to_owned();
        cluster.replication = "local: 101-0\n\ttarget b\n".to_owned();
        let all = |cluster: &Cluster| cluster.obstacles("100".parse().unwrap(), &config, Some("b"));
        assert_eq!(all(&cluster), []);
        cluster.ha.push_str("\nvm: 100\n\tstate started\n");
        cluster.replication.push_str("\nlocal: 100-0\n\ttarget b\n");
        let found = all(&cluster);
        assert!(found.iter().any(|one| one.instead.contains("ha-manager remove vm:100")), "{found:?}");
        assert_eq!(found.len(), 2);
        let elsewhere = cluster.obstacles("100".parse().unwrap(), &config, Some("c"));
        assert!(elsewhere.iter().any(|one| one.why.contains("not on node c")), "{elsewhere:?}");
    }
}
