//! The command line of `vmove setup`.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use rustls_pki_types::DnsName;
use vmove_types::node::DEFAULT_PORT;

/// Longest common name of a certificate, and longest name of a node. Unit: bytes.
const LONGEST_NAME: usize = 64;

/// What `vmove setup` makes.
#[derive(Debug, Subcommand)]
pub enum SetupCommand {
    /// Make an authority, certificates of nodes and clients, and the vmoved.toml of each node
    #[command(after_help = "Examples:
  vmove setup tls --out pki --node a=10.0.0.1,a.example --node b=10.0.0.2
  vmove setup tls --out pki --node a=10.0.0.1 --node b=10.0.0.2 --client scheduler:operator --client dashboard:viewer
  vmove setup tls --ca pki --node c=10.0.0.3                   # one more node
  vmove setup tls --ca pki --out pki-2027 --node a=10.0.0.1    # new certificates in place of those that end soon

Makes DIR/ca.pem and DIR/ca.key, DIR/nodes/NAME/ with node.pem, node.key, ca.pem and vmoved.toml, and DIR/clients/NAME/ with client.pem,
client.key, ca.pem and client.toml, and says what to copy where. Overwrites nothing. Asks no daemon: run it where ca.key is to stay.

A certificate is for all names and addresses that are given, and for the node's name. Other nodes reach the node by the first one.")]
    Tls(SetupTls),
}

/// Arguments of `setup tls`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("who").args(["nodes", "clients"]).required(true).multiple(true))]
pub struct SetupTls {
    /// Folder for what is made; made if it is not there [default: the folder of --ca]
    #[arg(long, value_name = "DIR", required_unless_present = "ca")]
    pub out: Option<PathBuf>,
    /// Folder of an authority that is there already (ca.pem and ca.key); without it, a new one is made
    #[arg(long, value_name = "DIR")]
    pub ca: Option<PathBuf>,
    /// A node: its name, and the addresses and DNS names by which others reach it, the first one with its port if that is not 7420; may be
    /// repeated
    #[arg(long = "node", value_name = "NAME=ADDRESS[:PORT],…")]
    pub nodes: Vec<NodeWanted>,
    /// A client: its name, and its role on all nodes (viewer, operator, admin); may be repeated
    #[arg(long = "client", value_name = "NAME:ROLE")]
    pub clients: Vec<ClientWanted>,
    /// For how many days the certificates hold; a new authority holds for ten years, or longer if they do
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub days: u32,
}

/// A node that gets a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeWanted {
    /// Its name: 1 to 64 of letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// DNS names in lower case, and addresses: at least one, each once.
    pub hosts: Vec<String>,
    /// Its peer port.
    pub port: u16,
}

impl NodeWanted {
    /// Where other nodes reach it: `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        // Only an IPv6 address has a colon.
        let host = &self.hosts[0];
        if host.contains(':') { format!("[{host}]:{}", self.port) } else { format!("{host}:{}", self.port) }
    }

    /// What its certificate is for: its hosts, and its name if that is a DNS name.
    #[must_use]
    pub fn subject_names(&self) -> Vec<String> {
        let mut names = self.hosts.clone();
        let own = self.name.to_ascii_lowercase();
        if dns_name(&own).is_some() && !names.contains(&own) {
            names.push(own);
        }
        names
    }
}

impl FromStr for NodeWanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |why: String| format!("{why}: expected NAME=ADDRESS[:PORT],… such as a=10.0.0.1,a.example");
        let (name, addresses) = text.split_once('=').ok_or_else(|| bad("no =".to_owned()))?;
        check_name(name).map_err(bad)?;
        let (mut hosts, mut port) = (Vec::new(), None);
        for (place, address) in addresses.split(',').enumerate() {
            let (host, found) = host_and_port(address).map_err(bad)?;
            if place > 0 && found.is_some() {
                return Err(bad(format!("{address:?} has a port, which belongs to the first address")));
            }
            port = port.or(found);
            if hosts.contains(&host) {
                return Err(bad(format!("{host} is there twice")));
            }
            hosts.push(host);
        }
        Ok(Self { name: name.to_owned(), hosts, port: port.unwrap_or(DEFAULT_PORT) })
    }
}

