//! Requests as people write them, in three spellings:
//!
//! - the extended instance type: `cg1.small; xpus=2; xpu_arch=fermi; cpu_features=SSE4.2,CLMUL; hypervisor_type=kvm`
//!   ([`instance::parse`]);
//! - extra specs of OpenStack flavors with the operators of Nova ([`nova::read`]);
//! - a file for a whole virtual cluster, in TOML or YAML ([`cluster::read`]).
//!
//! All are read into an [`Expr`], which becomes the alternatives of a [`crate::place::VmGroup`] ([`lower::alternatives`]).
//!
//! ```
//! use sched_bridge::request::{Flavors, instance, lower};
//!
//! let expr = instance::parse("m1.large; xpus=2; xpu_arch=hopper OR m1.xlarge; xpus=4")?;
//! let alternatives = lower::alternatives(&expr, &Flavors::default())?;
//! assert_eq!((alternatives[0].vcpus, alternatives[1].vcpus), (4, 8));
//! # Ok::<(), sched_bridge::request::RequestError>(())
//! ```

mod ast;
pub mod cluster;
mod error;
pub mod instance;
pub mod lower;
pub mod nova;

pub use ast::{Clause, Expr, Key, Op};
pub use error::RequestError;
pub use lower::{Flavor, Flavors};
