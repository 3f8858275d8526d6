//! Command lines about disks on their own host.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};
use vmove_types::disk::{DiskPace, SourceDisks};
use vmove_types::units;

/// Arguments of `disks`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove disks web
  vmove --json disks web | jq -r '.disks[] | select(.obstacles == []) | .name'

Below the disks it shows the moves of them (`vmove move-disk`) since vmoved was started.")]
pub struct Disks {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
}

/// Arguments of `move-disk`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["to", "cancel"]))]
#[command(after_help = "Examples:
  vmove move-disk web vda --to /fast/web.qcow2
  vmove move-disk web vda --to /fast/web.qcow2 --source-disks delete --bandwidth 200MiB
  vmove move-disk web vda --to /dev/vg1/web
  vmove move-disk web vda --cancel

QEMU copies the disk into a new image of its size and format, while the guest works on the old one, and gives it to the guest once it
lacks nothing. With QEMU 8.0 to 11.0 the guest stands still for some milliseconds when the copy begins. What it asks of this disk during
the switch waits for some milliseconds. Images below a qcow2 image become part of the new one. Until the switch the guest has its old disk,
whatever fails. vmoved may be restarted meanwhile.

Ctrl-C calls it off; a second Ctrl-C leaves it running, and ends with 130. To another node, disks go with their guest: `vmove migrate
--disks`.")]
pub struct MoveDisk {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub vm: String,
    /// Name of the disk: of its drive, its device or its block node; `vmove disks VM` lists them
    #[arg(value_name = "DISK")]
    pub disk: String,
    /// The new image: a file that is not there yet, or a block device of the disk's size
    #[arg(long, value_name = "PATH")]
    pub to: Option<PathBuf>,
    /// Cap on the copy, such as 10Gbit or 1GiB per second [default: none]
    #[arg(long, value_name = "RATE", value_parser = units::parse_rate, requires = "to")]
    pub bandwidth: Option<u64>,
    /// Share of its pace that the guest keeps at the disk meanwhile, 0 to 95 %: the copy gives way as far as that takes. 0% copies it as fast as it
    /// goes
    #[arg(long, value_name = "PERCENT", default_value_t, requires = "to")]
    pub disk_pace: DiskPace,
    /// What becomes of the old image in the end: it is renamed (`.moved-ID`), or deleted
    #[arg(long, value_name = "WHAT", default_value = "keep",
          value_parser = PossibleValuesParser::new(["keep", "delete"]).try_map(|s| s.parse::<SourceDisks>()))]
    pub source_disks: SourceDisks,
    /// Return once QEMU copies; `vmove disks VM` tells the rest
    #[arg(long, requires = "to")]
    pub detach: bool,
    /// Call the move of this disk off: the guest has its disk as before
    #[arg(long)]
    pub cancel: bool,
}
