//! A fleet as entities of GLUE 2.0 (OGF GFD.147), rendered as XML, JSON or LDIF.
//!
//! A site (`AdminDomain`) has the bridge as its `ComputingService` and `ComputingManager`; each node is an `ExecutionEnvironment`. GLUE 2.0 has no
//! entity for accelerators: they are extensions of their node (in LDIF, other information).

mod entity;
mod json;
mod ldif;
mod xml;

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use entity::{Entity, Kind, Value};

use crate::model::{Device, DeviceKind, LinkLayer, Node, NodeState};

/// A rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// XML, as GFD.209 has it.
    Xml,
    /// JSON, one array for each kind of entity.
    Json,
    /// LDIF, as GFD.218 has it.
    Ldif,
}

/// Not the name of a rendering.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no rendering of GLUE 2: expected xml, json or ldif")]
pub struct UnknownFormat(String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        match text {
            "xml" => Ok(Self::Xml),
            "json" => Ok(Self::Json),
            "ldif" => Ok(Self::Ldif),
            other => Err(UnknownFormat(other.to_owned())),
        }
    }
}

/// A node, and whether something of it is leased, where that is known.
#[derive(Debug, Clone, Copy)]
pub struct Described<'a> {
    /// The node.
    pub node: &'a Node,
    /// VMs have something of it.
    pub used: Option<bool>,
}

