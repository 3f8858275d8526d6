//! What hooks do to the VMs of this node, through the engines.

use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use serde_json::json;
use vmove_hooks::action::{Action, ForkCount, TemplateName, Where};
use vmove_hooks::{ActError, Event, Node, Order, Own, Vm};
use vmove_migrate::groups::GroupMember;
use vmove_node::peer::PeerTarget;
use vmove_node::record::VmRecord;
use vmove_types::fork::{ForkRequest, TemplateRequest};
use vmove_types::group::GroupTaken;
use vmove_types::migration::Taken;
use vmove_types::problem::{Code, Problem};
use vmove_types::progress::{GuestPlace, Outcome};
use vmove_types::spec::{MigrationSpec, Visit};
use vmove_types::units::format_ms;
use vmove_types::vm::Running;

use super::bridge;
use crate::server::App;
use crate::server::problem::IntoProblem;

/// Forks of hooks have ids that begin so; the name of the hook follows.
const FORK_ID: &str = "hook-";

/// The VMs of this node, for hooks.
pub struct OfNode(pub Arc<App>);

/// How a migration of a hook ended that did not move the VM.
enum NotMoved {
    /// It is where it was: another node may take it.
    StillHere(String),
    /// Another node would not help.
    Error(ActError),
}

impl OfNode {
    fn vm_of(&self, record: &VmRecord) -> Vm {
        let made_by = self.0.forks.child_of(record).and_then(|child| {
            let (hook, _) = child.fork.strip_prefix(FORK_ID)?.rsplit_once('-')?;
            Some(hook.to_owned())
        });
        Vm { name: record.name.clone(), labels: record.labels(), made_by }
    }

    async fn migrate(&self, nodes: &[String], order: &Order) -> Result<String, ActError> {
        let mut refusals = Vec::new();
        for node in nodes {
            match self.migrate_to(node, order).await {
                Ok(said) => return Ok(said),
                Err(NotMoved::StillHere(why)) => refusals.push(format!("{node}: {why}")),
                Err(NotMoved::Error(error)) => return Err(error),
            }
        }
        Err(ActError::Failed(refusals.join("; ")))
    }

    async fn migrate_to(&self, node: &str, order: &Order) -> Result<String, NotMoved> {
        let still = |problem: Problem| match act_error(problem) {
            ActError::Failed(why) => NotMoved::StillHere(why),
            other => NotMoved::Error(other),
        };
        let to = self.0.known.target(node).map_err(|error| still(error.into_problem()))?;
        let begun = begin_migration(&self.0, &order.vm, to, MigrationSpec::default());
        let id = begun.await.map_err(still)?.id;
        let failed = |why: String| NotMoved::Error(ActError::Failed(why));
        let mut progress = self.0.engine.progress(&id).map_err(|error| still(error.into_problem()))?;
        let last = progress.wait_for(|p| p.outcome.is_end()).await;
        let last = last.map_err(|_| failed(format!("migration {id} was given up")))?.clone();
        match last.outcome {
            Outcome::Done { report } => Ok(format!(
                "moved to {node} in {:.0} ms, paused for {:.1} ms (migration {id}, {})",
                report.total_ms, report.downtime_ms, report.mode
            )),
            Outcome::Refused { blockers } => {
                let all: Vec<String> = blockers.into_iter().map(|blocker| blocker.message).collect();
                Err(NotMoved::StillHere(all.join(", ")))
            }
            Outcome::Failed { error, guest: GuestPlace::Source, .. } => Err(NotMoved::StillHere(error)),
            Outcome::Failed { error, guest, .. } => {
                Err(failed(format!("migration {id} failed, the guest is {}: {error}", guest.as_str())))
            }
            Outcome::Running | Outcome::Reconnecting { .. } => {
                Err(failed(format!("migration {id} has no end")))
            }
        }
    }

    async fn fork(&self, count: ForkCount, paused: bool, order: &Order) -> Result<String, ActError> {
        let number = uuid::Uuid::new_v4().simple().to_string();
        let request = ForkRequest {
            vm: Some(order.vm.clone()),
            count: count.0,
            paused,
            id: Some(format!("{FORK_ID}{}-{}", order.hook, &number[..12])),
            ..ForkRequest::default()
        };
        let report =
            self.0.forks.clone().create(request).await.map_err(|error| act_error(error.into_problem()))?;
        let lost: Vec<String> = report.children.iter().filter_map(|child| child.error.clone()).collect();
        let made: Vec<&str> = report
            .children
            .iter()
            .filter(|child| child.error.is_none())
            .map(|child| child.name.as_str())
            .collect();
        if made.is_empty() {
            return Err(ActError::Failed(lost.join("; ")));
        }
        let lost = if lost.is_empty() {
            String::new()
        } else {
            format!("; {} failed: {}", lost.len(), lost.join("; "))
        };
        let state = if paused { ", kept paused" } else { "" };
        Ok(format!(
            "forked {}{state} in {:.0} ms, guest paused for {:.1} ms{lost}",
            made.join(", "),
            report.complete_ms,
            report.parent_pause_ms
        ))
    }

    async fn save(
        &self,
        name: &TemplateName,
        keep: Option<usize>,
        order: &Order,
    ) -> Result<String, ActError> {
        let forks = &self.0.forks;
        let template = name.at(&order.vm, &now());
        let request =
            TemplateRequest { vm: order.vm.clone(), name: template.clone(), ..TemplateRequest::default() };
        let saved =
            forks.clone().save_template(request).await.map_err(|error| act_error(error.into_problem()))?;
        let mut removed = 0;
        if let Some(keep) = keep {
            let all = forks.templates().await.map_err(|error| act_error(error.into_problem()))?;
            let mut ours: Vec<String> = all.templates.into_iter().map(|template| template.name).collect();
            ours.retain(|found| name.fits(&order.vm, found));
            ours.sort();
            for old in ours.iter().rev().skip(keep) {
                match forks.clone().remove_template(old.clone()).await {
                    Ok(_) => removed += 1,
                    Err(error) => {
                        tracing::warn!(hook = %order.hook, template = %old, error = %error.message(), "an old template stays");
                    }
                }
            }
        }
        let pause = saved.parent_pause_ms.unwrap_or_default();
        Ok(format!("saved {template}, guest paused for {pause:.1} ms, {removed} older removed"))
    }
}

