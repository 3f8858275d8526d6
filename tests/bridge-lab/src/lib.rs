//! Laboratory of the bridge: what tests and measurements need and the product does not.
//!
//! [`fleet`] makes up fleets, [`churn`] clusters that come and go, and [`slurm_model`] chooses nodes as Slurm would.
//! [`slurm_stream`] plays one stream of requests to a real Slurm and to the bridge's placement. [`storm`] lets many clients ask
//! bridges that are killed meanwhile. The programs `placement-bench` and `bridge-bench` measure with them (`./run bench`).
//!
//! ```
//! use bridge_lab::fleet::{FleetSpec, gpu_cluster};
//! use sched_bridge::model::Occupancy;
//! use sched_bridge::place::{Options, place};
//!
//! let fleet = FleetSpec::three_levels(100).build()?;
//! // 16 VMs with one GPU and one adapter each: they fill two nodes below one leaf switch.
//! let placement = place(&fleet, &Occupancy::new(&fleet), &gpu_cluster("cfd", 16, 1, 1), &Options::default())?;
//! assert_eq!((placement.score.max_hops, placement.score.leaf_switches), (1, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod churn;
pub mod fleet;
pub mod slurm_model;
pub mod slurm_stream;
pub mod storm;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// The program `vbridged`, built beside the running program.
///
/// # Errors
/// It is not built.
pub fn vbridged() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe()?;
    // Test programs are in `deps`, one below the others.
    let folder = program.ancestors().skip(1).find(|folder| folder.file_name() != Some(OsStr::new("deps")));
    let path = folder.map(|folder: &Path| folder.join("vbridged")).context("a program without a folder")?;
    if !path.is_file() {
        bail!("{} is not there; build it in the same profile: cargo build -p vmove-bridge", path.display());
    }
    Ok(path)
}
