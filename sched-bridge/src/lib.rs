//! Compact placement of virtual clusters: which nodes and devices their VMs get, so that they are close together in the network.
//!
//! A pure library: no network, no processes, no clock, no unsafe code. What a fleet is made of is in [`model`], and
//! [`inventory`] reads it from a node, and [`glue2`] tells others of it; [`topology`] reads networks in several formats, and [`picture`] draws them; [`request`] and
//! [`blueprint`] read what is asked for; [`place`] decides where VMs go, and [`moves`] plans how to empty nodes and to bring clusters
//! together. The method is described in `docs/placement.md`.
//!
//! ```
//! use sched_bridge::model::{Fleet, MemoryMib, Node, NodeName, Occupancy};
//! use sched_bridge::place::{Options, place};
//! use sched_bridge::request::{Catalog, cluster};
//! use sched_bridge::topology::{Format, import};
//!
//! // Four nodes of 16 cores and 64 GiB below two leaf switches.
//! let network = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\nSwitchName=top Switches=leaf[1-2]\n";
//! let topology = import(network, Format::SlurmConf, &[])?.topology;
//! let names = (1..=4).map(|number| NodeName::new(format!("n{number}"))).collect::<Result<Vec<_>, _>>()?;
//! let nodes = names.into_iter().map(|name| Node::plain(name, 16, MemoryMib(65536))).collect();
//! let fleet = Fleet::new(nodes, topology)?;
//!
//! // Eight VMs of 4 cores: they fill two nodes, which should be below one leaf switch.
//! let text = "name = 'cfd'\n[[vms]]\ncount = 8\nrequest = 'vcpus=4; memory_mb=8K'\n";
//! let request = cluster::read(text, cluster::Language::Toml, &Catalog::default())?.request;
//! let mut used = Occupancy::new(&fleet);
//! let placement = place(&fleet, &used, &request, &Options::default())?;
//! assert_eq!((placement.score.max_hops, placement.score.leaf_switches), (1, 1));
//! for assignment in &placement.assignments {
//!     used.take(&fleet, assignment)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod blueprint;
pub mod glue2;
mod ids;
pub mod inventory;
pub mod model;
pub mod moves;
pub mod picture;
pub mod place;
pub mod request;
pub mod topology;
mod unreadable;
