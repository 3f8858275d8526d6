//! Command lines.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;
use vmove_types::node::DEFAULT_CONTROL;
use vmove_types::units;

pub mod bridge;
pub mod cluster;
pub mod clusters;
mod members;
mod requests;
pub mod vfork;
pub mod vmove;

/// Options that every command takes.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// Control socket of the daemon
    #[arg(long, global = true, value_name = "SOCK", env = "VMOVE_CONTROL", default_value = DEFAULT_CONTROL)]
    pub control: PathBuf,
    /// Answer with one JSON object on standard output
    #[arg(long, global = true)]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove completions bash > /usr/share/bash-completion/completions/vmove")]
pub struct Completions {
    /// For which shell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  vmove man /usr/local/share/man/man1")]
pub struct Man {
    /// Folder; made if it is not there
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

fn milliseconds(text: &str) -> Result<u64, String> {
    let duration = units::parse_duration(text)?;
    if !duration.is_zero() && duration.as_millis() == 0 {
        return Err(format!("expected at least 1ms, found \"{text}\""));
    }
    u64::try_from(duration.as_millis()).map_err(|_| format!("expected a shorter time, found \"{text}\""))
}
