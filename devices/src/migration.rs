//! Whether a device can carry its own state to another host (VFIO migration, version 2).
//!
//! QEMU could migrate such a device without unplugging it. vmove cannot use this, because only QEMU's dirty log shows what the device
//! writes to memory. So vmove reports this capability, but still unplugs the device for a migration.

use std::fs::{File, OpenOptions};

use serde::{Deserialize, Serialize};

use crate::error::{Act, Cause, DeviceError};
use crate::{PciAddress, Sys, bind, list, vfio};

/// The migration capabilities that a device reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OwnState {
    /// It can be stopped, and its state saved and loaded (`VFIO_MIGRATION_STOP_COPY`).
    pub stop_copy: bool,
    /// It can first be stopped from writing to other devices (`VFIO_MIGRATION_P2P`): needed if a guest has several devices.
    pub p2p: bool,
    /// It can send state while it runs (`VFIO_MIGRATION_PRE_COPY`).
    pub pre_copy: bool,
    /// It reports which memory it wrote.
    pub logs_writes: bool,
}

/// Queries a device that is bound to a VFIO driver and that no VM has; `None` if it does not support migration.
///
/// # Errors
/// [`Cause::NoIommu`], [`Cause::NotBound`], [`Cause::File`] (busy: a VM has it), [`Cause::Vfio`].
pub fn probe(sys: &Sys, address: PciAddress) -> Result<Option<OwnState>, DeviceError> {
    let device = list::read(sys, address)?;
    let failed = |cause: Cause| cause.of(address, Act::Probe);
    let group = device.group.ok_or_else(|| failed(Cause::NoIommu))?;
    if !device.driver.as_deref().is_some_and(bind::is_vfio) {
        return Err(failed(Cause::NotBound { wanted: bind::VFIO.to_owned(), found: device.driver }));
    }
    let open = |path: String| -> Result<File, DeviceError> {
        let path = sys.path(&path);
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        opened.map_err(|source| failed(Cause::File { path, source }))
    };
    let (group, container) = (open(format!("dev/vfio/{group}"))?, open("dev/vfio/vfio".to_owned())?);
    let (flags, logs_writes) = vfio::migration_flags(&group, &container, &address.to_string())
        .map_err(|source| failed(Cause::Vfio { what: "to open the device", source }))?;
    let bit = |flags: u64, number: u32| flags >> number & 1 == 1;
    Ok(flags.map(|flags| OwnState {
        stop_copy: bit(flags, 0),
        p2p: bit(flags, 1),
        pre_copy: bit(flags, 2),
        logs_writes,
    }))
}
