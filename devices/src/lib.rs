//! Assigns the devices of a node to VMs: lists them, records their owners, gives them to VMs and returns them to the host.
//!
//! | Module | Owns |
//! |---|---|
//! | [`list`], [`device`] | the PCI devices of a node, read from `/sys`: kind, driver, IOMMU group, virtual functions |
//! | [`shared`] | parts of devices that are not PCI functions: mediated devices, MIG slices |
//! | [`group`] | whether an IOMMU group can be given to one VM |
//! | [`DeviceRequest`], [`Identity`] | which device a VM gets, in which role and with which addresses; defined in `vmove-types` |
//! | [`bind`] | binding a device to `vfio-pci`, and back to its former driver |
//! | [`vf`], [`rtnetlink`], [`infiniband`] | addresses of a virtual function, set through its physical function |
//! | [`ledger`] | the journal of devices and their VMs, so that a killed daemon neither loses a device nor gives it twice |
//! | [`report`] | what the node has, in plain words |
//! | [`migration`] | whether a device supports migration of its own state |
//!
//! All files are read and written below a root that the caller names ([`sys::Sys`]), so that tests can use recorded trees of other
//! machines. This crate does not communicate with QEMU.
//!
//! A virtual function of a network adapter for the VM `web`, in the role `net`, and back to its driver:
//!
//! ```no_run
//! use std::path::Path;
//! use std::time::Duration;
//!
//! use vmove_devices::rtnetlink::Rtnetlink;
//! use vmove_devices::{Ledger, Sys};
//!
//! let journal = Path::new("/var/lib/vmove/devices.jsonl");
//! let mut ledger = Ledger::open(journal, Sys::new(Path::new("/")), Box::new(Rtnetlink))?;
//! let claim = ledger.take("web", &"net=0000:3b:02.1,mac=52:54:00:12:34:56".parse()?)?;
//! println!("{claim:?}"); // bound to vfio-pci: start the VM with it
//! ledger.give_back("web", "net", Duration::from_secs(10))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod bind;
pub mod device;
pub mod error;
pub mod group;
pub mod infiniband;
pub mod ledger;
pub mod list;
pub mod migration;
pub mod report;
pub mod rtnetlink;
pub mod shared;
pub mod sys;
pub mod vf;
mod vfio;

pub use device::{Device, DeviceKind, Sriov};
pub use error::{Act, Cause, DeviceError};
pub use ledger::{Claim, Ledger};
pub use list::NodeDevices;
pub use sys::Sys;
pub use vmove_types::device::{DeviceRequest, Guid, Identity, Mac, PciAddress};
