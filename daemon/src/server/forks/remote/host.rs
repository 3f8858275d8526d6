//! Another host's part: fetches the template and makes its children of it, all of them or none; early, while it fetches, if it can.

use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use vmove_clone::child::Base;
use vmove_clone::disk::Images;
use vmove_clone::identity::child_name;
use vmove_clone::report::{ForkProgress, ForkReport};
use vmove_clone::room::Demand;
use vmove_clone::service::Chunks;
use vmove_clone::template::{self, Arriving, Manifest, Source, Template};
use vmove_clone::{CloneError, template as folder};
use vmove_fabric::{Fabric, FabricKind, Multicast, PeerAddress};
use vmove_migrate::clock::{Mono, ms};
use vmove_migrate::link::BoxedStream;
use vmove_migrate::node;
use vmove_migrate::proto::channel::Channel;
use vmove_migrate::proto::hello::Hello;
use vmove_migrate::report::FaultStats;
use vmove_qmp::RamBacking;
use vmove_spread::{Host, HostId, HostOptions, HostStatus, SpreadError};

use super::disks::{AtWork, Reached};
use super::fabric::Door;
use super::make::make;
use super::memory::Incoming;
use super::message::{At, Begin, Done, Order, Phase, Taken, ToHost, ToParent, address_of};
use super::record::HostRecord;
use super::warm::{discard_all, with_prepared};
use crate::api::problem::{Code, Problem, chain};
use crate::server::forks::Forks;
use crate::server::forks::children::{LoadOrder, Planned};
use crate::server::forks::create::{Start, finish_all};
use crate::server::forks::problem::clone_problem;
use crate::server::registry::off_worker;

/// For the first message.
const ORDER: Duration = Duration::from_secs(10);
/// The parent's daemon tells every other second that it lives.
const SILENCE: Duration = Duration::from_secs(30);
/// How often this host tells how far it is.
const PACE: Duration = Duration::from_millis(250);
/// The same while it makes children of a template that is whole. The parent's daemon gives a host up that says nothing for 30 s.
const MAKING: Duration = Duration::from_secs(2);

/// One order at work.
pub(super) struct Part {
    pub(super) forks: Arc<Forks>,
    hello: Hello,
    pub(super) order: Arc<Order>,
    pub(super) from: IpAddr,
    pub(super) begun: Mono,
    channel: Channel<ToHost>,
    /// How it gets the template, once that was tried.
    taken: Option<Taken>,
    /// Children whose QEMUs start when the guest is frozen: before, their images are still written.
    waiting: Vec<Planned>,
    /// Sockets for images of the parent's node are kept.
    sockets: Option<AtWork>,
}

impl Forks {
    /// Serves a connection by which another daemon asks for children here.
    pub async fn take_order(self: Arc<Self>, hello: Hello, stream: BoxedStream, from: IpAddr) {
        let begun = Mono::now();
        let mut channel: Channel<ToHost> = Channel::new(stream);
        let order = match tokio::time::timeout(ORDER, channel.receive()).await {
            Ok(Ok(ToHost::Order(order))) => order,
            Ok(Ok(ToHost::Warm(order))) => return self.host_warm(*order, channel).await,
            Ok(Ok(question @ (ToHost::Which(_) | ToHost::End(_) | ToHost::Came(_) | ToHost::Reads(_)))) => {
                return self.answer_kin(question, channel).await;
            }
            _ => return tracing::warn!(%from, "expected an order for children, found none"),
        };
        let (id, parent, node) = (order.fork.clone(), order.parent.clone(), order.node.clone());
        if self.progress(&id).is_ok() {
            // The parent's own daemon, by an address, or an id that was used before.
            let text = format!(
                "{} has a fork {id:?} already: name this node as itself, or choose another id",
                self.node
            );
            let _ = channel.send(&ToParent::refused(&Problem::new(Code::BadRequest, text))).await;
            return;
        }
        let part = Part {
            forks: self.clone(),
            hello,
            order: Arc::new(*order),
            from,
            begun,
            channel,
            taken: None,
            waiting: Vec::new(),
            sockets: None,
        };
        match part.run().await {
            Ok(report) => {
                tracing::info!(fork = %id, %parent, %node, children = report.children.len(), "children of a fork from another node run");
                self.end_progress(&id, begun, Ok(&report));
            }
            Err(problem) => {
                tracing::error!(fork = %id, %parent, %node, why = %problem, "no children of a fork from another node");
                self.end_progress(&id, begun, Err(&problem));
            }
        }
    }

