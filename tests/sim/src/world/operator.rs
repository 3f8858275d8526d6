//! An operator, who asks for migrations, calls one off, and does what the documents say where a migration cannot go on by itself.

use std::time::Duration;

use tokio::time::sleep;
use vmove_migrate::engine::Engine;
use vmove_migrate::groups::GroupMember;
use vmove_node::devices::Devices as _;
use vmove_node::peer::{PeerTarget, SessionId};
use vmove_node::record::{RamFileRecord, VmRecord};
use vmove_qmp::confine::Confinement;
use vmove_types::Backing;
use vmove_types::device::{DeviceChoice, DeviceRequest, Identity, VmDevice};
use vmove_types::go_home::GoHome;
use vmove_types::group::GroupProgress;
use vmove_types::progress::{GuestPlace, Outcome, Progress, Role};
use vmove_types::report::HeadStartStats;
use vmove_types::spec::{HeadStart, MigrationSpec, Visit};

use crate::plan::{NODES, NodeIndex};
use crate::world::World;
use crate::world::cards::{ID, ROLE, address};
use crate::world::daemon;
use crate::world::guest;
use crate::world::plug::{PORT, QUIESCE, RESUME};
use crate::world::qemu::{self, Ender};
use crate::world::running::Daemon;
use crate::world::status::Status;

/// How often it is looked whether the guest has come, and how many times.
const TURN_INTERVAL: Duration = Duration::from_millis(2);
const TURNS: usize = 5_000;
/// The name of the guest that may have a device.
const VM: &str = guest::NAMES[0];

fn daemon(world: &World, node: NodeIndex) -> Option<Daemon> {
    world.state().nodes[node].daemon.clone()
}

/// Does something as a task of a node's daemon; nothing if that is down, or is killed meanwhile.
async fn at<T, F>(world: &World, node: NodeIndex, act: impl FnOnce(Daemon) -> F) -> Option<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let daemon = daemon(world, node)?;
    let life = std::sync::Arc::clone(&daemon.life);
    life.process().spawn(act(daemon)).await.ok()
}

/// Starts the guest at a node, as `vmove run` would.
///
/// # Errors
/// There is no room for its memory.
pub async fn start_guest(world: &World, node: NodeIndex, vm: usize) -> anyhow::Result<()> {
    let layout = vmove_node::layout::of_vm(
        &daemon::run_dir(node),
        &world.memory_dir(node),
        guest::NAMES[vm],
        Backing::Thp,
        &Confinement::default(),
    );
    let ram = layout.memory_dir.join(format!("{}-ram0", guest::NAMES[vm]));
    crate::world::vmm::create_ram_file(&ram, guest::bytes())?;
    let paused = world.state().schedule.paused;
    let pid = qemu::start(world, node, &layout.vm_dir, &ram, Status::Paused)?;
    let memory = world.state().machine(pid).map(|machine| {
        machine.copy = Some(1);
        std::sync::Arc::clone(&machine.memory)
    });
    memory.iter().for_each(|memory| guest::fill(world, vm, memory));
    if !paused {
        qemu::run(world, pid);
    }
    let device = |at: NodeIndex| VmDevice {
        request: DeviceRequest { role: ROLE.to_owned(), address: address(at), identity: Identity::default() },
        id: ID.to_owned(),
        bus: PORT.to_owned(),
        properties: std::collections::BTreeMap::new(),
    };
    let devices = if world.state().schedule.device && vm == 0 { vec![device(node)] } else { Vec::new() };
    let command_line = [
        "/sim/bin/qemu-system-x86_64",
        "-machine",
        "q35,memory-backend=ram0",
        "-m",
        &format!("{}K", guest::bytes().0 >> 10),
        "-object",
        &format!(
            "memory-backend-file,id=ram0,size={}K,share=on,mem-path=/dev/shm/ram0",
            guest::bytes().0 >> 10
        ),
    ];
    let record = VmRecord {
        name: guest::NAMES[vm].to_owned(),
        pid,
        pid_start: u64::from(pid.unsigned_abs()),
        qmp_socket: layout.qmp_socket,
        vm_dir: layout.vm_dir,
        backing: Backing::Thp,
        command_line: command_line.map(str::to_owned).to_vec(),
        environment: Vec::new(),
        ram: vec![RamFileRecord { id: "ram0".to_owned(), path: ram, size: guest::bytes().0 }],
        overlays: Vec::new(),
        devices: devices.clone(),
        adopted: false,
        libvirt: None,
        session: None,
    };
    let entered = at(world, node, move |daemon| async move {
        for device in &record.devices {
            daemon.devices.take(VM, &device.request).await?;
        }
        anyhow::Ok(daemon.vms.insert(record)?)
    });
    entered.await.ok_or_else(|| anyhow::anyhow!("the daemon is down"))??;
    if let Some(device) = devices.first() {
        let mut state = world.state();
        state.nodes[node].card.plugged = Some(pid);
        if let Some(machine) = state.machine(pid) {
            machine.devices.insert(device.id.clone(), device.request.address);
        }
    }
    Ok(())
}

