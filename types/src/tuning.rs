//! Processors and memory that a VM has for itself, and what a host could do better.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Environment variable of QEMU with the number of processors that its VM is to have for itself. It goes where the VM goes, and to its
/// children, so that each node pins the VM anew.
pub const PINNED_CPUS: &str = "VMOVE_PINNED_CPUS";

/// Most NUMA nodes of one VM.
const MOST_NODES: usize = 1024;

/// Which processors a VM is to have for itself, and on which NUMA nodes its memory is to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PinRequest {
    /// What it gets of which NUMA node. Empty: as many processors as it has virtual ones, on as few NUMA nodes as possible.
    #[serde(default)]
    pub numa: Vec<NumaShare>,
    /// Whether the VM is refused if the node cannot do so. Otherwise it runs without, and `not_pinned` says why.
    #[serde(default)]
    pub required: bool,
}

/// What a VM gets of a NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct NumaShare {
    /// Number of the NUMA node.
    pub node: u32,
    /// Processors (hardware threads).
    pub cpus: u32,
    /// Memory. Unit: MiB. If no share names any, memory is on the NUMA nodes of the processors.
    #[serde(default)]
    pub memory_mib: u64,
}

/// What is no share of a NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected NUMA-NODE:PROCESSORS or NUMA-NODE:PROCESSORS:MIB, several with commas between them, such as \"0:4\" or \"0:4:8192,1:4:8192\"; \
     found {0:?}"
)]
pub struct BadShare(String);

impl FromStr for PinRequest {
    type Err = BadShare;

    /// `0:4,1:4`; empty: the node chooses. The VM is refused if the node cannot do so.
    fn from_str(text: &str) -> Result<Self, BadShare> {
        let bad = || BadShare(text.to_owned());
        let parts = text.split(',').filter(|_| !text.is_empty());
        let numa: Vec<NumaShare> = parts.map(|part| share(part).ok_or_else(bad)).collect::<Result<_, _>>()?;
        let twice = |at: usize| numa[..at].iter().any(|share| share.node == numa[at].node);
        if numa.len() > MOST_NODES || (0..numa.len()).any(twice) {
            return Err(bad());
        }
        Ok(Self { numa, required: true })
    }
}

fn share(text: &str) -> Option<NumaShare> {
    let mut numbers = text.split(':');
    let (node, cpus) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    let memory_mib = numbers.next().map_or(Some(0), |text| text.parse().ok())?;
    let empty = cpus == 0 && memory_mib == 0;
    (numbers.next().is_none() && !empty).then_some(NumaShare { node, cpus, memory_mib })
}

impl fmt::Display for PinRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, NumaShare { node, cpus, memory_mib }) in self.numa.iter().enumerate() {
            let comma = if place > 0 { "," } else { "" };
            write!(f, "{comma}{node}:{cpus}")?;
            if *memory_mib > 0 {
                write!(f, ":{memory_mib}")?;
            }
        }
        Ok(())
    }
}

/// Where a VM is pinned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PinInfo {
    /// Processors that it has for itself, such as `2-5`.
    pub cpus: String,
    /// Whether each of its virtual processors has one of them. Otherwise they share all.
    pub one_each: bool,
    /// Processors of QEMU's other threads.
    pub others: String,
    /// NUMA nodes of its memory.
    pub memory_nodes: Vec<u32>,
}

/// What to look at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema, utoipa::IntoParams))]
#[cfg_attr(feature = "schema", into_params(parameter_in = Query))]
#[serde(deny_unknown_fields)]
pub struct TuningQuery {
    /// Only this VM; without it, the host and all its VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}

/// What was compared with advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TuningReport {
    /// One for each thing that was looked at: those of the host first, then those of VMs.
    pub advice: Vec<Advice>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Advice {
    /// What it is, a stable word: `governor`, `pinning`, ...
    pub topic: String,
    /// The VM that it is about; absent: the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// How it is.
    pub state: AdviceState,
    /// What was found.
    pub found: String,
    /// What would be better, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub better: Option<String>,
    /// The command that does it. A kernel parameter needs a restart of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// How a thing is that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum AdviceState {
    /// As it should be.
    Good,
    /// It could be better: `command` does it.
    Better,
    /// It could be better, and `vmove tune --apply` does it.
    CanApply,
    /// It was just applied.
    Applied,
    /// It could not be learnt, or does not exist here.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_written_as_they_are_read() {
        for text in ["", "0:4", "0:4:8192,1:4:8192", "1:0:512,0:2"] {
            assert_eq!(text.parse::<PinRequest>().unwrap().to_string(), text);
        }
        for bad in ["0", "0:0", "0:4:1:2", "a:1", "0:4,0:4", "0:-1", ","] {
            let error = bad.parse::<PinRequest>().unwrap_err().to_string();
            assert!(error.contains("NUMA-NODE:PROCESSORS") && error.contains(bad), "{error}");
        }
    }
}
