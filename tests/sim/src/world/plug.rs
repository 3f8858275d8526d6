//! Devices that a played QEMU has plugged in. The guest decides when one leaves; and while QEMU has it open it writes guest memory, which nobody sees.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep};
use vmove_memory::PageIndex;
use vmove_migrate::vmm::{DeviceMonitor, InGuestError, Ran};
use vmove_qmp::QmpError;
use vmove_qmp::agent::{ExecRequest, Finish};
use vmove_qmp::hotplug::{HotplugError, PlugRefusal, Port, Seat, UnplugLimits};

use crate::plan::Manner;
use crate::world::cards::ID;
use crate::world::guest;
use crate::world::qemu::Machine;
use crate::world::status::Status;
use crate::world::vmm::Qemu;
use crate::world::{State, World};

/// The port that devices are plugged into.
pub const PORT: &str = "vmove-port0";
/// The script that has the guest leave its device alone.
pub const QUIESCE: &str = "quiesce";
/// The script that has it go on.
pub const RESUME: &str = "resume";

fn seat() -> Seat {
    let seat = json!({ "driver": "vfio-pci", "bus": PORT, "hotpluggable": true });
    serde_json::from_value(seat).unwrap_or_else(|error| unreachable!("{error}"))
}

fn refused(command: &str, description: &str) -> QmpError {
    QmpError::Refused {
        command: command.to_owned(),
        class: "GenericError".to_owned(),
        description: description.to_owned(),
    }
}

#[async_trait]
impl DeviceMonitor for Qemu {
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError> {
        self.asked("ask QEMU for a device").await?;
        Ok(self.look(|machine| machine.devices.contains_key(id)).unwrap_or(false).then(seat))
    }

    async fn ports(&self) -> Result<Vec<Port>, HotplugError> {
        self.asked("ask QEMU for its ports").await?;
        Ok(Vec::new())
    }

    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError> {
        let (begun, device) = (Instant::now(), id.to_owned());
        self.asked("device_del").await?;
        let has = self.look(|machine| (machine.devices.contains_key(id), machine.stage, machine.status));
        match has {
            Some((false, ..)) | None => return Err(HotplugError::NoSuchDevice { device }),
            Some((_, stage, Status::Running)) if !stage.is_running() => {}
            Some(_) => return Err(refused("device_del", "device_del not allowed while migrating").into()),
        }
        let manner = self.world().state().manner;
        if manner == Manner::Refuses {
            return Err(HotplugError::GuestRefused { device });
        }
        leave_later(self.world(), self.pid(), id.to_owned(), manner);
        loop {
            match self.look(|machine| machine.devices.contains_key(id)) {
                Some(true) => {}
                Some(false) => return Ok(begun.elapsed()),
                None => self.asked("ask QEMU for a device").await?,
            }
            if begun.elapsed() >= limits.timeout {
                return Err(HotplugError::GuestKeeps { device, waited: limits.timeout, requests: 1 });
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn plug(&self, properties: &Map<String, Value>, _: Duration) -> Result<Duration, HotplugError> {
        let begun = Instant::now();
        self.asked("device_add").await?;
        let text = |key: &str| properties.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (id, host) = (text("id"), text("host"));
        let missing = self.look(|machine| {
            let pages = 0..guest::PAGES;
            let lacks = |table: &std::sync::Arc<vmove_memory::PageTable>| {
                pages.clone().any(|page| !table.state(PageIndex(page)).is_final())
            };
            machine.table.as_ref().is_some_and(lacks)
        });
        if missing == Some(true) {
            self.world().violation(format!("QEMU {} pins guest memory that is missing", self.pid()));
        }
        let (pid, node) = (self.pid(), self.node());
        let mut state = self.world().state();
        let state = &mut *state;
        let card = &mut state.nodes[node].card;
        let not = |refusal, description: &str| {
            let (device, description) = (id.clone(), description.to_owned());
            Err(HotplugError::NotPlugged { device, refusal, description })
        };
        let Some(machine) = state.machines.iter_mut().find(|m| m.alive && m.pid == pid) else {
            return Err(refused("device_add", "QEMU has ended").into());
        };
        if machine.stage.is_running() || machine.status == Status::InMigrate {
            return not(PlugRefusal::Other, "device_add not allowed while migrating");
        }
        if machine.devices.contains_key(&id) {
            return not(PlugRefusal::IdTaken, "Duplicate device ID");
        }
        if host != card.address.to_string() || !card.is_vfio {
            return not(PlugRefusal::NotBound, "it is not bound to vfio-pci");
        }
        if card.opened_by().is_some() {
            return not(PlugRefusal::GroupBusy, "Device or resource busy");
        }
        card.plugged = Some(pid);
        machine.devices.insert(id, card.address);
        Ok(begun.elapsed())
    }

    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError> {
        self.asked("run a script in the guest").await?;
        let script = request.arguments.last().map_or("", String::as_str);
        if let Some((Status::Running, vm)) = self.look(|machine| (machine.status, machine.vm)) {
            let mut state = self.world().state();
            state.guests[vm].is_quiet = script == QUIESCE;
            if script == RESUME && lacks_device(&state, self.node()) {
                state.early_resumes += 1;
            }
        }
        Ok(Ran { finish: Finish::Exit(0), said: String::new() })
    }
}

/// Whether the guest that owns a device lacks it on this node.
fn lacks_device(state: &State, node: usize) -> bool {
    let has = |machine: &Machine| machine.alive && machine.vm == 0 && machine.node == node;
    !state.machines.iter().any(|machine| has(machine) && machine.devices.contains_key(ID))
}

/// The guest lets a device go, whether or not somebody still waits for that.
fn leave_later(world: &World, pid: i32, id: String, manner: Manner) {
    let world = world.clone();
    let late = match manner {
        Manner::LetsGo | Manner::Refuses => world.micros(5_000, 400_000),
        Manner::Late(ms) => Duration::from_millis(ms),
    };
    let closing = world.micros(1_000, 60_000);
    tokio::spawn(async move {
        sleep(late).await;
        let mut state = world.state();
        let state = &mut *state;
        // A guest that is stopped answers when it runs.
        let Some(machine) = state.machines.iter_mut().find(|m| m.alive && m.pid == pid) else { return };
        if machine.status != Status::Running {
            return;
        }
        if machine.devices.remove(&id).is_some() {
            let card = &mut state.nodes[machine.node].card;
            card.plugged = None;
            card.closes = Some((pid, Instant::now() + closing));
        }
    });
}
