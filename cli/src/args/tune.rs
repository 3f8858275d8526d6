//! The command line of `vmove tune`.

use clap::Args;

/// Arguments of `tune`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove tune
  vmove tune web
  vmove tune --apply web          # its threads and its memory to where they belong
  vmove tune --apply              # also settings of the host
  vmove --json tune | jq -r '.advice[] | select(.state == \"better\") | .command'

Ends with 0 if everything is as advised, with 3 if something could be better. What was applied is gone when the host is
started again.")]
pub struct Tune {
    /// Only this VM; otherwise the host and all its VMs
    #[arg(value_name = "VM")]
    pub vm: Option<String>,
    /// Do what can be done now
    #[arg(long)]
    pub apply: bool,
}
