//! The command line of `vmove report`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove report 3f2a
  vmove report 3f2a --html move.html
  vmove report 3f2a --svg - > move.svg

Phases, the parts of the pause, rounds, page faults and bytes of a migration, or what a fork and its children took. The id is that of `vmove history` or
`vfork list`, and may be cut short. One that is still at work is shown as far as it is. Pages and pictures need nothing else, and suit light and dark
screens. A FILE that is there is replaced; - is standard output.")]
pub struct ReportArgs {
    /// Id of a migration or a fork
    #[arg(value_name = "ID")]
    pub id: String,
    /// Draw it as a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write it as a page with the picture and all figures
    #[arg(long, value_name = "FILE", conflicts_with = "svg")]
    pub html: Option<PathBuf>,
}
