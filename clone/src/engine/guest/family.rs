//! Tickets: the children of one request of a guest, and what each of them left when it ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::limit::Share;

/// Tickets that a guest may have without joining or killing their children.
pub const MAX_TICKETS: usize = 16;

/// The children of one request.
#[derive(Debug)]
pub struct Family {
    /// The VM that asked.
    pub parent: String,
    /// What was asked for, until the fork has ended.
    pub under_way: Option<Share>,
    children: BTreeMap<u32, Child>,
    /// A child has said how it ends, or is gone.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Child {
    vm: String,
    /// Absent while it lives.
    end: Option<Value>,
}

impl Family {
    pub fn new(parent: &str, asked: Share) -> Self {
        let (parent, under_way) = (parent.to_owned(), Some(asked));
        Self { parent, under_way, children: BTreeMap::new(), changed: Arc::default() }
    }

    pub fn add(&mut self, index: u32, vm: &str) {
        self.children.insert(index, Child { vm: vm.to_owned(), end: None });
    }

    /// Notes how a child has ended; the first word counts.
    pub fn ended(&mut self, vm: &str, how: impl FnOnce() -> Value) {
        let child = self.children.values_mut().find(|child| child.vm == vm && child.end.is_none());
        if let Some(child) = child {
            child.end = Some(how());
            self.tell();
        }
    }

    pub fn has(&self, vm: &str) -> bool {
        self.children.values().any(|child| child.vm == vm)
    }

    /// Children that live.
    pub fn living(&self) -> Vec<String> {
        self.children.values().filter(|child| child.end.is_none()).map(|child| child.vm.clone()).collect()
    }

    pub fn size(&self) -> usize {
        self.children.len()
    }

    /// Names of all children, also of those that have ended.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.children.values().map(|child| child.vm.as_str())
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
        let of = |(index, child): (&u32, &Child)| {
            let mut end = child.end.clone()?;
            end["index"] = json!(index);
            Some(end)
        };
        self.children.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_there_when_all_have_ended() {
        let mut family = Family::new("web", Share::default());
        family.add(1, "web.4");
        family.add(2, "web.7");
        assert_eq!((family.size(), family.living()), (2, vec!["web.4".to_owned(), "web.7".to_owned()]));
        assert!(family.has("web.7") && !family.has("web"));
        family.ended("web.7", || json!({ "result": 3 }));
        family.ended("web.7", || json!({ "lost": "later word" }));
        assert_eq!(family.results(), None);
        family.ended("web.4", || json!({ "lost": "killed" }));
        let results = family.results().unwrap();
        assert_eq!(results, [json!({ "index": 1, "lost": "killed" }), json!({ "index": 2, "result": 3 })]);
    }
}
