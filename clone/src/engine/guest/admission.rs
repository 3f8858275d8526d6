//! Whether a guest may have the children that it asks for: how deep they are, and what it and all guests have already.

use vmove_types::problem::Code;

use super::family::Family;
use super::limit::{Share, admit, taken};
use super::line::Refusal;
use crate::engine::ForkEngine;
use crate::record::{Lineage, Member};

impl ForkEngine {
    /// Where children of this VM come from, if its guest asks for some.
    pub(super) fn below(&self, vm: &str) -> Result<Lineage, Refusal> {
        let record = self.registry.vms().get(vm).ok();
        let member = record.and_then(|record| self.members.get(&record)).filter(|member| member.by_guest);
        let own =
            member.map_or_else(|| Lineage { root: self.as_root(vm), depth: 0 }, |m| self.lineage_of(&m));
        let below = Lineage { depth: own.depth.saturating_add(1), ..own };
        self.not_too_deep(&below)?;
        Ok(below)
    }

    fn as_root(&self, vm: &str) -> String {
        format!("{}/{vm}", self.node)
    }

    /// Children of earlier releases are those of a guest that was no child itself.
    fn lineage_of(&self, member: &Member) -> Lineage {
        let first =
            || Lineage { root: self.as_root(member.parent.as_deref().unwrap_or(&member.vm)), depth: 1 };
        member.lineage.clone().unwrap_or_else(first)
    }

    /// Refuses children deeper than this host lets guests fork themselves.
    pub(super) fn not_too_deep(&self, children: &Lineage) -> Result<(), Refusal> {
        let most = self.policy.from_guest_max_depth;
        if children.depth <= most {
            return Ok(());
        }
        let text = match most {
            1 => "a child cannot fork itself".to_owned(),
            _ => format!("a child of depth {most} cannot fork itself: this host lets guests fork no deeper"),
        };
        Err(Refusal::new(Code::Forbidden, text))
    }

    /// Guest memory of a VM that is here, in bytes.
    pub(super) fn memory_of(&self, vm: &str) -> u64 {
        self.memory_if_here(vm).unwrap_or_default()
    }

    fn memory_if_here(&self, vm: &str) -> Option<u64> {
        let record = self.registry.vms().get(vm).ok()?;
        Some(record.ram.iter().map(|ram| ram.size).sum())
    }

    /// Whether this node lets a guest have `count` children, of which `here` are to be on it, with `bytes` of guest memory each. Ask one
    /// after the other, with each ticket entered before the next question.
    pub(super) fn admit_guests(
        &self,
        lineage: &Lineage,
        count: usize,
        (vm, here, bytes): (&str, usize, u64),
    ) -> Result<Share, Refusal> {
        // First: a fork that ends meanwhile is then counted as under way, and not left out.
        let (under_way, same_root, elsewhere) = {
            let state = self.guests.lock();
            let of_root = |lineage_of: &Lineage| lineage_of.root == lineage.root;
            let making = || state.families.iter().filter_map(|(id, f)| Some((id, f, f.under_way?)));
            let under_way: Vec<_> = making().map(|(id, _, share)| (id.clone(), share)).collect();
            let same: usize =
                making().filter(|(_, f, _)| of_root(&f.record.lineage)).map(|(_, f, _)| f.asked).sum();
            let made =
                state.families.values().filter(|f| f.under_way.is_none() && of_root(&f.record.lineage));
            (under_way, same, made.map(Family::living_elsewhere).sum::<usize>())
        };
        let members = self.members.list();
        let settled = members
            .iter()
            .filter(|m| m.by_guest && m.node.is_none() && under_way.iter().all(|(id, _)| *id != m.fork));
        let of_root = settled.filter(|m| self.lineage_of(m).root == lineage.root);
        let living = of_root.filter(|m| self.memory_if_here(&m.vm).is_some()).count() + same_root + elsewhere;
        let most = self.policy.max_children;
        if count > most.saturating_sub(living) {
            let text = format!("{count} children were asked for and {living} live, {most} are allowed");
            return Err(Refusal::new(Code::Forbidden, text));
        }
        let asked = Share::of(here, bytes);
        let taken = taken(&under_way, &members, |vm| self.memory_if_here(vm));
        admit(&self.policy, taken, asked).map(|()| asked).inspect_err(|refusal| {
            tracing::warn!(vm = %vm, count = here, taken = taken.children, taken_mib = taken.bytes >> 20,
                why = %refusal.line(), "a guest may not fork itself as it asked");
        })
    }
}
