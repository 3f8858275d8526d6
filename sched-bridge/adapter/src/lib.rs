//! Adapters of blueprints, by the contract of [`vmove_bridge_types::adapter`]: how one is [called](call), how a program of ours
//! [answers](serve), the [schema] of the contract, the [conformance check](conformance), and the adapters that make
//! [networks](network), run containers by [podman], and switch machines on by [redfish].
//!
//! ```
//! use vmove_adapter::schema;
//!
//! let schema = schema::of_contract();
//! assert_eq!(schema["$defs"]["AdapterAction"]["enum"][0], "start");
//! ```
#![forbid(unsafe_code)]

pub mod call;
pub mod conformance;
pub mod network;
pub mod podman;
pub mod program;
pub mod redfish;
pub mod schema;
pub mod serve;
