//! Children that run before their template is whole: a page service answers what they touch, the distribution brings it first.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tracing::Instrument;
use vmove_node::blocking::run_blocking;
use vmove_spread::{Host, HostStatus};
use vmove_types::Backing;
use vmove_types::fork_report::ForkReport;
use vmove_types::problem::chain;
use vmove_types::time::{Mono, ms};

use super::HostPart;
use super::make_children::make_children;
use crate::chunks::Chunks;
use crate::engine::ForkEngine;
use crate::engine::children::{LoadOrder, Start, discard_started};
use crate::engine::distribution::part_at;
use crate::engine::error::{DistributionError, ForkError};
use crate::engine::message::{Begin, RamPart};
use crate::service::{self, PageService};
use crate::template::{Arriving, Manifest};

/// How often it is looked whether a child could not be served.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// What is at work beside the distribution.
struct Making {
    service: Arc<PageService>,
    task: JoinHandle<Result<ForkReport, ForkError>>,
    /// Once the task has ended: the report, or that there are no children.
    made: Option<Option<ForkReport>>,
}

impl Making {
    /// Waits until the children run, or none of them is there.
    async fn made(self) -> Result<ForkReport, ForkError> {
        match self.made {
            Some(Some(report)) => Ok(report),
            Some(None) => Err(ForkError::ChildFailed("none of them runs".to_owned())),
            None => joined(self.task.await),
        }
    }
}

