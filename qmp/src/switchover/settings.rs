//! Migration capabilities and parameters: set for a switch-over, put back when the guest stays.
//!
//! Putting back matters: a guest left with `x-ignore-shared` would lose its memory in the next ordinary migration by
//! someone else's tool.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::SwitchoverError;
use crate::{Client, client::COMMAND_TIMEOUT};

/// Values by name.
pub(super) type Capabilities = BTreeMap<&'static str, bool>;

/// What was set before us.
#[derive(Clone, Debug, Default)]
pub(super) struct Saved {
    capabilities: BTreeMap<String, bool>,
    parameters: serde_json::Map<String, Value>,
}

impl Saved {
    /// QEMU's defaults of what a source sets, where nobody remembers what was there.
    pub(super) fn defaults() -> Self {
        let off = ["x-ignore-shared", "pause-before-switchover"].map(|name| (name.to_owned(), false));
        let bandwidth = ("max-bandwidth".to_owned(), (128u64 << 20).into());
        Self { capabilities: off.into(), parameters: [bandwidth].into_iter().collect() }
    }
}

/// Sets capabilities and parameters; returns what they were.
pub(super) async fn apply(
    client: &Client,
    capabilities: &Capabilities,
    parameters: &serde_json::Map<String, Value>,
) -> Result<Saved, SwitchoverError> {
    let saved = Saved {
        capabilities: current_capabilities(client).await?,
        parameters: current_parameters(client, parameters).await?,
    };
    for (name, wanted) in capabilities {
        if *wanted && !saved.capabilities.contains_key(*name) {
            let version = client.version().to_string();
            return Err(SwitchoverError::NoCapability { capability: name, version });
        }
    }
    // Everything else off: multifd, postcopy or compression left on by a tool would change the stream.
    let all: BTreeMap<String, bool> = saved
        .capabilities
        .keys()
        .map(|name| (name.clone(), capabilities.get(name.as_str()).copied().unwrap_or(false)))
        .collect();
    set_capabilities(client, &saved.capabilities, &all).await?;
    client
        .execute_raw("migrate-set-parameters", Value::Object(parameters.clone()), COMMAND_TIMEOUT)
        .await
        .map_err(SwitchoverError::at("setting migration parameters"))?;
    Ok(saved)
}

/// Puts everything back.
pub(super) async fn restore(client: &Client, saved: &Saved) -> Result<(), SwitchoverError> {
    let now = current_capabilities(client).await?;
    set_capabilities(client, &now, &saved.capabilities).await?;
    if !saved.parameters.is_empty() {
        client
            .execute_raw("migrate-set-parameters", Value::Object(saved.parameters.clone()), COMMAND_TIMEOUT)
            .await
            .map_err(SwitchoverError::at("restoring migration parameters"))?;
    }
    Ok(())
}

/// Sends only what differs: QEMU refuses some capabilities by their mere mention on some machines.
pub(super) async fn set_capabilities(
    client: &Client,
    now: &BTreeMap<String, bool>,
    wanted: &BTreeMap<String, bool>,
) -> Result<(), SwitchoverError> {
    let list: Vec<Value> = wanted
        .iter()
        .filter(|(name, state)| now.get(*name).is_some_and(|now| now != *state))
        .map(|(name, state)| json!({ "capability": name, "state": state }))
        .collect();
    if list.is_empty() {
        return Ok(());
    }
    client
        .execute_raw("migrate-set-capabilities", json!({ "capabilities": list }), COMMAND_TIMEOUT)
        .await
        .map(drop)
        .map_err(SwitchoverError::at("setting migration capabilities"))
}

pub(super) async fn current_capabilities(client: &Client) -> Result<BTreeMap<String, bool>, SwitchoverError> {
    let reply = client
        .execute_raw("query-migrate-capabilities", Value::Null, COMMAND_TIMEOUT)
        .await
        .map_err(SwitchoverError::at("asking for migration capabilities"))?;
    let one = |entry: &Value| {
        let name = entry.get("capability")?.as_str()?.to_owned();
        Some((name, entry.get("state")?.as_bool()?))
    };
    Ok(reply.as_array().map(|all| all.iter().filter_map(one).collect()).unwrap_or_default())
}

async fn current_parameters(
    client: &Client,
    wanted: &serde_json::Map<String, Value>,
) -> Result<serde_json::Map<String, Value>, SwitchoverError> {
    let reply = client
        .execute_raw("query-migrate-parameters", Value::Null, COMMAND_TIMEOUT)
        .await
        .map_err(SwitchoverError::at("asking for migration parameters"))?;
    let Value::Object(mut all) = reply else {
        return Ok(serde_json::Map::new());
    };
    all.retain(|name, _| wanted.contains_key(name));
    Ok(all)
}
