//! Requests as people write them, in three spellings:
//!
//! - the extended instance type: `cg1.small; xpus=2; xpu_arch=fermi; cpu_features=SSE4.2,CLMUL; hypervisor_type=kvm`
//!   ([`instance::parse`]);
//! - extra specs of OpenStack flavors with the operators of Nova ([`nova::read`]);
//! - a file for a whole virtual cluster, in TOML or YAML ([`cluster::read`]).
//!
//! Instance types, keys and PCI aliases beside those that ship come from files of operators ([`Catalog`]).
//!
//! All are read into an [`Expr`], which becomes the alternatives of a [`crate::place::VmGroup`] ([`lower::alternatives`]).
//!
//! ```
//! use sched_bridge::request::{Catalog, instance, lower};
//!
//! let catalog = Catalog::default();
//! let expr = instance::parse("m1.large; xpus=2; xpu_arch=hopper OR m1.xlarge; xpus=4", &catalog)?;
//! let alternatives = lower::alternatives(&expr, &catalog)?;
//! assert_eq!((alternatives[0].vcpus, alternatives[1].vcpus), (4, 8));
//! # Ok::<(), sched_bridge::request::RequestError>(())
//! ```

mod ast;
mod catalog;
mod catalog_file;
mod clause;
pub mod cluster;
mod error;
pub mod instance;
pub mod lower;
pub mod nova;

pub use ast::{Clause, Expr, Key, Op};
pub use catalog::{AliasText, Catalog, Defined, InstanceType, KeyText, TypeText};
pub use catalog_file::{CatalogError, LARGEST_FILE, Mistake, Source};
pub use error::RequestError;
