//! `/v1/types`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use sched_bridge::request::lower;
use vmove_bridge_types::types::{InstanceTypeInfo, TypeList};

use super::App;

/// The instance types, keys and aliases that requests may name.
#[utoipa::path(get, path = "/v1/types", operation_id = "listTypes", tag = "leases", responses((status = 200, body = TypeList)))]
pub async fn list(State(app): State<Arc<App>>) -> axum::Json<TypeList> {
    let catalog = app.types.current();
    let types = catalog.types().iter().map(|(name, own)| InstanceTypeInfo {
        name: name.clone(),
        request: own.text.request.clone(),
        description: own.text.description.clone(),
        file: own.file.clone(),
        // They were checked when they were read.
        alternatives: lower::of_type(&catalog, name).unwrap_or_default(),
    });
    let types = types.collect();
    let keys: BTreeMap<_, _> =
        catalog.keys().map(|(name, text, _)| (name.to_owned(), text.clone())).collect();
    let aliases = catalog.aliases().map(|(name, text, _)| (name.to_owned(), text.clone())).collect();
    axum::Json(TypeList { types, keys, aliases })
}
