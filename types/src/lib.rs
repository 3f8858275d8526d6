//! What `vmoved`, its clients and its engines speak of: requests, reports, progress, problems, and the units in them.
//!
//! Plain data without I/O. With the feature `schema` each type describes itself for OpenAPI.
//!
//! ```
//! use vmove_types::spec::{MigrationSpec, ModeRequest};
//!
//! let spec: MigrationSpec = serde_json::from_str(r#"{"mode": "hybrid", "max_downtime_ms": 50}"#)?;
//! assert_eq!(spec.mode, ModeRequest::Hybrid);
//! spec.validate()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backing;
pub mod check;
pub mod choice;
pub mod device;
pub mod disk;
pub mod disk_latency;
pub mod disk_move;
pub mod doctor;
pub mod fork;
pub mod fork_devices;
pub mod fork_report;
pub mod go_home;
pub mod goal;
pub mod group;
pub mod hook;
pub mod libvirt;
pub mod migration;
pub mod node;
pub mod problem;
pub mod progress;
pub mod promise;
pub mod proxmox;
pub mod report;
pub mod spec;
pub mod time;
pub mod tuning;
pub mod typo;
pub mod units;
pub mod vm;

pub use backing::{Backing, UnknownBacking};
