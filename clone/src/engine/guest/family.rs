//! Tickets: the children of one request of a guest, and what each of them left when it ended.
//!
//! The node of the guest that asked has all children of a ticket. A node that children of another node's guest are on has those.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::limit::Share;
use crate::record::Lineage;

/// Tickets that a guest may have without joining or killing their children.
pub const MAX_TICKETS: usize = 16;

/// What outlives the daemon of a ticket, beside the ends of its children.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketRecord {
    /// The fork's id.
    pub ticket: String,
    /// The VM that asked.
    pub parent: String,
    /// Its node, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    /// Of the children.
    pub lineage: Lineage,
    /// Children by the numbers that they are told.
    pub children: BTreeMap<u32, Place>,
    /// Children of the ticket on all nodes.
    pub size: u32,
    /// Nodes that keep results for this one, until they are told that nobody waits any more.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub hosts: BTreeSet<String>,
    /// Nodes among these whose children are to be ended as soon as they can be reached.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub kill_on: BTreeSet<String>,
    /// It was joined, or its guest has gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
}

/// Where a child is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Name of the VM.
    pub vm: String,
    /// Its node, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The children of one request.
#[derive(Debug)]
pub struct Family {
    pub record: TicketRecord,
    /// What the children here may take, until the fork has ended.
    pub under_way: Option<Share>,
    /// Children that were asked for, on all nodes.
    pub asked: usize,
    /// How children have ended.
    ends: BTreeMap<u32, Value>,
    /// Children here whose ports are connected before they run.
    met: HashSet<String>,
    /// A child has said how it ends, or is gone.
    changed: Arc<Notify>,
    /// Since when all have ended, as far as this life of the daemon knows.
    over: Option<Instant>,
}

impl Family {
    /// Of a fork that is about to be made: `asked` children in all, which take `here` of this node.
    pub fn new(record: TicketRecord, asked: usize, here: Share) -> Self {
        Self { under_way: Some(here), asked, ..Self::read(record, BTreeMap::new()) }
    }

    /// As an earlier life of the daemon has written it down.
    pub fn read(record: TicketRecord, ends: BTreeMap<u32, Value>) -> Self {
        let asked = record.children.len();
        let over = (ends.len() >= asked).then(Instant::now);
        Self { record, under_way: None, asked, ends, met: HashSet::new(), changed: Arc::default(), over }
    }

    pub fn add(&mut self, index: u32, vm: &str, node: Option<&str>) {
        let place = Place { vm: vm.to_owned(), node: node.map(str::to_owned) };
        self.record.children.insert(index, place);
        self.record.hosts.extend(node.map(str::to_owned));
    }

    /// Whether VM `parent` of this node may join it.
    pub fn is_of(&self, parent: &str) -> bool {
        self.record.home.is_none() && !self.record.closed && self.record.parent == parent
    }

