//! Children that run before their template is whole: a page service answers what they touch, the distribution brings it first.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use vmove_clone::report::ForkReport;
use vmove_clone::service::{self, Chunks, PageService};
use vmove_clone::template::{Arriving, Manifest};
use vmove_migrate::clock::{Mono, ms};
use vmove_qmp::RamBacking;
use vmove_spread::{Host, HostStatus};

use super::host::{Part, discard};
use super::make::make;
use super::memory::{Part as Piece, part_at};
use super::message::Begin;
use crate::api::problem::{Code, Problem, chain};
use crate::server::forks::Forks;
use crate::server::forks::children::LoadOrder;
use crate::server::forks::create::Start;
use crate::server::forks::problem::clone_problem;
use crate::server::registry::off_worker;

/// How often it is looked whether a child could not be served.
const LOOK: Duration = Duration::from_millis(250);

/// What is at work beside the distribution.
struct Making {
    service: Arc<PageService>,
    task: JoinHandle<Result<ForkReport, Problem>>,
    /// What came of the task, once it has ended.
    made: Option<Result<ForkReport, Problem>>,
}

impl Making {
    /// Waits until the children run, or none of them is there.
    async fn made(self) -> Result<ForkReport, Problem> {
        match self.made {
            Some(made) => made,
            None => joined(self.task.await),
        }
    }
}

impl Part {
    /// Whether children are to run before all of their memory is there. With huge pages of hugetlbfs a fault would wait for 2 MiB at
    /// least; what is compared must be whole.
    pub(super) fn runs_early(&self, backing: RamBacking) -> bool {
        if self.order.whole || self.order.verify || backing != RamBacking::Thp {
            return false;
        }
        let able = service::check();
        if let Err(why) = &able {
            tracing::info!(why = %chain(why), "children run when all of their memory is there");
        }
        able.is_ok()
    }

