//! The commands `vmove`, `vfork` and `vmove-pve`.
//!
//! They ask `vmoved` and `vbridged` through `vmove-client` and print what they answer: tables for people, one JSON object for programs. The
//! command lines in [`args`] are the one definition behind parsing, help, man pages and completions.
//!
//! ```
//! use clap::Parser;
//! use vmove_cli::args::vmove::{Cli, Command};
//!
//! let cli = Cli::try_parse_from(["vmove", "migrate", "web", "--to", "node2", "--max-downtime", "50ms"])?;
//! let Command::Migrate(migrate) = cli.command else { panic!("another command") };
//! let requests = migrate.requests().expect("options that fit together");
//! assert_eq!(requests[0].options.max_downtime_ms, 50);
//! # Ok::<(), clap::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod args;
mod changed_lines;
mod clusters;
mod failure;
mod manual;
mod mounts;
mod output;
mod page;
pub mod pve;
pub mod vfork;
pub mod vmove;
mod waiting;
