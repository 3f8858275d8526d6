//! The devices of this node that VMs have: the ledger, off the threads of requests.

mod leased;
#[cfg(test)]
mod tests;

pub use leased::LeasedDevices;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use vmove_devices::ledger::Step;
use vmove_devices::rtnetlink::Rtnetlink;
use vmove_devices::{DeviceError, Ledger, Sys, report};
use vmove_node::blocking::run_blocking;
use vmove_node::devices::{Claim, Devices, DevicesError, Trouble};
use vmove_types::device::{DeviceRequest, NodeDeviceList};

/// Between two looks whether a QEMU has closed a device.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Devices by the ledger of this node.
#[derive(Debug)]
pub struct LedgerDevices {
    ledger: Arc<Mutex<Ledger>>,
    /// What the ledger holds, for whoever must not wait for the kernel.
    claims: RwLock<Vec<Claim>>,
}

impl LedgerDevices {
    /// By the journal in this folder; QEMUs of `user` may open what VMs get.
    ///
    /// # Errors
    /// The journal cannot be read or begun.
    pub fn open(state_dir: &Path, user: Option<(u32, u32)>) -> std::io::Result<Arc<Self>> {
        Self::open_on(state_dir, Sys::new(Path::new("/")), user)
    }

    fn open_on(state_dir: &Path, sys: Sys, user: Option<(u32, u32)>) -> std::io::Result<Arc<Self>> {
        let ledger = Ledger::open(&state_dir.join("devices.jsonl"), sys, Box::new(Rtnetlink))?;
        let ledger = ledger.for_user(user);
        let claims = RwLock::new(claims_of(&ledger));
        Ok(Arc::new(Self { ledger: Arc::new(Mutex::new(ledger)), claims }))
    }

    /// Something with the ledger, on a thread of its own.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Ledger) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<T, DevicesError> {
        let ledger = self.ledger.clone();
        let done = run_blocking(move || {
            let mut ledger = lock(&ledger);
            let result = work(&mut ledger);
            (result, claims_of(&ledger))
        });
        let (result, claims) = done.await?;
        *self.claims.write().unwrap_or_else(PoisonError::into_inner) = claims;
        Ok(result?)
    }
}

/// Each change of the ledger is one line of its journal: a panic leaves nothing half done that recovery does not know.
fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

fn claims_of(ledger: &Ledger) -> Vec<Claim> {
    let claim = |claim: &vmove_devices::Claim| Claim {
        vm: claim.vm.clone(),
        request: claim.request.clone(),
        held: claim.step == Step::Held,
        taken_in: claim.taken_in,
    };
    ledger.claims().iter().map(claim).collect()
}

#[async_trait]
impl Devices for LedgerDevices {
    async fn take(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        let (name, wanted) = (vm.to_owned(), request.clone());
        let taken = self.with(move |ledger| ledger.take(&name, &wanted)).await?;
        tracing::info!(vm, device = %request, group = taken.group, former = ?taken.former.driver, "device given to a VM");
        Ok(())
    }

    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        let (name, wanted) = (vm.to_owned(), request.clone());
        self.with(move |ledger| ledger.take_in(&name, &wanted)).await?;
        tracing::info!(vm, device = %request, "device of an adopted VM noted");
        Ok(())
    }

    async fn give_back(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError> {
        let begun = Instant::now();
        loop {
            let (name, of) = (vm.to_owned(), role.to_owned());
            // Others may need the ledger while a QEMU still closes this one.
            let given = self.with(move |ledger| ledger.give_back(&name, &of, Duration::ZERO)).await;
            match given {
                Err(error) if error.is_open() && begun.elapsed() < limit => {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                Err(error) => return Err(error),
                Ok(()) => {
                    tracing::info!(vm, role, waited = ?begun.elapsed(), "device is back with the host");
                    return Ok(());
                }
            }
        }
    }

    async fn wait_until_closed(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError> {
        let begun = Instant::now();
        loop {
            let (name, of) = (vm.to_owned(), role.to_owned());
            if !self.with(move |ledger| Ok(ledger.is_open(&name, &of))).await? {
                return Ok(());
            }
            if begun.elapsed() >= limit {
                let why = format!("a process still has device {role} of {vm:?} open after {limit:?}");
                return Err(DevicesError::Device { trouble: Trouble::Open, why: why.into() });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn forget(&self, vm: &str) -> Result<(), DevicesError> {
        let name = vm.to_owned();
        self.with(move |ledger| ledger.forget(&name)).await
    }

    fn claims(&self) -> Vec<Claim> {
        self.claims.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn list(&self) -> Result<NodeDeviceList, DevicesError> {
        self.with(|ledger| Ok(report::list(ledger.sys(), ledger.claims()))).await
    }
}
