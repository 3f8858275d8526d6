//! What the end-to-end tests, the benchmark and the demo share: guests, daemons, measurements, and guards that clean up.

pub mod beacon;
pub mod bench;
pub mod booted;
pub mod bridge;
pub mod daemon;
pub mod disks;
pub mod fleet;
pub mod forks;
pub mod guest;
pub mod initramfs;
pub mod interrupt;
pub mod monitor;
pub mod networks;
pub mod old_kernel;
pub mod pki;
pub mod places;
pub mod priority;
pub mod process;
pub mod proxy;
pub mod sampler;
pub mod sandbox;
pub mod scene;
pub mod tsc;
