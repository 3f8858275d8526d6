//! What migrations and forks share on one node: records of its VMs, journals, monitors, and connections to other nodes.
//!
//! | Module | Owns |
//! |---|---|
//! | [`registry`] | the VMs of the node: started, adopted, watched, ended |
//! | [`record`], [`store`] | what is kept of each VM, and the folder that it is kept in |
//! | [`migrations`] | what others must know of migrations: which one holds a VM, where guests went |
//! | [`journal`], [`files`] | lines and files that survive a killed daemon |
//! | [`devices`] | devices of the node that its VMs own |
//! | [`guest_devices`] | devices that guests let go and get |
//! | [`disk`] | what is below them |
//! | [`layout`] | where a VM's files are |
//! | [`lock`] | one node per state folder |
//! | [`embed`] | what nodes inside programs are made of |
//! | [`monitors`] | one QMP connection for each QEMU |
//! | [`peer`] | greeting, messages and agreements between two daemons |
//! | [`domains`] | QEMUs of libvirt, whose guests libvirt moves |
//! | [`region`] | guest memory registered with a fabric |
//! | [`reservations`] | memory that was promised to guests on their way here |
//! | [`control_groups`] | a control group for each VM |
//! | [`oom_kills`] | who was killed for lack of memory |
//! | [`admission`] | which VMs may come from other nodes |
//! | [`qcow2`] | empty images |
//! | [`image_server`] | images that other nodes read |
//! | [`task`], [`blocking`] | tasks, and work that blocks, on threads of its own |
//! | [`chance`] | ids and secrets |
//! | [`latency`], [`clock`] | fault latencies, and the clocks of two hosts |
//!
//! ```
//! use vmove_node::journal::Journal;
//!
//! let dir = tempfile::tempdir()?;
//! let path = dir.path().join("journal");
//! let mut journal = Journal::create(&path, "stopped".to_owned())?;
//! journal.update(|state| *state = "committed".to_owned())?;
//! // A daemon that was killed here finds the last step that was taken.
//! assert_eq!(Journal::<String>::read(&path)?, "committed");
//! # Ok::<(), std::io::Error>(())
//! ```

pub mod admission;
pub mod blocking;
pub mod boot;
pub mod chance;
pub mod clock;
pub mod control_groups;
pub mod devices;
pub mod disk;
pub mod domains;
pub mod embed;
pub mod files;
pub mod guest_devices;
pub mod image_server;
pub mod journal;
pub mod latency;
pub mod layout;
pub mod lock;
pub mod migrations;
pub mod monitors;
pub mod oom_kills;
pub mod peer;
pub mod pins;
pub mod qcow2;
pub mod record;
pub mod region;
pub mod registry;
pub mod reservations;
#[cfg(feature = "simulation")]
pub mod simulation;
pub mod starter;
pub mod store;
pub mod task;
pub mod without_links;
