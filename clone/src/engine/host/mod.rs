//! A child's host: it fetches the template and makes its children of it when a parent's node orders them, all of them or none; early,
//! while it fetches, if it can.

mod before_memory;
mod fabric;
mod fetch;
mod make_children;
mod record;

use std::future::Future;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tracing::Instrument;
use vmove_fabric::FabricKind;
use vmove_node::blocking::run_blocking;
use vmove_node::files::read_json;
use vmove_node::peer::{BoxedStream, Caller, Channel, Hello};
use vmove_node::reservations::Reservation;
use vmove_spread::{Host, HostStatus};
use vmove_types::Backing;
use vmove_types::fork_report::{ForkProgress, ForkReport};
use vmove_types::report::FaultStats;
use vmove_types::time::{Mono, ms};

use self::make_children::make_children;
pub(super) use self::record::HostRecord;
use super::ForkEngine;
use super::children::{
    LoadOrder, Planned, Prepared, Start, discard_all, discard_started, may_open, with_prepared,
};
use super::devices::{Allowed, ChildDevices, HostDevices};
use super::error::{ForkError, TalkError};
use super::images::{self, RelayInUse};
use super::message::{At, Begin, Done, Order, Phase, Reached, Taken, ToHost, ToParent};
use super::unreadable::Unreadable;
use crate::child::{Base, Plan};
use crate::disk::Images;
use crate::room::Demand;
use crate::template::{self, Manifest, Source};

/// For the first message.
const ORDER_TIMEOUT: Duration = Duration::from_secs(10);
/// The parent's daemon tells every other second that it lives.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often this host tells how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);
/// The same while it makes children of a template that is whole. The parent's daemon gives a host up that says nothing for 30 s.
const MAKING_INTERVAL: Duration = Duration::from_secs(2);

/// One order at work.
struct HostPart {
    engine: Arc<ForkEngine>,
    hello: Hello,
    order: Arc<Order>,
    from: IpAddr,
    begun: Mono,
    channel: Channel<ToHost>,
    /// Its children count among those of guests: it is their ticket that is forgotten if this fails, and no other's.
    is_admitted: bool,
    /// How it gets the template, once that was tried.
    taken: Option<Taken>,
    /// Children whose QEMUs start when the guest is frozen: before, their images are still written.
    waiting: Vec<Planned>,
    /// Sockets for images of the parent's node are kept.
    sockets: Option<RelayInUse>,
    /// Memory for the template and the children, until all is there.
    room: Option<Reservation>,
    /// Devices of the children.
    devices: Option<ChildDevices>,
}

impl ForkEngine {
    /// Serves a connection by which another daemon asks for children here.
    pub async fn serve_order(
        self: Arc<Self>,
        hello: Hello,
        stream: BoxedStream,
        (from, caller): (IpAddr, Caller),
    ) {
        let begun = Mono::now();
        let mut channel: Channel<ToHost> = Channel::new(stream);
        let order = match tokio::time::timeout(ORDER_TIMEOUT, channel.receive()).await {
            Ok(Ok(ToHost::Order(_) | ToHost::Warm(_))) if self.peer_policy.accepts(&caller).is_err() => {
                return self.refuse(&caller, channel).await;
            }
            Ok(Ok(ToHost::Order(order))) => order,
            Ok(Ok(ToHost::Warm(order))) => return self.host_prepared(*order, channel).await,
            Ok(Ok(
                question @ (ToHost::Which(_)
                | ToHost::End(_)
                | ToHost::Came(_)
                | ToHost::Reads(_)
                | ToHost::Ticket(_)),
            )) => {
                return self.answer_question(question, channel).await;
            }
            _ => return tracing::warn!(%from, "expected an order for children, found none"),
        };
        let (id, parent, node) = (order.fork.clone(), order.parent.clone(), order.node.clone());
        if self.progress(&id).is_ok() {
            // The parent's own daemon, by an address, or an id that was used before.
            let error = ForkError::OwnFork { node: self.node.clone(), fork: id };
            let _ = channel.send(&ToParent::refused(&error)).await;
            return;
        }
        let part = HostPart {
            engine: self.clone(),
            hello,
            order: Arc::new(*order),
            from,
            begun,
            channel,
            is_admitted: false,
            taken: None,
            waiting: Vec::new(),
            sockets: None,
            room: None,
            devices: None,
        };
        let span = tracing::info_span!("fork_host", id = %id);
        match part.run().instrument(span).await {
            Ok(report) => {
                tracing::info!(fork = %id, %parent, %node, children = report.children.len(), "children of a fork from another node run");
                self.end_progress(&id, begun, Ok(&report));
            }
            Err(error) => {
                tracing::error!(fork = %id, %parent, %node, why = %error.message(), "no children of a fork from another node");
                self.end_progress(&id, begun, Err(&error));
            }
        }
    }

