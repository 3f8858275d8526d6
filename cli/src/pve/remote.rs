//! Reaching another node of the cluster.

use std::path::Path;

use serde_json::Value;
use tokio::process::Command;
use vmove_pve::words;

use super::refused;
use crate::args::pve::Remote;
use crate::failure::Failure;

/// Addresses of the nodes.
const MEMBERS: &str = "/etc/pve/.members";

/// A command that runs these words on a node. It ends with this process, and not by Ctrl-C, which this process hears.
pub fn command(remote: &Remote, node: &str, program: &[&str]) -> Result<Command, Failure> {
    let words = match &remote.remote {
        Some(text) => words(text)?.into_iter().map(|word| word.replace("{node}", node)).collect(),
        None => ssh(node),
    };
    let (first, rest) = words
        .split_first()
        .ok_or_else(|| refused("Expected a command in --remote (VMOVE_PVE_REMOTE), found none"))?;
    let line: Vec<String> = program.iter().map(|word| quoted(word)).collect();
    let mut command = Command::new(first);
    command.args(rest).arg(line.join(" ")).kill_on_drop(true).process_group(0);
    Ok(command)
}

/// As Proxmox VE reaches its nodes: by the key of root, the address that the cluster knows, and the host key that it has published.
fn ssh(node: &str) -> Vec<String> {
    let mut words: Vec<String> =
        ["ssh", "-e", "none", "-o", "BatchMode=yes", "-o"].iter().map(|word| (*word).to_owned()).collect();
    words.push(format!("HostKeyAlias={node}"));
    let keys = format!("/etc/pve/nodes/{node}/ssh_known_hosts");
    if Path::new(&keys).exists() {
        words.extend(["-o".to_owned(), format!("UserKnownHostsFile={keys}"), "-o".to_owned()]);
        words.push("GlobalKnownHostsFile=none".to_owned());
    }
    let members = std::fs::read_to_string(MEMBERS).unwrap_or_default();
    words.push(format!("root@{}", address(&members, node).unwrap_or_else(|| node.to_owned())));
    words
}

fn address(members: &str, node: &str) -> Option<String> {
    let all: Value = serde_json::from_str(members).ok()?;
    Some(all["nodelist"][node]["ip"].as_str()?.to_owned())
}

/// As one word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_reached_by_the_address_that_the_cluster_knows() {
        let members = r#"{"nodename":"a","version":4,"nodelist":{"a":{"id":1,"online":1,"ip":"10.0.0.1"},"b":{"id":2,"online":1,"ip":"10.0.0.2"}}}"#;
        assert_eq!(address(members, "b").as_deref(), Some("10.0.0.2"));
        assert_eq!(address(members, "c"), None);
        assert_eq!(address("", "b"), None);
    }

    #[test]
    fn words_arrive_as_they_are() {
        let remote = Remote { remote: Some("sh -c 'exec \"$0\" {node}-$1' sh".to_owned()) };
        let command = command(&remote, "b", &["echo", "it's; $x"]).unwrap();
        let words: Vec<_> =
            command.as_std().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words, ["-c", "exec \"$0\" b-$1", "sh", r"'echo' 'it'\''s; $x'"]);
    }
}
