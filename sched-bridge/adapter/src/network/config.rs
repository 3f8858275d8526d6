//! The configuration of the adapter.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use vmove_types::typo;

/// `/etc/vmove/network-adapter.toml`. Every value has a default.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How a program is run on another node; `{node}` is replaced. Not used for the own host.
    pub command: Vec<String>,
    /// Name of the own host, which is reached without `command`.
    pub own: String,
    /// Where it is kept which networks there are.
    pub state: PathBuf,
    /// Interface of each node to which public networks are attached.
    pub public: Option<String>,
    /// UDP port of VXLAN.
    pub port: u16,
    /// Size of the largest packet of private networks; VXLAN takes 50 bytes of that of the hosts' network. Unit: byte.
    pub mtu: u16,
    /// User of QEMUs on the nodes, to whom the taps of their VMs belong: `user` of `[qemu]` there.
    pub qemu_user: String,
    /// How long one node may take. Unit: s.
    pub limit_s: u64,
    /// What differs on nodes.
    pub nodes: BTreeMap<String, NodeConfig>,
}

/// As whom QEMUs run, and the number that stands for this user on nodes without it, as in `vmoved`.
const DEFAULT_USER: &str = "vmove-qemu";
const DEFAULT_ID: u32 = 60742;

/// What differs on a node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodeConfig {
    /// Its address for VXLAN; by default the one to which its name resolves.
    pub address: Option<IpAddr>,
    /// The interface for public networks.
    pub public: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self {
            command: ["ssh", "-o", "BatchMode=yes", "--", "{node}"].map(str::to_owned).to_vec(),
            own: host.split('.').next().unwrap_or_default().to_owned(),
            state: "/var/lib/vmove/networks".into(),
            public: None,
            port: 4789,
            mtu: 1450,
            qemu_user: DEFAULT_USER.to_owned(),
            limit_s: 20,
            nodes: BTreeMap::new(),
        }
    }
}

impl Config {
    /// Reads it. Without a file there, all is the default, unless the file was asked for.
    ///
    /// # Errors
    /// The file cannot be read, or is not a configuration.
    pub fn read(file: &Path, asked_for: bool) -> Result<Self, String> {
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !asked_for => String::new(),
            Err(error) => return Err(format!("could not read {}: {error}", file.display())),
        };
        let config: Self = toml::from_str(&text)
            .map_err(|error| format!("{}: {}", file.display(), typo::hinted(&error.to_string())))?;
        let user = &config.qemu_user;
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        // It becomes a word of a script.
        if user.is_empty() || user.starts_with('-') || !user.chars().all(is_name) {
            return Err(format!(
                "{}: qemu_user: expected the name or number of a user, found {user:?}",
                file.display()
            ));
        }
        Ok(config)
    }

    /// How long one node may take.
    #[must_use]
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.limit_s)
    }

    /// What stands in a script for the number of QEMU's user.
    #[must_use]
    pub fn user_in_script(&self) -> String {
        let user = &self.qemu_user;
        let otherwise =
            if user == DEFAULT_USER { format!(" 2>/dev/null || echo {DEFAULT_ID}") } else { String::new() };
        format!("$(id -u -- {user}{otherwise})")
    }

    /// The words before a program that is to run on a node; none for the own host.
    #[must_use]
    pub fn way_to(&self, node: &str) -> Vec<String> {
        if node == self.own {
            return Vec::new();
        }
        self.command.iter().map(|word| word.replace("{node}", node)).collect()
    }

    /// The address of a node for VXLAN.
    ///
    /// # Errors
    /// It is not configured, and the name does not resolve.
    pub fn address(&self, node: &str) -> Result<IpAddr, String> {
        if let Some(address) = self.nodes.get(node).and_then(|own| own.address) {
            return Ok(address);
        }
        let found = (node, 0).to_socket_addrs().map_err(|error| error.to_string());
        found
            .and_then(|mut all| all.next().ok_or_else(|| "no address".to_owned()))
            .map(|own| own.ip())
            .map_err(|error| {
                format!(
                    "the name of node {node} does not resolve ({error}): give its address by [nodes.{node}]"
                )
            })
    }

    /// The interface of a node for public networks.
    #[must_use]
    pub fn public_of(&self, node: &str) -> Option<&str> {
        let own = self.nodes.get(node).and_then(|own| own.public.as_deref());
        own.or(self.public.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_its_way_address_and_interface() {
        let text = "own = \"n1\"\npublic = \"br0\"\n[nodes.n2]\naddress = \"192.0.2.2\"\npublic = \"eth1\"\n";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!(config.way_to("n1"), [""; 0]);
        assert_eq!(config.way_to("n2").last().map(String::as_str), Some("n2"));
        assert_eq!(config.address("n2"), Ok("192.0.2.2".parse().unwrap()));
        assert!(config.address("no-such-host.invalid").unwrap_err().contains("[nodes.no-such-host.invalid]"));
        assert_eq!((config.public_of("n1"), config.public_of("n2")), (Some("br0"), Some("eth1")));
        toml::from_str::<Config>("bridge = \"br0\"\n").unwrap_err();
    }

    #[test]
    fn a_misspelt_key_is_named_with_file_line_and_the_nearest_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("network-adapter.toml");
        for (text, line, key, near) in [
            ("\nqemu_usr = \"x\"\n", 2, "`qemu_usr`", "`qemu_user`?"),
            ("[nodes.n1]\naddres = \"192.0.2.1\"\n", 2, "`addres`", "`address`?"),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = Config::read(&path, true).unwrap_err();
            assert!(said.starts_with(&path.display().to_string()), "{said}");
            assert!(said.contains(&format!("line {line}, ")) && said.contains(key), "{said}");
            assert!(said.contains(&format!("did you mean {near}")), "{said}");
        }
    }
}
