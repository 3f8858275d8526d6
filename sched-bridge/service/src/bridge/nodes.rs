//! Inventory and topology.

use std::sync::Arc;

use sched_bridge::model::{Fleet, Node, NodeName, NodeState};
use sched_bridge::topology::Topology;

use super::grant::{guarded, json};
use super::{Bridge, BridgeError, Step};
use crate::keys;
use crate::store::{Expect, Txn};

impl Bridge {
    /// Takes over a node's inventory. Its state (drained or not) stays what an operator made it, unless the inventory is the first.
    ///
    /// # Errors
    /// A device that is there twice, or the store does not answer.
    pub async fn put_node(&self, node: Node) -> Result<Arc<Node>, BridgeError> {
        Fleet::new(vec![node.clone()], Topology::default())?;
        self.change(|view| {
            let known = view.node(&node.name);
            let mut node = node.clone();
            if let Some((known, _)) = known {
                node.state = known.state;
                if **known == node {
                    return Ok(Step::Done(Arc::new(node)));
                }
            }
            let key = keys::node(&node.name);
            let txn = Txn::default().expect(&key, Expect::seen(known.map(|(_, r)| r))).put(key, json(&node));
            Ok(Step::Commit(guarded(txn, view, &node.name), Arc::new(node)))
        })
        .await
    }

    /// Says whether a node takes VMs. Who is on it stays.
    ///
    /// # Errors
    /// There is no such node, or the store does not answer.
    pub async fn set_node_state(&self, name: &NodeName, state: NodeState) -> Result<Arc<Node>, BridgeError> {
        self.change(|view| {
            let (known, revision) = view.node(name).ok_or_else(|| BridgeError::UnknownNode(name.clone()))?;
            let node = Node { state, ..Node::clone(known) };
            if **known == node {
                return Ok(Step::Done(Arc::new(node)));
            }
            let key = keys::node(name);
            let txn = Txn::default().expect(&key, Expect::At(revision)).put(key, json(&node));
            Ok(Step::Commit(guarded(txn, view, name), Arc::new(node)))
        })
        .await
    }

    /// Forgets a node on which nothing is held.
    ///
    /// # Errors
    /// There is no such node, something is on it, or the store does not answer.
    pub async fn remove_node(&self, name: &NodeName) -> Result<(), BridgeError> {
        self.change(|view| {
            let (_, revision) = view.node(name).ok_or_else(|| BridgeError::UnknownNode(name.clone()))?;
            let on_it: Vec<String> = view
                .leases()
                .values()
                .filter(|known| known.lease.held.iter().any(|held| held.assignment.node == *name))
                .map(|known| known.lease.id.to_string())
                .collect();
            if !on_it.is_empty() {
                return Err(BridgeError::NodeInUse { node: name.clone(), leases: on_it.join(", ") });
            }
            let key = keys::node(name);
            let txn = Txn::default().expect(&key, Expect::At(revision)).delete(key);
            Ok(Step::Commit(guarded(txn, view, name), ()))
        })
        .await
    }

    /// Replaces the topology. What was granted stays where it is.
    ///
    /// # Errors
    /// The store does not answer.
    pub async fn put_topology(&self, topology: &Topology) -> Result<(), BridgeError> {
        self.change(|view| {
            if view.topology_revision().is_some() && view.fleet().topology() == topology {
                return Ok(Step::Done(()));
            }
            let expect = Expect::seen(view.topology_revision());
            let txn = Txn::default().expect(keys::TOPOLOGY, expect).put(keys::TOPOLOGY, json(topology));
            Ok(Step::Commit(txn, ()))
        })
        .await
    }
}
