//! Requests in their spellings, as texts.

use sched_bridge::model::ClusterName;
use sched_bridge::place::ClusterRequest;

use crate::api::types::{RequestFormat, RequestText};

/// Reads a request. `name` is the cluster's, where the text has none.
///
/// # Errors
/// What is wrong, where, and what was expected.
pub fn parse(text: &RequestText, name: Option<&ClusterName>) -> Result<ClusterRequest, String> {
    let mut request: ClusterRequest = match text.format {
        RequestFormat::Toml => toml::from_str(&text.text).map_err(|e| e.to_string())?,
        RequestFormat::Yaml => serde_yaml_ng::from_str(&text.text).map_err(|e| e.to_string())?,
        other => {
            return Err(format!(
                "{other:?} is not read by this version: give the virtual cluster as TOML or YAML"
            ));
        }
    };
    if let Some(name) = name {
        request.name = name.clone();
    }
    Ok(request)
}
