//! Where the VMs of a virtual cluster go, so that they sit close together.
//!
//! A pure library: no network, no processes, no clock, no unsafe code. What a fleet is made of is in [`model`], and
//! [`inventory`] reads it from a node; [`topology`] reads networks in several formats; [`request`] and [`blueprint`] read what is
//! asked for; [`place`] decides, and [`moves`] plans how to empty nodes and bring clusters together. [`sim`] makes fleets that do
//! not exist. The method is described in `docs/placement.md`.
//!
//! ```
//! use sched_bridge::model::Occupancy;
//! use sched_bridge::place::{Options, place};
//! use sched_bridge::sim::{FleetSpec, gpu_cluster};
//!
//! let fleet = FleetSpec::three_levels(100).build()?;
//! let mut used = Occupancy::new(&fleet);
//! // 16 VMs with one GPU and one adapter each: they fill two nodes below one leaf switch.
//! let placement = place(&fleet, &used, &gpu_cluster("cfd", 16, 1, 1), &Options::default())?;
//! assert_eq!((placement.score.max_hops, placement.score.leaf_switches), (1, 1));
//! for assignment in &placement.assignments {
//!     used.take(&fleet, assignment)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod blueprint;
pub mod inventory;
pub mod model;
pub mod moves;
pub mod place;
pub mod request;
pub mod sim;
pub mod topology;
