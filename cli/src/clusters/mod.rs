//! The commands of `vmove` for virtual clusters.

mod account;
mod adapter;
mod blueprint;
pub mod cluster;
mod fleet;
mod ids;
pub mod input;
mod inventory;
mod lease;
mod place;
mod plan;
mod request;
mod show;
mod topology;
mod types;

use crate::args::clusters::ClusterCommand;
use crate::output::End;

/// Runs a command.
pub async fn run(command: ClusterCommand, json: bool) -> Result<(), End> {
    match command {
        ClusterCommand::Inventory(args) => inventory::run(args, json).await,
        ClusterCommand::Blueprint(args) => blueprint::run(*args, json).await,
        ClusterCommand::Adapter(args) => adapter::run(args, json).await,
        ClusterCommand::Fleet(args) => fleet::run(args, json).await,
        ClusterCommand::Topology(args) => topology::run(args, json).await,
        ClusterCommand::Place(args) => place::run(args, json).await,
        ClusterCommand::Lease(args) => lease::run(args, json).await,
        ClusterCommand::Cluster(args) => cluster::run(args, json).await,
        ClusterCommand::Plan(args) => plan::run(args, json).await,
        ClusterCommand::Account(args) => account::run(args, json).await,
    }
}
