//! A host's children: all of them come to be, or none.

use std::sync::Arc;

use crate::record::Member;
use tokio::task::JoinSet;
use vmove_types::fork_report::ForkReport;
use vmove_types::time::{Mono, ms};

use crate::engine::ForkEngine;
use crate::engine::children::{LoadOrder, Start, Then};
use crate::engine::error::ForkError;
use crate::engine::message::Order;
use vmove_types::problem::Code;

/// Loads and runs the children of an order whose QEMUs are being started.
pub(super) async fn make_children(
    engine: Arc<ForkEngine>,
    order: Arc<Order>,
    load: LoadOrder,
    starting: JoinSet<Start>,
    begun: Mono,
) -> Result<ForkReport, ForkError> {
    let mut report =
        ForkReport { id: order.fork.clone(), parent: order.parent.clone(), ..ForkReport::default() };
    let loaded = engine.load_all(&order.fork, Vec::new(), starting, &Arc::new(load), &mut report).await;
    let (loaded, lost) = engine.meet(&order.fork, loaded).await;
    report.children.extend(lost.into_iter().map(|(index, name, error)| engine.lost(index, name, &error)));
    let complete =
        report.children.iter().all(|child| child.error.is_none()) && loaded.len() == order.indexes.len();
    let names: Vec<String> = loaded.iter().map(|(child, _)| child.child.plan.name().to_owned()).collect();
    if complete {
        let then = Then { verified: order.verify, paused: false };
        engine.run_all(&order.fork, loaded, begun, then, &mut report).await;
    }
    let failed =
        report.children.iter().find_map(|child| Some(format!("{}: {}", child.name, child.error.as_ref()?)));
    if complete && failed.is_none() {
        engine.guests.made(&order.fork);
        report.children.sort_by_key(|child| child.index);
        report.complete_ms = ms(Mono::now().since(begun));
        return Ok(report);
    }
    for name in &names {
        match engine.registry.stop(name, true).await {
            Ok(_) => {}
            Err(error) if error.code() == Code::UnknownVm => {}
            Err(error) => {
                tracing::error!(child = %name, %error, "could not end a child whose sibling did not come to be");
            }
        }
    }
    forget(&engine, &order, &report, &names);
    let failed = failed.unwrap_or_else(|| "a task failed: see the log of vmoved there".to_owned());
    Err(ForkError::ChildFailed(failed))
}

/// Children that never ran are no members.
fn forget(engine: &ForkEngine, order: &Order, report: &ForkReport, names: &[String]) {
    for name in report.children.iter().map(|child| &child.name).chain(names) {
        let of_this = |member: &Member| member.vm == *name && member.fork == order.fork;
        if engine.members.list().iter().any(of_this) {
            let _ = engine.members.remove(name);
        }
    }
}
