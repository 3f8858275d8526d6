//! `vfork create`: the parent's side of a fork.

mod called_hosts;
mod disks;
mod divide;
mod follow;
mod freeze;

use std::sync::Arc;

use tokio::task::JoinSet;
use tracing::Instrument;
use vmove_node::blocking::run_blocking;
use vmove_node::journal::Journal;
use vmove_node::reservations::Reservation;
use vmove_node::store::check_name;
use vmove_types::Backing;
use vmove_types::fork::ForkRequest;
use vmove_types::fork_devices::Parting;
use vmove_types::fork_report::{ForkProgress, ForkReport, FreezeReport, FrozenDisk, Multicast};
use vmove_types::time::{Mono, ms};

use self::called_hosts::CalledHosts;
pub use self::divide::Division;
use super::children::{LoadOrder, Planned, Prepared, Start, Then, discard_all, may_open};
use super::devices::{Allowed, Away, ChildDevices, Dealt, deal};
use super::error::ForkError;
use super::origin::Origin;
use super::promote::Forked;
use super::{Claim, ForkEngine, metrics};
use crate::CloneError;
use crate::check::GuestRam;
use crate::child::Plan;
use crate::record::{ForkPhase, ForkRecord};
use crate::room::Demand;
use crate::template::Template;

/// What is said where children differ from their parent in this.
const NOT_LOCKED: &str = "the memory of the children is not locked (-overcommit mem-lock=on is left out of their command lines): all of \
                          the template would be copied for each of them";

/// One request for children, while it is at work.
struct Fork {
    id: String,
    /// The guest or the template.
    parent: String,
    request: ForkRequest,
    parting: Parting,
    begun: Mono,
}

