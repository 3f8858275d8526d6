//! Which disks move with a guest.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use vmove_types::disk::{DiskPace, DiskPlace, SourceDisks};

/// Of `check` and `migrate`.
#[derive(Debug, Args)]
pub struct DiskArgs {
    /// Disks to copy along: names of drives, devices or block nodes, with commas between them, or `all` that the guest can write
    #[arg(long, value_name = "all|NAME,…", value_delimiter = ',')]
    pub disks: Vec<String>,
    /// Where a disk is to be on the other node, if not at the path that it has here: a new file, or a block device; may be repeated
    #[arg(long = "disk-map", value_name = "NAME=PATH", requires = "disks")]
    pub disk_map: Vec<DiskPlace>,
    /// The guest goes at once, over its images here, and the disks follow it: if this node is lost before they are across, so is what they lack
    #[arg(long, requires = "disks")]
    pub disks_after: bool,
}

/// Of `migrate`.
#[derive(Debug, Args)]
pub struct MovedDiskArgs {
    /// Which, and where to.
    #[command(flatten)]
    pub which: DiskArgs,
    /// What becomes of the images here in the end: they are renamed (`.moved-ID`), or deleted
    #[arg(long, value_name = "WHAT", default_value = "keep",
          value_parser = PossibleValuesParser::new(["keep", "delete"]).try_map(|s| s.parse::<SourceDisks>()))]
    pub source_disks: SourceDisks,
    /// Share of its pace that the guest keeps at its disks while they are copied, 0 to 95 %: the copies give way as far as that takes. 0% copies
    /// them as fast as it goes
    #[arg(long, value_name = "PERCENT", default_value_t, requires = "disks")]
    pub disk_pace: DiskPace,
}
