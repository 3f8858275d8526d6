//! The sessions, journals and recovery of two daemons, run against played QEMUs, disks and a network that fail as a seed says.
//!
//! What runs is the code of `vmoved`: `migrate`'s engine with its sessions of both sides, and `node`'s journals and records. What is played is below
//! them: QEMU and the kernel (`vmm`, `qemu`), disks (`disk`), connections (`net`), time. Guest memory, page tables and the readers that fill
//! them are real.

mod life;
mod oracle;
pub mod plan;
mod rng;
pub mod run;
#[cfg(test)]
mod tests;
mod world;
