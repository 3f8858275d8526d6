//! Which fabric two nodes use with each other.

use vmove_fabric::FabricKind;

use crate::link::FabricOffer;

/// The best fabric that both sides offer and that reaches from one to the other: (kind, why, its address here).
///
/// `theirs` is in the source's order of preference; the destination's `ours` limits it.
pub(crate) fn negotiate(
    theirs: &[FabricOffer],
    ours: &[FabricOffer],
) -> Result<(FabricKind, String, String), String> {
    let mut refused = Vec::new();
    for offer in theirs {
        let same_kind = ours.iter().find(|o| o.kind == offer.kind);
        match same_kind {
            None => refused.push(format!("{} is not offered by the destination", offer.kind)),
            // Two daemons reach each other by `local` only on one running kernel.
            Some(mine) if mine.reach != offer.reach => {
                refused.push(format!("{} does not reach the other host", offer.kind));
            }
            Some(mine) => {
                let why = if refused.is_empty() {
                    "the best both sides have".to_owned()
                } else {
                    refused.join("; ")
                };
                return Ok((offer.kind, why, mine.address.clone()));
            }
        }
    }
    let words =
        |offers: &[FabricOffer]| offers.iter().map(|o| o.kind.to_string()).collect::<Vec<_>>().join(", ");
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
        FabricOffer { kind, reach: reach.to_owned(), address: format!("{kind}-address") }
    }

    #[test]
    fn local_is_used_on_one_host_only() {
        let a = [offer(FabricKind::Local, "boot-1"), offer(FabricKind::Tcp, "")];
        let b = [offer(FabricKind::Local, "boot-2"), offer(FabricKind::Tcp, "")];
        let (kind, _, address) = negotiate(&a, &a).unwrap();
        assert_eq!((kind, address.as_str()), (FabricKind::Local, "local-address"));
        let (kind, why, _) = negotiate(&a, &b).unwrap();
        assert_eq!(kind, FabricKind::Tcp);
        assert!(why.contains("does not reach"), "{why}");
    }

    #[test]
    fn nothing_in_common_names_both_lists() {
        let why = negotiate(&[offer(FabricKind::Tcp, "")], &[offer(FabricKind::Local, "x")]).unwrap_err();
        assert!(why.contains("tcp") && why.contains("local"), "{why}");
    }
}