    /// Takes up what an earlier life of the daemon left of forks from other nodes.
    pub async fn recover_hosted(&self) {
        let dir = self.hosted();
        for record in HostRecord::left(&dir) {
            tracing::warn!(fork = %record.fork, parent = %record.parent, node = %record.node,
                "an earlier vmoved was ended in a fork from another node: cleaning up");
            if record.fetching {
                self.end_those_that_fetched(&record).await;
            } else {
                self.end_those_that_never_ran(&record.children).await;
            }
            record.close(&dir);
        }
    }

    /// What they still miss, nobody can give them any more.
    async fn end_those_that_fetched(&self, record: &HostRecord) {
        let why =
            format!("vmoved was ended while the memory of this child was on its way from {}", record.node);
        for child in record.children.iter().filter(|child| self.registry.vms.get(child).is_ok()) {
            if let Err(problem) = self.registry.end_because(child, &why).await {
                tracing::error!(%child, %problem, "could not end a child whose memory is not there");
            }
        }
    }

    pub(super) fn hosted(&self) -> PathBuf {
        self.journals.join("hosted")
    }
}

impl Part {
    async fn run(mut self) -> Result<ForkReport, Problem> {
        let id = self.order.fork.clone();
        let asked = self.asked().await;
        let cold = match asked {
            Ok(cold) => cold,
            Err(problem) => {
                let _ = self.channel.send(&ToParent::refused(&problem)).await;
                return Err(problem);
            }
        };
        match self.work(cold).await {
            Ok(report) => Ok(report),
            Err(problem) => {
                tracing::debug!(fork = %id, "telling the parent's daemon");
                let _ = self.channel.send(&ToParent::Failed(problem.message.clone())).await;
                Err(problem)
            }
        }
    }

    /// Checks everything that can be checked before there is a template, and starts the QEMUs.
    async fn asked(&mut self) -> Result<JoinSet<Start>, Problem> {
        let (forks, order) = (&self.forks, &self.order);
        let count = order.indexes.len();
        forks.allowed(&order.fork, count)?;
        forks.begin_progress(ForkProgress {
            id: order.fork.clone(),
            parent: order.parent.clone(),
            phase: "check".to_owned(),
            children: count,
            ..ForkProgress::default()
        })?;
        forks.remote.able().map_err(|why| Problem::new(Code::Forbidden, why))?;
        let base = forks.hosted_base(&order.kind).await?;
        let (images, reached) = self.reach().await?;
        let disks = order.disks.iter().map(|ordered| ordered.disk.clone()).collect();
        let base = Base { disks, images, overlay_dir: forks.policy.overlay_dir.clone(), ..base };
        let demand = self.demand(base.backing);
        forks.fits(demand.with_template(order.live_bytes), base.backing).await?;
        let taken = Taken { disks: reached, ..self.choose(demand, base.backing).await? };
        let (planned, warm) = forks.children_of(order, &base).await?;
        let (id, forks) = (order.fork.clone(), forks.clone());
        self.taken = Some(taken.clone());
        if let Err(error) = self.channel.send(&ToParent::Accepted(taken)).await {
            discard_all(warm).await;
            return Err(lost(&chain(&error)));
        }
        forks.update(&id, |p| p.prepared += warm.len());
        if !self.order.disks.is_empty() {
            self.waiting = planned;
            return Ok(JoinSet::new());
        }
        // QEMUs start while the parent is being frozen and its memory is on its way.
        Ok(with_prepared(forks.start_all(&id, planned), warm))
    }

