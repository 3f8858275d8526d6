//! `vfork create`.

use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_clone::check::{GuestRam, Way};
use vmove_clone::child::Base;
use vmove_clone::disk::Images;
use vmove_clone::record::{ForkPhase, ForkRecord};
use vmove_clone::report::{
    ChildReport, ForkFailure, ForkProgress, ForkReport, FreezeReport, FrozenDisk, Multicast,
};
use vmove_clone::room::Demand;
use vmove_clone::template::Template;
use vmove_clone::{CloneError, check, disk};
use vmove_memory::MemoryDir;
use vmove_migrate::clock::{Mono, ms};
use vmove_migrate::journal::Journal;
use vmove_migrate::node;
use vmove_migrate::vm::VmRecord;
use vmove_qmp::inspect::VmFacts;
use vmove_qmp::{Client, RamBacking};

use super::children::{LoadOrder, Loaded, Planned, Prepared, words};
use super::problem::clone_problem;
use super::remote::{self, Outline};
use super::{Busy, Forks};
use crate::api::forks::ForkRequest;
use crate::api::problem::{Code, Problem};
use crate::server::registry::{off_worker, store_problem};

/// What is said where children differ from their parent in this.
const NOT_LOCKED: &str = "the memory of the children is not locked (-overcommit mem-lock=on is left out of their command lines): all of \
                          the template would be copied for each of them";

/// A guest that is to be forked, looked at.
pub(super) struct Parent {
    pub record: VmRecord,
    pub client: Client,
    pub facts: VmFacts,
    pub base: Base,
    pub rehomed_ms: Option<f64>,
}

impl Parent {
    /// What another host must know.
    pub(super) fn outline(&self) -> Outline {
        let files: Vec<_> = self.record.ram.iter().map(|ram| ram.path.as_path()).collect();
        let (live_bytes, registered_bytes) = remote::allocated(&files);
        Outline {
            base: self.base.clone(),
            qemu: format!("{} {}", self.facts.version, self.facts.package).trim().to_owned(),
            guest_bytes: self.record.ram.iter().map(|ram| ram.size).sum(),
            live_bytes,
            registered_bytes,
            client: Some(self.client.clone()),
        }
    }
}

/// Where children come from.
enum Origin {
    Guest(Box<Parent>, Arc<GuestRam>),
    Template(Box<Template>, Box<Base>),
}

impl Origin {
    const fn base(&self) -> &Base {
        match self {
            Self::Guest(parent, _) => &parent.base,
            Self::Template(_, base) => base,
        }
    }

    /// What another host must know.
    fn outline(&self) -> Outline {
        let template = match self {
            Self::Guest(parent, _) => return parent.outline(),
            Self::Template(template, _) => template,
        };
        let manifest = template.manifest();
        let files: Vec<_> = manifest.ram.iter().map(|ram| ram.file.as_path()).collect();
        let (live_bytes, registered_bytes) = remote::allocated(&files);
        let (base, guest_bytes) = (self.base().clone(), self.guest_bytes());
        let qemu = manifest.qemu.clone();
        Outline { base, qemu, guest_bytes, live_bytes, registered_bytes, client: None }
    }

    /// The guest's memory, if it becomes private: what it writes then is kept apart from the template.
    fn private(&self) -> Option<Arc<GuestRam>> {
        match self {
            Self::Guest(_, ram) if ram.way == Way::Remapped => Some(ram.clone()),
            _ => None,
        }
    }

    fn guest_bytes(&self) -> u64 {
        match self {
            Self::Guest(parent, _) => parent.record.ram.iter().map(|ram| ram.size).sum(),
            Self::Template(template, _) => template.manifest().guest_bytes(),
        }
    }
}

