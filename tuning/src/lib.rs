//! Processors and memory of a VM: which it gets of its host, and how it is kept on them.
//!
//! | Module | |
//! |---|---|
//! | [`cpus`] | sets of processors, as the kernel writes them (`0-3,8`) |
//! | [`host`] | cores, sibling threads and NUMA nodes of a host, from `/sys` |
//! | [`choose`] | which processors a VM gets |
//! | [`pin`] | what a VM has |
//! | [`threads`] | threads of a process are kept on processors |
//! | [`ahead`] | a thread runs before others for a while |
//! | [`policy`] | memory is allocated on NUMA nodes |
//! | [`memory`] | where memory is |
//! | [`advice`] | what a host could do better, with the command that does it |
//!
//! A *processor* is a hardware thread, numbered as the kernel does. A *core* has one or more of them, its sibling threads.

pub mod advice;
pub mod ahead;
pub mod choose;
pub mod cpus;
pub mod host;
pub mod memory;
pub mod pin;
pub mod policy;
pub mod threads;

mod sys;