impl ForkEngine {
    /// Forks a guest, or a template. Must not be cancelled in the middle.
    ///
    /// # Errors
    /// [`ForkError`]: no child of it is there then, and the guest runs on. Children that fail while others do not are told of in the
    /// report.
    pub async fn create(self: Arc<Self>, request: ForkRequest) -> Result<ForkReport, ForkError> {
        let begun = Mono::now();
        let id = request.id.clone().unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string());
        let parent = parent_name(&request)?.to_owned();
        self.allowed(&id, request.count)?;
        check_names(&request)?;
        if request.paused && !request.nodes.is_empty() {
            return Err(ForkError::PausedElsewhere);
        }
        let parting = parting(&request)?;
        // Before the VM is claimed: a hook may take its time.
        self.ask_before_fork(&id, &parent, &request).await?;
        let claim = self.claim_at_home(&parent).await?;
        // Of what is not here there is no fork that could be listed.
        self.is_here(&request, &parent)?;
        let told = ForkProgress {
            id: id.clone(),
            parent: parent.clone(),
            phase: "check".to_owned(),
            children: request.count,
            ..ForkProgress::default()
        };
        self.begin_progress(told, begun)?;
        let fork = Fork { id, parent, request, parting, begun };
        let span = tracing::info_span!("fork", id = %fork.id);
        let mut left = None;
        let ended = self.fork(&fork, &mut left).instrument(span).await;
        self.end_progress(&fork.id, begun, ended.as_ref());
        metrics::count(ended.as_ref(), fork.request.count);
        self.tell_end(&fork.id, &fork.parent, ended.as_ref());
        if ended.is_ok() {
            let wanted = fork.request.warm.unwrap_or(self.policy.warm);
            let wanted = fork.request.vm.filter(|_| wanted > 0).map(|vm| (vm, wanted));
            self.go_on(claim, fork.id, left, wanted);
        }
        ended
    }

    fn is_here(&self, request: &ForkRequest, parent: &str) -> Result<(), ForkError> {
        if request.template.is_some() {
            return self.loaded_template(parent).map(drop);
        }
        Ok(self.registry.vms().get(parent).map(drop)?)
    }

    /// The steps of a fork: check, call hosts, freeze, make children, report. The parent is without its devices from before the freeze until
    /// after it.
    async fn fork(self: &Arc<Self>, fork: &Fork, left: &mut Option<Forked>) -> Result<ForkReport, ForkError> {
        let mut away = self.stays_with_devices(&fork.id, &fork.parent, fork.parting.clone());
        let mut ready = match self.until_frozen(fork, &mut away).await {
            Ok(ready) => ready,
            Err(error) => return Err(self.return_after(away, &fork.id, error).await),
        };
        if self.guests.asked_for(&fork.id) {
            // The guest waits for its answer.
            *left = ready.forked.take();
        }
        // At once: the parent does without them meanwhile.
        let engine = self.clone();
        let returning = tokio::spawn(async move { engine.return_devices(away).await }.in_current_span());
        let Ready { here, mut hosts, source, guest, forked, mut report } = ready;
        self.number_for_guest(&fork.id, &here.names(), &mut hosts).await;
        let made = self.make_children(fork, here, hosts, &source, (guest, forked), &mut report).await;
        match returning.await {
            Ok(returned) => returned.report(&mut report),
            Err(error) => tracing::error!(%error, "a task that gives a guest its devices back failed"),
        }
        made?;
        self.close(fork, source, &mut report).await;
        Ok(report)
    }

    /// Up to the moment from which the guest goes on, and children can be made.
    async fn until_frozen(self: &Arc<Self>, fork: &Fork, away: &mut Away) -> Result<Ready, ForkError> {
        let origin = self.check(fork, away).await?;
        let dealt = self.deal(fork, &origin)?;
        let mut hosts = self.call_hosts(fork, &dealt, || origin.outline()).await?;
        let here = self.plan_here(fork, &origin, &hosts, &dealt).await?;

        let report = first_report(fork, &origin);
        let (guest, forked) = (origin.private(), origin.forked());
        let freezing = self.freeze_origin(fork, origin, here.names(), away);
        match hosts.alive_during(freezing).await {
            Ok(source) => Ok(Ready { here, hosts, source, guest, forked, report }),
            Err(error) => {
                discard_all(here.prepared).await;
                drop(here.planned);
                self.give_back_unused(&here.devices).await;
                Err(error)
            }
        }
    }

    /// Which child gets which device.
    fn deal(&self, fork: &Fork, origin: &Origin) -> Result<Dealt, ForkError> {
        let request = &fork.request;
        let division = Division::of(request, &self.node)?;
        let away = division.away.iter().flat_map(|(node, count)| std::iter::repeat_n(node.clone(), *count));
        let nodes: Vec<String> = std::iter::repeat_n(self.node.clone(), division.here).chain(away).collect();
        // Nothing can be run in children that stay paused.
        let resume = fork.parting.resume.clone().filter(|_| !request.paused);
        let parting = Parting { resume, ..fork.parting.clone() };
        deal(&origin.base().devices, &request.devices, &nodes, parting, request.as_it_was)
            .map_err(|wrong| CloneError::Refused(wrong).into())
    }

    /// Looks at what is to be forked, and refuses it with everything that is in the way.
    async fn check(self: &Arc<Self>, fork: &Fork, away: &mut Away) -> Result<Origin, ForkError> {
        if let Some(template) = &fork.request.template {
            return self.template_origin(template, fork.request.as_it_was);
        }
        let (guest, ram) = self.guest(&fork.id, away).await?;
        Ok(Origin::Guest(Box::new(guest), ram))
    }

    /// The children that are to be on this node: those that were prepared, and plans of the others. There must be memory for all.
    async fn plan_here(
        &self,
        fork: &Fork,
        origin: &Origin,
        hosts: &CalledHosts,
        dealt: &Dealt,
    ) -> Result<ChildrenHere, ForkError> {
        let (base, count) = (origin.base(), hosts.here);
        let devices = dealt.here(count);
        let hugetlb = base.backing != Backing::Thp;
        let demand = Demand::new(count as u64, origin.guest_bytes(), fork.request.expect_written, hugetlb);
        // Beside the guest, which keeps its file.
        let demand = if origin.is_copied() { demand.with_template(origin.guest_bytes()) } else { demand };
        let demand = demand.with_pinned(devices.pinned(), origin.is_pinned_again(), origin.hole_bytes());
        let room = self.room_for(&fork.id, &fork.parent, demand, base.backing).await?;
        let names = fork.request.names.get(..count).unwrap_or_default();
        // Those that are prepared have names.
        let wanted = if names.is_empty() { count } else { 0 };
        let mut prepared = self.take_prepared(&fork.parent, wanted);
        self.drop_outdated(&mut prepared, &base.disks);
        let missing = count - prepared.len();
        let planned = match self.plan(base, &fork.parent, missing, &hosts.numbers, names).await {
            Ok(planned) => planned,
            Err(error) => {
                self.give_back(&fork.parent, prepared);
                return Err(error);
            }
        };
        if let Err(error) = may_open(&planned, &base.disks).await {
            self.give_back(&fork.parent, prepared);
            return Err(error);
        }
        let mut plans: Vec<&Plan> = prepared.iter().map(|one| &one.child.plan).collect();
        plans.extend(planned.iter().map(|one| &one.plan));
        plans.sort_by_key(|plan| plan.index);
        let allowed = Allowed { grants: &fork.request.grants, backing: base.backing };
        let devices = match self.take_for_children(&fork.id, &plans, devices, allowed).await {
            Ok(devices) => devices,
            Err(error) => {
                self.give_back(&fork.parent, prepared);
                return Err(error);
            }
        };
        self.update(&fork.id, |p| p.prepared = prepared.len());
        Ok(ChildrenHere { prepared, planned, devices, room })
    }

    /// What children are loaded from: the guest as it is now, or the template.
    async fn freeze_origin(
        self: &Arc<Self>,
        fork: &Fork,
        origin: Origin,
        children: Vec<String>,
        away: &mut Away,
    ) -> Result<FrozenOrigin, ForkError> {
        let id = fork.id.as_str();
        match origin {
            Origin::Guest(guest, ram) => {
                if !guest.record.devices.is_empty() {
                    self.update(id, |p| p.phase = "detach".to_owned());
                }
                self.detach_devices(away, &guest.record, &guest.client).await?;
                self.update(id, |p| p.phase = "freeze".to_owned());
                self.freeze_for(fork, &guest, ram, children).await
            }
            Origin::Template(template, _) => frozen_template(*template).await,
        }
    }

    /// Makes the children, here and on the other hosts at the same time. Those that fail are told of in the report.
    async fn make_children(
        self: &Arc<Self>,
        fork: &Fork,
        here: ChildrenHere,
        hosts: CalledHosts,
        source: &FrozenOrigin,
        (guest, forked): (Option<Arc<GuestRam>>, Option<Forked>),
        report: &mut ForkReport,
    ) -> Result<(), ForkError> {
        let (id, verify) = (fork.id.as_str(), fork.request.verify);
        // Not earlier: QEMUs that start would take the processors from the parent while it is being stopped and saved.
        let starting: JoinSet<Start> = self.start_all(id, here.planned);
        report.parent_stopped_ms = source.stopped.map(|at| at.ms_since(fork.begun));
        report.parent_pause_ms = source.pause_ms;
        report.ran_on_ms = source.ran_on.map(|at| at.ms_since(fork.begun));
        report.freeze.clone_from(&source.freeze);
        report.disks.clone_from(&source.disks);
        let order = Arc::new(LoadOrder {
            fork: id.to_owned(),
            parent: fork.parent.clone(),
            sources: source.template.sources()?,
            files: source.template.manifest().ram.iter().map(|ram| ram.file.clone()).collect(),
            state: source.state.clone(),
            verify,
            service: None,
            devices: here.devices.by_index(),
        });
        let following = hosts.make_children(self, id, source, guest, fork.begun);
        let loaded = self.load_all(id, here.prepared, starting, &order, report).await;
        let (loaded, lost) = self.meet(id, loaded).await;
        report.children.extend(lost.into_iter().map(|(index, name, error)| self.lost(index, name, &error)));
        let then = Then { verified: verify, paused: fork.request.paused };
        self.run_all(id, loaded, fork.begun, then, report).await;
        self.update(id, |p| p.phase = "devices".to_owned());
        self.plug_children(&here.devices, &mut report.children).await;
        self.give_back_unused(&here.devices).await;
        let own_memory = async {
            match forked {
                Some(forked) => self.rehome_after_fork(id, &forked).await,
                None => (None, None),
            }
        };
        // What the children here are expected to write is kept for them.
        let (own_memory, warning) =
            tokio::join!(own_memory, async { following.finish(self, id, report).await }).0;
        drop(here.room);
        report.own_memory = own_memory;
        report.warnings.extend(warning);
        Ok(())
    }

    /// Ends the report, and removes what existed for this fork only. Memory that children map lives on with them.
    async fn close(self: &Arc<Self>, fork: &Fork, source: FrozenOrigin, report: &mut ForkReport) {
        // Also where the task that followed the hosts failed.
        self.images.settle_fork(&fork.id);
        self.tidy(&fork.parent, source).await;
        report.children.sort_by_key(|child| child.index);
        let waited = [report.own_memory_before, report.own_memory].into_iter().flatten();
        report.parent_stood_still_ms =
            report.parent_pause_ms + waited.map(|own| own.stood_still_ms()).sum::<f64>();
        report.complete_ms = ms(Mono::now().since(fork.begun));
        let lost: usize = report.hosts.iter().map(|host| host.children - host.running).sum();
        let failed = lost + report.children.iter().filter(|c| c.error.is_some()).count();
        tracing::info!(parent = %fork.parent, children = report.children.len(), failed,
            pause_ms = report.parent_pause_ms, all_running_ms = report.all_running_ms, "guest forked");
    }

    /// Removes what existed for a fork only. The journal goes when the VM's record is on the disk, which nobody waits for.
    async fn tidy(self: &Arc<Self>, parent: &str, source: FrozenOrigin) {
        let FrozenOrigin { template, journal, .. } = source;
        let Some(journal) = journal else { return };
        let work = move || {
            if let Err(error) = template.remove() {
                tracing::warn!(%error, "a template that is not needed any more is left");
            }
        };
        if let Err(error) = run_blocking(work).await {
            tracing::warn!(%error, "could not tidy up after a fork");
        }
        self.end_journal(parent, journal).await;
    }

    /// Ends the journal of a fork that is complete: at once, or when the VM's record is on the disk.
    pub(super) async fn end_journal(self: &Arc<Self>, parent: &str, mut journal: Journal<ForkRecord>) {
        if self.registry.vms().owed(parent).is_some() {
            let (engine, parent) = (self.clone(), parent.to_owned());
            tokio::spawn(async move {
                engine.until_written(&parent).await;
                let _ = std::fs::remove_file(journal.path());
            });
            return;
        }
        let work = move || {
            // If it cannot be removed, the next life finds that nothing is to be done.
            if let Err(error) = journal.update(|r: &mut ForkRecord| r.phase = ForkPhase::Complete) {
                tracing::warn!(%error, "could not write the journal of a fork");
            }
            if let Err(error) = std::fs::remove_file(journal.path()) {
                tracing::warn!(path = %journal.path().display(), %error, "the journal of a fork is left");
            }
        };
        if let Err(error) = run_blocking(work).await {
            tracing::warn!(%error, "could not tidy up after a fork");
        }
    }

    /// What is done after a fork was answered, with the claim on the VM kept meanwhile: memory of its own for a guest that has asked for
    /// the fork, children prepared for the next one.
    fn go_on(
        self: &Arc<Self>,
        claim: Claim,
        fork: String,
        left: Option<Forked>,
        wanted: Option<(String, usize)>,
    ) {
        if left.is_some() {
            self.lock().coming_home.insert(claim.name.clone());
        }
        let engine = self.clone();
        tokio::spawn(async move {
            if let Some(forked) = left {
                engine.rehome_after_fork(&fork, &forked).await;
                engine.update(&fork, |p| p.phase = "done".to_owned());
            }
            if let Some((vm, wanted)) = wanted
                && let Err(error) = engine.prepare_here(&vm, wanted).await
            {
                tracing::warn!(vm = %vm, why = %error.message(), "no children could be prepared for the next fork");
            }
            drop(claim);
        });
    }
}