    /// Tells a node that it may not bring children.
    async fn refuse(&self, caller: &Caller, mut channel: Channel<ToHost>) {
        let Err(why) = self.peer_policy.accepts(caller) else { return };
        tracing::warn!(%why, "children for another node are refused");
        let _ = channel.send(&ToParent::refused(&ForkError::NotTaken(why))).await;
    }

    /// Takes up what an earlier life of the daemon left of forks from other nodes.
    pub(super) fn recover_hosted(self: &Arc<Self>) {
        for (path, read) in HostRecord::left(&self.hosted()) {
            match read {
                Ok(record) => drop(tokio::spawn(self.clone().take_up_hosted(record))),
                Err(error) => self.enter_unreadable(Unreadable::hosted(path, &error)),
            }
        }
    }

    /// Reads the record of a fork from another node again.
    pub(super) async fn hosted_record(&self, path: &Path) -> Result<std::io::Result<HostRecord>, ForkError> {
        let path = path.to_owned();
        Ok(run_blocking(move || read_json(&path)).await?)
    }

    /// Takes up what is left of a fork from another node. The children are held as soon as this returns.
    pub(super) fn take_up_hosted(self: Arc<Self>, record: HostRecord) -> impl Future<Output = ()> + Send {
        tracing::warn!(fork = %record.fork, parent = %record.parent, node = %record.node,
            "an earlier vmoved was ended in a fork from another node: cleaning up");
        let held = self.hold(record.children.iter());
        // Until they are ended, nobody may take their memory for complete.
        let fetching = record.fetching.then(|| self.fetching(record.children.clone(), &record.node));
        async move {
            if record.fetching {
                self.end_those_that_fetched(&record).await;
            } else {
                self.end_those_that_never_ran(&record.fork, &record.children).await;
            }
            record.close(&self.hosted());
            drop((held, fetching));
        }
    }

    /// What they still miss, nobody can give them any more.
    async fn end_those_that_fetched(&self, record: &HostRecord) {
        let why =
            format!("vmoved was ended while the memory of this child was on its way from {}", record.node);
        for child in record.children.iter().filter(|child| self.registry.vms().get(child).is_ok()) {
            if let Err(error) = self.registry.end_because(child, &why).await {
                tracing::error!(%child, %error, "could not end a child whose memory is not there");
            }
        }
    }

    pub(super) fn hosted(&self) -> PathBuf {
        self.journals.join("hosted")
    }
}

impl HostPart {
    async fn run(mut self) -> Result<ForkReport, ForkError> {
        let done = self.run_until_released().await;
        if let Some(devices) = &self.devices {
            self.engine.give_back_unused(devices).await;
        }
        if done.is_err() && self.is_admitted {
            self.engine.order_failed(&self.order).await;
        }
        done
    }

    async fn run_until_released(&mut self) -> Result<ForkReport, ForkError> {
        let id = self.order.fork.clone();
        let asked = self.asked().await;
        let starting = match asked {
            Ok(starting) => starting,
            Err(error) => {
                let _ = self.channel.send(&ToParent::refused(&error)).await;
                return Err(error);
            }
        };
        match self.work(starting).await {
            Ok(report) => Ok(report),
            Err(error) => {
                tracing::debug!(fork = %id, "telling the parent's daemon");
                let _ = self.channel.send(&ToParent::Failed(error.message())).await;
                Err(error)
            }
        }
    }

