//! What a node has of a network, and scripts that are run there.

use std::process::ExitStatus;

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

/// Why a node did not do something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No shell of it has answered: it is down, does not let us in, or takes too long.
    #[error("node {node} was not reached: {why}")]
    NotReached {
        /// The node.
        node: String,
        /// What was said, and what to do next.
        why: String,
    },
    /// It answered, and could not do it.
    #[error("node {node}: {why}")]
    Failed {
        /// The node.
        node: String,
        /// What its shell said.
        why: String,
    },
}

/// What the shell of a node says first: who does not hear it has not reached the node.
const HERE: &str = "vmove: here";

/// Programs of an administrator may not be in the `PATH` of `ssh`.
const PATH: &str = "PATH=$PATH:/usr/sbin:/sbin\n";

/// Looks at a node.
///
/// # Errors
/// It is not reached, or has no `ip`.
pub async fn look(config: &Config, node: &str, namespace: &str) -> Result<Found, Error> {
    let script = format!(
        "ip -j -d address show || exit 1\necho\necho dnsmasq $(command -v dnsmasq)\necho serves $(ip netns pids {namespace} 2>/dev/null)\n"
    );
    let text = run(config, node, &script).await?;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let interfaces =
        serde_json::from_str(lines.next().unwrap_or_default()).map_err(|error| Error::Failed {
            node: node.to_owned(),
            why: format!("expected interfaces from `ip -j`, found {text:.80}: {error}"),
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
/// The node is not reached in time, or the script fails.
pub async fn run(config: &Config, node: &str, script: &str) -> Result<String, Error> {
    let way = config.way_to(node);
    let mut words = way.iter().map(String::as_str).chain(["sh", "-s"]);
    let program = words.next().unwrap_or("sh");
    let mut command = Command::new(program);
    command.args(words);
    let input = format!("echo '{HERE}'\n{PATH}{script}");
    let node = node.to_owned();
    let output = match run_with_input(&mut command, program, config.limit(), input.as_bytes()).await {
        Ok(output) => output,
        Err(error) => return Err(Error::NotReached { node, why: format!("{error}; {UP}") }),
    };
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // A shell may greet before that.
    let said = out.split_once(&format!("{HERE}\n")).map(|(_, said)| said.to_owned());
    match said {
        Some(said) if output.status.success() => Ok(said),
        Some(_) => Err(Error::Failed { node, why: in_a_line(err.lines(), &output.status) }),
        None => {
            // Of ssh's warnings, the last lines say what it comes to.
            let last = err.lines().skip(err.lines().count().saturating_sub(LAST_LINES));
            let why = format!("{}; {}", in_a_line(last, &output.status), next_step(&err));
            Err(Error::NotReached { node, why })
        }
    }
}

const LAST_LINES: usize = 2;

fn in_a_line<'a>(lines: impl Iterator<Item = &'a str>, status: &ExitStatus) -> String {
    let said = lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ");
    if said.is_empty() { status.to_string() } else { said }
}

const UP: &str =
    "see whether it is up, and whether `command` in the configuration of the adapter leads there";

/// What to do about what `ssh` says.
fn next_step(said: &str) -> &'static str {
    if said.contains("Host key verification failed") {
        "compare its host key with the one that the node shows on its console, and put it into known_hosts"
    } else if said.contains("Permission denied") {
        "let root of this host log in there by a key"
    } else {
        UP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_that_is_not_reached_is_told_from_one_where_a_script_fails() {
        let config = |command: &str| Config {
            command: ["sh", "-c", command].map(str::to_owned).to_vec(),
            own: "here".to_owned(),
            limit_s: 2,
            ..Config::default()
        };
        let reached = config("echo Welcome; exec sh -s");
        assert_eq!(run(&reached, "n1", "echo done\n").await.unwrap(), "done\n");
        let failed = run(&reached, "n1", "echo no such thing >&2; exit 3\n").await.unwrap_err();
        assert_eq!(failed.to_string(), "node n1: no such thing");
        for (command, wanted) in [
            ("echo 'a\nroot@n1: Permission denied (publickey).' >&2; exit 255", "by a key"),
            ("echo 'Host key verification failed.' >&2; exit 255", "known_hosts"),
            (
                "echo 'connect to host n1 port 22: No route to host' >&2; exit 255",
                "No route to host; see whether it is up",
            ),
            ("sleep 100", "has not ended within 2 s and was killed; see whether it is up"),
            ("exit 1", "exit status: 1; see whether"),
        ] {
            let error = run(&config(command), "n1", "true\n").await.unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::NotReached { .. }), "{text}");
            assert!(text.starts_with("node n1 was not reached: ") && text.contains(wanted), "{text}");
        }
    }
}
