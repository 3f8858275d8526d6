//! The networks of a blueprint: on each node a Linux bridge with a tap interface for each VM, and between nodes VXLAN.
//!
//! A private network is a network of its members alone: the nodes have no address on it. On each node a `dnsmasq` in a network namespace
//! of its own gives the VMs of that node their addresses, and knows the names of all members. A public network is that of an interface
//! that the operator names.
//!
//! Interfaces have names that are derived from those of cluster and network, and are known as ours by their alias. One that has such a
//! name without the alias is somebody else's: then the network is refused, and nothing is changed.

mod config;
mod left;
pub mod names;
mod node;
mod nodes;
mod record;
mod script;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use sched_bridge::model::VmName;
use vmove_bridge_types::adapter::{Action, Environment, Member, Request, State, Status};

use crate::serve;
use config::Config;
use names::Names;
use node::Found;
use nodes::{Nodes, told};
use record::{File, Left, Record};
pub use script::RESOLVERS;
use script::{Link, Part};

/// Makes the networks of a blueprint: an adapter, which reads one JSON object from standard input and writes one to standard output.
#[derive(Debug, Parser)]
#[command(
    name = "vmove-network-adapter",
    version,
    after_help = "Examples:
  vmove blueprint app.yaml --run --adapter network=vmove-network-adapter
  vmove-network-adapter --forget node7"
)]
struct Arguments {
    /// Configuration [default: /etc/vmove/network-adapter.toml, if it is there]
    #[arg(long, value_name = "FILE", env = "VMOVE_NETWORK_CONFIG")]
    config: Option<PathBuf>,
    /// Forget what stopped networks have left on a node that is lost for good; no request is read
    #[arg(long, value_name = "NODE")]
    forget: Option<String>,
}

impl Arguments {
    fn config(&self) -> Result<Config, String> {
        match &self.config {
            Some(file) => Config::read(file, true),
            None => Config::read(Path::new("/etc/vmove/network-adapter.toml"), false),
        }
    }
}

/// Runs the adapter on standard input and output.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(node) = &arguments.forget {
        return match arguments.config().and_then(|config| left::forget(&config.state, node)) {
            Ok(said) => {
                println!("{}", said.join("\n"));
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("vmove-network-adapter: {error}");
                ExitCode::FAILURE
            }
        };
    }
    serve::run("vmove-network-adapter", async |request: &Request| {
        let config = Arc::new(arguments.config()?);
        Ok::<_, String>(answer(&config, request).await)
    })
}

/// Handles a request, one network after the other.
async fn answer(config: &Arc<Config>, request: &Request) -> Vec<Status> {
    let nodes = Nodes::new(config);
    serve::each(request, async |environment| {
        let network = Network::new(config, &nodes, &request.cluster, &environment.name);
        match request.action {
            Action::Start => network.start(environment).await,
            Action::Status => network.status().await,
            Action::Stop => network.stop(environment).await,
        }
    })
    .await
}

struct Network<'a> {
    config: &'a Config,
    nodes: &'a Nodes,
    names: Names,
    file: File,
}

impl<'a> Network<'a> {
    fn new(config: &'a Config, nodes: &'a Nodes, cluster: &str, name: &str) -> Self {
        let file = File::of(&config.state, cluster, name);
        Self { config, nodes, names: Names::new(cluster, name), file }
    }

    async fn start(&self, wanted: &Environment) -> Result<Status, String> {
        self.check(wanted)?;
        let old = self.without_what_is_left().await?;
        let left = old.as_ref().map(|old| old.left.clone()).unwrap_or_default();
        // One that was stopped is made anew.
        let old = old.filter(|old| !old.nodes.is_empty());
        let mut nodes = old.iter().flat_map(|old| old.nodes.clone()).collect::<Vec<_>>();
        let of_members = wanted.members.iter().map(|member| &member.node);
        for node in wanted.nodes.iter().chain(of_members) {
            if !nodes.contains(node) {
                nodes.push(node.clone());
            }
        }
        if nodes.is_empty() {
            nodes.push(self.config.own.clone());
        }
        if let Some(left) = nodes.iter().find_map(|node| left.get(node)) {
            return Err(left.why.clone());
        }
        let found = self.look(&nodes).await?;
        let vni = match old.as_ref().map(|old| old.vni) {
            Some(vni) if vni > 0 => vni,
            _ if wanted.mode == "private" => self.free_vni(&found, &left)?,
            _ => 0,
        };
        let new = Record { mode: wanted.mode.clone(), nodes, members: wanted.members.clone(), vni, left };
        self.refuse_what_is_taken(&new, &found)?;
        let missing = self.missing(&new, &found)?;
        if old.as_ref() == Some(&new) && missing.is_empty() {
            return Ok(self.running(&new));
        }
        // Written before anything is made: if this is killed, a stop finds what there is.
        self.file.write(&new)?;
        let made = self.make(&new, &found).await;
        if let Err(reason) = made {
            let undone = if old.is_some() {
                "what it had before is there still".to_owned()
            } else {
                self.undone(new).await
            };
            return Err(format!("{reason}; {undone}"));
        }
        Ok(self.running(&new))
    }

