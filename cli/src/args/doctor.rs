//! The command line of `vmove doctor`.

use std::path::PathBuf;

use clap::Args;
use vmove_types::doctor::Area;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove doctor
  vmove doctor --area moving --area rdma
  vmove --json doctor | jq -r '.findings[] | select(.state != \"ok\") | .mend'

Areas: moving, huge-pages, rdma, passthrough, network, forks, daemon. Needs no running daemon: it has the vmoved that is installed (beside
vmove, or in PATH) look at the host, by the same checks that the daemon makes. Changes nothing.

Ends with 0 if guests can be moved, whatever else is missing, and with 1 if they cannot.")]
pub struct Doctor {
    /// Show only this area; may be repeated
    #[arg(long = "area", value_name = "AREA")]
    pub areas: Vec<Area>,
    /// Settings of the daemon [default: /etc/vmove/vmoved.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}