    /// Runs the children while the template is on its way.
    pub(super) async fn run_early(
        &mut self,
        cold: JoinSet<Start>,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(ForkReport, Arc<Host>), Problem> {
        let (known, layout) = oneshot::channel();
        let arriving = match self.arriving(manifest).await {
            Ok(arriving) => arriving,
            Err(problem) => return discard(cold, problem).await,
        };
        let host = match self.join(begin, &arriving, Some(known)) {
            Ok(host) => host,
            Err(problem) => return discard(cold, problem).await,
        };
        let _fetching = self.forks.fetching(self.children(), &self.order.node);
        match self.both(cold, begin, &arriving, &host, layout).await {
            Ok(report) => Ok((report, host)),
            Err(problem) => {
                // Its threads end, which may take a while.
                let _ = off_worker(move || drop(host)).await;
                Err(problem)
            }
        }
    }

    /// The distribution, and the children beside it.
    async fn both(
        &mut self,
        cold: JoinSet<Start>,
        begin: &Begin,
        arriving: &Arriving,
        host: &Arc<Host>,
        layout: oneshot::Receiver<Arc<Chunks>>,
    ) -> Result<ForkReport, Problem> {
        let sources = match arriving.sources() {
            Ok(sources) => sources,
            Err(error) => return discard(cold, clone_problem(&error)).await,
        };
        let load = self.load_order(sources, Vec::new(), begin);
        let (forks, order, begun, children) =
            (self.forks.clone(), self.order.clone(), self.begun, self.children());
        let (making, fetched) = {
            let mut fetch = pin!(self.until_whole(host));
            // The layout is there before anything of it, so it is looked at first.
            let chunks = tokio::select! {
                biased;
                Ok(chunks) = layout => Ok(chunks),
                failed = &mut fetch => Err(failed.err().unwrap_or_else(gone)),
            };
            let parts: Arc<[Piece]> = begin.parts.clone().into();
            let service = match chunks.and_then(|chunks| start(chunks, host, parts, order.indexes.len())) {
                Ok(service) => service,
                Err(problem) => return discard(cold, problem).await,
            };
            let load = LoadOrder { service: Some(service.clone()), ..load };
            let task = tokio::spawn(make(forks.clone(), order, load, cold, begun));
            let mut making = Making { service, task, made: None };
            let fetched = beside(&forks, &children, &mut making, fetch).await;
            (making, fetched)
        };
        self.settle(begin, making, fetched).await
    }

    /// The template is whole, or never will be.
    async fn settle(
        &mut self,
        begin: &Begin,
        making: Making,
        fetched: Result<HostStatus, Problem>,
    ) -> Result<ForkReport, Problem> {
        let template_ms = ms(Mono::now().since(self.begun));
        let service = making.service.clone();
        let status = match fetched {
            Ok(status) => status,
            Err(problem) => {
                self.end(&service, &problem).await;
                return self.ended(making.made().await, problem).await;
            }
        };
        let mut report = self.alive_during(&status, making.made()).await?;
        let released = service.clone();
        if let Err(error) = self.alive_during(&status, off_worker(move || released.release())).await? {
            let problem = clone_problem(&error);
            self.end(&service, &problem).await;
            return self.ended(Ok(report), problem).await;
        }
        self.done(begin, &mut report, &status, template_ms, Some(service.faults())).await;
        Ok(report)
    }

    /// Ends children that could not go on. Who watches them sees it before anybody else, so the reason is told first.
    async fn end(&self, service: &Arc<PageService>, problem: &Problem) {
        self.forks.registry.will_end(&self.children(), &never_complete(problem));
        let service = service.clone();
        let _ = off_worker(move || service.end()).await;
    }

    /// Children that ran were ended: says so wherever they are listed.
    async fn ended(
        &self,
        made: Result<ForkReport, Problem>,
        problem: Problem,
    ) -> Result<ForkReport, Problem> {
        let Ok(report) = made else { return Err(problem) };
        let why = never_complete(&problem);
        for child in &report.children {
            if let Err(problem) = self.forks.registry.end_because(&child.name, &why).await {
                tracing::error!(child = %child.name, %problem, "could not clean up after a child");
            }
        }
        let text = format!(
            "{} children that ran were ended, since their memory can never be complete: {}",
            report.children.len(),
            problem.message
        );
        Err(Problem { message: text, ..problem })
    }
}

fn never_complete(problem: &Problem) -> String {
    format!("its memory can never be complete: {}", problem.message)
}

fn gone() -> Problem {
    Problem::new(Code::ForkFailed, "the distribution ended before it began")
}

fn joined(ended: Result<Result<ForkReport, Problem>, tokio::task::JoinError>) -> Result<ForkReport, Problem> {
    ended.unwrap_or_else(|error| {
        Err(Problem::new(Code::Internal, format!("a task of vmoved failed: {error}")))
    })
}

fn start(
    chunks: Arc<Chunks>,
    host: &Host,
    parts: Arc<[Piece]>,
    children: usize,
) -> Result<Arc<PageService>, Problem> {
    let wants = host.wants();
    // What lies in no part is zero, and not asked for.
    let ask = Box::new(move |ram, offset| {
        part_at(&parts, ram, offset).is_none_or(|(region, offset)| wants.ask(region, offset))
    });
    PageService::start(chunks, children, ask).map_err(|e| clone_problem(&e))
}

/// Waits for the distribution, or for children that did not come to be. Ends children that could not be served.
async fn beside(
    forks: &Arc<Forks>,
    children: &[String],
    making: &mut Making,
    mut fetch: std::pin::Pin<&mut impl Future<Output = Result<HostStatus, Problem>>>,
) -> Result<HostStatus, Problem> {
    let mut look = tokio::time::interval(LOOK);
    let mut told = BTreeSet::new();
    loop {
        tokio::select! {
            fetched = &mut fetch => return fetched,
            made = &mut making.task, if making.made.is_none() => {
                let made = joined(made);
                let failed = made.as_ref().err().cloned();
                making.made = Some(made);
                if let Some(problem) = failed {
                    return Err(problem);
                }
            }
            _ = look.tick() => {}
        }
        for (pid, why) in making.service.failed().into_iter().filter(|(pid, _)| told.insert(*pid)) {
            let of_pid =
                |name: &&String| forks.registry.vms.get(name).is_ok_and(|vm| vm.pid.unsigned_abs() == pid);
            let Some(child) = children.iter().find(of_pid) else { continue };
            let why = format!("its page faults could not be answered: {why}");
            if let Err(problem) = forks.registry.end_because(child, &why).await {
                tracing::error!(%child, %problem, "could not clean up after a child");
            }
        }
    }
}
