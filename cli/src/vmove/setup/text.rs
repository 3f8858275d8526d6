//! Settings of nodes, and what is to be done with what was made.

use std::fmt::Write as _;
use std::path::Path;

use vmove_types::node::DEFAULT_PORT;

use super::folder::{CLIENTS, NODES};
use crate::args::setup::{ClientWanted, NodeWanted};

/// The `vmoved.toml` of a node that knows these others and lets these clients in.
pub fn vmoved_toml(node: &NodeWanted, others: &[&NodeWanted], entries: &[String]) -> String {
    let mut text = format!(
        "# /etc/vmove/vmoved.toml of node {name}, made by `vmove setup tls`. Keys that are not here have their defaults.\n\
         node = \"{name}\"\n",
        name = node.name
    );
    if node.port != DEFAULT_PORT {
        let _ = writeln!(text, "listen = \"[::]:{}\"", node.port);
    }
    text.push_str(
        "\n[tls]\ncert = \"/etc/vmove/node.pem\"\nkey = \"/etc/vmove/node.key\"\nca = \"/etc/vmove/ca.pem\"\n",
    );
    if !others.is_empty() {
        text.push_str("\n[nodes]\n");
    }
    for other in others {
        text.push_str(&node_entry(other));
    }
    for entry in entries {
        let _ = write!(text, "\n{entry}");
    }
    text
}

/// A node below `[nodes]`.
fn node_entry(node: &NodeWanted) -> String {
    format!("\"{}\" = \"{}\"\n", node.name, node.address())
}

/// The entry of a client for the `vmoved.toml` of all nodes.
pub fn client_entry(client: &ClientWanted) -> String {
    format!("[[client]]\nname = \"{}\"\nrole = \"{}\"\n", client.name, client.role)
}

/// What was made, and for whom.
#[derive(Debug)]
pub struct Outcome<'a> {
    pub out: &'a Path,
    /// The folder of the authority.
    pub authority: &'a Path,
    pub new_authority: bool,
    pub nodes: &'a [NodeWanted],
    pub clients: &'a [ClientWanted],
    /// Nodes that were made before.
    pub known: &'a [NodeWanted],
    pub days: u32,
}

impl Outcome<'_> {
    /// What is to be done now, as lines to read.
    pub fn next_steps(&self) -> Vec<String> {
        let out = self.out.display();
        let mut lines = Vec::new();
        if self.new_authority {
            lines.push(format!(
                "The authority is new: {out}/ca.pem and {out}/ca.key. Keep ca.key here, on no node: with it, anybody can make a node, and nodes hand guests to each other."
            ));
        }
        for node in self.nodes {
            let folder = format!("{out}/{NODES}/{}", node.name);
            let host = &node.hosts[0];
            let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            lines.push(format!("Node {}: copy its files (node.key is secret):", node.name));
            let file = |name: &str| format!("{folder}/{name}");
            let certificates = ["node.pem", "node.key", "ca.pem"].map(file).join(" ");
            lines.push(format!("  scp -p {certificates} root@{host}:/etc/vmove/"));
            lines.push(format!("  scp -p {folder}/vmoved.toml root@{host}:/etc/vmove/    # or put its lines into the vmoved.toml that is there"));
        }
        if !self.nodes.is_empty() && !self.known.is_empty() {
            let names: Vec<_> = self.known.iter().map(|node| node.name.as_str()).collect();
            lines.push(format!(
                "Nodes that were there before ({}): add below [nodes] in /etc/vmove/vmoved.toml, unless it is there already:",
                names.join(", ")
            ));
            lines.extend(self.nodes.iter().map(|node| format!("  {}", node_entry(node).trim_end())));
        }
        for client in self.clients {
            let folder = format!("{out}/{CLIENTS}/{}", client.name);
            lines.push(format!(
                "Client {}: give it client.pem, client.key (secret) and ca.pem of {folder}; it may do what the role {} allows.",
                client.name, client.role
            ));
            if !self.known.is_empty() || self.nodes.is_empty() {
                lines.push(format!(
                    "  Nodes that were there before: add the lines of {folder}/client.toml to the end of /etc/vmove/vmoved.toml."
                ));
            }
        }
        lines.push(
            "Then on each node: `systemctl enable --now vmoved`, or `systemctl restart vmoved` where it runs already (QEMUs run on); for new certificates and clients alone `systemctl reload vmoved`.".to_owned(),
        );
        lines.push(format!(
            "The certificates hold for {} days. For new ones: vmove setup tls --ca {} --out ANOTHER-FOLDER --node …",
            self.days,
            self.authority.display()
        ));
        lines
    }
}
