//! Inventories of nodes, and the topology.

use std::sync::Arc;

use sched_bridge::model::{Fleet, Node, NodeName, NodeState};
use sched_bridge::topology::Topology;

use super::transactions::{guarded, json};
use super::{Attempt, Bridge, BridgeError};
use crate::keys;
use crate::store::{Expect, Txn};

impl Bridge {
    /// Publishes a node's inventory. Its state stays what an operator has set, unless this is its first inventory.
    ///
    /// # Errors
    /// A device occurs twice, or the store does not answer.
    pub async fn put_node(&self, mut node: Node) -> Result<Arc<Node>, BridgeError> {
        node.count_shares();
        Fleet::new(vec![node.clone()], Topology::default())?;
        self.change(|view| {
            let known = view.node(&node.name);
            let mut node = node.clone();
            if let Some((known, _)) = known {
                node.state = known.state;
                if **known == node {
                    return Ok(Attempt::Done(Arc::new(node)));
                }
            }
            let key = keys::node(&node.name);
            let txn = Txn::default().expect(&key, Expect::seen(known.map(|(_, r)| r))).put(key, json(&node));
            Ok(Attempt::Commit(guarded(txn, view, &node.name), Arc::new(node)))
        })
        .await
    }

    /// Sets whether a node takes VMs. VMs on it stay.
    ///
    /// # Errors
    /// There is no such node, or the store does not answer.
    pub async fn set_node_state(&self, name: &NodeName, state: NodeState) -> Result<Arc<Node>, BridgeError> {
        self.change(|view| {
            let (known, revision) = view.node(name).ok_or_else(|| BridgeError::UnknownNode(name.clone()))?;
            let node = Node { state, ..Node::clone(known) };
            if **known == node {
                return Ok(Attempt::Done(Arc::new(node)));
            }
            let key = keys::node(name);
            let txn = Txn::default().expect(&key, Expect::At(revision)).put(key, json(&node));
            Ok(Attempt::Commit(guarded(txn, view, name), Arc::new(node)))
        })
        .await
    }

    /// Removes a node of which nothing is leased.
    ///
    /// # Errors
    /// There is no such node, a lease holds something on it, or the store does not answer.
    pub async fn remove_node(&self, name: &NodeName) -> Result<(), BridgeError> {
        self.change(|view| {
            let (_, revision) = view.node(name).ok_or_else(|| BridgeError::UnknownNode(name.clone()))?;
            let leases: Vec<String> = view
                .leases()
                .values()
                .filter(|entry| entry.lease.nodes().contains(name))
                .map(|entry| entry.lease.id.to_string())
                .collect();
            if !leases.is_empty() {
                return Err(BridgeError::NodeInUse { node: name.clone(), leases: leases.join(", ") });
            }
            let key = keys::node(name);
            let txn = Txn::default().expect(&key, Expect::At(revision)).delete(key);
            Ok(Attempt::Commit(guarded(txn, view, name), ()))
        })
        .await
    }

    /// Replaces the topology. Leases stay as they are.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn put_topology(&self, topology: &Topology) -> Result<(), BridgeError> {
        self.change(|view| {
            if view.topology_revision().is_some() && view.fleet().topology() == topology {
                return Ok(Attempt::Done(()));
            }
            let expect = Expect::seen(view.topology_revision());
            let txn = Txn::default().expect(keys::TOPOLOGY, expect).put(keys::TOPOLOGY, json(topology));
            Ok(Attempt::Commit(txn, ()))
        })
        .await
    }
}
