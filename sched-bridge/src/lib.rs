//! Where the VMs of a virtual cluster go, so that they sit close together.
//!
//! A pure library: no network, no processes, no clock. What a fleet is made of is in [`model`]; [`place`] decides.
#![forbid(unsafe_code)]

pub mod model;
pub mod place;
pub mod request;
pub mod sim;
pub mod topology;
