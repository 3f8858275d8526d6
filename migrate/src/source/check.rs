//! `vmove check`: looks for blockers on both sides, and changes nothing.

use std::sync::Arc;

use tokio::time::timeout;

use super::asking::{ANSWER_TIMEOUT, left_of, prepare_message};
use super::choosing::choose_by;
use super::disk_choice;
use super::memory::SourceMemory;
use super::promised::{goal_blocker, look_ahead};
use super::served_disks;
use crate::devices::{own_state, way};
use crate::node::Node;
use crate::pending::PageSet;
use crate::proto::message::{BlockInfo, PART_BYTES, ToDestination, ToSource};
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::{Channel, Hello, LinkKind, PROTOCOL_VERSION, PeerTarget, SessionId, Token};
use vmove_node::record::{RamFileRecord, VmRecord};
use vmove_types::check::{Blocker, BlockerCode, CheckReport};
use vmove_types::disk::cost_of_disks_after;
use vmove_types::go_home::GoHome;
use vmove_types::goal::Goals;
use vmove_types::problem::chain;
use vmove_types::spec::{MigrationSpec, Mode};

/// What stands in the way of a VM, and the modes that are left. `no_visit`: why it could not visit.
pub(crate) async fn check(
    node: Arc<Node>,
    vm: VmRecord,
    to: PeerTarget,
    spec: MigrationSpec,
    no_visit: Option<&str>,
) -> CheckReport {
    let mut report =
        CheckReport { vm: vm.name.clone(), destination: to.to_string(), ..CheckReport::default() };
    match look(&node, &vm, &to, spec.clone(), &mut report).await {
        Ok((blockers, runs)) => {
            report.blockers.extend(blockers);
            add_promise(&node, &vm, (&to.name, &spec), (runs, no_visit), &mut report).await;
        }
        Err(blocker) => report.blockers.push(blocker),
    }
    report.modes = left_of(&report.blockers).iter().map(ToString::to_string).collect();
    report
}

/// What a migration would be like, if the VM can move.
async fn add_promise(
    node: &Arc<Node>,
    vm: &VmRecord,
    (to, spec): (&str, &MigrationSpec),
    (runs, no_visit): (bool, Option<&str>),
    report: &mut CheckReport,
) {
    let modes = left_of(&report.blockers);
    if modes.is_empty() {
        return;
    }
    // What it writes goes to memory that is in none of its files.
    if let Ok(Some(_)) = crate::check::source::private_ram(&*node.config.vmm, vm) {
        return report.warnings.push(format!(
            "There is no promise until the memory of {:?} is its own: look again after `vfork promote {}`, or let `vmove migrate` do that",
            vm.name, vm.name
        ));
    }
    let known = match look_ahead(node, vm, (to, spec), runs).await {
        Ok(known) => known,
        Err(error) => {
            return report.warnings.push(format!("the guest could not be watched: {}", chain(&error)));
        }
    };
    let promised = known.promise(spec, &modes);
    if let Some(bytes) = spec.reads_bytes {
        let visits = modes.contains(&Mode::Postcopy).then_some(()).ok_or("post-copy is not possible");
        let no_visit = no_visit.or(visits.err());
        report.choice =
            Some(choose_by(node, vm, (to, spec), bytes, (&known, promised.as_ref().ok()), no_visit));
    }
    match promised {
        Ok(promise) => report.promise = Some(promise),
        Err(broken) if spec.goals.is_empty() => report.warnings.push(broken.why),
        Err(broken) => report.blockers.push(goal_blocker(broken)),
    }
}

/// An error that stands in the way.
fn blocker<E: std::error::Error + 'static>(code: BlockerCode) -> impl Fn(E) -> Blocker {
    move |error| Blocker::new(code.clone(), chain(&error))
}