    /// Checks everything that can be checked before there is a template, and starts the QEMUs.
    async fn asked(&mut self) -> Result<JoinSet<Start>, ForkError> {
        let (engine, order) = (&self.engine, &self.order);
        let count = order.indexes.len();
        engine.allowed(&order.fork, count)?;
        let told = ForkProgress {
            id: order.fork.clone(),
            parent: order.parent.clone(),
            phase: "check".to_owned(),
            ordered_by: Some(order.node.clone()),
            children: count,
            ..ForkProgress::default()
        };
        engine.begin_progress(told, self.begun)?;
        engine.peers.able().map_err(ForkError::Peers)?;
        engine.admit_order(order).await?;
        self.is_admitted = true;
        let base = engine.hosted_base(&order.kind, &order.parent).await?;
        let (images, reached) = self.reach().await?;
        let disks = order.disks.iter().map(|ordered| ordered.disk.clone()).collect();
        let base = Base { disks, images, overlay_dir: engine.policy.overlay_dir.clone(), ..base };
        let pinned = HostDevices::read(order.devices.as_ref(), count)?.pinned();
        let holes = order.guest_bytes.saturating_sub(order.live_bytes);
        let demand = self.demand(base.backing).with_pinned(pinned, false, holes);
        let whole = demand.with_template(order.live_bytes);
        let room = engine.room_for(&order.fork, &order.parent, whole, base.backing).await?;
        let taken = Taken { disks: reached, ..self.choose(demand, base.backing, &room).await? };
        let (planned, prepared) = engine.children_of(order, &base).await?;
        // What is not at its path here is reached by sockets.
        let images = if base.images == Images::Here { base.disks.as_slice() } else { &[] };
        if let Err(error) = may_open(&planned, images).await {
            discard_all(prepared).await;
            return Err(error);
        }
        let devices = match self.take_devices(&planned, &prepared).await {
            Ok(devices) => devices,
            Err(error) => {
                discard_all(prepared).await;
                return Err(error);
            }
        };
        let (id, engine) = (order.fork.clone(), engine.clone());
        self.devices = Some(devices);
        self.taken = Some(taken.clone());
        self.room = Some(room);
        if let Err(error) = self.channel.send(&ToParent::Accepted(taken)).await {
            discard_all(prepared).await;
            return Err(ForkError::ParentLost(error.into()));
        }
        engine.update(&id, |p| p.prepared += prepared.len());
        if !self.order.disks.is_empty() {
            self.waiting = planned;
            return Ok(JoinSet::new());
        }
        // QEMUs start while the parent is being frozen and its memory is on its way.
        Ok(with_prepared(engine.start_all(&id, planned), prepared))
    }

    /// Lets the children in, whose names are taken, and takes their devices.
    async fn take_devices(
        &self,
        planned: &[Planned],
        prepared: &[Prepared],
    ) -> Result<ChildDevices, ForkError> {
        let order = &self.order;
        let ordered = HostDevices::read(order.devices.as_ref(), order.indexes.len())?;
        let mut plans: Vec<&Plan> = prepared.iter().map(|one| &one.child.plan).collect();
        plans.extend(planned.iter().map(|one| &one.plan));
        // As their numbers are in the order.
        plans.sort_by_key(|plan| order.indexes.iter().position(|index| *index == plan.index));
        let allowed = Allowed { grants: &order.grants, backing: order.kind.backing };
        self.engine.take_for_children(&order.fork, &plans, ordered, allowed).await
    }

    /// Plugs in what the children get. All of their memory is there.
    async fn plug(&mut self, status: &HostStatus, report: &mut ForkReport) {
        let Some(devices) = self.devices.take() else { return };
        let engine = self.engine.clone();
        self.alive_during(status, engine.plug_children(&devices, &mut report.children)).await;
        self.devices = Some(devices);
    }

    /// How children would get at the images of their disks.
    async fn reach(&self) -> Result<(Images, Option<Reached>), ForkError> {
        let order = self.order.clone();
        if order.disks.is_empty() {
            return Ok((Images::Here, None));
        }
        let (engine, session) = (self.engine.clone(), self.hello.session);
        let reached = run_blocking(move || engine.images.reach(&engine.policy, &order));
        let reached = reached.await?.map_err(ForkError::NoImages)?;
        let images = match reached.shared {
            true => Images::Here,
            false => Images::Exported(self.engine.images.exported(session)),
        };
        Ok((images, Some(reached)))
    }

