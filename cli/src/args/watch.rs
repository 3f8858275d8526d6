//! The command line of `vmove watch`.

use clap::Args;

/// Arguments of `watch`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  vmove watch
  vmove --at node1.example:7420 --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem watch
  vmove --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem watch node1.example:7420 node2.example:7420
  vmove --tls-cert ops.pem --tls-key ops.key --tls-ca ca.pem watch --all

VMs, migrations with their time left, rate and pages, forks with their children, and what has ended. Keys: arrows or j and k choose, Enter shows
everything about one (as `vmove report` does), Esc goes back, ? helps, q ends. No key changes anything. A daemon that goes away is waited for. Without a
terminal: vmove status ID --follow, or --json. Without colours: NO_COLOR=1.")]
pub struct WatchArgs {
    /// Control socket (a path with /) or HOST:PORT of a node, which needs --tls-cert, --tls-key and --tls-ca; several are shown below each other
    /// [default: the node of --control or --at]
    #[arg(value_name = "NODE")]
    pub nodes: Vec<String>,
    /// The node of --control or --at, and all that its configuration names (`[nodes]`), each at its peer port, which needs --tls-cert, --tls-key and
    /// --tls-ca
    #[arg(long, conflicts_with = "nodes")]
    pub all: bool,
}