    /// How children would get at the images of their disks.
    async fn reach(&self) -> Result<(Images, Option<Reached>), Problem> {
        let order = self.order.clone();
        if order.disks.is_empty() {
            return Ok((Images::Here, None));
        }
        let (forks, session) = (self.forks.clone(), self.hello.session);
        let reached = off_worker(move || forks.remote.disks.reach(&forks.policy, &order));
        let reached = reached.await?.map_err(|why| Problem::new(Code::NotMovable, why))?;
        let images = match reached.shared {
            true => Images::Here,
            false => Images::Exported(self.forks.remote.disks.exported(session)),
        };
        Ok((images, Some(reached)))
    }

    /// Starts the QEMUs that waited for the freeze.
    async fn start_waiting(&mut self) -> Result<JoinSet<Start>, Problem> {
        let waiting = std::mem::take(&mut self.waiting);
        let reads = self.taken.as_ref().and_then(|t| t.disks.as_ref()).is_some_and(|disks| !disks.shared);
        if reads {
            let (remote, order, hello) = (self.forks.remote.clone(), self.order.clone(), self.hello.clone());
            let node = remote.root_of(&order.node, self.from, order.port);
            let listening = remote.relay(&hello, &order.fork, &order.parent, node, order.disks.len());
            self.sockets = Some(listening.map_err(|why| Problem::new(Code::ForkFailed, why))?);
        }
        Ok(self.forks.start_all(&self.order.fork, waiting))
    }

    /// Without the template.
    fn demand(&self, backing: RamBacking) -> Demand {
        let order = &self.order;
        let hugetlb = backing != RamBacking::Thp;
        Demand::new(order.indexes.len() as u64, order.guest_bytes, order.expect_written, hugetlb)
    }

    /// From the start of the QEMUs until the children run.
    async fn work(&mut self, cold: JoinSet<Start>) -> Result<ForkReport, Problem> {
        let begin = match self.begin().await {
            Ok(begin) => begin,
            Err(problem) => return discard(cold, problem).await,
        };
        let manifest: Manifest = match serde_json::from_str(&begin.manifest) {
            Ok(manifest) => manifest,
            Err(error) => {
                return discard(cold, Problem::new(Code::BadTemplate, format!("its manifest: {error}")))
                    .await;
            }
        };
        if let Err(problem) = self.as_ordered(&manifest) {
            return discard(cold, problem).await;
        }
        let record = self.record(&manifest);
        let dir = self.forks.hosted();
        if let Err(error) = record.write(&dir) {
            return discard(cold, clone_problem(&error)).await;
        }
        let cold = match self.waiting.is_empty() {
            true => cold,
            false => match self.start_waiting().await {
                Ok(started) => started,
                Err(problem) => {
                    record.close(&dir);
                    return Err(problem);
                }
            },
        };
        let ended = if record.fetching {
            self.run_early(cold, &begin, manifest).await
        } else {
            self.when_whole(cold, &begin, manifest).await
        };
        // Children that run map its memory: it stays with them, without a name, until the last of them ends.
        let _ = off_worker(move || record.close(&dir)).await;
        let (report, host) = ended?;
        self.until_released().await;
        // Its threads end.
        let _ = off_worker(move || drop(host)).await;
        Ok(report)
    }

    async fn begin(&mut self) -> Result<Begin, Problem> {
        loop {
            match tokio::time::timeout(SILENCE * 10, self.channel.receive()).await {
                Ok(Ok(ToHost::Begin(begin))) => return Ok(*begin),
                Ok(Ok(ToHost::Alive)) => {}
                Ok(Ok(ToHost::GiveUp(why))) => return Err(Problem::new(Code::ForkFailed, why)),
                Ok(Ok(other)) => return Err(lost(&format!("expected the template, found {other:?}"))),
                Ok(Err(error)) => return Err(lost(&chain(&error))),
                Err(_) => return Err(lost("nothing was heard of it")),
            }
        }
    }

