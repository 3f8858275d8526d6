//! Requests as text, in any format.

use sched_bridge::model::ClusterName;
use sched_bridge::place::{Alternative, ClusterRequest, VmGroup};
use sched_bridge::request::{Catalog, RequestError, cluster, instance, lower, nova};

use vmove_bridge_types::request_text::{RequestFormat, RequestText};

/// A request that was read.
#[derive(Debug)]
pub struct Parsed {
    /// The request.
    pub request: ClusterRequest,
    /// What of the text is left to whoever starts the VMs.
    pub notes: Vec<String>,
}

/// Reads a request. The cluster is named `name`, or as the text says.
///
/// # Errors
/// What is wrong, where, and what was expected.
pub fn parse(text: &RequestText, name: Option<&ClusterName>, catalog: &Catalog) -> Result<Parsed, String> {
    let message = |e: RequestError| e.to_string();
    let file = |language| {
        let read = cluster::read(&text.text, language, catalog).map_err(message)?;
        Ok::<_, String>(Parsed { request: read.request, notes: read.notes })
    };
    let mut parsed = match text.format {
        RequestFormat::Toml => file(cluster::Language::Toml)?,
        RequestFormat::Yaml => file(cluster::Language::Yaml)?,
        RequestFormat::Instance => {
            let expr = instance::parse(&text.text, catalog).map_err(message)?;
            let alternatives = lower::alternatives(&expr, catalog).map_err(message)?;
            Parsed { request: equal_vms(text.count, alternatives, name)?, notes: Vec::new() }
        }
        RequestFormat::Flavor => {
            let flavor = nova::read(&text.text, catalog).map_err(message)?;
            let alternatives = lower::alternatives(&flavor.expr, catalog).map_err(message)?;
            Parsed { request: equal_vms(text.count, alternatives, name)?, notes: flavor.notes }
        }
    };
    if let Some(name) = name {
        parsed.request.name = name.clone();
    }
    Ok(parsed)
}

/// A cluster of equal VMs.
fn equal_vms(
    count: u32,
    alternatives: Vec<Alternative>,
    name: Option<&ClusterName>,
) -> Result<ClusterRequest, String> {
    let name = name.ok_or("this format describes one VM without a cluster: name the cluster (--cluster)")?;
    Ok(ClusterRequest::new(name.clone(), vec![VmGroup { name: "vm".to_owned(), count, alternatives }]))
}
