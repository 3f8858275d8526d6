//! Requests in their spellings, as texts.

use sched_bridge::model::ClusterName;
use sched_bridge::place::ClusterRequest;

use crate::api::types::RequestText;

/// Reads a request. `name` is the cluster's, where the text has none.
///
/// # Errors
/// What is wrong, where, and what was expected.
pub fn parse(text: &RequestText, name: Option<&ClusterName>) -> Result<ClusterRequest, String> {
    let _ = name;
    Err(format!("{:?} is not read yet", text.format))
}