    /// What comes must be what room was found for.
    fn as_ordered(&self, manifest: &Manifest) -> Result<(), Problem> {
        let (order, bytes) = (&self.order, manifest.guest_bytes());
        let same = bytes == order.guest_bytes && manifest.backing == order.kind.backing;
        // It becomes the name of a folder.
        let plain =
            manifest.id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') && !manifest.id.is_empty();
        if same && plain && manifest.id.len() <= 64 {
            return Ok(());
        }
        let text = format!(
            "Expected a template of {} bytes of {}, found {bytes} of {} ({:?})",
            order.guest_bytes, order.kind.backing, manifest.backing, manifest.id
        );
        Err(Problem::new(Code::BadTemplate, text))
    }

    fn record(&self, manifest: &Manifest) -> HostRecord {
        let order = &self.order;
        let backing = node::backing_named(&order.kind.backing).unwrap_or(RamBacking::Thp);
        HostRecord {
            fork: order.fork.clone(),
            parent: order.parent.clone(),
            node: order.node.clone(),
            children: self.children(),
            fetching: self.runs_early(backing),
            template: folder::places(&self.forks.registry.memory_dir, &manifest.id, backing),
        }
    }

    /// Names of the children.
    pub(super) fn children(&self) -> Vec<String> {
        let order = &self.order;
        order.indexes.iter().map(|index| child_name(&order.parent, *index)).collect()
    }

    /// Waits for the whole template, then makes children of it.
    async fn when_whole(
        &mut self,
        cold: JoinSet<Start>,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(ForkReport, Arc<Host>), Problem> {
        let (template, host, status) = match self.fetch(begin, manifest).await {
            Ok(fetched) => fetched,
            Err(problem) => return discard(cold, problem).await,
        };
        let template_ms = ms(Mono::now().since(self.begun));
        self.say(&status, Phase::Load).await;
        let sources = match template.sources() {
            Ok(sources) => sources,
            Err(error) => return discard(cold, clone_problem(&error)).await,
        };
        let files = template.manifest().ram.iter().map(|ram| ram.file.clone()).collect();
        let load = self.load_order(sources, files, begin);
        let making = make(self.forks.clone(), self.order.clone(), load, cold, self.begun);
        let mut report = match self.alive_during(&status, making).await {
            Ok(report) => report,
            Err(problem) => {
                let _ = off_worker(move || drop(host)).await;
                return Err(problem);
            }
        };
        self.done(begin, &mut report, &status, template_ms, None).await;
        Ok((report, host))
    }

    /// Tells the parent's daemon how far this host is, and what it does while no child runs. The daemon may have gone: children that have all
    /// memory need it no more.
    async fn say(&mut self, status: &HostStatus, before: Phase) {
        let running = self.forks.progress(&self.order.fork).map_or(0, |p| p.running);
        let phase = if running == 0 { before } else { Phase::Run };
        let (running, pieces) = (u32::try_from(running).unwrap_or(u32::MAX), status.totals.into());
        let at = At { phase, chunks: status.chunks, missing: status.missing, running, pieces };
        let _ = self.channel.send(&ToParent::Progress(at)).await;
    }

    /// Does what may take long although all memory is here, and says meanwhile that this host is at it.
    pub(super) async fn alive_during<T>(&mut self, status: &HostStatus, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            match tokio::time::timeout(MAKING, &mut work).await {
                Ok(done) => return done,
                Err(_) => self.say(status, Phase::Load).await,
            }
        }
    }

