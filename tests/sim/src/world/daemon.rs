//! A daemon's life: what `vmoved` does from its start to its end, as far as migrations are concerned.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::sleep;
use vmove_memory::MemoryError;
use vmove_migrate::engine::{Engine, EngineConfig};
use vmove_node::devices::Devices as _;
use vmove_node::disk::Disk;
use vmove_node::peer::{PROTOCOL_VERSION, PeerPolicy};
use vmove_node::reservations::Reservations;
use vmove_node::store::VmStore;
use vmove_qmp::confine::Confinement;
use vmove_types::Backing;

use crate::life::Life;
use crate::plan::NodeIndex;
use crate::world::World;
use crate::world::cards::SimDevices;
use crate::world::disk::SimDisk;
use crate::world::net::SimDialer;
use crate::world::running::Daemon;
use crate::world::vmm::SimVmm;

/// A service manager starts a daemon again that has ended with an error.
const START_AGAIN: Duration = Duration::from_secs(1);
/// Another version runs for so long.
const OTHER_VERSION: Duration = Duration::from_secs(3);
/// How long a session tries to reach a peer that was lost after the hand-over.
pub const RECONNECT_FOR: Duration = Duration::from_secs(60);

/// State, run and memory folders of a node.
#[must_use]
pub fn run_dir(node: NodeIndex) -> PathBuf {
    Path::new("/sim").join(crate::plan::NODES[node]).join("run")
}

fn state_dir(node: NodeIndex) -> PathBuf {
    Path::new("/sim").join(crate::plan::NODES[node]).join("state")
}

/// There is always enough.
fn free(_: &Path, _: Backing) -> Result<u64, MemoryError> {
    Ok(1 << 40)
}

/// Starts a daemon, if there is none.
pub fn start(world: &World, node: NodeIndex, version: u16) {
    let life = {
        let mut state = world.state();
        let seed = state.rng.next();
        let here = &mut state.nodes[node];
        if here.life.is_some() {
            return;
        }
        here.lives += 1;
        let life = Life::new(node, version, seed);
        here.life = Some(Arc::clone(&life));
        life
    };
    world.note(life.name(), format!("vmoved starts, version {version}"));
    let booting = boot(world.clone(), Arc::clone(&life));
    drop(life.process().spawn(booting));
}

/// In the order of `vmoved`: what others wait for goes first.
async fn boot(world: World, life: Arc<Life>) {
    world.may(&life, "start").await;
    let daemon = match assemble(&world, &life) {
        Ok(daemon) => daemon,
        Err(error) => {
            world.note(life.name(), format!("vmoved ends: {error:#}"));
            if life.is_alive() {
                kill(&world, life.node(), START_AGAIN, false);
            }
            return;
        }
    };
    daemon.engine.resume_owners();
    if life.is_alive() {
        world.state().nodes[life.node()].daemon = Some(daemon.clone());
    }
    daemon.engine.resume_others();
    loop {
        give_back_ownerless(&daemon).await;
        sleep(Duration::from_secs(1)).await;
        daemon.vms.write_owed();
        end_vms_that_died(&world, &daemon).await;
    }
}

fn assemble(world: &World, life: &Arc<Life>) -> anyhow::Result<Daemon> {
    let node = life.node();
    let disk: Arc<dyn Disk> = Arc::new(SimDisk::new(world, life));
    let memory_dir = world.memory_dir(node);
    let reservations = Reservations::with_free(memory_dir.clone(), free);
    disk.create_dir_all(&state_dir(node)).context("state folder")?;
    let vms = Arc::new(VmStore::open_on(Arc::clone(&disk), &state_dir(node).join("vms"))?);
    let devices = SimDevices::new(world, life);
    let config = EngineConfig {
        node: life.name().to_owned(),
        sessions_dir: state_dir(node).join("sessions"),
        run_dir: run_dir(node),
        memory_dir,
        reservations: Arc::clone(&reservations),
        confinement: Confinement::default(),
        peers: Arc::new(PeerPolicy::default()),
        admission: Arc::new(vmove_node::admission::AdmitsAll),
        vmm: Arc::new(SimVmm::new(world, life)),
        devices: Arc::new(devices.clone()),
        disk,
        dialer: Arc::new(SimDialer::new(world, life)),
        port: None,
        bulk_connections: 2,
        reconnect_for: RECONNECT_FOR,
        keep_migrations: 1000,
    };
    let engine = Engine::open(config, Arc::clone(&vms))?;
    let told = world.told();
    engine.on_entered(move |id| {
        told.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_string());
    });
    Ok(Daemon { life: Arc::clone(life), engine, vms, reservations, devices })
}

/// As the registry does: devices of who is no VM here, and on no way here or away.
async fn give_back_ownerless(daemon: &Daemon) {
    let held = |vm: &str| daemon.engine.sessions().iter().any(|p| p.vm == vm && p.outcome.holds_vm());
    daemon.devices.recover(|vm| daemon.vms.has(vm) || held(vm)).await;
}

/// As the registry does for a VM whose QEMU has ended and that no migration holds.
async fn end_vms_that_died(world: &World, daemon: &Daemon) {
    for vm in daemon.vms.list() {
        let ended = world.state().machine(vm.pid).is_none();
        let held = daemon.engine.sessions().iter().any(|p| p.vm == vm.name && p.outcome.holds_vm());
        if ended && !held {
            for ram in &vm.ram {
                let _ = SimDisk::new(world, &daemon.life).remove_file(&ram.path);
            }
            let _ = daemon.devices.give_all_back(&vm.name, Duration::from_secs(1)).await;
            let _ = daemon.vms.remove(&vm.name);
        }
    }
}

/// SIGKILL; it is started again after a while, if `other_version` as the next one for a moment first.
pub fn kill(world: &World, node: NodeIndex, down: Duration, other_version: bool) {
    let life = {
        let mut state = world.state();
        state.nodes[node].daemon = None;
        state.nodes[node].life.take()
    };
    // It is down already, and will be started.
    let Some(life) = life else { return };
    life.end();
    world.note(life.name(), "vmoved is killed");
    let world = world.clone();
    tokio::spawn(async move {
        sleep(down).await;
        if other_version {
            start(&world, node, PROTOCOL_VERSION + 1);
            sleep(OTHER_VERSION).await;
            let other = world.state().nodes[node].life.clone();
            if other.is_some_and(|life| life.version() != PROTOCOL_VERSION) {
                kill(&world, node, Duration::from_millis(1), false);
            }
        }
        start(&world, node, PROTOCOL_VERSION);
    });
}
