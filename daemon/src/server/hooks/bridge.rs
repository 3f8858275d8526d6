//! Moves a VM to where the bridge says: by a plan that empties this node.

use std::path::PathBuf;
use std::sync::Arc;

use vmove_bridge_types::plan::{PlanRequest, PlanState, StepState};
use vmove_client::Endpoint;
use vmove_client::bridge::Bridge;
use vmove_hooks::{ActError, Order};
use vmove_types::problem::chain;

use crate::config::BridgeConfig;
use crate::server::App;

/// Plans of one node contradict each other: one at a time.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Has the bridge plan where the VMs of this node go, and carry that out: all of them, since a place is one only beside the others.
pub async fn migrate(app: &Arc<App>, order: &Order) -> Result<String, ActError> {
    let failed = |why: String| ActError::Failed(why);
    let config = app.config.bridge.as_ref().ok_or_else(|| failed("there is no [bridge]".to_owned()))?;
    let bridge = connect(config).await.map_err(|error| failed(chain(&error)))?;
    let _turn = TURN.lock().await;
    if app.registry.vms().get(&order.vm).is_err() {
        return Ok("the bridge has moved it already, with the others".to_owned());
    }
    let node = config.node.clone().unwrap_or_else(|| app.config.node.clone());
    let told = |error: vmove_client::bridge::Error| failed(format!("the bridge: {}", chain(&error)));
    let plan = bridge.make_plan(&PlanRequest::Evacuate { node }).await.map_err(told)?;
    let is_ours = |vm: &str| vm == order.vm;
    if !plan.steps.iter().any(|step| is_ours(step.vm.as_str())) {
        let notes = if plan.notes.is_empty() {
            "no lease of it has this VM".to_owned()
        } else {
            plan.notes.join("; ")
        };
        return Err(failed(format!("the bridge has no place for {:?}: {notes}", order.vm)));
    }
    let ended = bridge.run_plan(plan.id.as_str()).await.map_err(told)?;
    let step = ended.steps.iter().rfind(|step| is_ours(step.vm.as_str()));
    match (step.map(|step| (&step.state, step)), &ended.state) {
        (Some((StepState::Done { total_ms, downtime_us }, step)), _) => Ok(format!(
            "moved to {} in {total_ms} ms, paused for {downtime_us} us (plan {})",
            step.to.node,
            ended.id.as_str()
        )),
        (Some((StepState::Failed { reason }, _)), _) | (_, PlanState::Stopped { reason }) => {
            Err(failed(reason.clone()))
        }
        _ => Err(failed(format!("plan {} has not moved it: see `vmove plan show`", ended.id.as_str()))),
    }
}

/// Why the bridge cannot be asked at all.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("bridge.at")]
    Endpoint(#[source] vmove_http::client::BadEndpoint),
    #[error("could not read {}", path.display())]
    Token { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Authority(vmove_client::bridge::TlsError),
}

async fn connect(config: &BridgeConfig) -> Result<Bridge, ConnectError> {
    let endpoint: Endpoint = config.at.parse().map_err(ConnectError::Endpoint)?;
    let token = match &config.token_file {
        Some(path) => {
            let read = tokio::fs::read_to_string(path).await;
            Some(read.map_err(|source| ConnectError::Token { path: path.clone(), source })?)
        }
        None => None,
    };
    let bridge = Bridge::connect(endpoint, token.as_deref().map(str::trim));
    match &config.ca {
        Some(ca) => bridge.with_authority(ca).map_err(ConnectError::Authority),
        None => Ok(bridge),
    }
}
