//! What the operator's hooks are told of forks, and asked.

use serde_json::json;
use vmove_hooks::event::Event;
use vmove_hooks::{ForbiddenByHook, Own};
use vmove_node::record::VmRecord;
use vmove_types::fork::ForkRequest;
use vmove_types::fork_report::ForkReport;

use super::ForkEngine;
use super::error::ForkError;
use crate::CloneError;
use crate::child::Child;

/// Where a child came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildOf {
    /// The VM or template.
    pub parent: String,
    /// Id of the fork.
    pub fork: String,
    /// Its number among the children.
    pub index: u32,
}

impl ForkEngine {
    /// Asks before anything is begun.
    pub(super) async fn ask_before_fork(
        &self,
        id: &str,
        parent: &str,
        request: &ForkRequest,
    ) -> Result<(), ForkError> {
        let data = json!({
            "fork": id, "parent": parent, "count": request.count, "nodes": request.nodes,
            "template": request.template.is_some(), "by_guest": self.guests.asked_for(id),
        });
        Ok(self.hooks.ask(self.of_parent(Own::BeforeFork, parent, data)).await?)
    }

    pub(super) fn tell_phase(&self, id: &str, parent: &str, phase: &str, left: &str) {
        if self.hooks.wants_own(Own::ForkPhase) {
            let data = json!({ "fork": id, "parent": parent, "phase": phase, "left": left });
            self.hooks.tell(self.of_parent(Own::ForkPhase, parent, data));
        }
    }

    pub(super) fn tell_end(&self, id: &str, parent: &str, ended: Result<&ForkReport, &ForkError>) {
        if !self.hooks.wants_own(Own::AfterFork) {
            return;
        }
        let data = match ended {
            Ok(report) => {
                let children: Vec<&str> = report.children.iter().map(|child| child.name.as_str()).collect();
                json!({ "fork": id, "parent": parent, "outcome": "done", "children": children, "report": report })
            }
            Err(error) => {
                json!({ "fork": id, "parent": parent, "outcome": "failed", "code": error.code(), "error": error.message() })
            }
        };
        self.hooks.tell(self.of_parent(Own::AfterFork, parent, data));
    }

    /// Asks for a child that was loaded and has not run yet.
    pub(super) async fn ask_child_start(
        &self,
        child: &Child,
        fork: &str,
        parent: &str,
    ) -> Result<(), CloneError> {
        let plan = &child.plan;
        let name = plan.name();
        let data = json!({
            "fork": fork, "parent": parent, "child": name, "child_index": plan.index,
            "child_dir": plan.layout.vm_dir, "child_pid": child.qemu.pid(),
            "child_uuid": plan.identity.uuid, "child_macs": plan.identity.macs,
        });
        let event = Event::own(Own::ChildStart, name, data).with_labels(child.record().labels());
        let forbidden = |why: ForbiddenByHook| CloneError::Hook { child: name.to_owned(), why };
        self.hooks.ask(event).await.map_err(forbidden)
    }

    fn of_parent(&self, own: Own, parent: &str, data: serde_json::Value) -> Event {
        // A template has none.
        let labels = self.registry.vms().get(parent).map(|record| record.labels()).unwrap_or_default();
        Event::own(own, parent, data).with_labels(labels)
    }

    /// Where a VM came from, if it is a child. Reads a file.
    #[must_use]
    pub fn child_of(&self, record: &VmRecord) -> Option<ChildOf> {
        let member = self.members.get(record)?;
        let parent = member.parent?;
        Some(ChildOf { parent, fork: member.fork, index: member.index })
    }
}
