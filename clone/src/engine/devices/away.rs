//! A guest lets its devices go before its memory is frozen or mapped anew, and gets them back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmove_node::devices::Devices;
use vmove_node::guest_devices::detach::{DetachError, detach};
use vmove_node::guest_devices::{Asked, Detached, DeviceMonitor, missing, script};
use vmove_node::record::VmRecord;
use vmove_node::registry::RegistryError;
use vmove_qmp::hotplug::HotplugError;
use vmove_types::device::VmDevice;
use vmove_types::fork_devices::{ParentDevice, Parting};
use vmove_types::fork_report::ForkReport;
use vmove_types::problem::chain;
use vmove_types::progress::MissingDevice;
use vmove_types::time::{Mono, ms};

use super::owed::Owed;
use super::{plug_in, resume};
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;

/// A guest that is asked for its devices, from before until it has them back.
#[derive(Debug)]
pub struct Away {
    /// The guest.
    pub vm: String,
    owed: Owed,
    parting: Parting,
    quiesce_ms: Option<f64>,
    done: bool,
}

/// What became of a guest's devices.
#[derive(Debug, Default)]
pub struct Returned {
    /// Those that it was without.
    pub devices: Vec<ParentDevice>,
    /// Those that it lacks.
    pub missing: Vec<MissingDevice>,
    /// How long the scripts took, and why the second did not end as it should.
    pub quiesce_ms: Option<f64>,
    pub resume_ms: Option<f64>,
    pub resume_problem: Option<String>,
    /// The ports that devices are in now, where those are others than before.
    moved: BTreeMap<String, String>,
}

impl Returned {
    /// Into the report of a fork.
    pub fn report(self, report: &mut ForkReport) {
        report.devices = self.devices;
        report.quiesce_ms = self.quiesce_ms;
        report.resume_ms = self.resume_ms;
        report.resume_problem = self.resume_problem;
    }
}

impl Away {
    /// Has the guest let its devices go, unless it has already: from here on nothing but QEMU writes its memory. What is begun is written down
    /// first, so that whoever finds it can undo it.
    async fn let_go(
        &mut self,
        vm: &VmRecord,
        monitor: &dyn DeviceMonitor,
        devices: &dyn Devices,
    ) -> Result<(), ForkError> {
        if std::mem::replace(&mut self.done, true) {
            return Ok(());
        }
        self.quiesce(monitor).await?;
        let mut there = Vec::new();
        for device in &vm.devices {
            let role = &device.request.role;
            let seat = monitor.seat(&device.id).await;
            if seat.map_err(|source| not_away(role, source.into()))?.is_none() {
                tracing::info!(vm = vm.name, role, "this device is not plugged in");
                continue;
            }
            let asked = Asked { role: role.clone(), asked_at: Mono::now(), gone_at: None, refused: false };
            self.owed.note(&vm.name, |detached| detached.asked.push(asked))?;
            there.push(device);
        }
        for device in there {
            self.let_one_go(vm, monitor, devices, device).await?;
        }
        Ok(())
    }

    async fn quiesce(&mut self, monitor: &dyn DeviceMonitor) -> Result<(), ForkError> {
        if self.parting.quiesce.is_none() && self.parting.resume.is_none() {
            return Ok(());
        }
        self.owed.note(&self.vm, |detached| detached.quiesced = true)?;
        let Some(quiesce) = &self.parting.quiesce else { return Ok(()) };
        let begun = Mono::now();
        script::run(monitor, quiesce, Duration::from_millis(self.parting.script_timeout_ms)).await?;
        self.quiesce_ms = Some(ms(Mono::now().since(begun)));
        Ok(())
    }

    async fn let_one_go(
        &self,
        vm: &VmRecord,
        monitor: &dyn DeviceMonitor,
        devices: &dyn Devices,
        device: &VmDevice,
    ) -> Result<(), ForkError> {
        let role = &device.request.role;
        let note = |change: &dyn Fn(&mut Asked)| {
            self.owed.note_if_possible(&vm.name, |detached| {
                detached.asked.iter_mut().filter(|asked| asked.role == *role).for_each(change);
            });
        };
        let begun = Mono::now();
        note(&|asked| asked.asked_at = begun);
        let limit = Duration::from_millis(self.parting.unplug_timeout_ms);
        if let Err(error) = detach(monitor, devices, &vm.name, device, limit).await {
            if let DetachError::Unplug(HotplugError::GuestRefused { .. }) = error {
                note(&|asked| asked.refused = true);
            }
            return Err(not_away(role, error));
        }
        let gone = Mono::now();
        note(&|asked| asked.gone_at = Some(gone));
        Ok(())
    }
}

fn not_away(role: &str, source: DetachError) -> ForkError {
    ForkError::Detach { role: role.to_owned(), source }
}

impl ForkEngine {
    /// A guest that was asked for nothing yet, for the fork, or whatever else, of this id.
    pub(in crate::engine) fn stays_with_devices(&self, id: &str, vm: &str, parting: Parting) -> Away {
        let owed = Owed::new(&self.owed_devices(), id, parting.clone());
        Away { vm: vm.to_owned(), owed, parting, quiesce_ms: None, done: false }
    }

    pub(super) fn owed_devices(&self) -> std::path::PathBuf {
        self.journals.join("devices")
    }

    /// Has a guest let its devices go, unless it has already. On an error it is to get back what it let go.
    pub(in crate::engine) async fn detach_devices(
        &self,
        away: &mut Away,
        vm: &VmRecord,
        monitor: &dyn DeviceMonitor,
    ) -> Result<(), ForkError> {
        away.let_go(vm, monitor, &**self.registry.devices()).await
    }

