//! A guest lets a device go.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use vmove_qmp::hotplug::{HotplugError, UnplugLimits};
use vmove_types::device::VmDevice;

use super::DeviceMonitor;
use crate::devices::{Devices, DevicesError};

/// QEMU closes a device a little after the guest has let it go. Until then it may write guest memory.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(10);
/// A guest that was asked, and by a request that cannot be withdrawn, may still be at it.
const SETTLED_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Why a device did not leave.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DetachError {
    /// The guest, or QEMU.
    #[error(transparent)]
    Unplug(#[from] HotplugError),
    /// QEMU may still write guest memory by it.
    #[error("The guest has let the device go, but QEMU still has it open")]
    Open(#[source] DevicesError),
}

/// Asks the guest for a device, and waits until nothing of it can write guest memory any more. Cancel-safe: what was asked stands.
///
/// # Errors
/// [`DetachError`].
pub async fn detach(
    monitor: &dyn DeviceMonitor,
    devices: &dyn Devices,
    vm: &str,
    device: &VmDevice,
    limit: Duration,
) -> Result<(), DetachError> {
    let limits = UnplugLimits { timeout: limit, ..UnplugLimits::default() };
    match monitor.unplug(&device.id, limits).await {
        // It left between the look and the request.
        Ok(_) | Err(HotplugError::NoSuchDevice { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    devices.wait_until_closed(vm, &device.request.role, CLOSED_TIMEOUT).await.map_err(DetachError::Open)
}

/// Waits for a moment whether a device leaves that the guest was asked for. Whether it has left.
///
/// # Errors
/// [`HotplugError`].
pub async fn has_left(monitor: &dyn DeviceMonitor, device: &VmDevice) -> Result<bool, HotplugError> {
    let until = Instant::now() + SETTLED_TIMEOUT;
    loop {
        if monitor.seat(&device.id).await?.is_none() {
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        sleep(LOOK_INTERVAL).await;
    }
}
