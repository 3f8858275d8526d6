//! Instance types, and what of a request would fit.

use sched_bridge::place::{Alternative, Nearest};
use sched_bridge::request::{Catalog, TypeText};
use vmove_bridge_types::types::{InstanceTypeInfo, TypeList};
use vmove_client::bridge::Bridge;

use crate::failure::Failure;
use crate::output::table;

/// A table of the instance types.
pub fn table_of(list: &TypeList) -> String {
    let row = |own: &InstanceTypeInfo| {
        let each = |text: fn(&Alternative) -> String| -> String {
            let mut texts: Vec<String> = own.alternatives.iter().map(text).collect();
            texts.dedup();
            texts.join(" or ")
        };
        vec![
            own.name.clone(),
            each(|need| need.vcpus.to_string()),
            each(|need| need.memory.to_string()),
            each(devices),
            own.request.clone(),
            own.file.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    };
    let rows: Vec<_> = list.types.iter().map(row).collect();
    table(&["TYPE", "CORES", "MEMORY", "DEVICES", "REQUEST", "FILE"], &rows)
}

fn devices(need: &Alternative) -> String {
    let each = need.devices.iter().map(|own| format!("{} {}", own.count, own.filter.kind.name()));
    let text = each.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "-".to_owned() } else { text }
}

/// With which changes a request would fit.
pub fn nearest(nearest: &Nearest) -> String {
    let mut out: String = nearest.fits.iter().map(|fit| format!("nearest: {}\n", fit.text)).collect();
    if nearest.fits.is_empty() {
        out.push_str("nearest: no single change of the request lets it fit\n");
    }
    if !nearest.complete {
        out.push_str(&format!(
            "nearest: the time was over after {} placements; there may be more\n",
            nearest.tried
        ));
    }
    out
}

/// What requests may name at a bridge.
pub async fn catalog(bridge: &Bridge) -> Result<Catalog, Failure> {
    let TypeList { types, keys, aliases } = bridge.types().await?;
    let text =
        |own: InstanceTypeInfo| (own.name, TypeText { request: own.request, description: own.description });
    Catalog::of(types.into_iter().map(text).collect(), keys, aliases).map_err(|mistakes| {
        Failure::bad_request(format!("this vmove cannot read the bridge's instance types: {mistakes}"))
    })
}
