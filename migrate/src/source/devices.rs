//! The guest's devices at the source: they come back if it stays, and go to their drivers when it has left.

use std::time::Duration;

use vmove_node::guest_devices::attach::attach_again;
use vmove_types::problem::chain;
use vmove_types::progress::MissingDevice;
use vmove_types::report::DeviceTimes;
use vmove_types::time::ms;

use super::session::Session;
use crate::devices::{missing, of_role, script};
use crate::group::resuming::ResumePlace;
use crate::node::Node;
use crate::proto::message::Complete;
use crate::records::{Detached, SourceRecord};

/// For the devices of a group's other guests, when it has come back.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(60);

/// Gives the guest, which stays here, back what it was asked for. What it lacks then is told.
pub(super) async fn bring_back(session: &mut Session) -> Vec<MissingDevice> {
    let record = session.journal.record().clone();
    let missing = bring_back_of(&session.node, &record, session.resume.as_deref()).await;
    if record.detached != Detached::default() {
        session.write_owing(|r| r.are_back(&missing));
    }
    session.publisher.update(|p| p.missing_devices.clone_from(&missing));
    missing
}

/// The same by the journal alone.
pub(super) async fn bring_back_of(
    node: &Node,
    record: &SourceRecord,
    resume: Option<&ResumePlace>,
) -> Vec<MissingDevice> {
    let Detached { quiesced, asked } = &record.detached;
    if asked.is_empty() && !quiesced {
        return Vec::new();
    }
    let (vm, name) = (&record.vm, &node.config.node);
    let lacks = |role: &str, why: String| missing(name, &vm.name, role, why);
    let monitor = match node.config.vmm.monitor(vm).await {
        Ok(monitor) => monitor,
        Err(error) => return asked.iter().map(|asked| lacks(&asked.role, chain(&error))).collect(),
    };
    let mut all = Vec::new();
    for asked in asked {
        let Some(device) = of_role(vm, &asked.role) else { continue };
        let let_lock_memory = |bytes| node.config.vmm.let_lock_memory(vm, bytes);
        match attach_again(vm, &*monitor, device, asked, &let_lock_memory).await {
            Ok(_) => tracing::info!(role = asked.role, "the guest has its device"),
            Err(error) => all.push(lacks(&asked.role, chain(&error))),
        }
    }
    if let Some(words) = record.spec.resume.as_ref().filter(|_| *quiesced) {
        wait_for_others(&vm.name, resume).await;
        let limit = Duration::from_millis(record.spec.script_timeout_ms);
        if let Err(error) = script::run(&*monitor, words, limit).await {
            tracing::warn!(vm = vm.name, error = chain(&error), "the guest was not told that it stays");
        }
    }
    all
}

/// Waits for the devices of those that it was to move with.
async fn wait_for_others(vm: &str, resume: Option<&ResumePlace>) {
    let Some(place) = resume else { return };
    place.has_devices();
    if tokio::time::timeout(OTHERS_TIMEOUT, place.all_have_devices()).await.is_err() {
        tracing::warn!(vm, "the guest is told that it stays, though not all of its group have their devices");
    }
}

/// What the destination says of them, for the report.
pub(super) fn add_to_report(session: &mut Session, figures: &Complete) {
    let detached = session.journal.record().detached.clone();
    let offset = session.clock.offset();
    for end in &figures.devices {
        let report = &mut session.report;
        let known = report.devices.iter().position(|times| times.role == end.role);
        let index = known.unwrap_or_else(|| {
            report.devices.push(DeviceTimes { role: end.role.clone(), ..DeviceTimes::default() });
            report.devices.len() - 1
        });
        let times = &mut report.devices[index];
        times.destination.clone_from(&end.address);
        times.problem.clone_from(&end.problem);
        let gone_at =
            detached.asked.iter().find(|asked| asked.role == end.role).and_then(|asked| asked.gone_at);
        if let Some(plugged) = end.plugged {
            times.away_ms = gone_at.map(|gone| offset.to_ours(end.begun).ms_since(gone));
            times.plug_ms = Some(ms(plugged.since(end.begun)));
        }
    }
    let name = session.report.destination.clone();
    let vm = session.vm().name.clone();
    let lacks = figures
        .devices
        .iter()
        .filter_map(|end| end.problem.as_ref().map(|why| missing(&name, &vm, &end.role, why.clone())));
    let lacks: Vec<MissingDevice> = lacks.collect();
    if !lacks.is_empty() {
        session.write_owing(|r| r.missing.clone_from(&lacks));
    }
    session.publisher.update(|p| p.missing_devices = lacks);
    if let Some(script) = &figures.script {
        session.report.resume_ms = Some(script.ms);
        session.report.resume_waited_ms = script.waited_ms;
        session.report.resume_problem.clone_from(&script.problem);
    }
}

/// QEMU here has ended: the devices that its guest had here go to their drivers. What does not is said in the report, and goes when the next daemon
/// starts.
pub(super) async fn give_back(session: &mut Session) {
    let vm = session.vm().clone();
    let devices = &session.node.config.devices;
    for device in &vm.devices {
        let (role, address) = (&device.request.role, device.request.address);
        if !devices.of_vm(&vm.name).iter().any(|claim| claim.request.address == address) {
            continue;
        }
        if let Err(error) = devices.give_back(&vm.name, role, Duration::from_secs(20)).await {
            let error = chain(&error);
            tracing::warn!(vm = vm.name, role, error, "a device was not given back to its driver");
            let times = session.report.devices.iter_mut().filter(|times| times.role == *role);
            times.take(1).for_each(|times| times.left_at_source = Some(error.clone()));
        }
    }
}