#[async_trait]
impl Node for OfNode {
    fn vm(&self, name: &str) -> Option<Vm> {
        self.0.registry.vms().get(name).ok().map(|record| self.vm_of(&record))
    }

    fn vms(&self) -> Vec<Vm> {
        self.0.registry.records().iter().map(|record| self.vm_of(record)).collect()
    }

    async fn act(&self, action: &Action, order: Order) -> Result<String, ActError> {
        if self.vm(&order.vm).is_none() {
            let gone = format!("{:?} is not on this node any more", order.vm);
            // What an earlier daemon had begun has come to its end.
            let moved = order.again && matches!(action, Action::Migrate(_));
            return if moved { Ok(gone) } else { Err(ActError::Gone(gone)) };
        }
        match action {
            Action::Migrate(Where::Nodes(nodes)) => self.migrate(nodes, &order).await,
            Action::Migrate(Where::Bridge) => bridge::migrate(&self.0, &order).await,
            Action::Fork { count, paused } => self.fork(*count, *paused, &order).await,
            Action::SaveTemplate { name, keep } => self.save(name, *keep, &order).await,
            Action::Pause => {
                let paused = self.0.registry.set_running(&order.vm, Running::Paused).await;
                paused.map(|_| "paused".to_owned()).map_err(|error| act_error(error.into_problem()))
            }
            Action::Run { .. } => Err(ActError::Failed("a program is not run here".to_owned())),
        }
    }
}

fn act_error(problem: Problem) -> ActError {
    match problem.code {
        Code::Busy => ActError::Busy(problem.message),
        Code::UnknownVm => ActError::Gone(problem.message),
        _ => ActError::Failed(problem.message),
    }
}

/// `20261125-140000`, UTC.
fn now() -> String {
    let text = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    text.chars().filter(|c| c.is_ascii_digit() || *c == 'T').map(|c| if c == 'T' { '-' } else { c }).collect()
}

/// Moves a VM: decides how it goes, if that depends on what it is to read there, asks the hooks that may forbid it, gives it memory of its own if a fork has left it none, and starts the migration.
pub async fn begin_migration(
    app: &Arc<App>,
    vm: &str,
    to: PeerTarget,
    options: MigrationSpec,
) -> Result<Taken, Problem> {
    let settled = app.engine.settle(vm, &to, options).await;
    let (options, choice) = settled.map_err(IntoProblem::into_problem)?;
    let note = allow_migration(app, vm, &to, &options).await?;
    let id = app.engine.start_settled(vm, to, options, choice.clone()).map_err(IntoProblem::into_problem)?;
    Ok(Taken { id: id.to_string(), note, choice })
}

/// The same for several VMs that move at one barrier.
pub async fn begin_group(app: &Arc<App>, members: Vec<GroupMember>) -> Result<GroupTaken, Problem> {
    let mut notes = Vec::new();
    for member in &members {
        notes.extend(allow_migration(app, &member.vm, &member.to, &member.spec).await?);
    }
    let begun = app.engine.start_group(members).await.map_err(IntoProblem::into_problem)?;
    let members = begun.members.iter().map(ToString::to_string).collect();
    Ok(GroupTaken { id: begun.id.to_string(), members, notes })
}

/// Asks hooks, and gives a VM whose memory is private since a fork memory of its own. What was done is told.
async fn allow_migration(
    app: &Arc<App>,
    vm: &str,
    to: &PeerTarget,
    options: &MigrationSpec,
) -> Result<Option<String>, Problem> {
    if app.hooks.wants_own(Own::BeforeMigration) {
        let record = app.registry.vms().get(vm);
        let labels = record.map(|record| record.labels()).unwrap_or_default();
        let data = json!({ "to": to.name, "address": to.address, "options": options });
        let asked = app.hooks.ask(Event::own(Own::BeforeMigration, vm, data).with_labels(labels)).await;
        asked.map_err(|why| Problem::from_error(Code::ForbiddenByHook, &why))?;
    }
    // Of a guest that goes home from a visit it is not: it is held by the visit, and came here by a migration.
    if options.visit == Visit::Back {
        return Ok(None);
    }
    if let Some((_, home)) = app.engine.visitor(vm) {
        return Err(Problem::new(
            Code::Busy,
            format!(
                "{vm:?} is here for a visit from {home}: `vmove visit {vm} --back` takes it home, `vmove visit {vm} --stay` lets it stay; then it can be moved"
            ),
        ));
    }
    // After a fork a VM's memory is private, which cannot be moved: it gets a RAM file of its own first.
    let promoted = app.forks.clone().promote(vm.to_owned()).await.map_err(IntoProblem::into_problem)?;
    Ok(promoted.own_memory.map(|own| {
        format!(
            "the memory of {:?} was private since a fork: it was given memory of its own first ({}, guest stood still for {})",
            promoted.vm,
            format_ms(own.total_ms),
            format_ms(own.stood_still_ms())
        )
    }))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_time_in_names_of_templates_sorts() {
        let now = super::now();
        assert_eq!(now.len(), "20261125-140000".len(), "{now}");
        assert!(now.chars().all(|c| c.is_ascii_digit() || c == '-'), "{now}");
    }
}