    /// For children that nobody serves.
    pub(super) fn load_order(&self, sources: Vec<Source>, files: Vec<PathBuf>, begin: &Begin) -> LoadOrder {
        LoadOrder {
            fork: self.order.fork.clone(),
            parent: self.order.parent.clone(),
            sources,
            files,
            state: begin.state.clone().into(),
            verify: self.order.verify,
            service: None,
        }
    }

    /// Tells the parent's daemon that all is there.
    pub(super) async fn done(
        &mut self,
        begin: &Begin,
        report: &mut ForkReport,
        status: &HostStatus,
        template_ms: f64,
        faults: Option<FaultStats>,
    ) {
        let totals = status.totals;
        (report.fabric, report.fabric_reason) = self.by(begin, status);
        let done = Done {
            children: serde_json::to_string(&report.children).unwrap_or_default(),
            template_ms,
            pieces: totals.into(),
            wrong: totals.wrong,
            wanted: totals.wanted,
            fabric: report.fabric.clone(),
            fabric_reason: report.fabric_reason.clone(),
            faults: faults.map(|faults| serde_json::to_string(&faults).unwrap_or_default()),
        };
        let _ = self.channel.send(&ToParent::Done(Box::new(done))).await;
    }

    /// By what the template came, and why.
    fn by(&self, begin: &Begin, status: &HostStatus) -> (String, String) {
        let taken = self.taken.as_ref();
        let agreed = || taken.map(|taken| taken.why.clone()).unwrap_or_default();
        let refused = begin.no_verbs.as_ref().filter(|_| taken.is_some_and(|taken| taken.verbs));
        let why = match (&status.left, refused) {
            (Some(why), _) => format!("verbs was given up: {why}"),
            (None, Some(why)) => format!("no verbs at the source: {why}"),
            (None, None) => agreed(),
        };
        (status.fabric.unwrap_or(FabricKind::Tcp).to_string(), why)
    }

    /// Makes room for the template.
    pub(super) async fn arriving(&self, manifest: Manifest) -> Result<Arriving, Problem> {
        self.forks.update(&self.order.fork, |p| p.phase = "fetch".to_owned());
        let memory = self.forks.registry.memory_dir.clone();
        off_worker(move || template::receive(&memory, manifest)).await?.map_err(|e| clone_problem(&e))
    }

