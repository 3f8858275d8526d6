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

/// The best fabric that both sides offer and that, as far as they can tell, reaches from one to the other.
///
/// `theirs` is in the source's order of preference; the destination's `ours` limits it.
///
/// # Errors
/// Why there is none, in words.
pub fn negotiate(theirs: &[FabricOffer], ours: &[FabricOffer]) -> Result<Agreed, String> {
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
    let words =
        |offers: &[FabricOffer]| offers.iter().map(|o| o.kind.to_string()).collect::<Vec<_>>().join(", ");
    if theirs.iter().chain(ours).any(|o| o.why_not.is_some()) {
        return Err(format!("No common fabric: {}; see --fabric", refused.join("; ")));
    }
    Err(format!(
        "No common fabric: the source offers {}, the destination {}; see --fabric",
        words(theirs),
        words(ours)
    ))
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
        assert!(negotiate(&[none], &roce).unwrap_err().contains("this host has none"));
    }

    #[test]
    fn nothing_in_common_names_both_lists() {
        let why = negotiate(&[offer(FabricKind::Tcp, "")], &[offer(FabricKind::Local, "x")]).unwrap_err();
        assert!(why.contains("tcp") && why.contains("local"), "{why}");
    }
}
