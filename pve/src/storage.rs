//! `/etc/pve/storage.cfg`: which storages all nodes see.

use std::collections::BTreeMap;

/// Kinds that are on the network by their nature. Others are shared if `shared 1` says so.
const SHARED: [&str; 10] =
    ["cephfs", "cifs", "drbd", "glusterfs", "iscsi", "iscsidirect", "nfs", "pbs", "rbd", "zfs"];

#[derive(Debug, Default, Clone)]
struct Storage {
    kind: String,
    shared: bool,
    disabled: bool,
    /// If it is not on all nodes.
    nodes: Option<Vec<String>>,
}

/// The storages of a cluster, by name.
#[derive(Debug, Default, Clone)]
pub struct Storages(BTreeMap<String, Storage>);

impl Storages {
    /// Reads the text of the file.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let mut all = BTreeMap::new();
        let mut current: Option<&mut Storage> = None;
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let begins = !line.starts_with([' ', '\t']);
            if let (true, Some((kind, name))) = (begins, line.split_once(':')) {
                let kind = kind.trim().to_owned();
                let shared = SHARED.contains(&kind.as_str());
                let new = Storage { kind, shared, ..Storage::default() };
                current = Some(all.entry(name.trim().to_owned()).or_insert(new));
                continue;
            }
            let Some(storage) = current.as_deref_mut() else { continue };
            let (key, value) = line.trim().split_once([' ', '\t']).unwrap_or((line.trim(), "1"));
            match key {
                "shared" => storage.shared |= value.trim() == "1",
                "disable" => storage.disabled = value.trim() != "0",
                "nodes" => {
                    storage.nodes =
                        Some(value.split([',', ' ']).map(|name| name.trim().to_owned()).collect());
                }
                _ => {}
            }
        }
        Self(all)
    }

    /// Why a volume of a storage cannot be reached on another node; nothing if it can.
    #[must_use]
    pub fn why_not_on(&self, name: &str, node: Option<&str>) -> Option<String> {
        let Some(storage) = self.0.get(name) else {
            return Some(format!("storage {name} is not in /etc/pve/storage.cfg"));
        };
        if storage.disabled {
            return Some(format!("storage {name} is disabled"));
        }
        if !storage.shared {
            return Some(format!("storage {name} ({}) is of one node alone", storage.kind));
        }
        let (nodes, node) = (storage.nodes.as_ref()?, node?);
        (!nodes.iter().any(|one| one == node)).then(|| format!("storage {name} is not on node {node}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "dir: local\n\tpath /var/lib/vz\n\tcontent iso,backup\n\nlvmthin: local-lvm\n\tvgname pve\n\n# comment\nnfs: filer\n\tserver 10.0.0.1\n\tnodes a,b\n\nlvm: san\n\tvgname san\n\tshared 1\n\nrbd: off\n\tdisable\n";

    #[test]
    fn what_all_nodes_see_is_known_by_kind_or_by_word() {
        let storages = Storages::read(FILE);
        let fits = |name, node| storages.why_not_on(name, Some(node));
        assert_eq!(fits("filer", "b"), None);
        assert_eq!(fits("san", "c"), None);
        assert!(fits("filer", "c").unwrap().contains("node c"));
        assert!(fits("local", "b").unwrap().contains("one node alone"));
        assert!(fits("local-lvm", "b").is_some() && fits("none", "b").is_some());
        assert!(fits("off", "b").unwrap().contains("disabled"));
        assert_eq!(storages.why_not_on("filer", None), None);
    }
}
