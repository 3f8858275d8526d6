//! Children on this node and their devices: let in and taken before the guest is frozen, plugged in when their memory is there, given back if
//! they do not come to be.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use vmove_node::admission::Coming;
use vmove_node::guest_devices::fit::why_not_in_place;
use vmove_node::guest_devices::{Asked, Detached, missing};
use vmove_types::Backing;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::device::{Mac, VmDevice};
use vmove_types::fork_devices::{ChildDeviceReport, Parting};
use vmove_types::fork_report::ChildReport;
use vmove_types::problem::chain;
use vmove_types::time::{Mono, ms};
use vmove_types::vm::RunRequest;

use super::choice::{Dealt, FAILOVER_PAIR};
use super::owed::Owed;
use super::{plug_in, resume};
use crate::CloneError;
use crate::child::Plan;
use crate::engine::ForkEngine;
use crate::engine::error::ForkError;

/// Nobody has them open: they were never plugged in, or QEMU has ended.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(10);

/// What another host is told of its children's devices: crosses as JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostDevices {
    /// Of each child, in the order of their numbers in the order.
    pub children: Vec<Vec<VmDevice>>,
    /// The model of each role, where it is known.
    pub models: BTreeMap<String, String>,
    /// What is run in them.
    pub parting: Parting,
}

impl Dealt {
    /// What a host is told of the children at these places; `None` if there is nothing to tell.
    pub fn order(&self, places: Range<usize>) -> Option<String> {
        let children = self.children.get(places)?.to_vec();
        if self.parting.resume.is_none() && children.iter().all(Vec::is_empty) {
            return None;
        }
        let order = HostDevices { children, models: self.models.clone(), parting: self.parting.clone() };
        serde_json::to_string(&order).ok()
    }

    /// The first so many.
    pub fn here(&self, count: usize) -> HostDevices {
        let children = self.children.iter().take(count).cloned().collect();
        HostDevices { children, models: self.models.clone(), parting: self.parting.clone() }
    }
}

impl HostDevices {
    /// Of an order for so many children.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(order: Option<&String>, children: usize) -> Result<Self, ForkError> {
        let Some(text) = order else { return Ok(Self::default()) };
        let read: Self = serde_json::from_str(text).map_err(ForkError::OrderOfDevices)?;
        if read.children.len() == children {
            return Ok(read);
        }
        let why = format!("Expected devices of {children} children, found those of {}", read.children.len());
        Err(CloneError::Refused(vec![Blocker::new(BlockerCode::Device, why)]).into())
    }

    /// How many children have devices: all of their memory is copied and pinned.
    pub fn pinned(&self) -> u64 {
        self.children.iter().filter(|devices| !devices.is_empty()).count() as u64
    }
}

/// A child that gets devices, or in which something is to be run.
#[derive(Debug, Clone)]
struct OfChild {
    name: String,
    devices: Vec<VmDevice>,
}

/// What children on this node get.
#[derive(Debug)]
pub struct ChildDevices {
    children: BTreeMap<u32, OfChild>,
    parting: Parting,
    owed: Owed,
}

impl ChildDevices {
    /// By number.
    pub fn by_index(&self) -> BTreeMap<u32, Vec<VmDevice>> {
        self.children.iter().map(|(index, child)| (*index, child.devices.clone())).collect()
    }
}

/// What children on one node may have there.
#[derive(Debug, Clone, Copy)]
pub struct Allowed<'a> {
    /// What a bridge has signed, by the name of the child.
    pub grants: &'a BTreeMap<String, String>,
    /// Backing of their memory.
    pub backing: Backing,
}

impl ForkEngine {
    /// Lets children in that are planned here, and takes their devices, in their order: all of them or none. Nothing was done to the guest yet.
    pub(in crate::engine) async fn take_for_children(
        &self,
        fork: &str,
        plans: &[&Plan],
        mut of: HostDevices,
        allowed: Allowed<'_>,
    ) -> Result<ChildDevices, ForkError> {
        // A device that a child was granted is given to no other VM.
        self.admit_children(plans, &of, allowed)?;
        let owed = Owed::new(&self.owed_devices(), &format!("{fork}-children"), of.parting.clone());
        let mut taken = ChildDevices { children: BTreeMap::new(), parting: of.parting.clone(), owed };
        if of.parting.resume.is_none() && of.pinned() == 0 {
            return Ok(taken);
        }
        let mut wrong = self.misfits(&of).await?;
        for (plan, devices) in plans.iter().zip(&mut of.children) {
            wrong.extend(devices.iter_mut().filter_map(|device| with_nic(plan, device)));
            let child = OfChild { name: plan.name().to_owned(), devices: devices.clone() };
            taken.children.insert(plan.index, child);
        }
        if !wrong.is_empty() {
            return Err(CloneError::Refused(wrong).into());
        }
        if let Err(error) = self.take_all(&taken).await {
            self.give_back_unused(&taken).await;
            return Err(error);
        }
        Ok(taken)
    }

    /// Lets children in that are planned here, with the devices of each, in the same order. Their names are taken. What was let in and does not
    /// come to be is forgotten when its name is free again.
    fn admit_children(
        &self,
        plans: &[&Plan],
        devices: &HostDevices,
        Allowed { grants, backing }: Allowed<'_>,
    ) -> Result<(), ForkError> {
        for (place, plan) in plans.iter().enumerate() {
            let own = devices.children.get(place).into_iter().flatten();
            let asked = RunRequest {
                name: plan.name().to_owned(),
                memory: backing.to_string(),
                command_line: plan.command_line().to_vec(),
                environment: plan.environment().iter().cloned().collect(),
                devices: own.map(|device| device.request.clone()).collect(),
                grant: grants.get(plan.name()).cloned(),
                pin: None,
            };
            self.admission.admit(&asked, Coming::AsChild).map_err(ForkError::NotAdmitted)?;
        }
        Ok(())
    }

