//! Requests as text, in any format.

use sched_bridge::model::ClusterName;
use sched_bridge::place::{Alternative, ClusterRequest, VmGroup};
use sched_bridge::request::{Flavors, cluster, instance, lower, nova};

use vmove_bridge_types::request_text::{RequestFormat, RequestText};

/// Reads a request. The cluster is named `name`, or as the text says.
///
/// # Errors
/// What is wrong, where, and what was expected.
pub fn parse(text: &RequestText, name: Option<&ClusterName>) -> Result<ClusterRequest, String> {
    let flavors = Flavors::default();
    let message = |e: sched_bridge::request::RequestError| e.to_string();
    let file = |language| {
        let read =
            cluster::read(&text.text, language, &flavors, &nova::default_aliases()).map_err(message)?;
        Ok::<ClusterRequest, String>(read.request)
    };
    let mut request = match text.format {
        RequestFormat::Toml => file(cluster::Language::Toml)?,
        RequestFormat::Yaml => file(cluster::Language::Yaml)?,
        RequestFormat::Instance => {
            let expr = instance::parse(&text.text).map_err(message)?;
            equal_vms(text.count, lower::alternatives(&expr, &flavors).map_err(message)?, name)?
        }
        RequestFormat::Flavor => {
            let flavor = nova::read(&text.text, &nova::default_aliases()).map_err(message)?;
            equal_vms(text.count, lower::alternatives(&flavor.expr, &flavors).map_err(message)?, name)?
        }
    };
    if let Some(name) = name {
        request.name = name.clone();
    }
    Ok(request)
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