/// The guest is frozen: children can be made of it.
struct Ready {
    here: ChildrenHere,
    hosts: CalledHosts,
    source: FrozenOrigin,
    guest: Option<Arc<GuestRam>>,
    forked: Option<Forked>,
    report: ForkReport,
}

/// The children of a fork that are to be on the parent's node.
struct ChildrenHere {
    prepared: Vec<Prepared>,
    planned: Vec<Planned>,
    /// Their devices.
    devices: ChildDevices,
    /// Memory for them, until they run.
    room: Reservation,
}

impl ChildrenHere {
    fn names(&self) -> Vec<String> {
        let prepared = self.prepared.iter().map(|p| p.child.plan.name());
        prepared.chain(self.planned.iter().map(|p| p.plan.name())).map(str::to_owned).collect()
    }
}

/// What children are loaded from.
struct FrozenOrigin {
    /// When a guest that ran was stopped.
    stopped: Option<Mono>,
    pause_ms: f64,
    /// When a guest that was paused ran on, if it was to.
    ran_on: Option<Mono>,
    freeze: Option<FreezeReport>,
    template: Template,
    state: Arc<[u8]>,
    disks: Vec<FrozenDisk>,
    /// None of a template that was there.
    journal: Option<Journal<ForkRecord>>,
}