/// The node whose daemon has all guests among its VMs, and no migration or group that holds one.
#[must_use]
pub fn home(world: &World) -> Option<NodeIndex> {
    let guests = world.state().guests.len();
    (0..NODES.len()).find(|node| (0..guests).all(|vm| home_of(world, vm) == Some(*node)))
}

/// The same for one guest.
#[must_use]
pub fn home_of(world: &World, vm: usize) -> Option<NodeIndex> {
    (0..NODES.len()).find(|node| {
        let Some(daemon) = daemon(world, *node) else { return false };
        daemon.vms.get(guest::NAMES[vm]).is_ok()
            && !daemon.engine.sessions().iter().any(|p| p.outcome.holds_vm())
            && daemon.engine.groups().iter().all(|group| group.outcome.is_end())
    })
}

/// `vmove migrate`, or `vmove visit` if the schedule has the guest go for one: whether it was begun.
pub async fn send_off(world: &World) -> bool {
    let visits = world.state().schedule.visit;
    match visits {
        None => return migrate(world, 0).await,
        Some(ends) if ends.turned => {
            let of_world = world.clone();
            tokio::spawn(async move { turn(&of_world).await });
            return migrate(world, 0).await;
        }
        Some(_) => {}
    }
    let begun = visit(world, 0, Visit::Go).await;
    world.note("world", format!("visit {}: {begun}", NODES[1]));
    begun
}

/// `vmove visit --keep-home` at the other node, as soon as a guest is on its way there.
async fn turn(world: &World) {
    for _ in 0..TURNS {
        sleep(TURN_INTERVAL).await;
        let comes = |p: &Progress| p.role == Role::Destination && !p.outcome.is_end();
        let Some(migration) = listed(world, 1).unwrap_or_default().into_iter().find(comes) else { continue };
        let asked = at(world, 1, move |daemon| async move {
            daemon.engine.turn_into_visit(&migration.id, GoHome::default()).await
        });
        if let Some(told) = asked.await {
            world.note("world", format!("visit --keep-home: {told:?}"));
        }
    }
}

/// The visit by which the guest is at the other node, if it is there for one.
#[must_use]
pub fn visitor(world: &World) -> Option<SessionId> {
    daemon(world, 1)?.engine.visitor(VM).map(|(id, _)| id)
}

/// `vmove visit --back` or `--stay`, as the schedule has it.
pub async fn end_visit(world: &World) {
    let Some((id, ends)) = visitor(world).zip(world.state().schedule.visit) else { return };
    if ends.stays {
        let asked = at(world, 1, move |daemon| async move { daemon.engine.stay(&id.to_string()).is_ok() });
        let told = asked.await;
        world.note("world", format!("visit --stay: {told:?}"));
    } else if visit(world, 1, Visit::Back).await {
        let before =
            listed(world, 1).unwrap_or_default().into_iter().find_map(|progress| match progress.outcome {
                Outcome::Failed { error, .. } => Some(error),
                Outcome::Refused { blockers, .. } => Some(format!("{blockers:?}")),
                _ => None,
            });
        world.note("world", format!("visit --back, after {before:?}"));
    }
}