    async fn status(&self) -> Result<Status, String> {
        let Some(record) = self.file.read()? else { return Ok(Status::unnamed(State::Absent, "", "")) };
        if record.nodes.is_empty() {
            return Err(left::told(&record.left));
        }
        let found = self.look(&record.nodes).await?;
        let missing = self.missing(&record, &found)?;
        if missing.is_empty() { Ok(self.running(&record)) } else { Err(missing.join("; ")) }
    }

    async fn stop(&self, wanted: &Environment) -> Result<Status, String> {
        let left = self.removed(self.file.read()?, &wanted.nodes).await?;
        if left.is_empty() { Ok(Status::unnamed(State::Absent, "", "")) } else { Err(left::told(&left)) }
    }

    fn running(&self, record: &Record) -> Status {
        let handle = format!("bridge:{}", self.names.bridge);
        let note = if record.left.is_empty() { String::new() } else { left::told(&record.left) };
        Status { nodes: record.nodes.clone(), ..Status::unnamed(State::Running, handle, note) }
    }

    /// What each node has. All of them must answer.
    async fn look(&self, nodes: &[String]) -> Result<BTreeMap<String, Found>, String> {
        let (found, failed) = self.nodes.look(&self.names, nodes).await;
        if failed.is_empty() { Ok(found) } else { Err(told(&failed)) }
    }

    /// The part of a network on one of its nodes.
    fn part<'p>(&'p self, record: &'p Record, number: usize) -> Result<Part<'p>, String> {
        let node = &record.nodes[number];
        let link = if record.mode == "private" {
            let alone = record.nodes.len() == 1;
            let others = record.nodes.iter().filter(|other| *other != node && !alone);
            Link::Private {
                vni: record.vni,
                port: self.config.port,
                own: if alone { None } else { Some(self.config.address(node)?) },
                others: others.map(|other| self.config.address(other)).collect::<Result<_, _>>()?,
                number,
            }
        } else {
            let interface = self.config.public_of(node).ok_or_else(|| {
                format!("node {node} has no interface for public networks: name a bridge by `public` in the configuration")
            })?;
            Link::Public { interface }
        };
        let (mtu, user) = (self.config.mtu, self.config.user_in_script());
        Ok(Part { names: &self.names, node, members: &record.members, mtu, user, link })
    }

