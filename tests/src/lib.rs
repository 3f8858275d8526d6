//! What the end-to-end tests, the benchmark and the demo share: guests, daemons, measurements, and guards that clean up.
//!
//! ```no_run
//! use vmove_guest::config::Config;
//! use vmove_tests::guest::Guest;
//!
//! # fn main() -> anyhow::Result<()> {
//! // A guest of 256 MiB that rewrites and checks its memory, on the QEMU under test.
//! let guest = Guest::new(256, Config::default())?;
//! println!("{}", guest.command_line("serial.log")?.join(" "));
//! # Ok(())
//! # }
//! ```

pub mod beacon;
pub mod bench;
pub mod blows;
pub mod booted;
pub mod bridge;
pub mod browser;
pub mod cluster_demo;
pub mod cluster_walk;
pub mod control_groups;
pub mod daemon;
pub mod debian_disk;
pub mod disks;
pub mod failing_writes;
pub mod fleet;
pub mod forks;
pub mod groups;
pub mod guest;
pub mod hosts;
pub mod huge_pages;
mod huge_pages_turn;
pub mod initramfs;
pub mod interrupt;
pub mod kvm_device;
pub mod lan;
pub mod libvirt;
pub mod monitor;
pub mod networks;
pub mod old_kernel;
pub mod own_namespaces;
pub mod payload;
pub mod pki;
pub mod places;
pub mod priority;
pub mod process;
pub mod proxmox;
pub mod proxy;
pub mod sampler;
pub mod sandbox;
pub mod scene;
pub mod ssh;
pub mod tap;
pub mod tsc;
pub mod typist;