/// Host, and port if there is one.
fn host_and_port(text: &str) -> Result<(String, Option<u16>), String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok((usable(address)?, None));
    }
    let number = |port: &str| match port.parse::<u16>() {
        Ok(port) if port > 0 => Ok(Some(port)),
        _ => Err(format!("{port:?} is no port")),
    };
    if let Some((inner, rest)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let address: IpAddr = inner.parse().map_err(|_| format!("{inner:?} is no address"))?;
        let port = if rest.is_empty() { None } else { number(rest.strip_prefix(':').unwrap_or(rest))? };
        return Ok((usable(address)?, port));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, number(port)?),
        None => (text, None),
    };
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok((usable(address)?, port));
    }
    let name = host.to_ascii_lowercase();
    dns_name(&name).ok_or_else(|| format!("{host:?} is neither an address nor a DNS name"))?;
    Ok((name, port))
}

fn usable(address: IpAddr) -> Result<String, String> {
    if address.is_unspecified() || address.is_multicast() {
        return Err(format!("no other node can connect to {address}"));
    }
    Ok(address.to_string())
}

/// The name, if a certificate can be for it.
fn dns_name(name: &str) -> Option<DnsName<'_>> {
    DnsName::try_from(name).ok().filter(|_| !name.ends_with('.'))
}

/// Names are those of folders, too.
fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty()
        || name.len() > LONGEST_NAME
        || !name.chars().all(allowed)
        || name.starts_with(['.', '-'])
    {
        return Err(format!(
            "{name:?} is no name of 1 to {LONGEST_NAME} letters, digits, '.', '_' and '-' that begins with a letter or digit"
        ));
    }
    Ok(())
}

/// A client that gets a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientWanted {
    /// Its name, as [`NodeWanted::name`].
    pub name: String,
    /// What it may do.
    pub role: ClientRole,
}

impl FromStr for ClientWanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |why: String| format!("{why}: expected NAME:ROLE such as scheduler:operator");
        let (name, role) = text.split_once(':').ok_or_else(|| bad("no :".to_owned()))?;
        check_name(name).map_err(bad)?;
        let no_role = |_| bad(format!("{role:?} is none of viewer, operator and admin"));
        Ok(Self { name: name.to_owned(), role: ClientRole::from_str(role, false).map_err(no_role)? })
    }
}

/// What a client may do on the nodes (`role` of `[[client]]`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ClientRole {
    /// Ask, and change nothing
    Viewer,
    /// Move, fork, pause and stop guests
    Operator,
    /// Everything
    Admin,
}

impl fmt::Display for ClientRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_a_name_and_addresses() {
        for (text, address, names) in [
            ("a=10.0.0.1,A.Example", "10.0.0.1:7420", &["10.0.0.1", "a.example", "a"][..]),
            ("b=b.example:7421", "b.example:7421", &["b.example", "b"]),
            ("n_1=2001:db8::1", "[2001:db8::1]:7420", &["2001:db8::1", "n_1"]),
            ("c=[2001:db8::1]:99,c", "[2001:db8::1]:99", &["2001:db8::1", "c"]),
            ("7=10.0.0.7:7421", "10.0.0.7:7421", &["10.0.0.7"]),
        ] {
            let node: NodeWanted = text.parse().unwrap();
            assert_eq!(node.address(), address, "{text}");
            assert_eq!(node.subject_names(), names, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_in_a_certificate_is_named() {
        for (text, word) in [
            ("a", "no ="),
            ("=10.0.0.1", "no name"),
            ("../a=10.0.0.1", "no name"),
            (".a=10.0.0.1", "no name"),
            ("a=", "neither"),
            ("a=10.0.0.1,", "neither"),
            ("a=10.0.0.300", "neither"),
            ("a=a b", "neither"),
            ("a=*.example", "neither"),
            ("a=https://a", "no port"),
            ("a=a.example.", "neither"),
            ("a=0.0.0.0", "no other node"),
            ("a=[::]:1", "no other node"),
            ("a=a:0", "no port"),
            ("a=a:65536", "no port"),
            ("a=10.0.0.1,a:1", "first address"),
            ("a=10.0.0.1,10.0.0.1", "twice"),
            ("a=[10]:1", "no address"),
        ] {
            let error = text.parse::<NodeWanted>().unwrap_err();
            assert!(error.contains(word) && error.contains("NAME=ADDRESS"), "{text}: {error}");
        }
        for (text, word) in
            [("ops", "no :"), ("ops:root", "viewer"), ("ops:none", "viewer"), (":viewer", "name")]
        {
            let error = text.parse::<ClientWanted>().unwrap_err();
            assert!(error.contains(word) && error.contains("NAME:ROLE"), "{text}: {error}");
        }
    }
}
