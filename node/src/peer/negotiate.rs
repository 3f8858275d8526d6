//! Which fabric two nodes use with each other.

use vmove_fabric::FabricKind;

use super::link::FabricOffer;

/// What two nodes agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    /// Which.
    pub kind: FabricKind,
    /// For reports.
    pub why: String,
    /// Its address at the destination, where that is not the daemon's port.
    pub address: String,
    /// Both have tcp besides.
    pub may_fall_back: bool,
}

/// Why two nodes cannot exchange pages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoCommonFabric {
    /// No fabric can be used, each for a reason of its own.
    #[error("No common fabric: {}; see --fabric", .0.join("; "))]
    Refused(Vec<String>),
    /// What one side offers, the other does not.
    #[error("No common fabric: the source offers {}, the destination {}; see --fabric", list(.theirs), list(.ours))]
    Different {
        /// What the source offers.
        theirs: Vec<FabricKind>,
        /// What the destination offers.
        ours: Vec<FabricKind>,
    },
}

/// The best fabric that both sides offer and that, as far as they can tell, reaches from one to the other.
///
/// `theirs` is in the source's order of preference; the destination's `ours` limits it.
///
/// # Errors
/// [`NoCommonFabric`].
pub fn negotiate(theirs: &[FabricOffer], ours: &[FabricOffer]) -> Result<Agreed, NoCommonFabric> {
    let usable = |offers: &[FabricOffer], kind| offers.iter().any(|o| o.kind == kind && o.why_not.is_none());
    let both = |kind| usable(theirs, kind) && usable(ours, kind);
    let mut refused = Vec::new();
    for offer in theirs {
        let same_kind = ours.iter().find(|o| o.kind == offer.kind);
        let kind = offer.kind;
        match (&offer.why_not, same_kind) {
            (Some(why), _) => refused.push(format!("no {kind} at the source: {why}")),
            (None, None) => refused.push(format!("{kind} is not offered by the destination")),
            (None, Some(FabricOffer { why_not: Some(why), .. })) => {
                refused.push(format!("no {kind} at the destination: {why}"));
            }
            // Two daemons reach each other by `local` only on one running kernel.
            (None, Some(mine)) if mine.reach != offer.reach => refused.push(match kind {
                FabricKind::Verbs => {
                    format!(
                        "no verbs between {} at the source and {} at the destination",
                        offer.reach, mine.reach
                    )
                }
                _ => format!("{kind} does not reach the other host"),
            }),
            (None, Some(mine)) => {
                let best = match kind {
                    FabricKind::Verbs => format!("the best both sides have, {}", mine.reach),
                    _ => "the best both sides have".to_owned(),
                };
                let why = if refused.is_empty() { best } else { refused.join("; ") };
                let may_fall_back = kind != FabricKind::Tcp && both(FabricKind::Tcp);
                return Ok(Agreed { kind, why, address: mine.address.clone(), may_fall_back });
            }
        }
    }
    if theirs.iter().chain(ours).any(|o| o.why_not.is_some()) {
        return Err(NoCommonFabric::Refused(refused));
    }
    let kinds = |offers: &[FabricOffer]| offers.iter().map(|offer| offer.kind).collect();
    Err(NoCommonFabric::Different { theirs: kinds(theirs), ours: kinds(ours) })
}

fn list(kinds: &[FabricKind]) -> String {
    kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(kind: FabricKind, reach: &str) -> FabricOffer {
        FabricOffer { kind, reach: reach.to_owned(), address: format!("{kind}-address"), why_not: None }
    }

    #[test]
    fn local_is_used_on_one_host_only() {
        let a = [offer(FabricKind::Local, "boot-1"), offer(FabricKind::Tcp, "")];
        let b = [offer(FabricKind::Local, "boot-2"), offer(FabricKind::Tcp, "")];
        let same = negotiate(&a, &a).unwrap();
        assert_eq!((same.kind, same.address.as_str()), (FabricKind::Local, "local-address"));
        let other = negotiate(&a, &b).unwrap();
        assert_eq!(other.kind, FabricKind::Tcp);
        assert!(other.why.contains("does not reach"), "{}", other.why);
    }

    #[test]
    fn verbs_needs_a_device_on_both_sides_of_one_network() {
        let tcp = offer(FabricKind::Tcp, "");
        let roce = [offer(FabricKind::Verbs, "RoCE v2"), tcp.clone()];
        let infiniband = [offer(FabricKind::Verbs, "InfiniBand 1"), tcp.clone()];
        let none =
            FabricOffer { why_not: Some("this host has none".to_owned()), ..offer(FabricKind::Verbs, "") };
        let with = negotiate(&roce, &roce).unwrap();
        assert_eq!((with.kind, with.may_fall_back), (FabricKind::Verbs, true));
        let mixed = negotiate(&roce, &infiniband).unwrap();
        assert_eq!((mixed.kind, mixed.may_fall_back), (FabricKind::Tcp, false));
        assert!(mixed.why.contains("RoCE v2 at the source"), "{}", mixed.why);
        let without = negotiate(&roce, &[none.clone(), tcp]).unwrap();
        assert_eq!(without.kind, FabricKind::Tcp);
        assert!(without.why.contains("at the destination: this host has none"), "{}", without.why);
        // Asked for verbs alone: nothing to fall back to.
        let insisted = negotiate(&roce[..1], &roce).unwrap();
        assert_eq!((insisted.kind, insisted.may_fall_back), (FabricKind::Verbs, false));
        assert!(negotiate(&[none], &roce).unwrap_err().to_string().contains("this host has none"));
    }

    #[test]
    fn nothing_in_common_names_both_lists() {
        let why = negotiate(&[offer(FabricKind::Tcp, "")], &[offer(FabricKind::Local, "x")]).unwrap_err();
        let why = why.to_string();
        assert!(why.contains("tcp") && why.contains("local"), "{why}");
    }
}
