//! Requests in their spellings, as texts.

use sched_bridge::model::ClusterName;
use sched_bridge::place::{Alternative, ClusterRequest, Compactness, VmGroup};
use sched_bridge::request::{Flavors, cluster, instance, lower, nova};

use crate::api::types::{RequestFormat, RequestText};

/// Reads a request. `name` is the cluster's, where the text has none; it wins where the text has one.
///
/// # Errors
/// What is wrong, where, and what was expected.
pub fn parse(text: &RequestText, name: Option<&ClusterName>) -> Result<ClusterRequest, String> {
    let flavors = Flavors::default();
    let said = |e: sched_bridge::request::RequestError| e.to_string();
    let file = |language| {
        let read = cluster::read(&text.text, language, &flavors, &nova::default_aliases()).map_err(said)?;
        Ok::<ClusterRequest, String>(read.request)
    };
    let mut request = match text.format {
        RequestFormat::Toml => file(cluster::Language::Toml)?,
        RequestFormat::Yaml => file(cluster::Language::Yaml)?,
        RequestFormat::Instance => {
            let expr = instance::parse(&text.text).map_err(said)?;
            alike(text.count, lower::alternatives(&expr, &flavors).map_err(said)?, name)?
        }
        RequestFormat::Flavor => {
            let flavor = nova::read(&text.text, &nova::default_aliases()).map_err(said)?;
            alike(text.count, lower::alternatives(&flavor.expr, &flavors).map_err(said)?, name)?
        }
    };
    if let Some(name) = name {
        request.name = name.clone();
    }
    Ok(request)
}

/// VMs that are all alike.
fn alike(
    count: u32,
    alternatives: Vec<Alternative>,
    name: Option<&ClusterName>,
) -> Result<ClusterRequest, String> {
    let name =
        name.ok_or("this spelling describes one VM and has no name: give the cluster one (--cluster)")?;
    Ok(ClusterRequest {
        name: name.clone(),
        groups: vec![VmGroup { name: "vm".to_owned(), count, alternatives }],
        compactness: Compactness::default(),
        anti_affinity: None,
        near: None,
        only_nodes: std::collections::BTreeSet::new(),
        not_nodes: std::collections::BTreeSet::new(),
    })
}
