//! Domains of libvirt whose guests vmove moves: what their XML says, and what must be changed in it and in `qemu.conf`.
//!
//! Text in, text out: nothing here calls libvirt, and nothing changes a file. A domain is enabled if its QEMU has a monitor for vmove, a socket in
//! [`SOCKETS`].
//!
//! ```
//! use vmove_libvirt::Domain;
//!
//! let domain = Domain::read("<domain type='kvm'><name>web</name><uuid>1f0c</uuid></domain>")?;
//! assert!(!domain.is_enabled());
//! assert!(Domain::read(&domain.enabled()?)?.is_enabled());
//! # Ok::<(), vmove_libvirt::DomainError>(())
//! ```

mod change;
mod domain;
mod qemu_conf;

pub use domain::{Domain, DomainError, Source};
pub use qemu_conf::QemuConf;

/// Where the monitors for vmove are: below the folder that libvirt has for itself, so that both end with the boot.
pub const SOCKETS: &str = "/run/libvirt/vmove";
/// Namespace of the elements for QEMU's own arguments.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
