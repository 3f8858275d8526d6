//! Children on their way: what must go away again if one does not come to be.

use std::sync::Arc;

use tokio::process::Command;
use vmove_clone::CloneError;
use vmove_clone::child::{Base, Child, Plan};
use vmove_clone::identity::child_name;
use vmove_clone::record::Member;
use vmove_clone::service::PageService;
use vmove_clone::template::Source;
use vmove_qmp::QemuProcess;

use super::Forks;
use super::problem::clone_problem;
use crate::api::problem::{Code, Problem, chain};
use crate::server::registry::starting::{self, Note};
use crate::server::registry::{Reserved, off_worker};

/// How long the operator's hook may take.
const HOOK: std::time::Duration = std::time::Duration::from_secs(30);

/// A child whose QEMU waits. Its name is reserved, and a note in its folder lets the next daemon clean up.
#[derive(Debug)]
pub struct Prepared {
    pub child: Child,
    note: Note,
    reserved: Reserved,
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
        if let Err(problem) = off_worker(work).await {
            tracing::error!(%problem, "could not clean up after a child");
        }
    }
}

/// A plan with its name taken.
#[derive(Debug)]
pub struct Planned {
    pub plan: Plan,
    reserved: Reserved,
}

impl Forks {
    /// Plans of `count` children, each with the next free name; `ordered`: numbers that the same fork gives to children on other nodes,
    /// which are remembered only when they run.
    pub fn plan(
        &self,
        base: &Base,
        parent: &str,
        count: usize,
        ordered: &[u32],
    ) -> Result<Vec<Planned>, Problem> {
        let mut planned = Vec::new();
        let mut index = 0;
        let elsewhere: Vec<String> =
            self.members.list().into_iter().filter(|m| m.node.is_some()).map(|m| m.vm).collect();
        let mut away = self.numbers_away(parent);
        away.extend(ordered);
        while planned.len() < count {
            index += 1;
            if away.contains(&index) || elsewhere.contains(&child_name(parent, index)) {
                continue;
            }
            match self.plan_one(base, parent, index) {
                Ok(plan) => planned.push(plan),
                Err(problem) if problem.code == Code::NameTaken => {}
                Err(problem) => return Err(problem),
            }
        }
        Ok(planned)
    }

    /// The plan of child `index`, whose name must be free.
    pub fn plan_one(&self, base: &Base, parent: &str, index: u32) -> Result<Planned, Problem> {
        let name = child_name(parent, index);
        let reserved = self.registry.reserve(&name)?;
        let plan = Plan::new(base, index, &name).map_err(|e| clone_problem(&e))?;
        Ok(Planned { plan, reserved })
    }

    /// Starts the QEMU of a child. On an error nothing is left behind.
    pub async fn prepare(&self, planned: Planned) -> Result<Prepared, CloneError> {
        let _turn = self.at_work.acquire().await;
        let Planned { plan, reserved } = planned;
        let files = plan.ram.iter().map(|ram| ram.path.clone());
        let files = files.chain(plan.overlays.iter().map(|overlay| overlay.path.clone())).collect();
        let note = Note { name: plan.name().to_owned(), ram: files };
        let (vm_dir, begun) = (plan.layout.vm_dir.clone(), note.clone());
        let made = off_worker(move || starting::begin(&vm_dir, &begun)).await;
        match made {
            Ok(Ok(())) => {}
            Ok(Err(source)) => {
                let path = plan.layout.vm_dir.clone();
                return Err(CloneError::Io { action: "create", path, source });
            }
            Err(problem) => return Err(CloneError::Task(problem.message)),
        }
        let vm_dir = plan.layout.vm_dir.clone();
        let mut started: Option<QemuProcess> = None;
        match Child::prepare(plan, |qemu| started = Some(qemu)).await {
            Ok(child) => Ok(Prepared { child, note, reserved }),
            Err(error) => {
                if let Some(qemu) = started {
                    let _ = qemu.kill().await;
                }
                let _ = off_worker(move || starting::undo(&vm_dir, &note)).await;
                drop(reserved);
                Err(error)
            }
        }
    }

