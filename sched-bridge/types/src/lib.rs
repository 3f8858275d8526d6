//! What `vbridged` and its clients speak of: leases, plans, accounts, requests and answers, and the contract of adapters.
//!
//! Plain data without I/O, over the types of `vmove-sched`. With the feature `schema` each type describes itself for OpenAPI; with `clap`,
//! formats can be arguments of commands.
//!
//! ```
//! use vmove_bridge_types::lease::LeaseId;
//! use vmove_bridge_types::plan::PlanRequest;
//!
//! let id: LeaseId = "job-17".parse()?;
//! assert_eq!(id.as_str(), "job-17");
//! let wanted: PlanRequest = serde_json::from_str(r#"{"for": "evacuate", "node": "n1"}"#)?;
//! assert!(matches!(wanted, PlanRequest::Evacuate { node } if node == "n1"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod account;
pub mod adapter;
pub mod cluster;
pub mod lease;
pub mod plan;
pub mod problem;
pub mod request_text;
pub mod requests;
pub mod shown;
pub mod topology_text;
pub mod types;
