//! What a node has given to which VM.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Grant, GrantError, PublicKey};

/// What a node knows of itself.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name, by which bridges know it.
    pub node: String,
    /// Its hardware threads.
    pub cores: u64,
    /// Keys of the bridges whose grants it takes.
    pub keys: Vec<PublicKey>,
}

/// What a VM is to be started with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// Virtual processors.
    pub cores: u32,
    /// Memory outside huge pages. Unit: MiB.
    pub memory_mib: u64,
    /// Memory in pages of 2 MiB. Unit: MiB.
    pub huge_2m_mib: u64,
    /// Memory in pages of 1 GiB. Unit: MiB.
    pub huge_1g_mib: u64,
    /// Addresses of its passthrough devices.
    pub devices: Vec<String>,
}

/// A VM that was started into a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// The grant.
    pub grant: Grant,
}

/// The VMs of a node that were started into grants, and the grants that were used. Whoever keeps it writes it down before a VM starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// By VM.
    vms: BTreeMap<String, Taken>,
    /// Serial numbers of grants that were used, and when these end. After that they are refused anyway.
    used: BTreeMap<u64, u64>,
}

impl Book {
    /// Takes a VM into the grant of `text`. `now_ms` is the time of day.
    ///
    /// # Errors
    /// See [`GrantError`]; the book is as it was.
    pub fn take(
        &mut self,
        host: &Host,
        text: &str,
        vm: &str,
        demand: &Demand,
        now_ms: u64,
    ) -> Result<&Grant, GrantError> {
        let grant = read(&host.keys, text)?;
        if grant.node != host.node {
            return Err(GrantError::OtherNode { granted: grant.node, here: host.node.clone() });
        }
        if grant.vm != vm {
            return Err(GrantError::OtherVm { granted: grant.vm, vm: vm.to_owned() });
        }
        if now_ms >= grant.expires_ms {
            let ago_s = (now_ms - grant.expires_ms) / 1000;
            return Err(GrantError::Expired { lease: grant.lease, ago_s });
        }
        if self.used.contains_key(&grant.serial) {
            return Err(GrantError::Replayed { lease: grant.lease, serial: grant.serial });
        }
        within(&grant, demand)?;
        self.free(&grant, host.cores)?;
        self.used.retain(|_, ends_ms| *ends_ms > now_ms);
        self.used.insert(grant.serial, grant.expires_ms);
        self.vms.remove(vm);
        Ok(&self.vms.entry(vm.to_owned()).or_insert(Taken { grant }).grant)
    }

    /// Whether nobody else has what a grant gives.
    fn free(&self, grant: &Grant, cores: u64) -> Result<(), GrantError> {
        let others = || self.vms.iter().filter(|(vm, _)| **vm != grant.vm).map(|(_, taken)| &taken.grant);
        for device in &grant.devices {
            let has = |other: &&Grant| other.devices.iter().any(|held| held.address == device.address);
            if let Some(other) = others().find(has) {
                return Err(GrantError::Held {
                    address: device.address.clone(),
                    by: other.vm.clone(),
                    lease: other.lease.clone(),
                });
            }
        }
        let wanted = others().map(|other| u64::from(other.cores)).sum::<u64>() + u64::from(grant.cores);
        if wanted > cores {
            return Err(GrantError::Overcommitted { wanted, cores });
        }
        Ok(())
    }

    /// A VM has ended, or has not started: what it had is free. The grant stays used.
    pub fn end(&mut self, vm: &str) -> Option<Taken> {
        self.vms.remove(vm)
    }

    /// The VMs that were started into grants, by name.
    #[must_use]
    pub fn vms(&self) -> &BTreeMap<String, Taken> {
        &self.vms
    }
}

/// Reads a grant that any of the keys has signed.
fn read(keys: &[PublicKey], text: &str) -> Result<Grant, GrantError> {
    let mut refused = GrantError::OtherBridge;
    for key in keys {
        match key.read(text) {
            Ok(grant) => return Ok(grant),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// Whether a VM has no more than was granted.
fn within(grant: &Grant, demand: &Demand) -> Result<(), GrantError> {
    for (what, wanted, granted) in [
        ("cores", u64::from(demand.cores), u64::from(grant.cores)),
        ("MiB of memory", demand.memory_mib, grant.memory_mib),
        ("MiB in pages of 2 MiB", demand.huge_2m_mib, grant.huge_2m_mib),
        ("MiB in pages of 1 GiB", demand.huge_1g_mib, grant.huge_1g_mib),
    ] {
        if wanted > granted {
            let (vm, lease) = (grant.vm.clone(), grant.lease.clone());
            return Err(GrantError::Exceeds { vm, lease, what, wanted, granted });
        }
    }
    let granted = |address: &&String| grant.devices.iter().any(|device| device.address == **address);
    match demand.devices.iter().find(|address| !granted(address)) {
        None => Ok(()),
        Some(address) => Err(GrantError::NotGranted {
            vm: grant.vm.clone(),
            lease: grant.lease.clone(),
            address: address.clone(),
        }),
    }
}
