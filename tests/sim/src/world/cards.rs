//! Devices of the nodes, and who has them: what the kernel and the ledger of a daemon keep, whatever becomes of its lives. One goes to a VM in steps, and a
//! daemon may die between any two.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::json;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, sleep};
use vmove_node::devices::{Claim, Devices, DevicesError, Trouble};
use vmove_types::device::{DeviceRequest, NodeDeviceList, PciAddress};

use crate::life::Life;
use crate::plan::{NODES, NodeIndex};
use crate::world::World;
use crate::world::disk::SimDisk;
use crate::world::guest;

/// What the device is to the guest.
pub const ROLE: &str = "net0";
/// QEMU's id of it.
pub const ID: &str = "vmove-net0";
/// Between two looks whether it is closed.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// How far a claim is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Taking,
    Held,
    Returning,
}

/// A device of a node.
#[derive(Debug)]
pub struct Card {
    pub address: PciAddress,
    /// Bound to `vfio-pci`, not to its own driver.
    pub is_vfio: bool,
    /// The QEMU that has it plugged in.
    pub plugged: Option<i32>,
    /// A QEMU that has let it go closes it then.
    pub closes: Option<(i32, Instant)>,
    /// In the ledger's journal.
    pub claim: Option<(String, DeviceRequest, Step)>,
    /// One change at a time.
    lock: Arc<AsyncMutex<()>>,
}

impl Card {
    /// Of a node; the host's own driver has it.
    #[must_use]
    pub fn of(node: NodeIndex) -> Self {
        let address = address(node);
        Self { address, is_vfio: false, plugged: None, closes: None, claim: None, lock: Arc::default() }
    }

    /// The QEMU that can write guest memory by it.
    #[must_use]
    pub fn opened_by(&self) -> Option<i32> {
        self.plugged.or_else(|| self.closes.filter(|(_, at)| Instant::now() < *at).map(|(pid, _)| pid))
    }
}

/// Where a node's device is.
#[must_use]
pub fn address(node: NodeIndex) -> PciAddress {
    let text = format!("0000:0{}:10.0", node + 1);
    text.parse().unwrap_or_else(|_| unreachable!("{text} is one"))
}

/// Devices of a node, as one life of its daemon reaches them.
#[derive(Clone)]
pub struct SimDevices {
    world: World,
    life: Arc<Life>,
}

impl std::fmt::Debug for SimDevices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimDevices").field("life", &self.life).finish_non_exhaustive()
    }
}

impl SimDevices {
    /// For a life.
    #[must_use]
    pub fn new(world: &World, life: &Arc<Life>) -> Self {
        Self { world: world.clone(), life: Arc::clone(life) }
    }

    fn card<T>(&self, act: impl FnOnce(&mut Card) -> T) -> T {
        act(&mut self.world.state().nodes[self.life.node()].card)
    }

    /// Writes a line of the ledger.
    async fn note(&self, what: &str, act: impl FnOnce(&mut Card)) -> Result<(), DevicesError> {
        self.world.may(&self.life, format!("devices: {what}")).await;
        if SimDisk::new(&self.world, &self.life).fails() {
            self.world.note(self.life.name(), format!("devices: cannot {what}"));
            return Err(trouble(Trouble::Failed, "the disk of the ledger"));
        }
        self.card(act);
        Ok(())
    }

    async fn undo(&self, limit: Duration) -> Result<(), DevicesError> {
        let until = Instant::now() + limit;
        while self.card(|card| card.opened_by().is_some()) {
            if Instant::now() >= until {
                return Err(trouble(Trouble::Open, "a process has it open"));
            }
            sleep(LOOK_INTERVAL).await;
        }
        self.note("return", |card| {
            if let Some(claim) = &mut card.claim {
                claim.2 = Step::Returning;
            }
        })
        .await?;
        self.world.may(&self.life, "devices: unbind").await;
        self.card(|card| card.is_vfio = false);
        guest::moment(&self.world).await;
        self.note("forget", |card| card.claim = None).await
    }

    /// What VMs had that are no more, or were to have that never came, goes back.
    pub async fn recover(&self, lives: impl Fn(&str) -> bool) {
        let lock = self.card(|card| Arc::clone(&card.lock));
        let _held = lock.lock().await;
        let claim = self.card(|card| card.claim.clone());
        if let Some((vm, ..)) = claim
            && !lives(&vm)
        {
            let done = self.undo(Duration::from_secs(5)).await;
            self.world.note(self.life.name(), format!("devices: recovered: {}", done.is_ok()));
        }
    }
}

