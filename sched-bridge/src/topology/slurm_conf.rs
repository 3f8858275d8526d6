//! Slurm's `topology.conf`, for topology/tree and topology/block.
//!
//! Keys are case-insensitive, `#` starts a comment, and a backslash at the end of a line joins it with the next.

use std::fmt::Write as _;

use vmove_types::typo;

use super::hostlist::compress;
use super::names::{node_names, switch_names, texts};
use super::{Builder, Origin, Style, SwitchId, SwitchSpec, Topology, TopologyError, block};

const KEYS: &str = "SwitchName=, Switches=, Nodes=, LinkSpeed= or BlockName=, Nodes=, BlockSizes=";

/// Reads a `topology.conf`.
///
/// # Errors
/// What is wrong, with its line.
pub fn read(text: &str) -> Result<Topology, TopologyError> {
    let mut builder = Builder::new();
    let mut blocks = Vec::new();
    let mut sizes: Option<(Vec<u32>, usize)> = None;
    let mut switches = 0;
    for (line, text) in logical_lines(text) {
        let pairs = pairs(&text, line)?;
        let Some((key, _)) = pairs.first() else { continue };
        match key.as_str() {
            "switchname" => {
                switches += 1;
                for spec in switch(&pairs, line)? {
                    builder.add(spec, Origin::line(line));
                }
            }
            "blockname" => blocks.push((block_of(&pairs, line)?, line)),
            "blocksizes" => sizes = Some((block::sizes(&pairs[0].1, line)?, line)),
            other => {
                let first = ["SwitchName", "BlockName", "BlockSizes"];
                return Err(unknown(other, "at the start of a line", &first, line));
            }
        }
    }
    if let Some((_, line)) = blocks.first().filter(|_| switches > 0) {
        return Err(TopologyError::syntax(
            *line,
            "both blocks and switches in one file",
            "either SwitchName= or BlockName= lines",
        ));
    }
    if blocks.is_empty() {
        if let Some((_, line)) = sizes {
            return Err(TopologyError::syntax(
                line,
                "BlockSizes without a block",
                "BlockName= lines before it",
            ));
        }
        return builder.build(Style::Tree);
    }
    block::build(blocks, sizes)
}

/// Lines without comments; joined lines have the number of the first.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (at, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim_end();
        let (line, continues) = line.strip_suffix('\\').map_or((line, false), |line| (line, true));
        match lines.last_mut().filter(|_| open) {
            Some((_, whole)) => {
                whole.push(' ');
                whole.push_str(line);
            }
            None => lines.push((at + 1, line.to_owned())),
        }
        open = continues;
    }
    lines.retain(|(_, line)| !line.trim().is_empty());
    lines
}

fn pairs(text: &str, line: usize) -> Result<Vec<(String, String)>, TopologyError> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for word in text.split_whitespace() {
        let Some((key, value)) = word.split_once('=') else {
            return Err(TopologyError::syntax(line, format!("{word:?} is not KEY=VALUE"), KEYS));
        };
        let key = key.to_ascii_lowercase();
        if pairs.iter().any(|(known, _)| *known == key) {
            return Err(TopologyError::syntax(
                line,
                format!("{key:?} appears twice in one line"),
                "each key once",
            ));
        }
        pairs.push((key, value.trim_matches('"').to_owned()));
    }
    Ok(pairs)
}

/// A key that has no meaning where it is; those in `known` would have one.
fn unknown(key: &str, place: &str, known: &[&str], line: usize) -> TopologyError {
    let near = typo::nearest(key, known.iter().copied());
    let near = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
    TopologyError::syntax(line, format!("unknown key {key:?} {place}"), format!("{KEYS}{near}"))
}

/// One switch, or several that differ only in their names.
fn switch(pairs: &[(String, String)], line: usize) -> Result<Vec<SwitchSpec>, TopologyError> {
    let mut specs: Vec<SwitchSpec> = Vec::new();
    let (mut switches, mut nodes, mut speed) = (Vec::new(), Vec::new(), None);
    for (key, value) in pairs {
        match key.as_str() {
            "switchname" => specs = switch_names(value, line)?.into_iter().map(SwitchSpec::new).collect(),
            "switches" => switches = switch_names(value, line)?,
            "nodes" => nodes = node_names(value, line)?,
            "linkspeed" => speed = Some(value.clone()),
            other => {
                return Err(unknown(other, "of a switch", &["Switches", "Nodes", "LinkSpeed"], line));
            }
        }
    }
    if switches.is_empty() && nodes.is_empty() {
        return Err(TopologyError::syntax(line, "a switch with nothing below it", "Switches= or Nodes="));
    }
    for spec in &mut specs {
        spec.switches.clone_from(&switches);
        spec.nodes.clone_from(&nodes);
        spec.link_speed.clone_from(&speed);
    }
    Ok(specs)
}

fn block_of(pairs: &[(String, String)], line: usize) -> Result<SwitchSpec, TopologyError> {
    let mut names = switch_names(&pairs[0].1, line)?;
    if names.len() != 1 {
        return Err(TopologyError::syntax(line, "several names for one block", "BlockName= with one name"));
    }
    let mut spec = SwitchSpec::new(names.remove(0));
    for (key, value) in &pairs[1..] {
        match key.as_str() {
            "nodes" => spec.nodes = node_names(value, line)?,
            other => {
                return Err(unknown(other, "of a block", &["Nodes"], line));
            }
        }
    }
    Ok(spec)
}

/// Writes a `topology.conf`. Link speeds are left out if they are not the numbers that Slurm expects.
#[must_use]
pub fn write(topology: &Topology) -> String {
    let mut text = String::from("# topology.conf, written by vmove\n");
    if let Style::Block { sizes } = topology.style() {
        for id in block::blocks(topology) {
            let switch = topology.switch(id);
            let _ = writeln!(text, "BlockName={} Nodes={}", switch.name, compress(&texts(&switch.nodes)));
        }
        let sizes: Vec<String> = sizes.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "BlockSizes={}", sizes.join(","));
        return text;
    }
    let mut ids: Vec<SwitchId> = topology.ids().collect();
    ids.sort_by_key(|id| (topology.switch(*id).height, id.0));
    for id in ids {
        let switch = topology.switch(id);
        if switch.nodes.is_empty() && switch.children.is_empty() {
            continue;
        }
        let _ = write!(text, "SwitchName={}", switch.name);
        if !switch.children.is_empty() {
            let names: Vec<&str> =
                switch.children.iter().map(|child| topology.switch(*child).name.as_str()).collect();
            let _ = write!(text, " Switches={}", compress(&names));
        }
        if !switch.nodes.is_empty() {
            let _ = write!(text, " Nodes={}", compress(&texts(&switch.nodes)));
        }
        if let Some(speed) =
            switch.link_speed.as_ref().filter(|speed| speed.bytes().all(|b| b.is_ascii_digit()))
        {
            let _ = write!(text, " LinkSpeed={speed}");
        }
        text.push('\n');
    }
    text
}
