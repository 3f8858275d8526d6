//! `vmove-fork`: a guest's shell scripts fork their machine. See `docs/guest-forks.md`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vmove_fork::command::run(std::env::args_os().skip(1))
}