async fn frozen_template(template: Template) -> Result<FrozenOrigin, ForkError> {
    let work = move || {
        let state = template.state()?;
        let (freeze, disks, journal) = (None, Vec::new(), None);
        let (stopped, pause_ms, ran_on) = (None, 0.0, None);
        Ok::<_, CloneError>(FrozenOrigin {
            stopped,
            pause_ms,
            ran_on,
            freeze,
            template,
            state,
            disks,
            journal,
        })
    };
    Ok(run_blocking(work).await??)
}

fn first_report(fork: &Fork, origin: &Origin) -> ForkReport {
    ForkReport {
        id: fork.id.clone(),
        parent: fork.parent.clone(),
        warnings: if origin.base().locks_memory() { vec![NOT_LOCKED.to_owned()] } else { Vec::new() },
        multicast: Multicast::default(),
        fabric: "local".to_owned(),
        own_memory_before: origin.own_memory_before(),
        ..ForkReport::default()
    }
}

/// How the guest is asked for its devices.
fn parting(request: &ForkRequest) -> Result<Parting, ForkError> {
    match (&request.template, &request.parting.quiesce) {
        (Some(_), Some(script)) => Err(ForkError::QuiesceTemplate(script.clone())),
        _ => request.parting.parting().map_err(ForkError::Parting),
    }
}

/// Names of children that could not be given as they are asked for; and a guest that would be there twice.
fn check_names(request: &ForkRequest) -> Result<(), ForkError> {
    let ForkRequest { names, count, .. } = request;
    if !names.is_empty() && names.len() != *count {
        return Err(ForkError::OtherNumberOfNames { names: names.len(), children: *count });
    }
    for (place, name) in names.iter().enumerate() {
        check_name(name)?;
        if names[..place].contains(name) {
            return Err(ForkError::NameTwice(name.clone()));
        }
    }
    let alone = request.template.is_some() && *count == 1 && request.nodes.is_empty();
    if request.as_it_was && !alone {
        return Err(ForkError::NotAsItWas);
    }
    Ok(())
}

fn parent_name(request: &ForkRequest) -> Result<&str, ForkError> {
    match (&request.vm, &request.template) {
        (Some(name), None) | (None, Some(name)) => Ok(name),
        _ => Err(ForkError::NoSingleParent),
    }
}
