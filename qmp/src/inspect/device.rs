//! Devices that matter for a move, and network back ends.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Ask, none_if_refused};
use crate::QmpError;

/// Why a device matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// Another process writes guest RAM (vhost-user, virtiofsd).
    VhostUser,
    /// A physical device writes guest RAM.
    Vfio,
    /// A vDPA device writes guest RAM.
    Vdpa,
    /// Memory shared with other guests.
    Ivshmem,
    /// Gives pages back to the host while the guest runs.
    Balloon,
    /// Memory that grows and shrinks.
    VirtioMem,
    /// Persistent memory.
    Pmem,
    /// A pass-through TPM, USB or SCSI device of this host, or a target of its kernel (vhost-scsi, whose transfers also write to pinned
    /// guest memory unseen).
    HostBound,
}

/// One such device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceFact {
    /// Its id, or its QOM path where it has none.
    pub id: String,
    /// QEMU's type, such as `vhost-user-fs-pci`.
    pub driver: String,
    /// Why it matters.
    pub kind: DeviceKind,
}

/// One network back end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NetdevFact {
    /// Its id.
    pub id: String,
    /// Its type, such as `tap` or `vhost-user`.
    pub kind: String,
    /// All that QEMU says of it, such as `index=0,type=tap,ifname=tap0,script=no`.
    #[serde(default)]
    pub said: String,
}

impl NetdevFact {
    /// The value of one of its options, as far as QEMU says them.
    #[must_use]
    pub fn option(&self, key: &str) -> Option<&str> {
        self.said.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
    }
}

pub(super) async fn facts(ask: &Ask<'_>) -> Result<Vec<DeviceFact>, QmpError> {
    let mut found = Vec::new();
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        for (name, kind) in ask.list(folder).await? {
            let Some(driver) = kind.strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')) else {
                continue;
            };
            let Some(kind) = kind_of(driver) else { continue };
            let anonymous = folder.ends_with("-anon");
            let id = if anonymous { format!("{folder}/{name}") } else { name };
            found.push(DeviceFact { id, driver: driver.to_owned(), kind });
        }
    }
    Ok(found)
}

fn kind_of(driver: &str) -> Option<DeviceKind> {
    Some(match driver {
        _ if driver.starts_with("vhost-user-") => DeviceKind::VhostUser,
        _ if driver.starts_with("vfio-") => DeviceKind::Vfio,
        _ if driver.starts_with("vhost-vdpa-") => DeviceKind::Vdpa,
        _ if driver.starts_with("ivshmem") => DeviceKind::Ivshmem,
        _ if driver.starts_with("virtio-balloon") => DeviceKind::Balloon,
        _ if driver.starts_with("virtio-mem") => DeviceKind::VirtioMem,
        _ if driver.starts_with("virtio-pmem") || driver == "nvdimm" => DeviceKind::Pmem,
        _ if driver.starts_with("vhost-scsi") => DeviceKind::HostBound,
        "usb-host" | "scsi-generic" | "scsi-block" => DeviceKind::HostBound,
        _ => return None,
    })
}

/// QMP has no query for network back ends; the human monitor prints one per line: ` \ net0: index=0,type=user,net=…`.
pub(super) async fn netdevs(ask: &Ask<'_>) -> Result<Vec<NetdevFact>, QmpError> {
    let command = json!({ "command-line": "info network" });
    let reply = none_if_refused(ask.with("human-monitor-command", command).await)?;
    Ok(parse_netdevs(reply.as_ref().and_then(Value::as_str).unwrap_or_default()))
}

fn parse_netdevs(text: &str) -> Vec<NetdevFact> {
    let mut found = Vec::<NetdevFact>::new();
    for line in text.lines() {
        let line = line.trim_start_matches([' ', '\\', '|']).trim();
        let Some((id, rest)) = line.split_once(": ") else { continue };
        let kind = rest.split(',').find_map(|part| part.strip_prefix("type="));
        let Some(kind) = kind.filter(|kind| *kind != "nic") else { continue };
        if found.iter().all(|known| known.id != id) {
            found.push(NetdevFact { id: id.to_owned(), kind: kind.to_owned(), said: rest.trim().to_owned() });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_back_ends_are_read_from_the_human_monitor() {
        let text = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \
                    \\ n0: index=0,type=user,net=10.0.2.0,restrict=off\r\nn1: index=0,type=vhost-user,fd=3\r\n";
        let found = parse_netdevs(text);
        assert_eq!(found[0].option("net"), Some("10.0.2.0"));
        let found: Vec<_> = found.iter().map(|one| (one.id.as_str(), one.kind.as_str())).collect();
        assert_eq!(found, [("n0", "user"), ("n1", "vhost-user")]);
    }

    #[test]
    fn devices_that_do_not_matter_are_left_out() {
        assert_eq!(kind_of("virtio-blk-pci"), None);
        assert_eq!(kind_of("vhost-user-fs-pci"), Some(DeviceKind::VhostUser));
        assert_eq!(kind_of("ivshmem-plain"), Some(DeviceKind::Ivshmem));
        assert_eq!(kind_of("virtio-net-pci"), None);
    }

    #[test]
    fn targets_of_the_host_s_kernel_are_found() {
        assert_eq!(kind_of("vhost-scsi-pci"), Some(DeviceKind::HostBound));
        assert_eq!(kind_of("vhost-scsi-pci-non-transitional"), Some(DeviceKind::HostBound));
        assert_eq!(kind_of("vhost-user-scsi-pci"), Some(DeviceKind::VhostUser));
    }
}
