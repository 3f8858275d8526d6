//! IOMMU groups: devices that can only go together.

use crate::device::{Device, DeviceKind};
use crate::{Cause, NodeDevices};

/// Whether a device can be given to a VM by itself: its group holds nothing else but bridges, which the kernel keeps.
///
/// # Errors
/// [`Cause::NoIommu`]; [`Cause::GroupHoldsOthers`] with their names.
pub fn check(all: &NodeDevices, device: &Device) -> Result<u32, Cause> {
    let group = device.group.ok_or(Cause::NoIommu)?;
    let others: Vec<String> = all
        .group_mates(device)
        .filter(|mate| mate.kind != DeviceKind::Bridge)
        .map(|mate| {
            let driver = mate.driver.as_deref().unwrap_or("no driver");
            let same = if mate.address.same_slot(device.address) { ", of the same card" } else { "" };
            format!("{} ({driver}{same})", mate.address)
        })
        .collect();
    if others.is_empty() {
        Ok(group)
    } else {
        Err(Cause::GroupHoldsOthers { group, others: others.join(", ") })
    }
}
