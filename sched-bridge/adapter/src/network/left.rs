//! Removing a network, also while one of its nodes is not reached: the others are cleaned at once, and the record keeps what is left
//! until the next run or stop finds the node again, or the operator says that it is lost.

use std::collections::BTreeMap;
use std::path::Path;

use super::Network;
use super::nodes::{self, Failed};
use super::record::{File, Left, Record};
use super::script;

impl Network<'_> {
    /// The record, after another attempt at what an earlier stop has left.
    pub(super) async fn without_what_is_left(&self) -> Result<Option<Record>, String> {
        let Some(mut record) = self.file.read()? else { return Ok(None) };
        if record.left.is_empty() {
            return Ok(Some(record));
        }
        let nodes: Vec<String> = record.left.keys().cloned().collect();
        let failed = self.remove_from(&nodes).await;
        record.left = still(&record, failed);
        self.file.keep(&record)?;
        Ok(Some(record).filter(|record| !record.nodes.is_empty() || !record.left.is_empty()))
    }

    /// Removes the network from all nodes that the record names, and from these. Gives what is left then.
    pub(super) async fn removed(
        &self,
        record: Option<Record>,
        more: &[String],
    ) -> Result<BTreeMap<String, Left>, String> {
        let known = record.iter().flat_map(|own| own.nodes.iter().chain(own.left.keys()));
        let mut nodes: Vec<String> = known.chain(more).cloned().collect();
        nodes.sort();
        nodes.dedup();
        let failed = self.remove_from(&nodes).await;
        match record {
            Some(record) => {
                let left = still(&record, failed);
                let stopped = Record { nodes: Vec::new(), members: Vec::new(), left, ..record };
                self.file.keep(&stopped)?;
                Ok(stopped.left)
            }
            None if failed.is_empty() => Ok(BTreeMap::new()),
            None => Err(nodes::told(&failed)),
        }
    }

    /// After a start that has failed: what became of what it had made.
    pub(super) async fn undone(&self, record: Record) -> String {
        match self.removed(Some(record), &[]).await {
            Ok(left) if left.is_empty() => "undone".to_owned(),
            Ok(left) => told(&left),
            Err(why) => format!("not undone: {why}"),
        }
    }

    /// Removes it from these nodes. Gives those that still have something, or may have.
    async fn remove_from(&self, nodes: &[String]) -> Failed {
        let (found, mut failed) = self.nodes.look(&self.names, nodes).await;
        let scripts = found.iter().map(|(node, own)| (node.clone(), script::remove(&self.names, node, own)));
        failed.extend(self.nodes.run(scripts.collect()).await);
        let done: Vec<String> = found.into_keys().filter(|node| !failed.contains_key(node)).collect();
        let (found, silent) = self.nodes.look(&self.names, &done).await;
        failed.extend(silent);
        for (node, found) in found {
            if let Some(left) = found.interfaces.iter().find(|own| own.ifalias == self.names.alias) {
                let why = format!("node {node} still has interface {}", left.ifname);
                failed.insert(node, why);
            }
        }
        failed
    }
}

/// What is left of a network of this record, if these nodes failed to remove it. One that the network was not on has nothing.
fn still(record: &Record, failed: Failed) -> BTreeMap<String, Left> {
    let left = |(node, why): (String, String)| {
        let vni = match record.left.get(&node) {
            Some(left) => left.vni,
            None if record.nodes.contains(&node) => record.vni,
            None => return None,
        };
        Some((node, Left { why, vni }))
    };
    failed.into_iter().filter_map(left).collect()
}

/// What is left, and what to do about it.
pub fn told(left: &BTreeMap<String, Left>) -> String {
    let one = |(node, own): (&String, &Left)| {
        format!(
            "node {node} still has its part ({}): the next run or stop removes it; if {node} is lost for good: vmove-network-adapter --forget {node}",
            own.why
        )
    };
    left.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Forgets what stopped networks have left on a node. Gives a line for each.
///
/// # Errors
/// A record cannot be read or written, a network runs there, or none has left anything.
pub fn forget(folder: &Path, node: &str) -> Result<Vec<String>, String> {
    let mut said = Vec::new();
    for file in File::all(folder)? {
        let Some(mut record) = file.read()? else { continue };
        let network = file.network();
        if record.nodes.iter().any(|own| own == node) {
            return Err(format!("network {network} is on node {node}: stop its blueprint first"));
        }
        if record.left.remove(node).is_none() {
            continue;
        }
        file.keep(&record)?;
        said.push(format!("network {network}: forgotten what node {node} has of it"));
    }
    if said.is_empty() {
        return Err(format!("no network has left anything on node {node}, as {} says", folder.display()));
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_on_a_node_is_forgotten_on_request_only_there() {
        let folder = tempfile::tempdir().unwrap();
        let write = |network: &str, nodes: &[&str], left: &[&str]| {
            let own = |node: &&str| ((*node).to_owned(), Left { why: "down".to_owned(), vni: 7 });
            let record = Record {
                nodes: nodes.iter().map(|&node| node.to_owned()).collect(),
                left: left.iter().map(own).collect(),
                ..Record::default()
            };
            let file = File::of(folder.path(), "app", network);
            file.write(&record).unwrap();
            file
        };
        let one = write("one", &[], &["n2"]);
        let both = write("both", &["n1"], &["n2", "n3"]);
        assert_eq!(forget(folder.path(), "n2").unwrap().len(), 2);
        assert_eq!(one.read(), Ok(None));
        let left: Vec<String> = both.read().unwrap().unwrap().left.into_keys().collect();
        assert_eq!(left, ["n3"]);
        assert!(forget(folder.path(), "n2").unwrap_err().contains("no network has left anything"));
        assert!(forget(folder.path(), "n1").unwrap_err().contains("network app/both is on node n1"));
        forget(&folder.path().join("none"), "n1").unwrap_err();
    }
}
