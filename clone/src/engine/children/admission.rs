//! Whether this node takes children: as VMs that are started here, those of forks need what a bridge lets them have, where that is required.

use std::collections::BTreeMap;

use vmove_types::Backing;
use vmove_types::vm::RunRequest;

use crate::child::Plan;
use crate::engine::ForkEngine;
use crate::engine::devices::HostDevices;
use crate::engine::error::ForkError;

impl ForkEngine {
    /// Lets children in that are planned here, with the devices of each, in the same order. Their names are taken. What was let in and does not
    /// come to be is forgotten when its name is free again.
    pub(in crate::engine) fn admit_children(
        &self,
        plans: &[&Plan],
        devices: &HostDevices,
        grants: &BTreeMap<String, String>,
        backing: Backing,
    ) -> Result<(), ForkError> {
        for (place, plan) in plans.iter().enumerate() {
            let own = devices.children.get(place).into_iter().flatten();
            let asked = RunRequest {
                name: plan.name().to_owned(),
                memory: backing.to_string(),
                command_line: plan.command_line().to_vec(),
                environment: BTreeMap::new(),
                devices: own.map(|device| device.request.clone()).collect(),
                grant: grants.get(plan.name()).cloned(),
            };
            self.admission.admit(&asked).map_err(ForkError::NotAdmitted)?;
        }
        Ok(())
    }
}
