//! Whether a guest that is to read data of another node goes there: what is known is looked up, and each way computed.

use std::sync::Arc;

use super::error::SourceError;
use super::promised::{Known, free_link, look_ahead};
use crate::node::Node;
use crate::promise::reads::{self, Brought, NEAR, Reads, Ways};
use vmove_node::record::VmRecord;
use vmove_types::choice::{Choice, ReadsCost};
use vmove_types::promise::Promise;
use vmove_types::spec::{MigrationSpec, Mode};
use vmove_types::units::{format_bytes, format_rate, to_f64};

/// Watches a guest, and says which way is the cheapest. `no_visit`: why it could not visit.
///
/// # Errors
/// Its memory cannot be looked at.
pub(crate) async fn choose(
    node: &Arc<Node>,
    vm: &VmRecord,
    (to, spec): (&str, &MigrationSpec),
    bytes: u64,
    no_visit: Option<&str>,
) -> Result<Choice, SourceError> {
    let known = look_ahead(node, vm, (to, spec), true).await?;
    let promise = known.promise(spec, &[Mode::Precopy, Mode::Hybrid, Mode::Postcopy]).ok();
    Ok(choose_by(node, vm, (to, spec), bytes, (&known, promise.as_ref()), no_visit))
}

/// The same of a guest that was watched. `promise`: of a migration.
pub(super) fn choose_by(
    node: &Node,
    vm: &VmRecord,
    (to, spec): (&str, &MigrationSpec),
    bytes: u64,
    (known, promise): (&Known, Option<&Promise>),
    no_visit: Option<&str>,
) -> Choice {
    let link = free_link(node, to);
    let near = spec.reads_near_bytes_per_s;
    let reads = Reads {
        bytes: to_f64(bytes),
        near_bytes_per_s: near.map_or(NEAR, to_f64),
        link_bytes_per_s: link.bytes_per_s,
    };
    let brought = node.past.brought_by_visits(&vm.name);
    let ways = Ways {
        outlook: &known.outlook,
        brought: brought.map(|(there, back)| Brought { there: to_f64(there), back: to_f64(back) }),
        visits: no_visit.is_none(),
        migration: promise.map(|one| ReadsCost { time_ms: one.time_ms, link_bytes: one.sent_bytes }),
    };
    let near_is = if near.is_some() { "as was said" } else { "assumed" };
    let mut basis = format!(
        "{}; reading it there {} ({near_is}), from afar {:.0} % of the link at most",
        link.told(),
        format_rate(reads.near_bytes_per_s),
        reads::FAR_SHARE * 100.0
    );
    basis.push_str(&match (no_visit, brought) {
        (Some(why), _) => format!("; no visit is possible: {why}"),
        (None, Some((there, back))) => {
            format!("; its visits have brought {} there and {} back", format_bytes(there), format_bytes(back))
        }
        (None, None) => "; no visit of it is remembered, so what it touches is assumed".to_owned(),
    });
    basis.push_str(&format!("; a migration: {}", known.basis));
    reads::choose(&reads, &ways, basis)
}