    /// Memory and state into a prepared child, comparison, hook, record. It does not run yet. On an error it is gone.
    pub async fn load(
        &self,
        mut prepared: Prepared,
        order: &LoadOrder,
    ) -> Result<Loaded, (u32, String, CloneError)> {
        let turn = self.at_work.acquire().await;
        let (index, name) = (prepared.child.plan.index, prepared.child.plan.name().to_owned());
        let done = self.fill(&mut prepared, order).await;
        drop(turn);
        if let Err(error) = done {
            prepared.discard().await;
            return Err((index, name, error));
        }
        Ok(Loaded { child: prepared.child, _reserved: prepared.reserved })
    }

    async fn fill(&self, prepared: &mut Prepared, order: &LoadOrder) -> Result<(), CloneError> {
        let child = &mut prepared.child;
        child.lay_over(&order.sources).await?;
        if let Some(service) = &order.service {
            child.be_served(service).await?;
        }
        child.load(&order.state).await?;
        if order.verify {
            child.verify(&order.files).await?;
        }
        if let Some(hook) = &self.policy.child_start {
            run_hook(hook, child, order).await?;
        }
        let record = child.record();
        let member = Member {
            vm: record.name.clone(),
            pid: record.pid,
            pid_start: record.pid_start,
            parent: Some(order.parent.clone()),
            index: child.plan.index,
            fork: order.fork.clone(),
            node: None,
            private: child.mappings.clone(),
        };
        let members = Arc::clone(&self.members);
        off_worker(move || members.put(&member)).await.map_err(|p| CloneError::Task(p.message))??;
        self.registry.monitors.insert(&record.qmp_socket, child.client.clone()).await;
        let vm_dir = record.vm_dir.clone();
        if let Err(problem) = self.registry.enter(record.clone()).await {
            self.registry.monitors.forget(&record.qmp_socket).await;
            return Err(CloneError::Task(problem.message));
        }
        off_worker(move || starting::done(&vm_dir)).await.map_err(|p| CloneError::Task(p.message))
    }
}

/// What all children of one fork are loaded with.
#[derive(Debug, Clone)]
pub struct LoadOrder {
    pub fork: String,
    pub parent: String,
    pub sources: Vec<Source>,
    pub files: Vec<std::path::PathBuf>,
    pub state: Arc<[u8]>,
    pub verify: bool,
    /// Answers the children's faults, as long as the template is on its way.
    pub service: Option<Arc<PageService>>,
}

/// A child that is complete and stands still.
#[derive(Debug)]
pub struct Loaded {
    pub child: Child,
    _reserved: Reserved,
}

/// Runs the operator's program for a child that has not run yet.
async fn run_hook(hook: &std::path::Path, child: &Child, order: &LoadOrder) -> Result<(), CloneError> {
    let failed =
        |how: String| CloneError::Hook { child: child.plan.name().to_owned(), hook: hook.to_owned(), how };
    let mut command = Command::new(hook);
    command
        .env("VMOVE_FORK", &order.fork)
        .env("VMOVE_PARENT", &order.parent)
        .env("VMOVE_CHILD", child.plan.name())
        .env("VMOVE_CHILD_INDEX", child.plan.index.to_string())
        .env("VMOVE_CHILD_DIR", &child.plan.layout.vm_dir)
        .env("VMOVE_CHILD_PID", child.qemu.pid().to_string())
        .env("VMOVE_CHILD_UUID", &child.plan.identity.uuid)
        .env("VMOVE_CHILD_MACS", child.plan.identity.macs.join(" "))
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true);
    let output = tokio::time::timeout(HOOK, command.output())
        .await
        .map_err(|_| failed(format!("did not end within {} s", HOOK.as_secs())))?
        .map_err(|error| failed(format!("could not be started ({error})")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    Err(failed(format!("ended with {} ({last})", output.status)))
}

/// What becomes of an error in a child's report.
pub fn words(error: &CloneError) -> String {
    chain(error)
}