    /// Gives a guest its devices back. Its memory is as it is to stay.
    pub(in crate::engine) async fn return_devices(self: &Arc<Self>, away: Away) -> Returned {
        let returned = self.return_owed(&away.owed, &away.vm).await;
        Returned { quiesce_ms: away.quiesce_ms, ..returned }
    }

    /// The same after a failure, of which it is told what the guest lacks. If the fork is not undone yet, the guest has its devices once it
    /// is.
    pub(in crate::engine) async fn return_after(
        self: &Arc<Self>,
        away: Away,
        fork: &str,
        error: ForkError,
    ) -> ForkError {
        if away.owed.record().guests.is_empty() {
            return error;
        }
        if self.journals.join(format!("{fork}.jsonl")).exists() {
            tracing::warn!(%fork, vm = away.vm, "the guest gets its devices back when the fork is undone");
            tokio::spawn(self.clone().return_when_free(away.owed));
            return error;
        }
        let returned = self.return_devices(away).await;
        if returned.missing.is_empty() {
            return error;
        }
        ForkError::DevicesMissing { missing: returned.missing, source: Box::new(error) }
    }

    /// Gives a guest what is owed to it, by what is written down alone.
    pub(super) async fn return_owed(self: &Arc<Self>, owed: &Owed, name: &str) -> Returned {
        let detached = owed.of(name);
        if detached == Detached::default() {
            return Returned::default();
        }
        let (vm, monitor) = match self.reached(name).await {
            Ok(reached) => reached,
            Err(error) => return self.none_returned(owed, name, &detached, &chain(&error)),
        };
        let parting = owed.record().parting;
        let mut returned = give_back(&self.node, &vm, &monitor, &detached, &parting).await;
        self.follow_ports(name, std::mem::take(&mut returned.moved)).await;
        // It lacks what it lacks: whoever mends that needs no note of ours.
        owed.settle(name);
        returned
    }

    async fn reached(&self, name: &str) -> Result<(VmRecord, vmove_qmp::Client), RegistryError> {
        let vm = self.registry.vms().get(name)?;
        let monitor = self.registry.monitor(&vm).await?;
        Ok((vm, monitor))
    }

    /// What is owed stays written down, for the next daemon.
    fn none_returned(&self, owed: &Owed, name: &str, detached: &Detached, why: &str) -> Returned {
        if self.registry.vms().get(name).is_err() {
            owed.settle(name);
            return Returned::default();
        }
        let lacks = |asked: &Asked| missing(&self.node, name, &asked.role, why.to_owned());
        Returned { missing: detached.asked.iter().map(lacks).collect(), ..Returned::default() }
    }

    /// Devices may have come into other ports than before: the record says which.
    async fn follow_ports(&self, name: &str, moved: BTreeMap<String, String>) {
        let Ok(vm) = self.registry.vms().get(name) else { return };
        let differs =
            |device: &VmDevice| moved.get(&device.request.role).is_some_and(|bus| *bus != device.bus);
        if !vm.devices.iter().any(differs) {
            return;
        }
        let vms = self.registry.vms().clone();
        let change = move |now: &mut VmRecord| {
            for device in &mut now.devices {
                if let Some(bus) = moved.get(&device.request.role) {
                    device.bus.clone_from(bus);
                }
            }
        };
        let done = vmove_node::blocking::run_blocking(move || vms.change_owing(&vm, change)).await;
        if let Ok(Err(error)) = done {
            tracing::warn!(vm = name, %error, "the port of a device is not written down");
        }
    }
}

/// Plugs in what a guest is to get, and runs what is to be run then.
async fn give_back(
    node: &str,
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    detached: &Detached,
    parting: &Parting,
) -> Returned {
    let mut returned = Returned::default();
    for asked in &detached.asked {
        let Some(device) = vmove_node::guest_devices::of_role(vm, &asked.role) else { continue };
        let mut times = ParentDevice {
            role: asked.role.clone(),
            address: device.request.address.to_string(),
            ..ParentDevice::default()
        };
        let begun = Mono::now();
        match plug_in(vm, monitor, device, asked).await {
            Ok(None) => continue,
            Ok(Some(attached)) => {
                let plugged = Mono::now();
                // One that left late was not seen to go.
                let gone = asked.gone_at.unwrap_or(begun);
                times.unplug_ms = gone.ms_since(asked.asked_at);
                times.away_ms = Some(begun.ms_since(gone));
                times.plug_ms = Some(plugged.ms_since(begun));
                times.outage_ms = Some(plugged.ms_since(asked.asked_at));
                returned.moved.insert(asked.role.clone(), attached.bus);
                tracing::info!(
                    vm = vm.name,
                    role = asked.role,
                    outage_ms = times.outage_ms,
                    "the guest has its device"
                );
            }
            Err(error) => {
                let why = chain(&error);
                tracing::error!(vm = vm.name, role = asked.role, %why, "the guest lacks its device");
                let lacks = missing(node, &vm.name, &asked.role, why.clone());
                (times.problem, times.mend) = (Some(why), Some(lacks.mend.clone()));
                returned.missing.push(lacks);
            }
        }
        returned.devices.push(times);
    }
    if let Some(command) = parting.resume.as_ref().filter(|_| detached.quiesced) {
        let (took, problem) = resume(monitor, command, parting.script_timeout_ms).await;
        if let Some(why) = &problem {
            tracing::warn!(vm = vm.name, %why, "the guest was not told that it has its devices");
        }
        (returned.resume_ms, returned.resume_problem) = (Some(took), problem);
    }
    returned
}

#[cfg(test)]
mod tests;
