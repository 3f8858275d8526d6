//! Requests as people write them: three spellings, one tree of conditions behind them.
//!
//! - the extended instance type: `cg1.small; xpus=2; xpu_arch=fermi; cpu_features=SSE4.2,CLMUL; hypervisor_type=kvm`
//!   ([`instance::parse`]);
//! - extra specs of OpenStack flavors with the operators of Nova ([`nova::read`]);
//! - a file for a whole virtual cluster, in TOML or YAML ([`cluster::read`]).
//!
//! All become an [`Expr`], and that the alternatives of a [`crate::place::VmGroup`] ([`lower::alternatives`]).

mod ast;
pub mod cluster;
mod error;
pub mod instance;
pub mod lower;
pub mod nova;

pub use ast::{Clause, Expr, Key, Op};
pub use error::RequestError;
pub use lower::{Flavor, Flavors};