    /// Starts the QEMUs that waited for the freeze.
    async fn start_waiting(&mut self) -> Result<JoinSet<Start>, ForkError> {
        let waiting = std::mem::take(&mut self.waiting);
        let reads = self.taken.as_ref().and_then(|t| t.disks.as_ref()).is_some_and(|disks| !disks.shared);
        if reads {
            let (engine, order) = (&self.engine, &self.order);
            let images = images::Images {
                fork: &order.fork,
                parent: &order.parent,
                node: engine.peers.parent_of(&order.node, self.from, order.port),
                disks: order.disks.len(),
            };
            let listening = engine.images.relay(&engine.peers, &self.hello, images);
            self.sockets = Some(listening.map_err(ForkError::Images)?);
        }
        Ok(self.engine.start_all(&self.order.fork, waiting))
    }

    /// Without the template.
    fn demand(&self, backing: Backing) -> Demand {
        let order = &self.order;
        let hugetlb = backing != Backing::Thp;
        Demand::new(order.indexes.len() as u64, order.guest_bytes, order.expect_written, hugetlb)
    }

    /// From the start of the QEMUs until the children run.
    async fn work(&mut self, starting: JoinSet<Start>) -> Result<ForkReport, ForkError> {
        let begin = match self.begin().await {
            Ok(begin) => begin,
            Err(error) => return discard_started(starting, error).await,
        };
        let manifest: Manifest = match serde_json::from_str(&begin.manifest) {
            Ok(manifest) => manifest,
            Err(error) => {
                return discard_started(starting, ForkError::Manifest(error)).await;
            }
        };
        if let Err(error) = self.as_ordered(&manifest) {
            return discard_started(starting, error).await;
        }
        if let Err(error) = self.engine.number_hosted(&self.order, begin.numbers).await {
            return discard_started(starting, error).await;
        }
        let record = self.record(&manifest);
        if let Some(room) = &self.room {
            room.in_files(record.template.clone());
        }
        let dir = self.engine.hosted();
        if let Err(error) = record.write(&dir) {
            return discard_started(starting, error.into()).await;
        }
        let starting = match self.waiting.is_empty() {
            true => starting,
            false => match self.start_waiting().await {
                Ok(started) => started,
                Err(error) => {
                    record.close(&dir);
                    return Err(error);
                }
            },
        };
        let ended = if record.fetching {
            self.run_early(starting, &begin, manifest).await
        } else {
            self.when_whole(starting, &begin, manifest).await
        };
        // Children that run map its memory: it stays with them, without a name, until the last of them ends.
        let _ = run_blocking(move || record.close(&dir)).await;
        let (report, host) = ended?;
        self.until_released().await;
        // Its threads end.
        let _ = run_blocking(move || drop(host)).await;
        Ok(report)
    }

    async fn begin(&mut self) -> Result<Begin, ForkError> {
        loop {
            match tokio::time::timeout(SILENCE_TIMEOUT * 10, self.channel.receive()).await {
                Ok(Ok(ToHost::Begin(begin))) => return Ok(*begin),
                Ok(Ok(ToHost::Alive)) => {}
                Ok(Ok(ToHost::GiveUp(why))) => return Err(ForkError::GivenUp(why)),
                Ok(Ok(other)) => {
                    let found = other.word();
                    return Err(ForkError::ParentLost(TalkError::Unexpected {
                        expected: "the template",
                        found,
                    }));
                }
                Ok(Err(error)) => return Err(ForkError::ParentLost(error.into())),
                Err(_) => return Err(ForkError::ParentLost(TalkError::NotHeard(SILENCE_TIMEOUT * 10))),
            }
        }
    }

    /// What comes must be what room was found for.
    fn as_ordered(&self, manifest: &Manifest) -> Result<(), ForkError> {
        let (order, bytes) = (&self.order, manifest.guest_bytes());
        let same = bytes == order.guest_bytes && manifest.backing == order.kind.backing;
        // It becomes the name of a folder.
        let plain =
            manifest.id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') && !manifest.id.is_empty();
        if same && plain && manifest.id.len() <= 64 {
            return Ok(());
        }
        Err(ForkError::OtherTemplate {
            expected: format!("{} bytes of {}", order.guest_bytes, order.kind.backing),
            found: format!("{bytes} of {} ({:?})", manifest.backing, manifest.id),
        })
    }

