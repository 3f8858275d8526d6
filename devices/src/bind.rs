//! A device goes to `vfio-pci`, and back to the driver that it had.
//!
//! By `driver_override`: it names the one driver that may take the device, whatever other drivers know its number, and holds over a rescan.

use std::time::{Duration, Instant};

use crate::error::{Act, Cause, DeviceError};
use crate::list::{DEVICES, driver};
use crate::{PciAddress, Sys};

/// The driver by which QEMU gets a device.
pub const VFIO: &str = "vfio-pci";
/// What the kernel says where no driver is named.
const NOBODY: &str = "(null)";

/// Whether it is a driver by which QEMU gets devices: `vfio-pci`, or a variant for one model such as `mlx5_vfio_pci`.
#[must_use]
pub fn is_vfio(driver: &str) -> bool {
    driver == VFIO || driver.ends_with("_vfio_pci") || driver.ends_with("-vfio-pci")
}

/// The driver that alone may take a device, if one is named.
pub(crate) fn named(sys: &Sys, address: PciAddress) -> Option<String> {
    sys.read(&format!("{DEVICES}/{address}/driver_override")).filter(|name| name != NOBODY)
}

/// Hands a device to `vfio-pci`, if no driver of that kind has it. Done again, it does nothing.
///
/// # Errors
/// [`Cause::File`], [`Cause::NotBound`].
pub fn bind(sys: &Sys, address: PciAddress) -> Result<(), DeviceError> {
    if driver(sys, address).is_some_and(|driver| is_vfio(&driver)) {
        return Ok(());
    }
    change(sys, address, Some(VFIO), Some(VFIO)).map_err(|cause| cause.of(address, Act::Bind))
}

/// Gives a device back to the driver that it had, or to none. Done again, it does nothing. `named` is the driver that alone might take
/// it before.
///
/// # Errors
/// [`Cause::File`], [`Cause::NotBound`].
pub fn unbind(
    sys: &Sys,
    address: PciAddress,
    former: Option<&str>,
    named: Option<&str>,
) -> Result<(), DeviceError> {
    change(sys, address, named, former).map_err(|cause| cause.of(address, Act::Return))
}

fn change(sys: &Sys, address: PciAddress, named: Option<&str>, wanted: Option<&str>) -> Result<(), Cause> {
    let dir = format!("{DEVICES}/{address}");
    // A new line alone names nobody.
    sys.write(&format!("{dir}/driver_override"), &format!("{}\n", named.unwrap_or_default()))?;
    let has = driver(sys, address);
    if has.as_deref() == wanted {
        return Ok(());
    }
    if has.is_some() {
        sys.write(&format!("{dir}/driver/unbind"), &address.to_string())?;
    }
    let Some(wanted) = wanted else { return Ok(()) };
    // Fails if a driver looks at the device and does not want it; the link below says more.
    let probed = sys.write("sys/bus/pci/drivers_probe", &address.to_string());
    let found = driver(sys, address);
    if found.as_deref() == Some(wanted) {
        return Ok(());
    }
    probed?;
    Err(Cause::NotBound { wanted: wanted.to_owned(), found })
}

/// Waits until no process has a group open: a QEMU that has let a device go frees the group a little later, and taking the device from
/// `vfio-pci` before would wait in the kernel.
///
/// # Errors
/// [`Cause::GroupOpen`].
pub fn wait_until_free(sys: &Sys, group: u32, limit: Duration) -> Result<Duration, Cause> {
    let begun = Instant::now();
    while is_open(sys, group) {
        if begun.elapsed() >= limit {
            return Err(Cause::GroupOpen { group, waited: limit });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(begun.elapsed())
}

/// A group is opened by one process at a time.
pub(crate) fn is_open(sys: &Sys, group: u32) -> bool {
    let opened =
        std::fs::OpenOptions::new().read(true).write(true).open(sys.path(&format!("dev/vfio/{group}")));
    opened.is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
}
