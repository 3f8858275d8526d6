//! What guests that fork themselves may take of this host, all of them together. What an operator forks does not count.

use vmove_types::problem::Code;

use super::line::Refusal;
use crate::engine::ForkPolicy;
use crate::record::Member;
use crate::room::QEMU_BYTES;

/// Children, and the memory that they may come to hold: each may write all of its memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    pub children: usize,
    /// Guest memory, and QEMU itself. Bytes.
    pub bytes: u64,
}

impl Share {
    /// Of so many children with so much guest memory each.
    pub fn of(children: usize, guest_bytes: u64) -> Self {
        let count = u64::try_from(children).unwrap_or(u64::MAX);
        Self { children, bytes: guest_bytes.saturating_add(QEMU_BYTES).saturating_mul(count) }
    }

    fn and(self, other: Self) -> Self {
        let children = self.children.saturating_add(other.children);
        Self { children, bytes: self.bytes.saturating_add(other.bytes) }
    }
}

/// What is taken: by forks under way, each with its id and what was asked for, and by the children of all others that live. `lives` gives a
/// VM's guest memory in bytes, if it is here.
pub fn taken(
    under_way: &[(String, Share)],
    members: &[Member],
    lives: impl Fn(&str) -> Option<u64>,
) -> Share {
    let asked = under_way.iter().fold(Share::default(), |sum, (_, share)| sum.and(*share));
    // Those that are there already are among those that were asked for.
    let settled = members.iter().filter(|m| m.by_guest && under_way.iter().all(|(id, _)| *id != m.fork));
    settled.filter_map(|m| lives(&m.vm)).fold(asked, |sum, bytes| sum.and(Share::of(1, bytes)))
}

/// Refuses what is more than is left. A guest is told the limit, but not what others have of it.
pub fn admit(policy: &ForkPolicy, taken: Share, asked: Share) -> Result<(), Refusal> {
    let sum = taken.and(asked);
    let most = policy.from_guest_max_children.unwrap_or(policy.max_children);
    if sum.children > most {
        let text = format!(
            "{} children were asked for, and this host lets all guests together have {most}: ask for fewer, or join or kill some",
            asked.children
        );
        return Err(Refusal::new(Code::Forbidden, text));
    }
    let Some(mib) = policy.from_guest_max_mib else { return Ok(()) };
    if sum.bytes > mib.saturating_mul(1 << 20) {
        let text = format!(
            "{} children may take {} MiB, and this host lets the children of all guests together have {mib} MiB: ask for fewer, or join or kill some",
            asked.children,
            asked.bytes.div_ceil(1 << 20)
        );
        return Err(Refusal::new(Code::Forbidden, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn member(vm: &str, fork: &str, by_guest: bool) -> Member {
        Member {
            vm: vm.to_owned(),
            pid: 1,
            pid_start: 1,
            parent: Some("web".to_owned()),
            index: 1,
            fork: fork.to_owned(),
            node: None,
            private: Vec::new(),
            stopped_to_move: false,
            by_guest,
            lineage: None,
        }
    }

    fn policy(children: Option<usize>, mib: Option<u64>) -> ForkPolicy {
        ForkPolicy {
            max_children: 5,
            from_guest_max_children: children,
            from_guest_max_mib: mib,
            ..ForkPolicy::default()
        }
    }

    #[test]
    fn children_of_all_guests_count_and_those_of_operators_do_not() {
        let members = [
            member("web.1", "f1", true),
            member("web.2", "f1", true),
            member("db.1", "f2", true),
            member("db.2", "by-hand", false),
            member("gone.1", "f3", true),
        ];
        let lives = |vm: &str| (vm != "gone.1").then_some(96 * MIB);
        assert_eq!(taken(&[], &members, lives), Share::of(3, 96 * MIB));
        // One child of f2 is there and another is on its way.
        let under_way = [("f2".to_owned(), Share::of(2, 96 * MIB))];
        assert_eq!(taken(&under_way, &members, lives), Share::of(4, 96 * MIB));
    }

    #[test]
    fn all_guests_together_get_no_more_than_the_host_gives() {
        let refused = |policy: &ForkPolicy, taken, asked| {
            admit(policy, taken, asked).unwrap_err().line()["message"].as_str().unwrap().to_owned()
        };
        let (two, three) = (Share::of(2, 96 * MIB), Share::of(3, 96 * MIB));
        // As many as one guest may have, unless said otherwise.
        admit(&policy(None, None), two, three).unwrap();
        let said = refused(&policy(None, None), three, three);
        assert!(said.contains("3 children") && said.contains("all guests together have 5"), "{said}");
        admit(&policy(Some(6), None), three, three).unwrap();
        let said = refused(&policy(Some(4), None), two, three);
        assert!(said.contains("all guests together have 4"), "{said}");
        // 128 MiB each, with QEMU.
        admit(&policy(None, Some(640)), two, three).unwrap();
        let said = refused(&policy(None, Some(639)), two, three);
        assert!(said.contains("may take 384 MiB") && said.contains("have 639 MiB"), "{said}");
    }
}