    fn missing(&self, record: &Record, found: &BTreeMap<String, Found>) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for (number, node) in record.nodes.iter().enumerate() {
            let lacks = self.part(record, number)?.missing(&found[node]);
            all.extend((!lacks.is_empty()).then(|| format!("node {node} lacks {}", lacks.join(", "))));
        }
        Ok(all)
    }

    /// Before anything is changed: nothing of another has one of our names, and nodes have what is needed.
    fn refuse_what_is_taken(&self, record: &Record, found: &BTreeMap<String, Found>) -> Result<(), String> {
        for (number, node) in record.nodes.iter().enumerate() {
            let (part, found) = (self.part(record, number)?, &found[node]);
            for name in part.interfaces(found) {
                if let Some(own) = found.named(name).filter(|own| own.ifalias != self.names.alias) {
                    let alias = if own.ifalias.is_empty() { "none" } else { &own.ifalias };
                    return Err(format!(
                        "the name {name} is taken on node {node}: expected no interface, or one with the alias {:?}, found one with the alias {alias:?}; remove it, or give the blueprint another name",
                        self.names.alias
                    ));
                }
            }
            match &part.link {
                Link::Private { .. } if !found.has_dnsmasq => {
                    return Err(format!("node {node} has no dnsmasq: install it (Debian: dnsmasq-base)"));
                }
                Link::Public { interface } => self.refuse_used(node, interface, found)?,
                Link::Private { .. } => {}
            }
        }
        Ok(())
    }

    /// An interface that is no bridge becomes a port of ours: it must not be in use.
    fn refuse_used(&self, node: &str, interface: &str, found: &Found) -> Result<(), String> {
        let own = found.named(interface).ok_or_else(|| {
            format!(
                "node {node} has no interface {interface}, which the configuration names for public networks"
            )
        })?;
        let next = "name a bridge, or an interface that nothing uses";
        match &own.master {
            _ if script::is_bridge(found, interface) => Ok(()),
            Some(master) if *master != self.names.bridge => {
                Err(format!("interface {interface} of node {node} belongs to {master}; {next}"))
            }
            _ if own.addr_info.iter().any(|address| address.scope != "link") => {
                Err(format!("interface {interface} of node {node} has addresses of the node; {next}"))
            }
            _ => Ok(()),
        }
    }

    /// A network identifier that no VXLAN interface of the nodes has, nor that part of this network which is left elsewhere.
    fn free_vni(
        &self,
        found: &BTreeMap<String, Found>,
        left: &BTreeMap<String, Left>,
    ) -> Result<u32, String> {
        let interfaces = || found.values().flat_map(|own| &own.interfaces);
        if let Some(own) = interfaces().find(|own| own.ifname == self.names.vxlan).and_then(Found::vni_of) {
            return Ok(own);
        }
        let of_left = left.values().map(|own| own.vni);
        let used: Vec<u32> = interfaces().filter_map(Found::vni_of).chain(of_left).collect();
        let from = self.names.first_vni;
        let free = (from..0x0100_0000).chain(1..from).find(|vni| !used.contains(vni));
        free.ok_or_else(|| "all VXLAN network identifiers are in use".to_owned())
    }

    async fn make(&self, record: &Record, found: &BTreeMap<String, Found>) -> Result<(), String> {
        let script = |(number, node): (usize, &String)| {
            self.part(record, number).map(|part| (node.clone(), part.make(&found[node])))
        };
        let scripts: Result<Vec<_>, String> = record.nodes.iter().enumerate().map(script).collect();
        let failed = self.nodes.run(scripts?).await;
        if !failed.is_empty() {
            return Err(told(&failed));
        }
        let missing = self.missing(record, &self.look(&record.nodes).await?)?;
        if missing.is_empty() { Ok(()) } else { Err(missing.join("; ")) }
    }

    /// What becomes part of a script must be what it says.
    fn check(&self, wanted: &Environment) -> Result<(), String> {
        let namespaces = |node: &str| format!("{}+", names::of_node(&self.names, node));
        if wanted.kind != "network" || !["private", "public"].contains(&wanted.mode.as_str()) {
            return Err(format!(
                "expected a network of mode private or public, found kind {:?} of mode {:?}",
                wanted.kind, wanted.mode
            ));
        }
        let is_name = |name: &str| {
            (1..=15).contains(&name.len())
                && name.starts_with("vt")
                && name.chars().all(|c| c.is_ascii_alphanumeric())
        };
        let is_mac = |mac: &str| {
            mac.len() == 17
                && mac.split(':').count() == 6
                && mac.split(':').all(|byte| byte.len() == 2 && u8::from_str_radix(byte, 16).is_ok())
        };
        for Member { name, interface, mac, address, namespace, node, .. } in &wanted.members {
            if !is_name(interface) {
                return Err(format!(
                    "interface {interface:?} of {name}: expected vt and up to 13 letters or digits"
                ));
            }
            if !is_mac(mac) {
                return Err(format!(
                    "MAC address {mac:?} of {name}: expected six bytes, as in 02:00:5e:10:00:01"
                ));
            }
            let container = namespace.strip_prefix(&namespaces(node));
            if !namespace.is_empty()
                && (wanted.mode != "private" || container.is_none_or(|own| VmName::new(own).is_err()))
            {
                return Err(format!(
                    "namespace {namespace:?} of {name}: expected one of a private network, {}NAME",
                    namespaces(node)
                ));
            }
            if wanted.mode == "private" && address.parse::<Ipv4Addr>().is_err() {
                return Err(format!("address {address:?} of {name}: expected an IPv4 address"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use vmove_skip::installed::man_page_is_current;

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-adapter --lib the_checked_in` writes it. `vmove man` installs it with the others.
    #[test]
    fn the_checked_in_man_page_is_current() {
        man_page_is_current(Arguments::command(), "sched-bridge/adapter/dist", "vmove-adapter");
    }
}
