//! The command line of `vmove libvirt`.

use clap::{Args, Subcommand};

/// What `vmove libvirt` does.
#[derive(Debug, Subcommand)]
pub enum LibvirtCommand {
    /// Have `virsh migrate` of a domain carried by vmove: shows what is changed, and changes it
    #[command(after_help = "Examples:
  vmove libvirt enable web --check    # show the changes, and what the host lacks; change nothing
  vmove libvirt enable web            # counts from the domain's next start
  virsh migrate --live web qemu+ssh://node2/system

Every host that the domain may move to needs vmoved, and once `vmove libvirt host`. The domain takes its own settings with it.
`vmove libvirt disable web` undoes it.")]
    Enable(DomainArgs),
    /// Undo what `enable` has changed in a domain
    #[command(after_help = "Example:
  vmove libvirt disable web

The host's hook and settings stay: they do nothing for domains that are not enabled.")]
    Disable(DomainArgs),
    /// Make this host ready to take guests by `virsh migrate`: installs the hook, and says what else the host lacks
    #[command(after_help = "Example:
  vmove libvirt host --check

`enable` does the same on the host that has the domain. The others need it too.")]
    Host(HostArgs),
    /// What libvirt calls (/etc/libvirt/hooks/qemu.d/vmove); the domain's XML is read from standard input
    #[command(after_help = "Example:
  exec vmove libvirt hook \"$@\"      # the whole of /etc/libvirt/hooks/qemu.d/vmove, but for its first line

Ends with 0 at once for domains that are not enabled.")]
    Hook(HookArgs),
}

/// A domain.
#[derive(Debug, Args)]
pub struct DomainArgs {
    /// Name or UUID of the domain
    #[arg(value_name = "DOMAIN")]
    pub domain: String,
    /// Show the changes, and change nothing
    #[arg(long)]
    pub check: bool,
    /// The libvirt to ask
    #[arg(long, value_name = "URI", env = "LIBVIRT_DEFAULT_URI", default_value = "qemu:///system")]
    pub connect: String,
}

/// Arguments of `host`.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// Change nothing
    #[arg(long)]
    pub check: bool,
}

/// What libvirt tells its hook.
#[derive(Debug, Args)]
pub struct HookArgs {
    /// Name of the domain
    #[arg(value_name = "DOMAIN")]
    pub domain: String,
    /// What libvirt does
    #[arg(value_name = "OPERATION")]
    pub operation: String,
    /// Which part of it
    #[arg(value_name = "PART")]
    pub part: String,
    /// More
    #[arg(value_name = "MORE", allow_hyphen_values = true)]
    pub more: Option<String>,
}
