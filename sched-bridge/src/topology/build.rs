//! From descriptions of single switches to a topology.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{Origin, Style, Switch, SwitchId, SwitchName, Topology, TopologyError};
use crate::ids::NodeName;

/// One switch as a source describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Switch))]
#[serde(deny_unknown_fields)]
pub struct SwitchSpec {
    /// Its name.
    #[cfg_attr(test, schema(value_type = String))]
    pub name: SwitchName,
    /// Switches below it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    pub switches: Vec<SwitchName>,
    /// Nodes connected to it directly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(test, schema(value_type = Vec<String>))]
    pub nodes: Vec<NodeName>,
    /// Speed of its links, in the words of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_speed: Option<String>,
}

impl SwitchSpec {
    /// A switch with nothing below it.
    #[must_use]
    pub fn new(name: SwitchName) -> Self {
        Self { name, switches: Vec::new(), nodes: Vec::new(), link_speed: None }
    }
}

/// A topology in JSON, YAML or TOML of our own.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(utoipa::ToSchema), schema(as = Topology))]
#[serde(deny_unknown_fields)]
pub(super) struct TopologyFile {
    /// How the network is described when it is exported; `tree`, if it is not given.
    #[serde(default)]
    pub style: Style,
    /// All switches.
    #[serde(default)]
    pub switches: Vec<SwitchSpec>,
}

impl TryFrom<TopologyFile> for Topology {
    type Error = TopologyError;
    fn try_from(file: TopologyFile) -> Result<Self, TopologyError> {
        let mut builder = Builder::new();
        for spec in file.switches {
            builder.add(spec, Origin::default());
        }
        builder.build(file.style)
    }
}

impl From<Topology> for TopologyFile {
    fn from(topology: Topology) -> Self {
        let spec = |switch: &Switch| SwitchSpec {
            name: switch.name.clone(),
            switches: switch.children.iter().map(|id| topology.switch(*id).name.clone()).collect(),
            nodes: switch.nodes.clone(),
            link_speed: switch.link_speed.clone(),
        };
        Self { switches: topology.switches.iter().map(spec).collect(), style: topology.style.clone() }
    }
}

/// Collects descriptions of switches, in any order.
#[derive(Debug, Default)]
pub struct Builder {
    specs: Vec<(SwitchSpec, Origin)>,
}

impl Builder {
    /// One without switches.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a switch. Nothing is checked before [`Builder::build`].
    pub fn add(&mut self, spec: SwitchSpec, origin: Origin) {
        self.specs.push((spec, origin));
    }

    /// Checks that the switches make a forest.
    ///
    /// # Errors
    /// Switches or nodes that are described twice or are below two switches, unknown switches, cycles.
    pub fn build(self, style: Style) -> Result<Topology, TopologyError> {
        let by_name = self.names()?;
        let mut switches = Vec::with_capacity(self.specs.len());
        let mut home: HashMap<NodeName, SwitchId> = HashMap::new();
        for (at, (spec, origin)) in self.specs.iter().enumerate() {
            for node in &spec.nodes {
                if let Some(first) = home.insert(node.clone(), id(at)) {
                    return Err(TopologyError::TwoLeaves {
                        origin: *origin,
                        node: node.to_string(),
                        first: self.specs[first.usize()].0.name.to_string(),
                        second: spec.name.to_string(),
                    });
                }
            }
            switches.push(Switch {
                name: spec.name.clone(),
                parent: None,
                children: Vec::new(),
                nodes: spec.nodes.clone(),
                height: 1,
                depth: 0,
                link_speed: spec.link_speed.clone(),
            });
        }
        self.link(&by_name, &mut switches)?;
        self.levels(&mut switches)?;
        Ok(Topology { switches, by_name, home, style })
    }

