//! A host's children: all of them come to be, or none.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_clone::record::Member;
use vmove_clone::report::ForkReport;
use vmove_migrate::clock::{Mono, ms};

use super::message::Order;
use crate::api::problem::{Code, Problem};
use crate::server::forks::Forks;
use crate::server::forks::children::LoadOrder;
use crate::server::forks::create::Start;

/// Loads and runs the children of an order whose QEMUs are being started.
pub(super) async fn make(
    forks: Arc<Forks>,
    order: Arc<Order>,
    load: LoadOrder,
    cold: JoinSet<Start>,
    begun: Mono,
) -> Result<ForkReport, Problem> {
    let mut report =
        ForkReport { id: order.fork.clone(), parent: order.parent.clone(), ..ForkReport::default() };
    let loaded = forks.load_all(&order.fork, Vec::new(), cold, &Arc::new(load), &mut report).await;
    let complete =
        report.children.iter().all(|child| child.error.is_none()) && loaded.len() == order.indexes.len();
    let names: Vec<String> = loaded.iter().map(|(child, _)| child.child.plan.name().to_owned()).collect();
    if complete {
        forks.run_all(&order.fork, loaded, begun, order.verify, &mut report).await;
    }
    let failed =
        report.children.iter().find_map(|child| Some(format!("{}: {}", child.name, child.error.as_ref()?)));
    if complete && failed.is_none() {
        report.children.sort_by_key(|child| child.index);
        report.complete_ms = ms(Mono::now().since(begun));
        return Ok(report);
    }
    for name in &names {
        match forks.registry.stop(name, true).await {
            Ok(_) => {}
            Err(problem) if problem.code == Code::UnknownVm => {}
            Err(problem) => {
                tracing::error!(child = %name, %problem, "could not end a child whose sibling did not come to be");
            }
        }
    }
    forget(&forks, &order, &report, &names);
    let failed = failed.unwrap_or_else(|| "a task failed: see the log of vmoved there".to_owned());
    Err(Problem::new(Code::ForkFailed, format!("a child did not come to be, so none is there: {failed}")))
}

/// Children that never ran are no members.
fn forget(forks: &Forks, order: &Order, report: &ForkReport, names: &[String]) {
    for name in report.children.iter().map(|child| &child.name).chain(names) {
        let of_this = |member: &Member| member.vm == *name && member.fork == order.fork;
        if forks.members.list().iter().any(of_this) {
            let _ = forks.members.remove(name);
        }
    }
}