    /// The whole template, from the parent's node and from other hosts.
    async fn fetch(
        &mut self,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(Template, Arc<Host>, HostStatus), Problem> {
        let arriving = self.arriving(manifest).await?;
        let host = self.join(begin, &arriving, None)?;
        let status = match self.until_whole(&host).await {
            Ok(status) => status,
            Err(problem) => {
                // Its threads end, which may take a while.
                let _ = off_worker(move || drop(host)).await;
                return Err(problem);
            }
        };
        let (state, checksum) = (begin.state.clone(), begin.checksum);
        let work = move || {
            let template = arriving.complete(&state)?;
            if checksum.is_some_and(|sum| template.checksum().ok() != Some(sum)) {
                let why = "its memory is not that of the parent's node: the checksum differs".to_owned();
                return Err(CloneError::Template { path: template.dir().to_owned(), why });
            }
            Ok(template)
        };
        let completed = self.alive_during(&status, off_worker(work)).await?;
        Ok((completed.map_err(|e| clone_problem(&e))?, host, status))
    }

    /// Takes part in the distribution; `known` is told what travels.
    pub(super) fn join(
        &self,
        begin: &Begin,
        arriving: &Arriving,
        known: Option<oneshot::Sender<Arc<Chunks>>>,
    ) -> Result<Arc<Host>, Problem> {
        let failed = |why: String| Problem::new(Code::ForkFailed, why);
        let remote = &self.forks.remote;
        let root = remote.root_of(&self.order.node, self.from, self.order.port);
        let peers = begin
            .peers
            .iter()
            .map(|(name, target)| (name.clone(), remote.peer(&target.name, &target.address)));
        let peers = peers.chain([(address_of(0), root)]).collect();
        let (session, token) = (self.hello.session, self.hello.token);
        let door = Door::open(remote, session, token, peers);
        let taken = |so: fn(&Taken) -> bool| self.taken.as_ref().is_some_and(so);
        let verbs = begin.no_verbs.is_none() && taken(|taken| taken.verbs);
        let kind = if verbs { FabricKind::Verbs } else { FabricKind::Tcp };
        let shared = |kind| door.by(kind).map(|fabric| fabric as Arc<dyn Fabric>);
        let tcp = shared(FabricKind::Tcp);
        let (fabric, second) = match shared(kind).filter(|_| verbs) {
            Some(fabric) => (Some(fabric), tcp),
            None => (tcp, None),
        };
        let fabric = fabric.ok_or_else(|| failed(format!("fabric {kind} cannot be used here (any more)")))?;
        // Where the parent's node has RDMA, datagrams go that way.
        let hears = taken(|taken| taken.hears) && fabric.kind() == kind && verbs == begin.no_verbs.is_none();
        let multicast = remote.multicast(kind).ok().filter(|_| hears).map(Arc::<dyn Multicast>::from);
        let memory = arriving.memory.clone();
        let target = Incoming { memory, parts: begin.parts.clone().into(), known, chunks: None };
        let options = HostOptions {
            me: HostId(begin.me),
            root: PeerAddress::Named(address_of(0)),
            listens: begin.listens,
            second,
        };
        let host = Host::join(fabric, multicast, Box::new(target), options).map_err(|e| failed(chain(&e)))?;
        Ok(Arc::new(host))
    }

    /// Follows the distribution until everything is here, and tells the parent's daemon how far it is.
    pub(super) async fn until_whole(&mut self, host: &Arc<Host>) -> Result<HostStatus, Problem> {
        let mut heard = tokio::time::Instant::now();
        let mut gone: Option<String> = None;
        loop {
            let waiting = host.clone();
            match off_worker(move || waiting.wait(PACE)).await? {
                Ok(status) => return Ok(status),
                Err(SpreadError::Timeout { .. }) => self.say(&host.status(), Phase::Fetch).await,
                Err(error) => {
                    let error = chain(&error);
                    let why = gone.map_or_else(|| error.clone(), |gone| format!("{gone} ({error})"));
                    return Err(Problem::new(Code::ForkFailed, why));
                }
            }
            while let Some(message) = self.channel.received() {
                heard = tokio::time::Instant::now();
                match message {
                    Ok(ToHost::GiveUp(why)) => return Err(Problem::new(Code::ForkFailed, why)),
                    Ok(_) => {}
                    // What is under way may still be completed by other hosts.
                    Err(error) => gone = gone.or_else(|| Some(lost(&chain(&error)).message)),
                }
            }
            if heard.elapsed() > SILENCE {
                let missing = host.status().missing;
                let text = gone.unwrap_or_else(|| lost("nothing was heard of it").message);
                return Err(Problem::new(
                    Code::ForkFailed,
                    format!("{text}, with {missing} chunks of 4 KiB missing"),
                ));
            }
        }
    }

    /// Other hosts may still read from here.
    async fn until_released(&mut self) {
        loop {
            match tokio::time::timeout(SILENCE, self.channel.receive()).await {
                Ok(Ok(ToHost::Alive)) => {}
                Ok(Ok(_) | Err(_)) | Err(_) => return,
            }
        }
    }
}

fn lost(why: &str) -> Problem {
    Problem::new(Code::ForkFailed, format!("the parent's node is gone: {why}"))
}

/// Ends QEMUs that were started for nothing.
pub(super) async fn discard<T>(cold: JoinSet<Start>, problem: Problem) -> Result<T, Problem> {
    for (prepared, _) in finish_all(cold).await.into_iter().flatten() {
        prepared.discard().await;
    }
    Err(problem)
}
