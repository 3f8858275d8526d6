//! Children on this node, on their way: what must go away again if one does not come to be.
//!
//! A child is planned (its name is taken), prepared (its QEMU waits), loaded (it has memory and device state), and run.

mod load;
mod run;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::task::JoinSet;
use vmove_node::blocking::run_blocking;
use vmove_node::registry::starting::{self, Note};
use vmove_node::reservations::Reservation;
use vmove_node::store::HeldName;
use vmove_qmp::QemuProcess;
use vmove_types::Backing;
use vmove_types::device::VmDevice;
use vmove_types::fork_report::LoadWrite;
use vmove_types::problem::{Code, chain};

pub use self::run::Then;
use super::ForkEngine;
use super::error::ForkError;
use crate::CloneError;
use crate::child::{Base, Child, Plan};
use crate::disk::Disk;
use crate::identity::child_name;
use crate::room::Demand;
use crate::service::PageService;
use crate::template::Source;

/// A child whose QEMU waits. Its name is reserved, and a note in its folder lets the next daemon clean up.
#[derive(Debug)]
pub struct Prepared {
    pub child: Child,
    note: Note,
    reserved: HeldName,
}

impl Prepared {
    /// Ends it and removes what was made for it.
    pub async fn discard(self) {
        self.child.kill().await;
        let vm_dir = self.child.plan.layout.vm_dir.clone();
        let (note, reserved) = (self.note, self.reserved);
        let work = move || {
            starting::undo(&vm_dir, &note);
            drop(reserved);
        };
        if let Err(error) = run_blocking(work).await {
            tracing::error!(%error, "could not clean up after a child");
        }
    }
}

/// A plan with its name taken.
#[derive(Debug)]
pub struct Planned {
    pub plan: Plan,
    reserved: HeldName,
}

impl ForkEngine {
    /// Plans of `count` children, each with the next of `names`, or without any with the next free name; `ordered`: numbers that the same fork
    /// gives to children on other nodes, which are remembered only when they run.
    pub(in crate::engine) async fn plan(
        &self,
        base: &Base,
        parent: &str,
        count: usize,
        ordered: &[u32],
        names: &[String],
    ) -> Result<Vec<Planned>, ForkError> {
        let mut planned = Vec::new();
        let mut index = 0;
        let mut elsewhere = self.names_taken_away(parent).await;
        elsewhere.extend(self.members.list().into_iter().filter(|m| m.node.is_some()).map(|m| m.vm));
        let mut away = self.numbers_kept(parent);
        away.extend(ordered);
        if !names.is_empty() {
            // Their names do not tell which numbers are taken.
            let children =
                self.members.list().into_iter().filter(|member| member.parent.as_deref() == Some(parent));
            away.extend(children.map(|child| child.index));
        }
        while planned.len() < count {
            index += 1;
            if away.contains(&index) || elsewhere.contains(&child_name(parent, index)) {
                continue;
            }
            if let Some(name) = names.get(planned.len()) {
                planned.push(self.plan_one(base, index, name)?);
                continue;
            }
            match self.plan_one(base, index, &child_name(parent, index)) {
                Ok(plan) => planned.push(plan),
                Err(error) if error.code() == Code::NameTaken => {}
                Err(error) => return Err(error),
            }
        }
        Ok(planned)
    }

    /// The plan of child `index`, whose name must be free.
    pub(in crate::engine) fn plan_one(
        &self,
        base: &Base,
        index: u32,
        name: &str,
    ) -> Result<Planned, ForkError> {
        let reserved = self.registry.reserve(name)?;
        let plan = Plan::new(base, index, name)?;
        Ok(Planned { plan, reserved })
    }

    /// Reserves the memory that a fork demands on this node, of this kind.
    pub(in crate::engine) async fn room_for(
        &self,
        fork: &str,
        parent: &str,
        demand: Demand,
        backing: Backing,
    ) -> Result<Reservation, ForkError> {
        let reservations = self.registry.reservations().clone();
        let holder = format!("fork {fork} of {parent:?}");
        let work = move || {
            let reserved = reservations.reserve(&holder, demand.wanted(backing), |rooms| demand.fits(rooms));
            reserved.map_err(CloneError::from)?
        };
        Ok(run_blocking(work).await??)
    }

