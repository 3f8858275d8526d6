//! What a node has of a network, and scripts that are run there.

use serde::Deserialize;
use tokio::process::Command;

use super::config::Config;
use crate::program::run_with_input;

/// An interface, as `ip -j -d address show` tells it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// Name.
    pub ifname: String,
    /// Alias.
    pub ifalias: String,
    /// The bridge that it is a port of.
    pub master: Option<String>,
    /// Kind, and what is special for the kind.
    pub linkinfo: LinkInfo,
    /// Addresses.
    pub addr_info: Vec<AddressInfo>,
}

/// Kind of an interface.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct LinkInfo {
    /// `bridge`, `vxlan`, …
    pub info_kind: String,
    /// What is special for the kind.
    pub info_data: LinkData,
}

/// Of a VXLAN interface.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct LinkData {
    /// Network identifier.
    pub id: Option<serde_json::Value>,
}

/// An address of an interface.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct AddressInfo {
    /// `link` for those that the kernel makes by itself.
    pub scope: String,
}

/// What a node has.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// All interfaces.
    pub interfaces: Vec<Interface>,
    /// Whether there is a program `dnsmasq`.
    pub has_dnsmasq: bool,
    /// Whether a name server runs in the namespace of the network.
    pub serves: bool,
}

impl Found {
    /// The interface of this name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|own| own.ifname == name)
    }

    /// The network identifier of a VXLAN interface.
    #[must_use]
    pub fn vni_of(interface: &Interface) -> Option<u32> {
        let id = interface.linkinfo.info_data.id.as_ref().filter(|_| interface.linkinfo.info_kind == "vxlan");
        id.and_then(serde_json::Value::as_u64).and_then(|id| u32::try_from(id).ok())
    }
}

/// Programs of an administrator may not be in the `PATH` of `ssh`.
const PATH: &str = "PATH=$PATH:/usr/sbin:/sbin\n";

/// Looks at a node.
///
/// # Errors
/// It does not answer, or has no `ip`.
pub async fn look(config: &Config, node: &str, namespace: &str) -> Result<Found, String> {
    let script = format!(
        "ip -j -d address show || exit 1\necho\necho dnsmasq $(command -v dnsmasq)\necho serves $(ip netns pids {namespace} 2>/dev/null)\n"
    );
    let text = run(config, node, &script).await?;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let interfaces = serde_json::from_str(lines.next().unwrap_or_default()).map_err(|error| {
        format!("node {node}: expected interfaces from `ip -j`, found {text:.80}: {error}")
    })?;
    let mut found = Found { interfaces, ..Found::default() };
    for line in lines {
        match line.trim().split_once(' ') {
            Some(("dnsmasq", _)) => found.has_dnsmasq = true,
            Some(("serves", _)) => found.serves = true,
            _ => {}
        }
    }
    Ok(found)
}

/// Runs a script on a node. Gives its output.
///
/// # Errors
/// The node does not answer in time, or the script fails.
pub async fn run(config: &Config, node: &str, script: &str) -> Result<String, String> {
    let way = config.way_to(node);
    let mut words = way.iter().map(String::as_str).chain(["sh", "-s"]);
    let mut command = Command::new(words.next().unwrap_or("sh"));
    command.args(words);
    let input = format!("{PATH}{script}");
    let name = format!("the shell of node {node}");
    let output = run_with_input(&mut command, &name, config.limit(), input.as_bytes()).await;
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
    Err(format!("node {node}: {}", if said.is_empty() { output.status.to_string() } else { said }))
}