async fn look(
    node: &Arc<Node>,
    vm: &VmRecord,
    to: &PeerTarget,
    mut spec: MigrationSpec,
    report: &mut CheckReport,
) -> Result<(Vec<Blocker>, bool), Blocker> {
    // Goals are this side's, and so is what the guest is to read.
    spec.goals = Goals::default();
    (spec.reads_bytes, spec.reads_near_bytes_per_s, spec.go_home) = (None, None, GoHome::default());
    let vmm = &*node.config.vmm;
    let monitor = vmm.monitor(vm).await.map_err(blocker(BlockerCode::Monitor))?;
    let facts = monitor.facts(vm.pid.unsigned_abs()).await.map_err(blocker(BlockerCode::Monitor))?;
    report.blockers.extend(crate::check::source::blockers(&facts, &vm.devices));
    let ways =
        way::look(vm, &*monitor, &facts, &spec.devices).await.map_err(blocker(BlockerCode::Monitor))?;
    report.blockers.extend(ways.blockers);
    report.devices = ways.ways;
    own_state::add(node, vm, &mut report.devices).await;
    let disks = monitor.disks().await.map_err(blocker(BlockerCode::Monitor))?;
    let disks = disk_choice::choose(vm, &spec, disks).map_err(blocker(BlockerCode::CommandLine))?;
    disks.mend(&facts, &mut report.blockers);
    report.blockers.extend(disks.blockers.iter().cloned());
    report.blockers.extend(served_disks::blockers(node, vm, &spec, &disks));
    report.warnings = crate::check::source::warnings(&facts);
    if spec.disks_after {
        report.warnings.push(cost_of_disks_after(&node.config.node, &to.name));
    }
    // Mended by a migration itself.
    let private = crate::check::source::private_ram(vmm, vm).map_err(blocker(BlockerCode::RamNotShared))?;
    let is_private = private.is_some();
    report.warnings.extend(private.map(|private| private.message));
    // The kernel may take long to say which huge pages there are.
    let (found_by, of) = (Arc::clone(&node.config.vmm), vm.clone());
    let infos = spawn_blocking(move || {
        if is_private {
            return Ok(whole(&of));
        }
        SourceMemory::open(&*found_by, &of).and_then(|memory| memory.infos())
    });
    let infos = infos.await.map_err(blocker(BlockerCode::RamNotShared))?;
    let infos = infos.map_err(blocker(BlockerCode::RamNotShared))?;
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: LinkKind::Control,
        index: 0,
        session: SessionId::random(),
        token: Token::default(),
        rdma: false,
        node: node.config.node.clone(),
    };
    let stream = node.config.dialer.stream(to, &hello).await.map_err(blocker(BlockerCode::Unreachable))?;
    let mut channel: Channel<ToSource> = Channel::new(stream);
    let owned = way::owned_devices(node, vm).await;
    let prepare = prepare_message(node, vm, &spec, (&facts, &disks), (infos, owned), Token::random(), true);
    let asked = channel.send(&ToDestination::Prepare(Box::new(prepare))).await;
    asked.map_err(blocker(BlockerCode::Unreachable))?;
    let why = match timeout(ANSWER_TIMEOUT, channel.receive()).await {
        Ok(Ok(ToSource::Checked { blockers, fabric, warnings })) => {
            report.fabric = fabric;
            report.warnings.extend(warnings);
            return Ok((blockers, facts.status == "running"));
        }
        Ok(Ok(other)) => format!("it said {}", other.name()),
        Ok(Err(error)) => chain(&error),
        Err(_) => format!("nothing came within {} s", ANSWER_TIMEOUT.as_secs()),
    };
    Err(Blocker::new(BlockerCode::Unreachable, format!("{to} did not answer the check: {why}")))
}

/// The guest's memory as it may be when it has memory of its own, which is in none of its files yet: all of it may hold something.
fn whole(vm: &VmRecord) -> Vec<BlockInfo> {
    let info = |ram: &RamFileRecord| BlockInfo {
        id: ram.id.clone(),
        size: ram.size,
        page_size: vm.backing.page_bytes(),
        data: PageSet::full(ram.size.div_ceil(PART_BYTES)).encode(),
    };
    vm.ram.iter().map(info).collect()
}