    /// Devices that this node cannot give, or that the guest's drivers would not know.
    async fn misfits(&self, of: &HostDevices) -> Result<Vec<Blocker>, ForkError> {
        if of.pinned() == 0 {
            return Ok(Vec::new());
        }
        let list = self.registry.devices().list().await?;
        let why_not = |device: &VmDevice| {
            let role = &device.request.role;
            let model = of.models.get(role).map_or("", String::as_str);
            // A child has nothing yet.
            let why = why_not_in_place(&self.node, "", role, device.request.address, model, &list)?;
            Some(Blocker::new(BlockerCode::Device, why).about(role))
        };
        Ok(of.children.iter().flatten().filter_map(why_not).collect())
    }

    async fn take_all(&self, taken: &ChildDevices) -> Result<(), ForkError> {
        for OfChild { name, devices } in taken.children.values() {
            for device in devices {
                self.registry.devices().take(name, &device.request).await?;
            }
        }
        for OfChild { name, devices } in taken.children.values() {
            let now = Mono::now();
            let role = |device: &VmDevice| device.request.role.clone();
            let lacks =
                |device| Asked { role: role(device), asked_at: now, gone_at: Some(now), refused: false };
            let asked: Vec<Asked> = devices.iter().map(lacks).collect();
            taken.owed.note(name, |detached| {
                *detached = Detached { quiesced: taken.parting.resume.is_some(), asked }
            })?;
        }
        Ok(())
    }

    /// Plugs in what children are to have and have all of their memory.
    pub(in crate::engine) async fn plug_children(
        self: &Arc<Self>,
        taken: &ChildDevices,
        children: &mut [ChildReport],
    ) {
        let mut plugging = JoinSet::new();
        for (place, report) in children.iter().enumerate().filter(|(_, report)| report.error.is_none()) {
            let Some(child) = taken.children.get(&report.index).cloned() else { continue };
            let script = taken.parting.resume.clone();
            let (engine, limit) = (self.clone(), taken.parting.script_timeout_ms);
            plugging.spawn(async move { (place, engine.plug_child(&child, script, limit).await) });
        }
        while let Some(ended) = plugging.join_next().await {
            match ended {
                Ok((place, (devices, problem))) => {
                    taken.owed.settle(&children[place].name);
                    (children[place].devices, children[place].resume_problem) = (devices, problem);
                }
                Err(error) => tracing::error!(%error, "a task that gives a child its devices failed"),
            }
        }
    }

    async fn plug_child(
        self: &Arc<Self>,
        child: &OfChild,
        script: Option<String>,
        limit: u64,
    ) -> (Vec<ChildDeviceReport>, Option<String>) {
        // Whoever moves or forks it waits.
        let _claim = self.claim(&child.name);
        let record = self.registry.vms().get(&child.name).map_err(|error| chain(&error));
        let monitor = match &record {
            Ok(record) => self.registry.monitor(record).await.map_err(|error| chain(&error)),
            Err(why) => Err(why.clone()),
        };
        let mut reports = Vec::new();
        for device in &child.devices {
            let (role, begun) = (&device.request.role, Mono::now());
            let asked = Asked { role: role.clone(), asked_at: begun, gone_at: Some(begun), refused: false };
            let plugged = match (&record, &monitor) {
                (Ok(record), Ok(monitor)) => {
                    plug_in(record, monitor, device, &asked).await.map_err(|error| chain(&error))
                }
                (Err(why), _) | (_, Err(why)) => Err(why.clone()),
            };
            let mut report = ChildDeviceReport {
                role: role.clone(),
                address: device.request.address.to_string(),
                mac: device.request.identity.mac.map(|mac| mac.to_string()),
                ..ChildDeviceReport::default()
            };
            match plugged {
                Ok(_) => report.plug_ms = Some(ms(Mono::now().since(begun))),
                Err(why) => {
                    tracing::error!(child = child.name, role, %why, "a child lacks its device");
                    report.mend = Some(missing(&self.node, &child.name, role, String::new()).mend);
                    report.problem = Some(why);
                }
            }
            reports.push(report);
        }
        let problem = match (script, &monitor) {
            (Some(script), Ok(monitor)) => resume(monitor, &script, limit).await.1,
            _ => None,
        };
        (reports, problem)
    }

    /// Gives the devices of children back that did not come to be.
    pub(in crate::engine) async fn give_back_unused(&self, taken: &ChildDevices) {
        for OfChild { name, .. } in taken.children.values() {
            if self.registry.vms().get(name).is_ok() {
                continue;
            }
            if let Err(error) = self.registry.devices().give_all_back(name, CLOSED_TIMEOUT).await {
                tracing::error!(child = name, %error, "a device of a child that did not come to be is not back yet: trying again");
            }
            taken.owed.settle(name);
        }
    }
}

/// The primary of a pair has the address of the NIC that it makes a pair with, which is the child's own. What is in the way of that.
fn with_nic(plan: &Plan, device: &mut VmDevice) -> Option<Blocker> {
    let partner = device.properties.get(FAILOVER_PAIR)?;
    let mac = plan.mac_of(partner).and_then(|mac| mac.parse::<Mac>().ok());
    let role = &device.request.role;
    match (mac, device.request.identity.mac) {
        (Some(mac), None) => device.request.identity.mac = Some(mac),
        (Some(mac), Some(asked)) if mac != asked => {
            let message = format!(
                "Device {role} makes a pair with the NIC {partner}, whose address the child gets fresh: leave mac={asked} out"
            );
            return Some(Blocker::new(BlockerCode::Device, message).about(role));
        }
        _ => {}
    }
    None
}