    fn record(&self, manifest: &Manifest) -> HostRecord {
        let order = &self.order;
        let backing = order.kind.backing;
        HostRecord {
            fork: order.fork.clone(),
            parent: order.parent.clone(),
            node: order.node.clone(),
            children: self.children(),
            fetching: self.runs_early(backing),
            template: template::places(self.engine.registry.memory_dir(), &manifest.id, backing),
        }
    }

    /// Names of the children.
    fn children(&self) -> Vec<String> {
        self.order.children().map(|(_, name)| name).collect()
    }

    /// Waits for the whole template, then makes children of it.
    async fn when_whole(
        &mut self,
        starting: JoinSet<Start>,
        begin: &Begin,
        manifest: Manifest,
    ) -> Result<(ForkReport, Arc<Host>), ForkError> {
        let (template, host, status) = match self.fetch(begin, manifest).await {
            Ok(fetched) => fetched,
            Err(error) => return discard_started(starting, error).await,
        };
        let template_ms = ms(Mono::now().since(self.begun));
        self.say(&status, Phase::Load).await;
        let sources = match template.sources() {
            Ok(sources) => sources,
            Err(error) => return discard_started(starting, error.into()).await,
        };
        let files = template.manifest().ram.iter().map(|ram| ram.file.clone()).collect();
        let load = self.load_order(sources, files, begin);
        let making = make_children(self.engine.clone(), self.order.clone(), load, starting, self.begun);
        let mut report = match self.alive_during(&status, making).await {
            Ok(report) => report,
            Err(error) => {
                let _ = run_blocking(move || drop(host)).await;
                return Err(error);
            }
        };
        self.plug(&status, &mut report).await;
        self.done(begin, &mut report, &status, template_ms, None).await;
        Ok((report, host))
    }

    /// Tells the parent's daemon how far this host is, and what it does while no child runs. The daemon may have gone: children that have all
    /// memory need it no more.
    async fn say(&mut self, status: &HostStatus, before: Phase) {
        let running = self.engine.progress(&self.order.fork).map_or(0, |p| p.running);
        let phase = if running == 0 { before } else { Phase::Run };
        let (running, pieces) = (u32::try_from(running).unwrap_or(u32::MAX), status.totals.into());
        let at = At { phase, chunks: status.chunks, missing: status.missing, running, pieces };
        let _ = self.channel.send(&ToParent::Progress(at)).await;
    }

    /// Does what may take long although all memory is here, and says meanwhile that this host is at it.
    async fn alive_during<T>(&mut self, status: &HostStatus, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            match tokio::time::timeout(MAKING_INTERVAL, &mut work).await {
                Ok(done) => return done,
                Err(_) => self.say(status, Phase::Load).await,
            }
        }
    }

    /// For children that nobody serves.
    fn load_order(&self, sources: Vec<Source>, files: Vec<PathBuf>, begin: &Begin) -> LoadOrder {
        LoadOrder {
            fork: self.order.fork.clone(),
            parent: self.order.parent.clone(),
            sources,
            files,
            state: begin.state.clone().into(),
            verify: self.order.verify,
            service: None,
            devices: self.devices.as_ref().map(ChildDevices::by_index).unwrap_or_default(),
        }
    }

    /// Tells the parent's daemon that all is there.
    async fn done(
        &mut self,
        begin: &Begin,
        report: &mut ForkReport,
        status: &HostStatus,
        template_ms: f64,
        faults: Option<FaultStats>,
    ) {
        self.room = None;
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

    /// Other hosts may still read from here.
    async fn until_released(&mut self) {
        loop {
            match tokio::time::timeout(SILENCE_TIMEOUT, self.channel.receive()).await {
                Ok(Ok(ToHost::Alive)) => {}
                Ok(Ok(_) | Err(_)) | Err(_) => return,
            }
        }
    }
}
