//! What came of a guest: the tree of its children, which of them live, and their end.

mod migrated_children;
mod remote_children;

use super::ForkEngine;
use super::error::ForkError;
use crate::record::Member;
use vmove_types::fork::ForkNode;

impl ForkEngine {
    /// A VM (or a template) and everything that came from it, ended children included.
    pub(super) fn tree(&self, name: &str) -> Result<ForkNode, ForkError> {
        let all = self.members.list();
        let own = all.iter().find(|member| member.vm == name);
        let has_children = all.iter().any(|member| member.parent.as_deref() == Some(name));
        if own.is_none() && !has_children {
            self.registry.vms().get(name)?;
        }
        Ok(self.node_of(name, own, &all, 0))
    }

    fn node_of(&self, name: &str, own: Option<&Member>, all: &[Member], depth: usize) -> ForkNode {
        let record = self.registry.vms().get(name).ok();
        let is_own =
            |m: &&Member| record.as_ref().is_none_or(|r| r.pid == m.pid && r.pid_start == m.pid_start);
        let own = own.filter(is_own);
        let below = |member: &&Member| member.parent.as_deref() == Some(name) && member.vm != name;
        let children = if depth < 64 {
            all.iter().filter(below).map(|m| self.node_of(&m.vm, Some(m), all, depth + 1)).collect()
        } else {
            Vec::new()
        };
        ForkNode {
            name: name.to_owned(),
            index: own.map_or(0, |m| m.index),
            status: match (&record, own.and_then(|m| m.node.as_ref())) {
                (Some(_), _) if self.is_readable(name).is_err() => "unknown",
                (Some(_), _) if self.lock().fetching.contains_key(name) => "fetching",
                (Some(_), _) => "here",
                (None, Some(_)) => "elsewhere",
                (None, None) => "ended",
            }
            .to_owned(),
            why: if record.is_none() { self.registry.why_ended(name) } else { None },
            node: own.and_then(|m| m.node.clone()),
            private: record.is_some() && own.is_some_and(|m| !m.private.is_empty()),
            parent: own.and_then(|m| m.parent.clone()),
            prepared: if record.is_some() { self.prepared_nodes(name) } else { Vec::new() },
            children,
        }
    }
}
