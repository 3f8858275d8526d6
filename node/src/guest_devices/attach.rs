//! A guest gets a device that the node holds for it.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use vmove_qmp::hotplug::{HotplugError, PlugRefusal, properties};
use vmove_types::device::VmDevice;

use super::detach::has_left;
use super::{Asked, DeviceMonitor};
use crate::record::VmRecord;

/// A QEMU that has let a device go frees it a little later.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// Between attempts.
const BUSY_INTERVAL: Duration = Duration::from_millis(100);
/// `device_add` pins all guest memory.
const PLUG_TIMEOUT: Duration = Duration::from_secs(60);
/// And for each GiB of that.
const PLUG_TIMEOUT_PER_GIB: Duration = Duration::from_secs(2);

/// A device that is plugged in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// The port: another one than before, if somebody had put something else there.
    pub bus: String,
}

/// Lets QEMU lock so many bytes of guest memory.
pub type LetLockMemory<'a> = &'a (dyn Fn(u64) -> std::io::Result<()> + Sync);

/// Plugs a device in that this node holds for the guest. If it is there already, this does nothing.
///
/// # Errors
/// [`HotplugError`].
pub async fn attach(
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    device: &VmDevice,
    let_lock_memory: LetLockMemory<'_>,
) -> Result<Attached, HotplugError> {
    let memory: u64 = vm.ram.iter().map(|ram| ram.size).sum();
    if let Err(error) = let_lock_memory(memory) {
        // If the limit is too low, QEMU says so.
        tracing::warn!(vm = vm.name, %error, "QEMU's limit of locked memory was not raised");
    }
    let limit = PLUG_TIMEOUT + PLUG_TIMEOUT_PER_GIB * u32::try_from(memory >> 30).unwrap_or(u32::MAX >> 8);
    let until = Instant::now() + BUSY_TIMEOUT;
    let mut bus = device.bus.clone();
    loop {
        if let Some(seat) = monitor.seat(&device.id).await? {
            return Ok(Attached { bus: seat.bus });
        }
        let seated = VmDevice { bus: bus.clone(), ..device.clone() };
        let error = match monitor.plug(&properties(&seated), limit).await {
            Ok(_) => return Ok(Attached { bus }),
            Err(error) => error,
        };
        match &error {
            HotplugError::NotPlugged { refusal: PlugRefusal::GroupBusy, .. } if Instant::now() < until => {
                sleep(BUSY_INTERVAL).await;
            }
            HotplugError::NotPlugged { refusal: PlugRefusal::PortTaken, .. } if bus == device.bus => {
                let ports = monitor.ports().await?;
                let free = ports.into_iter().find(|port| port.hotplug && !port.taken);
                bus = free.ok_or(error)?.id;
            }
            // QEMU may have taken it all the same.
            HotplugError::Qmp(_) => {
                return match monitor.seat(&device.id).await {
                    Ok(Some(seat)) => Ok(Attached { bus: seat.bus }),
                    _ => Err(error),
                };
            }
            _ => return Err(error),
        }
    }
}

/// Plugs a device in again that the guest was asked for. `None` if the guest has not let it go, and keeps it.
///
/// # Errors
/// [`HotplugError`].
pub async fn attach_again(
    vm: &VmRecord,
    monitor: &dyn DeviceMonitor,
    device: &VmDevice,
    asked: &Asked,
    let_lock_memory: LetLockMemory<'_>,
) -> Result<Option<Attached>, HotplugError> {
    // What the guest was asked stands: it may be at it.
    if asked.gone_at.is_none() && !asked.refused && !has_left(monitor, device).await? {
        return Ok(None);
    }
    attach(vm, monitor, device, let_lock_memory).await.map(Some)
}