impl HostPart {
    /// Whether children are to run before all of their memory is there. With huge pages of hugetlbfs a fault would wait for 2 MiB at
    /// least; what is compared must be whole.
    pub(super) fn runs_early(&self, backing: Backing) -> bool {
        if self.order.whole || self.order.verify || backing != Backing::Thp {
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
        starting: JoinSet<Start>,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(ForkReport, Arc<Host>), ForkError> {
        let (known, layout) = oneshot::channel();
        let arriving = match self.arriving(manifest).await {
            Ok(arriving) => arriving,
            Err(error) => return discard_started(starting, error).await,
        };
        let host = match self.join(begin, &arriving, Some(known)) {
            Ok(host) => host,
            Err(error) => return discard_started(starting, error).await,
        };
        let _fetching = self.engine.fetching(self.children(), &self.order.node);
        match self.both(starting, begin, &arriving, &host, layout).await {
            Ok(report) => Ok((report, host)),
            Err(error) => {
                // Its threads end, which may take a while.
                let _ = run_blocking(move || drop(host)).await;
                Err(error)
            }
        }
    }

    /// The distribution, and the children beside it.
    async fn both(
        &mut self,
        starting: JoinSet<Start>,
        begin: &Begin,
        arriving: &Arriving,
        host: &Arc<Host>,
        layout: oneshot::Receiver<Arc<Chunks>>,
    ) -> Result<ForkReport, ForkError> {
        let sources = match arriving.sources() {
            Ok(sources) => sources,
            Err(error) => return discard_started(starting, error.into()).await,
        };
        let load = self.load_order(sources, Vec::new(), begin);
        let (engine, order, begun, children) =
            (self.engine.clone(), self.order.clone(), self.begun, self.children());
        let (making, fetched) = {
            let mut fetch = pin!(self.until_whole(host));
            // The layout is there before anything of it, so it is looked at first.
            let chunks = tokio::select! {
                biased;
                Ok(chunks) = layout => Ok(chunks),
                failed = &mut fetch => Err(failed.err().unwrap_or(DistributionError::NotBegun.into())),
            };
            let parts: Arc<[RamPart]> = begin.parts.clone().into();
            let service = match chunks.and_then(|chunks| start(chunks, host, parts, order.indexes.len())) {
                Ok(service) => service,
                Err(error) => return discard_started(starting, error).await,
            };
            let load = LoadOrder { service: Some(service.clone()), ..load };
            let task =
                tokio::spawn(make_children(engine.clone(), order, load, starting, begun).in_current_span());
            let mut making = Making { service, task, made: None };
            let fetched = beside(&engine, &children, &mut making, fetch).await;
            (making, fetched)
        };
        self.settle(begin, making, fetched).await
    }

    /// The template is whole, or never will be.
    async fn settle(
        &mut self,
        begin: &Begin,
        making: Making,
        fetched: Result<HostStatus, ForkError>,
    ) -> Result<ForkReport, ForkError> {
        let template_ms = ms(Mono::now().since(self.begun));
        let service = making.service.clone();
        let status = match fetched {
            Ok(status) => status,
            Err(error) => {
                self.end(&service, &error).await;
                return self.ended(making.made().await, error).await;
            }
        };
        let mut report = self.alive_during(&status, making.made()).await?;
        let released = service.clone();
        if let Err(error) = self.alive_during(&status, run_blocking(move || released.release())).await? {
            let error = ForkError::from(error);
            self.end(&service, &error).await;
            return self.ended(Ok(report), error).await;
        }
        self.plug(&status, &mut report).await;
        self.done(begin, &mut report, &status, template_ms, Some(service.faults())).await;
        Ok(report)
    }

    /// Ends children that could not go on. Who watches them sees it before anybody else, so the reason is told first.
    async fn end(&self, service: &Arc<PageService>, error: &ForkError) {
        self.engine.registry.will_end(&self.children(), &never_complete(error));
        let service = service.clone();
        let _ = run_blocking(move || service.end()).await;
    }

    /// Children that ran were ended: says so wherever they are listed.
    async fn ended(
        &self,
        made: Result<ForkReport, ForkError>,
        error: ForkError,
    ) -> Result<ForkReport, ForkError> {
        let Ok(report) = made else { return Err(error) };
        let why = never_complete(&error);
        for child in &report.children {
            if let Err(error) = self.engine.registry.end_because(&child.name, &why).await {
                tracing::error!(child = %child.name, %error, "could not clean up after a child");
            }
        }
        Err(ForkError::Ended { children: report.children.len(), source: Box::new(error) })
    }
}

fn never_complete(error: &ForkError) -> String {
    format!("its memory can never be complete: {}", error.message())
}

fn joined(
    ended: Result<Result<ForkReport, ForkError>, tokio::task::JoinError>,
) -> Result<ForkReport, ForkError> {
    ended.unwrap_or_else(|error| Err(ForkError::Task(error.into())))
}

fn start(
    chunks: Arc<Chunks>,
    host: &Host,
    parts: Arc<[RamPart]>,
    children: usize,
) -> Result<Arc<PageService>, ForkError> {
    let wants = host.wants();
    // What lies in no part is zero, and not asked for.
    let ask = Box::new(move |ram, offset| {
        part_at(&parts, ram, offset).is_none_or(|(region, offset)| wants.ask(region, offset))
    });
    Ok(PageService::start(chunks, children, ask)?)
}

/// Waits for the distribution, or for children that did not come to be. Ends children that could not be served.
async fn beside(
    engine: &Arc<ForkEngine>,
    children: &[String],
    making: &mut Making,
    mut fetch: std::pin::Pin<&mut impl Future<Output = Result<HostStatus, ForkError>>>,
) -> Result<HostStatus, ForkError> {
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    let mut told = BTreeSet::new();
    loop {
        tokio::select! {
            fetched = &mut fetch => return fetched,
            made = &mut making.task, if making.made.is_none() => {
                match joined(made) {
                    Ok(report) => making.made = Some(Some(report)),
                    Err(error) => {
                        making.made = Some(None);
                        return Err(error);
                    }
                }
            }
            _ = look.tick() => {}
        }
        for (pid, why) in making.service.failed().into_iter().filter(|(pid, _)| told.insert(*pid)) {
            let of_pid =
                |name: &&String| engine.registry.vms().get(name).is_ok_and(|vm| vm.pid.unsigned_abs() == pid);
            let Some(child) = children.iter().find(of_pid) else { continue };
            let why = format!("its page faults could not be answered: {why}");
            if let Err(error) = engine.registry.end_because(child, &why).await {
                tracing::error!(%child, %error, "could not clean up after a child");
            }
        }
    }
}
