//! Everything that needs `unsafe`: system calls and raw memory. Each file states its rules.

pub(crate) mod datagram;
pub(crate) mod memory;
pub(crate) mod net;
pub(crate) mod process;
pub(crate) mod sched;
pub(crate) mod shm;