fn trouble(trouble: Trouble, what: &str) -> DevicesError {
    DevicesError::Device { trouble, why: what.into() }
}

#[async_trait]
impl Devices for SimDevices {
    async fn take(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        let lock = self.card(|card| Arc::clone(&card.lock));
        let _held = lock.lock().await;
        match self.card(|card| card.claim.clone()) {
            Some((of, has, Step::Held)) if of == vm && has == *request => return Ok(()),
            Some(_) => return Err(trouble(Trouble::Unavailable, "somebody has it")),
            None => {}
        }
        if self.card(|card| card.address) != request.address {
            return Err(trouble(Trouble::Unavailable, "there is none"));
        }
        let claim = (vm.to_owned(), request.clone(), Step::Taking);
        self.note("take", |card| card.claim = Some(claim)).await?;
        self.world.may(&self.life, "devices: bind").await;
        self.card(|card| card.is_vfio = true);
        guest::moment(&self.world).await;
        let hold = |card: &mut Card| {
            if let Some(claim) = &mut card.claim {
                claim.2 = Step::Held;
            }
        };
        if let Err(error) = self.note("hold", hold).await {
            let _ = self.undo(Duration::ZERO).await;
            return Err(error);
        }
        Ok(())
    }

    async fn take_in(&self, vm: &str, request: &DeviceRequest) -> Result<(), DevicesError> {
        self.take(vm, request).await
    }

    async fn give_back(&self, vm: &str, role: &str, limit: Duration) -> Result<(), DevicesError> {
        let lock = self.card(|card| Arc::clone(&card.lock));
        let _held = lock.lock().await;
        let claim = self.card(|card| card.claim.clone());
        if claim.is_none_or(|(of, request, _)| of != vm || request.role != role) {
            return Ok(());
        }
        self.undo(limit).await
    }

    async fn wait_until_closed(&self, _: &str, _: &str, limit: Duration) -> Result<(), DevicesError> {
        let until = Instant::now() + limit;
        while self.card(|card| card.opened_by().is_some()) {
            if Instant::now() >= until {
                return Err(trouble(Trouble::Open, "a process has it open"));
            }
            sleep(LOOK_INTERVAL).await;
        }
        Ok(())
    }

    async fn forget(&self, _: &str) -> Result<(), DevicesError> {
        Ok(())
    }

    fn claims(&self) -> Vec<Claim> {
        let claim = self.card(|card| card.claim.clone());
        let claim =
            claim.map(|(vm, request, step)| Claim { vm, request, held: step == Step::Held, taken_in: false });
        claim.into_iter().collect()
    }

    async fn list(&self) -> Result<NodeDeviceList, DevicesError> {
        let (address, taken) = self.card(|card| (card.address, card.claim.is_some()));
        let refused = taken.then_some("somebody has it");
        let list = json!({ "parts": [], "devices": [{
            "address": address, "kind": "nic", "model": "8086:10ca", "moves": "unplug", "refused": refused,
        }]});
        Ok(serde_json::from_value(list).unwrap_or_default())
    }
}

/// Whether the devices are where they are to be: the guest has its own, and that of the other node has its driver. Nothing is said of a guest that
/// has none.
#[must_use]
pub fn wrong(world: &World) -> Vec<String> {
    let state = world.state();
    if !state.schedule.device {
        return Vec::new();
    }
    let mut found = Vec::new();
    let machine = state.machines.iter().find(|machine| machine.alive && machine.vm == 0);
    for (node, name) in NODES.iter().enumerate() {
        let card = &state.nodes[node].card;
        let has = machine.filter(|machine| machine.node == node);
        let expected = match has {
            Some(machine) => {
                let plugged =
                    machine.devices.get(ID) == Some(&card.address) && card.plugged == Some(machine.pid);
                let held = card.claim.as_ref().is_some_and(|claim| claim.2 == Step::Held);
                plugged && held && card.is_vfio && machine.devices.len() == 1
            }
            None => !card.is_vfio && card.claim.is_none() && card.plugged.is_none(),
        };
        if !expected {
            let devices = has.map(|machine| &machine.devices);
            found.push(format!(
                "the device of {name} is not where it is to be: {card:?}, its QEMU has {devices:?}"
            ));
        }
    }
    if machine.is_some() && state.guests[0].is_quiet {
        found.push("the guest was quiesced, and nobody had it resume".to_owned());
    }
    found
}