    /// The numbers in the names of its children.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        let number = |vm: &str| vm.strip_prefix(&self.record.parent)?.strip_prefix('.')?.parse().ok();
        self.record.children.values().filter_map(move |child| number(&child.vm))
    }

    /// The number of a child that is on this node.
    pub fn index_of(&self, vm: &str) -> Option<u32> {
        self.record.children.iter().find(|(_, child)| child.node.is_none() && child.vm == vm).map(|(i, _)| *i)
    }

    /// The VM of a child that is on this node.
    pub fn name_here(&self, index: u32) -> Option<&str> {
        self.record.children.get(&index).filter(|child| child.node.is_none()).map(|child| child.vm.as_str())
    }

    /// Notes how a child has ended; the first word counts.
    pub fn ended(&mut self, index: u32, how: Value) {
        if self.record.children.contains_key(&index) {
            self.ends.entry(index).or_insert(how);
            if self.ends.len() == self.record.children.len() {
                self.over.get_or_insert_with(Instant::now);
            }
            self.tell();
        }
    }

    pub fn has_ended(&self, index: u32) -> bool {
        self.ends.contains_key(&index)
    }

    /// Children here that have ended, as far as was said: their QEMUs may still be there.
    pub fn ended_here(&self) -> impl Iterator<Item = &str> {
        let here = self.record.children.iter().filter(|(_, place)| place.node.is_none());
        here.filter(|(index, _)| self.ends.contains_key(index)).map(|(_, place)| place.vm.as_str())
    }

    pub fn has(&self, vm: &str) -> bool {
        self.index_of(vm).is_some()
    }

    /// The port of this child is connected.
    pub fn meet(&mut self, vm: &str) {
        self.met.insert(vm.to_owned());
    }

    /// Whether the port of this child is left alone: the fork has not got so far.
    pub fn is_to_be_met(&self, vm: &str) -> bool {
        self.under_way.is_some() && !self.met.contains(vm)
    }

    /// Children that live, on this node (`None`) or on another one.
    pub fn living_on(&self, node: Option<&str>) -> Vec<(u32, String)> {
        let on = |(index, child): &(&u32, &Place)| child.node.as_deref() == node && !self.has_ended(**index);
        self.record.children.iter().filter(on).map(|(index, child)| (*index, child.vm.clone())).collect()
    }

    /// Numbers of the children that live anywhere.
    pub fn living(&self) -> Vec<u32> {
        self.record.children.keys().filter(|index| !self.has_ended(**index)).copied().collect()
    }

    /// How many live on other nodes.
    pub fn living_elsewhere(&self) -> usize {
        let away = |index: &u32| self.record.children[index].node.is_some();
        self.living().iter().filter(|index| away(index)).count()
    }

    /// Numbers of a node's children that have ended.
    pub fn ended_on(&self, node: &str) -> Vec<u32> {
        let on = |index: &&u32| {
            self.record.children.get(index).is_some_and(|child| child.node.as_deref() == Some(node))
        };
        self.ends.keys().filter(on).copied().collect()
    }

    /// How children have ended that are none of these.
    pub fn ends_but(&self, known: &[u32]) -> impl Iterator<Item = (u32, &Value)> {
        let known: HashSet<u32> = known.iter().copied().collect();
        self.ends.iter().filter(move |(index, _)| !known.contains(index)).map(|(index, end)| (*index, end))
    }

    /// Since when all children have ended.
    pub fn over(&self) -> Option<Instant> {
        self.over.filter(|_| self.under_way.is_none())
    }

    /// Names of all children here, also of those that have ended.
    pub fn names_here(&self) -> impl Iterator<Item = &str> {
        self.record.children.values().filter(|child| child.node.is_none()).map(|child| child.vm.as_str())
    }

    /// Wakes those who wait for ends.
    pub fn tell(&self) {
        self.changed.notify_waiters();
    }

    /// Told when a child has said how it ends, and when it is gone.
    pub fn changes(&self) -> Arc<Notify> {
        self.changed.clone()
    }

    /// What each child left, once all have ended.
    pub fn results(&self) -> Option<Vec<Value>> {
        let of = |index: &u32| {
            let mut end = self.ends.get(index)?.clone();
            end["index"] = json!(index);
            Some(end)
        };
        self.record.children.keys().map(of).collect()
    }
}

/// A child without a result.
pub fn lost(why: &str) -> Value {
    json!({ "lost": why })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> TicketRecord {
        TicketRecord {
            ticket: "t".to_owned(),
            parent: "web".to_owned(),
            home: None,
            lineage: Lineage { root: "a/web".to_owned(), depth: 1 },
            children: BTreeMap::new(),
            size: 3,
            hosts: BTreeSet::new(),
            kill_on: BTreeSet::new(),
            closed: false,
        }
    }

    #[test]
    fn results_are_there_when_all_have_ended() {
        let mut family = Family::new(record(), 3, Share::default());
        family.add(1, "web.4", None);
        family.add(2, "web.7", None);
        family.add(3, "web.8", Some("b"));
        assert_eq!((family.living(), family.living_elsewhere()), (vec![1, 2, 3], 1));
        assert_eq!(family.living_on(Some("b")), [(3, "web.8".to_owned())]);
        assert!(family.has("web.7") && !family.has("web") && !family.has("web.8"));
        family.ended(2, json!({ "result": 3 }));
        family.ended(2, json!({ "lost": "later word" }));
        family.ended(3, json!({ "result": null }));
        family.ended(9, json!({ "result": "of no child" }));
        assert_eq!(family.results(), None);
        assert_eq!(family.ended_on("b"), [3]);
        assert_eq!(family.ends_but(&[3]).map(|(index, _)| index).collect::<Vec<_>>(), [2]);
        family.ended(1, json!({ "lost": "killed" }));
        let results = family.results().unwrap();
        let expected = [
            json!({ "index": 1, "lost": "killed" }),
            json!({ "index": 2, "result": 3 }),
            json!({ "index": 3, "result": null }),
        ];
        assert_eq!(results, expected);
    }

    #[test]
    fn only_the_guest_that_asked_may_join() {
        let mut family = Family::new(record(), 1, Share::default());
        assert!(family.is_of("web") && !family.is_of("db"));
        family.record.closed = true;
        assert!(!family.is_of("web"));
        // A VM here that has the name of a guest of another node.
        let elsewhere =
            Family::new(TicketRecord { home: Some("b".to_owned()), ..record() }, 1, Share::default());
        assert!(!elsewhere.is_of("web"));
    }
}