impl Forks {
    /// Forks a guest, or a template. Must not be cancelled in the middle.
    pub async fn create(self: Arc<Self>, request: ForkRequest) -> Result<ForkReport, Problem> {
        let begun = Mono::now();
        let id = request.id.clone().unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string());
        let name = origin_name(&request)?.to_owned();
        self.allowed(&id, request.count)?;
        let busy = self.claim(&name)?;
        self.begin_progress(ForkProgress {
            id: id.clone(),
            parent: name.clone(),
            phase: "check".to_owned(),
            children: request.count,
            ..ForkProgress::default()
        })?;
        let ended = self.fork(&id, &name, &request, begun).await;
        self.end_progress(&id, begun, ended.as_ref());
        if ended.is_ok() {
            let wanted = request.warm.unwrap_or(self.policy.warm);
            if let (Some(vm), true) = (request.vm, wanted > 0) {
                self.refill(busy, vm, wanted);
            }
        }
        ended
    }

    /// What came of a fork is told to those who ask.
    pub(super) fn end_progress(&self, id: &str, begun: Mono, ended: Result<&ForkReport, &Problem>) {
        self.update(id, |p| {
            p.elapsed_ms = ms(Mono::now().since(begun));
            match ended {
                Ok(report) => (p.phase, p.report) = ("done".to_owned(), Some(report.clone())),
                Err(problem) => {
                    p.phase = "failed".to_owned();
                    p.error = Some(ForkFailure {
                        code: problem.code.word(),
                        message: problem.message.clone(),
                        exit_code: problem.exit_code,
                    });
                }
            }
        });
    }

    pub(super) fn allowed(&self, id: &str, count: usize) -> Result<(), Problem> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if id.is_empty() || id.len() > 64 || !id.chars().all(plain) {
            return Err(Problem::new(
                Code::BadRequest,
                format!("Expected an id of 1 to 64 letters, digits and dashes, found {id:?}"),
            ));
        }
        if count == 0 {
            return Err(Problem::new(
                Code::BadOption,
                "Expected at least one child, found 0; to keep a guest as it is now, see `vfork template save`",
            ));
        }
        let most = self.policy.max_children;
        if count > most {
            return Err(Problem::new(
                Code::Forbidden,
                format!("{count} children were asked for, this node allows {most} (max-children in [fork])"),
            ));
        }
        Ok(())
    }

    async fn fork(
        self: &Arc<Self>,
        id: &str,
        name: &str,
        request: &ForkRequest,
        begun: Mono,
    ) -> Result<ForkReport, Problem> {
        let origin = match &request.template {
            Some(template) => self.template_origin(template)?,
            None => {
                let (parent, ram) = self.parent(id, name).await?;
                Origin::Guest(Box::new(parent), ram)
            }
        };
        let mut away = self.call_hosts(id, name, || origin.outline(), request).await?;
        // What is left for this node.
        let request = &ForkRequest { count: away.here, ..request.clone() };
        self.room(&origin, request).await?;
        let mut warm = self.take_warm(name, request.count);
        self.drop_outdated(&mut warm, &origin.base().disks);
        let missing = request.count - warm.len();
        let planned = match self.plan(origin.base(), name, missing, &away.numbers) {
            Ok(planned) => planned,
            Err(problem) => {
                self.give_back(name, warm);
                return Err(problem);
            }
        };
        let mut children: Vec<String> = warm.iter().map(|p| p.child.plan.name().to_owned()).collect();
        children.extend(planned.iter().map(|p| p.plan.name().to_owned()));
        self.update(id, |p| {
            p.phase = "freeze".to_owned();
            p.prepared = warm.len();
        });
        let rehomed_ms = if let Origin::Guest(parent, _) = &origin { parent.rehomed_ms } else { None };
        let (locked, guest) = (origin.base().locks_memory(), origin.private());
        let freeze = async {
            match origin {
                Origin::Guest(parent, ram) => self.freeze_for(id, &parent, ram, children).await,
                Origin::Template(template, _) => self.frozen_template(*template).await,
            }
        };
        let source = match away.alive_during(freeze).await {
            Ok(source) => source,
            Err(problem) => {
                for prepared in warm {
                    prepared.discard().await;
                }
                return Err(problem);
            }
        };
        // Not earlier: QEMUs that start would take the processors from the parent while it is being stopped and saved.
        let cold = self.start_all(id, planned);
        let mut report = ForkReport {
            id: id.to_owned(),
            parent: name.to_owned(),
            parent_pause_ms: source.pause_ms,
            freeze: source.freeze.clone(),
            warnings: if locked { vec![NOT_LOCKED.to_owned()] } else { Vec::new() },
            multicast: Multicast::default(),
            fabric: "local".to_owned(),
            rehomed_ms,
            disks: source.disks.clone(),
            ..ForkReport::default()
        };
        let order = Arc::new(LoadOrder {
            fork: id.to_owned(),
            parent: name.to_owned(),
            sources: source.template.sources().map_err(|e| clone_problem(&e))?,
            files: source.template.manifest().ram.iter().map(|ram| ram.file.clone()).collect(),
            state: source.state.clone(),
            verify: request.verify,
            service: None,
        });
        let away = away.begin(self, id, &source.template, &source.state, guest, begun);
        let loaded = self.load_all(id, warm, cold, &order, &mut report).await;
        let (loaded, lost) = self.meet(id, loaded).await;
        report.children.extend(lost.into_iter().map(|(index, name, error)| self.lost(index, name, &error)));
        self.run_all(id, loaded, begun, request.verify, &mut report).await;
        away.finish(self, id, &mut report).await;
        // Also if who followed the hosts broke off.
        self.remote.disks.settle_fork(id);
        self.close(source).await;
        report.children.sort_by_key(|child| child.index);
        report.complete_ms = ms(Mono::now().since(begun));
        let lost: usize = report.hosts.iter().map(|host| host.children - host.running).sum();
        let failed = lost + report.children.iter().filter(|c| c.error.is_some()).count();
        tracing::info!(fork = %id, parent = %name, children = report.children.len(), failed,
            pause_ms = report.parent_pause_ms, all_running_ms = report.all_running_ms, "guest forked");
        Ok(report)
    }

    /// Looks at a guest and its memory; gives it memory of its own first, if it was forked before.
    pub(super) async fn parent(
        self: &Arc<Self>,
        id: &str,
        name: &str,
    ) -> Result<(Parent, Arc<GuestRam>), Problem> {
        let mut parent = self.look(name).await?;
        if self.members.get(&parent.record).is_some_and(|m| !m.private.is_empty()) {
            self.update(id, |p| p.phase = "rehome".to_owned());
            let done = self.rehome(&parent.record, &parent.client, &parent.facts).await?;
            parent.rehomed_ms = Some(done.total_ms);
        }
        let record = parent.record.clone();
        let ram = off_worker(move || GuestRam::open(&record)).await?.map_err(|e| clone_problem(&e))?;
        Ok((parent, Arc::new(ram)))
    }

    /// Looks at a guest, and refuses it with everything that is in the way.
    pub(super) async fn look(&self, name: &str) -> Result<Parent, Problem> {
        self.registry.not_in_session(name)?;
        let record = self.registry.vms.get(name).map_err(|e| store_problem(&e))?;
        let (client, facts) = self.registry.inspect(&record).await?;
        let mut blockers = check::blockers(&facts);
        let (disks, more) = disk::look(&client, &record, &facts).await.map_err(|e| clone_problem(&e))?;
        blockers.extend(more);
        if !blockers.is_empty() {
            return Err(clone_problem(&CloneError::Refused(blockers)));
        }
        let backing = backing(&record.backing)?;
        let base = Base {
            command_line: record.command_line.clone(),
            environment: record.environment.clone(),
            machine: facts.machine.clone(),
            backing,
            run_dir: self.registry.run_dir.clone(),
            memory_dir: self.registry.memory_dir.clone(),
            disks,
            images: Images::Here,
            overlay_dir: self.policy.overlay_dir.clone(),
        };
        Ok(Parent { record, client, facts, base, rehomed_ms: None })
    }

    fn template_origin(&self, name: &str) -> Result<Origin, Problem> {
        let template = self.loaded_template(name)?;
        let manifest = template.manifest();
        let base = Base {
            command_line: manifest.command_line.clone(),
            environment: manifest.environment.clone(),
            machine: manifest.machine.clone(),
            backing: backing(&manifest.backing)?,
            run_dir: self.registry.run_dir.clone(),
            memory_dir: self.registry.memory_dir.clone(),
            disks: manifest.disks.clone(),
            images: Images::Here,
            overlay_dir: self.policy.overlay_dir.clone(),
        };
        Ok(Origin::Template(Box::new(template), Box::new(base)))
    }

    async fn room(&self, origin: &Origin, request: &ForkRequest) -> Result<(), Problem> {
        let backing = origin.base().backing;
        let hugetlb = backing != RamBacking::Thp;
        let count = request.count as u64;
        let demand = Demand::new(count, origin.guest_bytes(), request.expect_written, hugetlb);
        let copied = matches!(origin, Origin::Guest(_, ram) if ram.way == Way::WriteProtected);
        // Beside the guest, which keeps its file.
        let demand = if copied { demand.with_template(origin.guest_bytes()) } else { demand };
        self.fits(demand, backing).await
    }

    /// Whether there is memory for what is demanded of this kind.
    pub(super) async fn fits(&self, demand: Demand, backing: RamBacking) -> Result<(), Problem> {
        let memory = self.registry.memory_dir.clone();
        let work = move || {
            let free = |backing: RamBacking| {
                let dir = node::memory_dir(&memory, backing);
                MemoryDir::prepare(&dir, node::memory_backing(backing))?.free()
            };
            Ok::<_, CloneError>((free(backing)?.0, free(RamBacking::Thp)?.0))
        };
        let (guest_free, host_free) = off_worker(work).await?.map_err(|e| clone_problem(&e))?;
        demand.fits(guest_free, host_free).map_err(|e| clone_problem(&e))
    }

    pub(super) fn start_all(self: &Arc<Self>, id: &str, planned: Vec<Planned>) -> JoinSet<Start> {
        let mut tasks = JoinSet::new();
        for plan in planned {
            let (forks, id) = (self.clone(), id.to_owned());
            tasks.spawn(async move {
                let (index, name) = (plan.plan.index, plan.plan.name().to_owned());
                let prepared = forks.prepare(plan).await.map_err(|e| (index, name, e))?;
                forks.update(&id, |p| p.prepared += 1);
                Ok((prepared, false))
            });
        }
        tasks
    }

    async fn frozen_template(&self, template: Template) -> Result<Ready, Problem> {
        let work = move || {
            let state = template.state()?;
            let (freeze, disks, journal) = (None, Vec::new(), None);
            Ok::<_, CloneError>(Ready { pause_ms: 0.0, freeze, template, state, disks, journal })
        };
        off_worker(work).await?.map_err(|e| clone_problem(&e))
    }

    /// Loads all children, each as soon as its QEMU is there. None runs before all are loaded: those that run would take the
    /// processors from those that load.
    pub(super) async fn load_all(
        self: &Arc<Self>,
        id: &str,
        warm: Vec<Prepared>,
        mut cold: JoinSet<Start>,
        order: &Arc<LoadOrder>,
        report: &mut ForkReport,
    ) -> Vec<(Loaded, bool)> {
        self.update(id, |p| p.phase = "load".to_owned());
        let mut loading = JoinSet::new();
        let start = |prepared: Prepared, warm: bool, loading: &mut JoinSet<LoadEnd>| {
            let (forks, order, id) = (self.clone(), Arc::clone(order), id.to_owned());
            loading.spawn(async move {
                let loaded = forks.load(prepared, &order).await?;
                forks.update(&id, |p| p.loaded += 1);
                Ok((loaded, warm))
            });
        };
        for prepared in warm {
            start(prepared, true, &mut loading);
        }
        while let Some(ended) = cold.join_next().await {
            match ended {
                Ok(Ok((prepared, warm))) => start(prepared, warm, &mut loading),
                Ok(Err((index, name, error))) => report.children.push(self.lost(index, name, &error)),
                Err(error) => tracing::error!(%error, "a task that starts a child failed"),
            }
        }
        let mut loaded = Vec::new();
        while let Some(ended) = loading.join_next().await {
            match ended {
                Ok(Ok(child)) => loaded.push(child),
                Ok(Err((index, name, error))) => report.children.push(self.lost(index, name, &error)),
                Err(error) => tracing::error!(%error, "a task that loads a child failed"),
            }
        }
        loaded
    }

    fn lost(&self, index: u32, name: String, error: &CloneError) -> ChildReport {
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

    pub(super) async fn run_all(
        self: &Arc<Self>,
        id: &str,
        loaded: Vec<(Loaded, bool)>,
        begun: Mono,
        verified: bool,
        report: &mut ForkReport,
    ) {
        self.update(id, |p| p.phase = "run".to_owned());
        let mut running = JoinSet::new();
        for (mut child, warm) in loaded {
            let (forks, id) = (self.clone(), id.to_owned());
            running.spawn(async move {
                let ran = child.child.run().await;
                forks.update(&id, |p| p.running += usize::from(ran.is_ok()));
                forks.greet(child.child.plan.name(), ran.is_ok());
                let network = match ran {
                    Ok(_) => child.child.bring_up_network().await,
                    Err(_) => "none".to_owned(),
                };
                let plan = &child.child.plan;
                ChildReport {
                    name: plan.name().to_owned(),
                    index: plan.index,
                    node: forks.node.clone(),
                    qmp: plan.layout.qmp_socket.display().to_string(),
                    pid: child.child.record().pid,
                    running_ms: ran.as_ref().ok().map(|at| at.ms_since(begun)),
                    warm,
                    verified: verified.then_some(true),
                    network,
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
            if let Err(problem) = self.registry.stop(&child.name, true).await {
                tracing::error!(child = %child.name, %problem, "could not end a child that did not run");
            }
        }
        report.all_running_ms = ended.iter().filter_map(|child| child.running_ms).fold(0.0, f64::max);
        report.children.extend(ended);
    }

    /// What served this fork only goes away; memory that children map stays with them.
    async fn close(&self, source: Ready) {
        let Ready { template, journal, .. } = source;
        let Some(mut journal) = journal else { return };
        let work = move || {
            if let Err(error) = template.remove() {
                tracing::warn!(%error, "a template that is not needed any more is left");
            }
            if let Err(error) = journal.update(|r: &mut ForkRecord| r.phase = ForkPhase::Complete) {
                tracing::warn!(%error, "could not write the journal of a fork");
            }
            let _ = std::fs::remove_file(journal.path());
        };
        if let Err(problem) = off_worker(work).await {
            tracing::warn!(%problem, "could not tidy up after a fork");
        }
    }
}

pub(super) type Start = Result<(Prepared, bool), (u32, String, CloneError)>;
type LoadEnd = Result<(Loaded, bool), (u32, String, CloneError)>;

pub(super) async fn finish_all(mut tasks: JoinSet<Start>) -> Vec<Start> {
    let mut ended = Vec::new();
    while let Some(task) = tasks.join_next().await {
        ended.extend(task.ok());
    }
    ended
}

/// What children are loaded from.
pub(super) struct Ready {
    pub pause_ms: f64,
    pub freeze: Option<FreezeReport>,
    pub template: Template,
    pub state: Arc<[u8]>,
    pub disks: Vec<FrozenDisk>,
    pub journal: Option<Journal<ForkRecord>>,
}

fn origin_name(request: &ForkRequest) -> Result<&str, Problem> {
    match (&request.vm, &request.template) {
        (Some(name), None) | (None, Some(name)) => Ok(name),
        _ => Err(Problem::new(Code::BadRequest, "Expected either vm or template, found both or none")),
    }
}

fn backing(name: &str) -> Result<RamBacking, Problem> {
    node::backing_named(name)
        .ok_or_else(|| Problem::new(Code::Internal, format!("unknown backing {name:?} in a record")))
}

impl Forks {
    /// Prepares children for the next fork, with the claim on the VM kept meanwhile.
    fn refill(self: &Arc<Self>, busy: Busy, vm: String, wanted: usize) {
        let forks = self.clone();
        tokio::spawn(async move {
            if let Err(problem) = forks.fill_warm(&vm, wanted).await {
                tracing::warn!(vm = %vm, %problem, "no children could be prepared for the next fork");
            }
            drop(busy);
        });
    }
}