    /// Starts the QEMU of a child. On an error nothing is left behind.
    pub(in crate::engine) async fn start_child(&self, planned: Planned) -> Result<Prepared, CloneError> {
        let _turn = self.at_work.acquire().await;
        let Planned { plan, reserved } = planned;
        let files = plan.ram.iter().map(|ram| ram.path.clone());
        let files = files.chain(plan.overlays.iter().map(|overlay| overlay.path.clone())).collect();
        let note = Note { name: plan.name().to_owned(), ram: files };
        let (layout, begun) = (plan.layout.clone(), note.clone());
        let made = run_blocking(move || starting::begin(&layout, &begun)).await;
        match made {
            Ok(Ok(())) => {}
            Ok(Err(source)) => {
                let path = plan.layout.vm_dir.clone();
                return Err(CloneError::Io { action: "create", path, source });
            }
            Err(error) => return Err(CloneError::Task(error.to_string())),
        }
        let vm_dir = plan.layout.vm_dir.clone();
        let mut started: Option<QemuProcess> = None;
        match Child::prepare(plan, |qemu| started = Some(qemu)).await {
            Ok(child) => Ok(Prepared { child, note, reserved }),
            Err(error) => {
                if let Some(qemu) = started {
                    let _ = qemu.kill().await;
                }
                let _ = run_blocking(move || starting::undo(&vm_dir, &note)).await;
                drop(reserved);
                Err(error)
            }
        }
    }
}

/// Refuses what the QEMUs of children could not open: of one, as for all. They read the images of these disks.
pub async fn may_open(planned: &[Planned], disks: &[Disk]) -> Result<(), ForkError> {
    let Some(plan) = planned.first().map(|planned| planned.plan.clone()) else { return Ok(()) };
    let images: Vec<PathBuf> = disks.iter().map(|disk| disk.file.clone()).collect();
    Ok(run_blocking(move || plan.may_open(&images)).await??)
}

/// What all children of one fork are loaded with.
#[derive(Debug, Clone)]
pub struct LoadOrder {
    pub fork: String,
    pub parent: String,
    pub sources: Vec<Source>,
    pub files: Vec<PathBuf>,
    pub state: Arc<[u8]>,
    pub verify: bool,
    /// Answers the children's faults, as long as the template is on its way.
    pub service: Option<Arc<PageService>>,
    /// Devices of the node that are theirs, by number: plugged in later.
    pub devices: BTreeMap<u32, Vec<VmDevice>>,
}

/// A child that is complete and stands still.
#[derive(Debug)]
pub struct Loaded {
    pub child: Child,
    /// What was found by `verify`.
    pub written_while_loading: Vec<LoadWrite>,
    _reserved: HeldName,
}

/// The end of a start: the child, and whether it was prepared before the fork; or its number, its name and why there is none.
pub type Start = Result<(Prepared, bool), (u32, String, CloneError)>;
/// Waits for all that are being started.
pub async fn finish_all(mut tasks: JoinSet<Start>) -> Vec<Start> {
    let mut ended = Vec::new();
    while let Some(task) = tasks.join_next().await {
        ended.extend(task.ok());
    }
    ended
}

/// Those that were prepared, among those that are being started.
pub fn with_prepared(mut starting: JoinSet<Start>, prepared: Vec<Prepared>) -> JoinSet<Start> {
    for prepared in prepared {
        starting.spawn(async move { Ok((prepared, true)) });
    }
    starting
}

/// Ends QEMUs that were started for nothing.
pub async fn discard_started<T>(started: JoinSet<Start>, error: ForkError) -> Result<T, ForkError> {
    for (prepared, _) in finish_all(started).await.into_iter().flatten() {
        prepared.discard().await;
    }
    Err(error)
}

/// Ends them, all at once.
pub async fn discard_all(all: Vec<Prepared>) {
    let mut tasks = JoinSet::new();
    for prepared in all {
        tasks.spawn(prepared.discard());
    }
    tasks.join_all().await;
}

/// What becomes of an error in a child's report.
pub fn words(error: &CloneError) -> String {
    chain(error)
}