/// Whether the guest has been on a visit that has ended.
#[must_use]
pub fn has_visited(world: &World) -> bool {
    let visited =
        |progress: &Progress| matches!(&progress.outcome, Outcome::Done { report } if report.visit.is_some());
    (0..NODES.len()).filter_map(|node| listed(world, node)).flatten().any(|progress| visited(&progress))
}

async fn visit(world: &World, from: NodeIndex, visit: Visit) -> bool {
    let to = NODES[1 - from].to_owned();
    let target = PeerTarget { name: to.clone(), address: to };
    let spec = MigrationSpec { visit, ..MigrationSpec::default() };
    let asked =
        at(world, from, move |daemon| async move { daemon.engine.start(VM, target, spec).await.is_ok() });
    asked.await == Some(true)
}

/// `vmove migrate`: whether it was begun.
pub async fn migrate(world: &World, from: NodeIndex) -> bool {
    let to = NODES[1 - from];
    let target = PeerTarget { name: to.to_owned(), address: to.to_owned() };
    let mode = world.state().schedule.mode;
    let visit = world.state().schedule.visit;
    let turned = from == 0 && visit.is_some_and(|ends| ends.turned);
    let mode = if turned { "postcopy" } else { mode };
    let mut spec = MigrationSpec { mode: mode.parse().unwrap_or_default(), ..MigrationSpec::default() };
    if world.state().schedule.device {
        let identity = Identity::default();
        let request = DeviceRequest { role: ROLE.to_owned(), address: address(1 - from), identity };
        spec.devices.push(DeviceChoice(request));
        if world.state().schedule.seed.is_multiple_of(4) {
            spec.head_start = HeadStart::Never;
        }
        (spec.quiesce, spec.resume) = (Some(QUIESCE.to_owned()), Some(RESUME.to_owned()));
    }
    let guests = world.state().guests.len();
    let asked = at(world, from, move |daemon| async move {
        if guests == 1 {
            return daemon.engine.start(VM, target, spec).await.is_ok();
        }
        let plain = MigrationSpec { devices: Vec::new(), ..spec.clone() };
        let member = |vm: usize| GroupMember {
            vm: guest::NAMES[vm].to_owned(),
            to: target.clone(),
            spec: if vm == 0 { spec.clone() } else { plain.clone() },
        };
        daemon.engine.start_group((0..guests).map(member).collect()).await.is_ok()
    });
    let begun = asked.await == Some(true);
    world.note("world", format!("migrate to {to}: {begun}"));
    begun
}

/// What a node lists of migrations; nothing if its daemon is down.
#[must_use]
pub fn listed(world: &World, node: NodeIndex) -> Option<Vec<Progress>> {
    Some(daemon(world, node)?.engine.sessions())
}

/// What finished migrations say of memory that was sent ahead.
#[must_use]
pub fn head_starts(world: &World) -> Vec<HeadStartStats> {
    let all = (0..NODES.len()).filter_map(|node| listed(world, node)).flatten();
    let of = |progress: Progress| match progress.outcome {
        Outcome::Done { report } if progress.role == Role::Source => report.head_start,
        _ => None,
    };
    all.filter_map(of).collect()
}

/// What the nodes list of groups.
#[must_use]
pub fn groups(world: &World) -> Vec<GroupProgress> {
    (0..NODES.len())
        .filter_map(|node| daemon(world, node))
        .flat_map(|daemon| daemon.engine.groups())
        .collect()
}

