//! `vmove libvirt`.

mod enable;
mod hook;
mod host;

pub use enable::{disable, enable, host as prepare_host};
pub use hook::hook;
