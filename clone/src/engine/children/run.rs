//! All children of a fork on this node: started, loaded, and then run.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_types::fork_report::{ChildReport, ForkReport};
use vmove_types::time::Mono;

use super::{Loaded, Planned, Start, words};
use crate::CloneError;
use crate::engine::ForkEngine;

/// What becomes of children that are loaded.
#[derive(Debug, Clone, Copy)]
pub struct Then {
    /// Their memory was compared with the template.
    pub verified: bool,
    /// They stay as they are.
    pub paused: bool,
}

impl ForkEngine {
    pub(in crate::engine) fn start_all(self: &Arc<Self>, id: &str, planned: Vec<Planned>) -> JoinSet<Start> {
        let mut tasks = JoinSet::new();
        for plan in planned {
            let (engine, id) = (self.clone(), id.to_owned());
            tasks.spawn(async move {
                let (index, name) = (plan.plan.index, plan.plan.name().to_owned());
                let prepared = engine.start_child(plan).await.map_err(|e| (index, name, e))?;
                engine.update(&id, |p| p.prepared += 1);
                Ok((prepared, false))
            });
        }
        tasks
    }

    pub(in crate::engine) fn lost(&self, index: u32, name: String, error: &CloneError) -> ChildReport {
        tracing::warn!(child = %name, error = %words(error), "a child did not come to be");
        ChildReport {
            name,
            index,
            node: self.node.clone(),
            network: "none".to_owned(),
            error: Some(words(error)),
            ..ChildReport::default()
        }
    }

    pub(in crate::engine) async fn run_all(
        self: &Arc<Self>,
        id: &str,
        loaded: Vec<(Loaded, bool)>,
        begun: Mono,
        then: Then,
        report: &mut ForkReport,
    ) {
        self.update(id, |p| p.phase = "run".to_owned());
        let mut running = JoinSet::new();
        for (mut child, was_prepared) in loaded {
            let (engine, id) = (self.clone(), id.to_owned());
            running.spawn(async move {
                let ran = if then.paused { Ok(None) } else { child.child.run().await.map(Some) };
                engine.update(&id, |p| p.running += usize::from(ran.is_ok()));
                engine.greet(child.child.plan.name(), matches!(ran, Ok(Some(_))));
                let network = match ran {
                    Ok(Some(_)) => child.child.bring_up_network().await,
                    Ok(None) => "off".to_owned(),
                    Err(_) => "none".to_owned(),
                };
                let plan = &child.child.plan;
                ChildReport {
                    name: plan.name().to_owned(),
                    index: plan.index,
                    node: engine.node.clone(),
                    qmp: plan.layout.qmp_socket.display().to_string(),
                    pid: child.child.record().pid,
                    running_ms: ran.as_ref().ok().copied().flatten().map(|at| at.ms_since(begun)),
                    warm: was_prepared,
                    verified: then.verified.then_some(true),
                    written_while_loading: child.written_while_loading,
                    network,
                    nics: plan.nic_report(),
                    devices: Vec::new(),
                    resume_problem: None,
                    error: ran.err().map(|error| words(&error)),
                }
            });
        }
        let mut ended = Vec::new();
        while let Some(child) = running.join_next().await {
            match child {
                Ok(child) => ended.push(child),
                Err(error) => tracing::error!(%error, "a task that runs a child failed"),
            }
        }
        for child in ended.iter().filter(|child| child.error.is_some()) {
            // It may have run: it is ended like any VM.
            if let Err(error) = self.registry.stop(&child.name, true).await {
                tracing::error!(child = %child.name, %error, "could not end a child that did not run");
            }
        }
        report.all_running_ms = ended.iter().filter_map(|child| child.running_ms).fold(0.0, f64::max);
        report.children.extend(ended);
    }
}
