//! Options that keep a guest from being moved, or its destination from being derived.

use super::{CommandLine, CommandLineError, Item};

/// One reason, with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The option with its argument, as written.
    pub option: String,
    /// Why it stands in the way.
    pub reason: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}; {}", self.option, self.reason, self.remedy)
    }
}

pub(super) fn list(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|one| format!("\n  {one}")).collect()
}

impl Obstacle {
    pub(super) fn of(item: &Item, reason: &'static str, remedy: &'static str) -> Self {
        let value = item.value.as_ref().map(|value| format!(" {}", value.to_string_lossy()));
        Self {
            option: format!("{}{}", item.flag.to_string_lossy(), value.unwrap_or_default()),
            reason,
            remedy,
        }
    }
}

/// Options by name alone.
const NAMES: &[(&str, &str, &str)] = &[
    ("mem-path", "vmove places guest RAM itself", "remove it, or give -object memory-backend-file,share=on"),
    ("snapshot", "the guest's disk writes go to temporary files of this node", "remove it"),
    ("preconfig", "QEMU waits for a configuration by hand", "remove it"),
    ("readconfig", "its file may configure memory that vmove does not see", "write the options out"),
    ("xen-attach", "Xen guests have their memory elsewhere", "not possible"),
];

/// Options that only matter where vmove starts the guest itself.
const NAMES_AT_START: &[(&str, &str, &str)] = &[
    (
        "daemonize",
        "QEMU would leave its process id and its messages behind",
        "remove it, vmove detaches QEMU itself",
    ),
    ("incoming", "this QEMU would wait for a migration", "remove it; to take in a running QEMU use adopt"),
];

impl CommandLine {
    /// All reasons why a guest started from this could not be moved.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn obstacles(&self) -> Result<Vec<Obstacle>, CommandLineError> {
        let mut found = Vec::new();
        for item in &self.items {
            for (name, reason, remedy) in NAMES {
                if item.name() == *name {
                    found.push(Obstacle::of(item, reason, remedy));
                }
            }
            found.extend(device_obstacle(item)?);
            found.extend(numa_obstacle(item)?);
        }
        Ok(found)
    }

    /// As [`CommandLine::obstacles`], with those of a guest that vmove is to start itself.
    pub(super) fn obstacles_at_start(&self) -> Result<Vec<Obstacle>, CommandLineError> {
        let mut found = self.obstacles()?;
        for item in &self.items {
            let hit = NAMES_AT_START.iter().find(|(name, ..)| item.name() == *name);
            found.extend(hit.map(|(_, reason, remedy)| Obstacle::of(item, reason, remedy)));
        }
        Ok(found)
    }
}

/// Devices and back ends that write guest RAM from outside QEMU, or hide it.
fn device_obstacle(item: &Item) -> Result<Option<Obstacle>, CommandLineError> {
    const OUTSIDE: &str = "it writes guest RAM from outside QEMU, where writes are neither seen nor served";
    let kind = match item.name() {
        "device" => item.options()?.get("driver", true),
        "netdev" => item.options()?.get("type", true),
        "object" => item.options()?.get("qom-type", true),
        _ => None,
    };
    let kind = kind.unwrap_or_default();
    let found = match (item.name(), kind.as_str()) {
        ("device", kind) if kind.starts_with("vhost-user-") => {
            (OUTSIDE, "use the device that QEMU emulates itself")
        }
        ("device", kind) if kind.starts_with("vfio-") => (OUTSIDE, "detach it before the move"),
        ("device", kind) if kind.starts_with("vhost-vdpa-") => (OUTSIDE, "use virtio-net with a tap netdev"),
        ("device", kind) if kind.starts_with("ivshmem") => (OUTSIDE, "remove it"),
        ("netdev", "vhost-user" | "vhost-vdpa" | "af-xdp") => (OUTSIDE, "use a tap, bridge or user netdev"),
        ("object", "sev-guest" | "sev-snp-guest" | "tdx-guest" | "memory-backend-epc") => {
            ("guest memory is encrypted against the host", "remove it")
        }
        _ => return Ok(None),
    };
    Ok(Some(Obstacle::of(item, found.0, found.1)))
}

fn numa_obstacle(item: &Item) -> Result<Option<Obstacle>, CommandLineError> {
    if item.name() != "numa" {
        return Ok(None);
    }
    let options = item.options()?;
    let legacy = options.get("type", true).as_deref() == Some("node") && options.get("mem", false).is_some();
    Ok(legacy.then(|| {
        let reason = "memory of a node is given by size only";
        Obstacle::of(item, reason, "use memdev= with an -object memory-backend-file per node")
    }))
}