/// These nodes of a site. What has no place in a rendering is left out.
#[must_use]
pub fn render(site: &str, nodes: &[Described<'_>], format: Format) -> String {
    let entities = entities(site, nodes);
    match format {
        Format::Xml => xml::render(&entities),
        Format::Json => json::render(&entities),
        Format::Ldif => ldif::render(&entities),
    }
}

fn entities(site: &str, nodes: &[Described<'_>]) -> Vec<Entity> {
    // An identifier is a URI.
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let of_site = |what: &str| format!("urn:vmove:{what}:{}", site.chars().map(plain).collect::<String>());
    let (domain, service, manager) =
        (of_site("admin-domain"), of_site("computing-service"), of_site("computing-manager"));
    let environments: Vec<Entity> = nodes.iter().map(|own| environment(*own, &manager)).collect();
    let site = Entity::new(Kind::AdminDomain, &domain, site).with_many("ServiceID", vec![service.clone()]);
    let mut all = vec![site.with_none("ParentDomainID").with_none("LocationID")];
    let mut own = Entity::new(Kind::ComputingService, &service, "vbridged");
    own.value(
        "Service",
        "Capability",
        Value::List(vec![
            "executionmanagement.reservation".to_owned(),
            "executionmanagement.dynamicvmdeploy".to_owned(),
        ]),
    );
    own.value("Service", "Type", Value::Text("org.vmove.vbridged".to_owned()));
    own.value("Service", "QualityLevel", Value::Text("production".to_owned()));
    own.link("Service", "AdminDomain", &domain);
    let own = own.with_many("ManagerID", vec![manager.clone()]).with_many("ServiceID", Vec::new());
    all.push(own.with_many("ContactID", Vec::new()).with_none("LocationID"));
    all.push(computing_manager(&manager, &service, nodes, &environments));
    all.extend(environments);
    all
}

fn computing_manager(id: &str, service: &str, nodes: &[Described<'_>], environments: &[Entity]) -> Entity {
    let mut manager = Entity::new(Kind::ComputingManager, id, "vbridged");
    let base = "ComputingManager";
    manager.value("Manager", "ProductName", Value::Text("vmove".to_owned()));
    manager.value("Manager", "ProductVersion", Value::Text(env!("CARGO_PKG_VERSION").to_owned()));
    manager.value(base, "Reservation", Value::Flag(Some(true)));
    let sum = |of: fn(&Node) -> u64| Value::Number(nodes.iter().map(|own| of(own.node)).sum());
    manager.value(base, "TotalPhysicalCPUs", sum(|node| sockets(node).len() as u64));
    manager.value(base, "TotalLogicalCPUs", sum(|node| node.cores().into()));
    let alike = |node: &Node| (node.cpu.clone(), node.numa.clone(), accelerators(node));
    let homogeneous = nodes.windows(2).all(|pair| alike(pair[0].node) == alike(pair[1].node));
    manager.value(base, "Homogeneous", Value::Flag(Some(homogeneous)));
    let networks: BTreeSet<&str> = nodes.iter().flat_map(|own| networks(own.node)).collect();
    manager.value(base, "NetworkInfo", Value::List(networks.into_iter().map(str::to_owned).collect()));
    manager.link("Manager", "Service", service);
    manager.link(base, "ComputingService", service);
    let ids = environments.iter().map(|own| own.id.clone()).collect();
    manager.with_one("ServiceID", service).with_many("ResourceID", ids)
}

fn environment(own: Described<'_>, manager: &str) -> Entity {
    let node = own.node;
    let id = format!("urn:vmove:execution-environment:{}", node.name);
    let mut entity = Entity::new(Kind::ExecutionEnvironment, &id, node.name.as_str());
    entity.other = node.hypervisors.iter().map(|name| format!("hypervisor={name}")).collect();
    entity.extensions = accelerators(node)
        .into_iter()
        .enumerate()
        .map(|(at, (what, count))| (format!("accelerator-{at}"), format!("{count} {what}")))
        .collect();
    let mut value = |name, value| entity.value("ExecutionEnvironment", name, value);
    let platform = match node.cpu.arch.as_ref() {
        "x86_64" => "amd64",
        "i686" | "i586" => "i386",
        "ia64" => "itanium",
        "ppc64" | "ppc64le" => "powerpc",
        "sparc64" => "sparc",
        "" => "unknown",
        other => other,
    };
    value("Platform", Value::Text(platform.to_owned()));
    value("VirtualMachine", Value::Flag(Some(false)));
    value("TotalInstances", Value::Number(1));
    if let Some(used) = own.used {
        value("UsedInstances", Value::Number(used.into()));
    }
    value("UnavailableInstances", Value::Number((node.state != NodeState::Up).into()));
    let sockets = sockets(node).len();
    value("PhysicalCPUs", Value::Number(sockets as u64));
    value("LogicalCPUs", Value::Number(node.cores().into()));
    let (cpus, cores) = (u32::try_from(sockets).unwrap_or(u32::MAX), node.cores());
    let multiplicity = match (cpus > 1, cores > cpus) {
        (true, true) => "multicpu-multicore",
        (true, false) => "multicpu-singlecore",
        (false, true) => "singlecpu-multicore",
        (false, false) => "singlecpu-singlecore",
    };
    value("CPUMultiplicity", Value::Text(multiplicity.to_owned()));
    if !node.cpu.model.is_empty() {
        value("CPUModel", Value::Text(node.cpu.model.to_string()));
    }
    let huge: u64 = node.numa.iter().map(|numa| numa.huge.pages_2m * 2 + numa.huge.pages_1g * 1024).sum();
    value("MainMemorySize", Value::Number(node.memory().0 + huge));
    value("OSFamily", Value::Text("linux".to_owned()));
    // Only who runs the network knows.
    value("ConnectivityIn", Value::Flag(None));
    value("ConnectivityOut", Value::Flag(None));
    value("NetworkInfo", Value::List(networks(node).into_iter().map(str::to_owned).collect()));
    entity.link("Resource", "Manager", manager);
    entity.link("ExecutionEnvironment", "ComputingManager", manager);
    entity.with_one("ManagerID", manager)
}

fn sockets(node: &Node) -> BTreeSet<u16> {
    node.numa.iter().map(|numa| numa.socket.0).collect()
}

/// Link layers of a node's adapters, in the words of GLUE 2.
pub(crate) fn networks(node: &Node) -> Vec<&'static str> {
    let has = |layer| node.devices.iter().any(|device| device.link_layer() == Some(layer));
    let known = [(LinkLayer::InfiniBand, "infiniband"), (LinkLayer::Ethernet, "gigabitethernet")];
    known.into_iter().filter(|(layer, _)| has(*layer)).map(|(_, name)| name).collect()
}

/// Number of GPUs, shares of GPUs and remote GPUs, by what they are.
fn accelerators(node: &Node) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for device in node.devices.iter().filter(|device| !device.kind.is_network()) {
        // The word of a GPU that is divided is that of its shares.
        if device.kind != DeviceKind::Gpu || device.shares == 0 {
            *counts.entry(described(device)).or_default() += 1;
        }
    }
    counts
}

fn described(device: &Device) -> String {
    let mut words = vec![device.kind.name().to_owned()];
    if device.kind != DeviceKind::RemoteGpu {
        words.push(vendor(device.id.vendor));
        words.extend(
            [device.arch.to_string(), device.id.to_string()].into_iter().filter(|word| !word.is_empty()),
        );
    }
    words.extend(Some(device.model.to_string()).filter(|model| !model.is_empty()));
    words.join(" ")
}

/// The vendor of a GPU, by name or, where it is not known, by number.
pub(crate) fn vendor(id: u16) -> String {
    match id {
        0x10de => "NVIDIA".to_owned(),
        0x1002 => "AMD".to_owned(),
        0x8086 => "Intel".to_owned(),
        other => format!("{other:04x}"),
    }
}
