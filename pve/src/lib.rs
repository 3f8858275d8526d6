//! VMs of Proxmox VE whose guests vmove moves: what their configuration says, what must be changed in it, and what stands in the way.
//!
//! Text in, text out: nothing here calls Proxmox VE, and nothing changes a file. A VM is enabled if its `args` give its QEMU memory in a named
//! file and a monitor for vmove.
//!
//! ```
//! use vmove_pve::{Config, Section, Vm, Vmid};
//!
//! let vmid: Vmid = "100".parse()?;
//! let vm = Vm::new(vmid, Config::read("memory: 2048\nname: web\n"));
//! assert!(!vm.is_enabled(Section::Main)?);
//! let enabled = vm.enabled(Section::Main)?;
//! assert!(enabled.text().contains("args: -object memory-backend-file,id=vmove-ram,size=2048M,"));
//! # Ok::<(), vmove_pve::PveError>(())
//! ```

mod arguments;
mod change;
mod config;
mod error;
mod obstacles;
mod storage;
mod vmid;

pub use arguments::words;
pub use change::Vm;
pub use config::{Config, Section};
pub use error::PveError;
pub use obstacles::{Cluster, Obstacle};
pub use storage::Storages;
pub use vmid::{NoVmid, Vmid};

/// Where the files of guest memory are: in a folder below the mount point, whose other entries are names that vmove gives them while it moves a guest.
pub const MEMORY: &str = "/var/lib/vmove/pve/ram";

/// Where Proxmox VE has QEMU write its process id and make its monitor, as it stands in QEMU's command line.
pub const PID_FILES: &str = "/var/run/qemu-server";
