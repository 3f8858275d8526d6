//! Unplugs devices from a running guest (`device_del`), plugs them in (`device_add`), and waits for the result.
//!
//! QEMU answers `device_del` at once and then sends a request to the guest. The guest decides: it releases the device
//! (`DEVICE_DELETED`), refuses (`DEVICE_UNPLUG_GUEST_ERROR`), or does not react, for instance because it still boots. [`unplug()`] waits
//! for one of these events and repeats the request at intervals. It also polls QEMU's device tree, because the event may be missed.
//! A request cannot be withdrawn: after a timeout the guest may still release the device at any time. [`find`] shows whether it has.
//!
//! After `DEVICE_DELETED`, QEMU frees the device's back end a little later, when no thread can use it any more. Until then, a
//! `vfio-pci` device may hold its group and guest memory.

mod error;
mod host_device;
mod plug;
mod tree;
mod unplug;

pub use error::{HotplugError, PlugRefusal};
pub use host_device::properties;
pub use plug::{Plugged, plug};
pub use tree::{Port, Seat, find, ports};
pub use unplug::{Departure, UnplugLimits, Unplugged, unplug};
