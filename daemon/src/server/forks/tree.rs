//! `vfork tree`.

use super::Forks;
use crate::api::forks::ForkNode;
use crate::api::problem::Problem;
use crate::server::registry::store_problem;
use vmove_clone::record::Member;

impl Forks {
    /// A VM (or a template) and everything that came from it, ended children included.
    pub fn tree(&self, name: &str) -> Result<ForkNode, Problem> {
        let all = self.members.list();
        let own = all.iter().find(|member| member.vm == name);
        let known = self.registry.vms.get(name);
        let has_children = all.iter().any(|member| member.parent.as_deref() == Some(name));
        if let (Err(error), None, false) = (&known, own, has_children) {
            return Err(store_problem(error));
        }
        Ok(self.node_of(name, own, &all, 0))
    }

    fn node_of(&self, name: &str, own: Option<&Member>, all: &[Member], depth: usize) -> ForkNode {
        let record = self.registry.vms.get(name).ok();
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
            prepared: if record.is_some() { self.prepared(name) } else { Vec::new() },
            children,
        }
    }
}