/// `vmove cancel` on both nodes, of whatever runs.
pub fn cancel(world: &World) {
    for node in 0..NODES.len() {
        let world = world.clone();
        tokio::spawn(async move {
            for session in listed(&world, node).unwrap_or_default() {
                if !session.outcome.is_end() {
                    let asked = at(&world, node, move |daemon| async move {
                        Engine::cancel(&daemon.engine, &session.id).await.is_ok()
                    });
                    let _ = asked.await;
                }
            }
        });
    }
}

/// What is to be done about a migration that has ended with the guest in nobody's hands.
pub async fn recover(world: &World) {
    for (node, name) in NODES.into_iter().enumerate() {
        for session in listed(world, node).unwrap_or_default() {
            let Outcome::Failed { guest, error, .. } = &session.outcome else { continue };
            match guest {
                GuestPlace::PausedAtSource | GuestPlace::PausedAtDestination => {
                    world.note(name, format!("operator: recover, after {:?}: {error}", session.role));
                    let id = session.id.clone();
                    let asked =
                        at(world, node, move |daemon| async move { daemon.engine.recover(&id).await });
                    let _ = asked.await;
                }
                // What is on the disk can be read by now.
                GuestPlace::Unknown if error.contains("unknown, see") => {
                    world.note(name, "operator: starts vmoved again, which could not read a journal");
                    daemon::kill(world, node, Duration::from_millis(10), false);
                    sleep(Duration::from_secs(1)).await;
                }
                // A side that could not free what it had given away.
                GuestPlace::Destination if error.contains("recover") => {
                    let id = session.id.clone();
                    let asked =
                        at(world, node, move |daemon| async move { daemon.engine.recover(&id).await });
                    let _ = asked.await;
                }
                _ => {}
            }
        }
        // Records that could not be read when it was started.
        if daemon(world, node).is_some_and(|daemon| !daemon.vms.damaged().is_empty()) {
            world.note(name, "operator: starts vmoved again, which could not read a record");
            daemon::kill(world, node, Duration::from_millis(10), false);
            sleep(Duration::from_secs(1)).await;
        }
    }
}

/// What is to be done about devices: `vmove devices attach` where the guest lacks its own, and a start of a daemon that could not give one back.
pub async fn mend_devices(world: &World) {
    if !world.state().schedule.device {
        return;
    }
    for (node, name) in NODES.into_iter().enumerate() {
        let (lacks, left) = {
            let state = world.state();
            let machine = state.machines.iter().find(|m| m.alive && m.vm == 0 && m.node == node);
            let lacks = machine.is_some_and(|machine| !machine.devices.contains_key(ID));
            (lacks, machine.is_none() && state.nodes[node].card.claim.is_some())
        };
        if lacks {
            world.note(name, "operator: devices attach");
            let asked = at(world, node, |daemon| async move { daemon.engine.attach_device(VM, ROLE).await });
            let done = asked.await;
            world.note(name, format!("attached: {:?}", done.map(|done| done.map_err(|e| e.to_string()))));
        }
        if left {
            world.note(name, "operator: starts vmoved again, which could not give a device back");
            daemon::kill(world, node, Duration::from_millis(10), false);
            sleep(Duration::from_secs(20)).await;
        }
    }
}

/// `vmove stop --force` on both nodes, of a guest that has died.
pub async fn end_guest(world: &World, vm: usize) {
    for (node, name) in NODES.into_iter().enumerate() {
        world.note(name, "operator: stop --force");
        let of_world = world.clone();
        let ended = at(world, node, move |daemon| async move {
            let abandoned = daemon.engine.abandon(guest::NAMES[vm]).await;
            of_world.note(daemon.life.name(), format!("abandoned: {}", abandoned.is_ok()));
            if let Ok(record) = daemon.vms.get(guest::NAMES[vm]) {
                qemu::end(&of_world, record.pid, Ender::Operator);
            }
            let _ = daemon.devices.give_all_back(guest::NAMES[vm], Duration::from_secs(1)).await;
        });
        let _ = ended.await;
    }
}