    fn names(&self) -> Result<HashMap<SwitchName, SwitchId>, TopologyError> {
        let mut by_name = HashMap::with_capacity(self.specs.len());
        for (at, (spec, origin)) in self.specs.iter().enumerate() {
            if by_name.insert(spec.name.clone(), id(at)).is_some() {
                let switch = spec.name.to_string();
                return Err(TopologyError::DuplicateSwitch { origin: *origin, switch });
            }
        }
        Ok(by_name)
    }

    fn link(
        &self,
        by_name: &HashMap<SwitchName, SwitchId>,
        switches: &mut [Switch],
    ) -> Result<(), TopologyError> {
        for (at, (spec, origin)) in self.specs.iter().enumerate() {
            for child_name in &spec.switches {
                let child = *by_name.get(child_name).ok_or_else(|| TopologyError::NoSuchSwitch {
                    origin: *origin,
                    parent: spec.name.to_string(),
                    child: child_name.to_string(),
                })?;
                if let Some(first) = switches[child.usize()].parent {
                    return Err(TopologyError::TwoParents {
                        origin: *origin,
                        switch: child_name.to_string(),
                        first: switches[first.usize()].name.to_string(),
                        second: spec.name.to_string(),
                    });
                }
                switches[child.usize()].parent = Some(id(at));
                switches[at].children.push(child);
            }
        }
        Ok(())
    }

    /// Sets depths from the top and heights from the bottom. A switch that is not reached from any top is part of a cycle.
    fn levels(&self, switches: &mut [Switch]) -> Result<(), TopologyError> {
        let mut order: Vec<usize> = (0..switches.len()).filter(|at| switches[*at].parent.is_none()).collect();
        let mut reached = 0;
        while reached < order.len() {
            let at = order[reached];
            for child in switches[at].children.clone() {
                switches[child.usize()].depth = switches[at].depth + 1;
                order.push(child.usize());
            }
            reached += 1;
        }
        if order.len() < switches.len() {
            return Err(self.cycle(switches, &order));
        }
        for at in order.into_iter().rev() {
            let below = switches[at].children.iter().map(|child| switches[child.usize()].height).max();
            switches[at].height = below.unwrap_or(0) + 1;
        }
        Ok(())
    }

    fn cycle(&self, switches: &[Switch], reached: &[usize]) -> TopologyError {
        let reached: std::collections::HashSet<_> = reached.iter().copied().collect();
        let start = (0..switches.len()).find(|at| !reached.contains(at)).unwrap_or(0);
        // A switch that is not reached has a parent that is not reached either: going up ends in the cycle.
        let mut seen = vec![start];
        loop {
            let last = seen[seen.len() - 1];
            let Some(parent) = switches[last].parent.map(SwitchId::usize) else { break };
            if let Some(first) = seen.iter().position(|at| *at == parent) {
                seen.drain(..first);
                seen.push(parent);
                break;
            }
            seen.push(parent);
        }
        seen.reverse();
        let names: Vec<_> = seen.iter().map(|at| switches[*at].name.as_str()).collect();
        TopologyError::Cycle { origin: self.specs[seen[0]].1, path: names.join(" > ") }
    }
}

fn id(at: usize) -> SwitchId {
    SwitchId(u32::try_from(at).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use vmove_skip::installed::is_current;
    use vmove_skip::reference::{keys_page, type_named};

    use super::*;

    /// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-sched --lib the_checked_in` writes it.
    #[test]
    fn the_checked_in_page_of_keys_is_current() {
        let types = [type_named::<TopologyFile>(), type_named::<SwitchSpec>(), type_named::<Style>()];
        let about = "A file for `vmove topology --import` and for `topology` in `[fork]`, in TOML, YAML or JSON: [Inventory and topology](../sched-bridge.md#inventory-and-topology). \
            The file is a [Topology](#topology). Slurm's `topology.conf` and `topology.yaml`, the output of `ibnetdiscover` and labels of nodes are read as well, in their own formats.";
        let page = keys_page("Keys of topologies", about, &types);
        is_current("docs/reference/topologies.md", page.as_bytes(), "vmove-sched");
    }
}
