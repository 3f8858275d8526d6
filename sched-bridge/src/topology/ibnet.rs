//! Output of `ibnetdiscover` (infiniband-diags), old and new: with and without port GUIDs, LIDs and speeds.

use std::collections::{BTreeMap, HashMap};

use super::TopologyError;
use super::fabric::{Fabric, Imported};
use crate::ids::NodeName;

const EXPECTED: &str = "a line of ibnetdiscover: `Switch 36 \"S-…\" # …`, `Ca 2 \"H-…\" # \"host HCA-1\"`, \
                        `[1] \"H-…\"[1](…) # \"host HCA-1\" lid 67 4xEDR`, or KEY=VALUE";

/// A switch or an adapter that the lines after it describe.
struct Record {
    id: String,
    switch: bool,
}

/// Reads the output of `ibnetdiscover`. The name of a host is the first word of the description of its adapters.
///
/// # Errors
/// A line that `ibnetdiscover` does not write, with its number; a port before any switch or adapter.
pub fn read(text: &str) -> Result<Imported, TopologyError> {
    let mut current: Option<Record> = None;
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut links: Vec<(String, String)> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let (number, line) = (at + 1, line.trim());
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = || TopologyError::syntax(number, format!("{line:?} is not understood"), EXPECTED);
        if let Some(rest) = line.strip_prefix('[') {
            let record = current.as_ref().ok_or_else(|| {
                TopologyError::syntax(
                    number,
                    "a port before any switch or adapter",
                    "a line `Switch …` or `Ca …` before it",
                )
            })?;
            let (peer, description) = port(rest).ok_or_else(bad)?;
            describe(&mut names, &peer, description);
            links.push((record.id.clone(), peer));
        } else if let Some(kind) = ["Switch", "Ca", "Rt"].iter().find(|kind| heads(line, kind)) {
            let (id, rest) = quoted(line).ok_or_else(bad)?;
            describe(
                &mut names,
                id,
                rest.split_once('#').and_then(|(_, comment)| quoted(comment)).map(|(text, _)| text),
            );
            current = Some(Record { id: id.to_owned(), switch: *kind == "Switch" });
            if let Some(record) = current.as_ref().filter(|record| record.switch) {
                names.entry(record.id.clone()).or_default();
            }
        } else if !(heads(line, "Chassis") || line.starts_with("Non-Chassis") || is_pair(line)) {
            return Err(bad());
        }
    }
    build(&names, links)
}

fn heads(line: &str, kind: &str) -> bool {
    line.strip_prefix(kind).is_some_and(|rest| rest.starts_with(char::is_whitespace))
}

fn is_pair(line: &str) -> bool {
    line.split_once('=').is_some_and(|(key, _)| {
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    })
}

/// The first text in quotes, and what follows.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once('"')?;
    let (inside, rest) = rest.split_once('"')?;
    (!inside.is_empty()).then_some((inside, rest))
}

/// `1](guid) "H-…"[1](guid) # "host HCA-1" lid 67 4xEDR`, without the first bracket.
fn port(rest: &str) -> Option<(String, Option<&str>)> {
    let (number, rest) = rest.split_once(']')?;
    let own: bool = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    let (before, comment) =
        rest.split_once('#').map_or((rest, None), |(before, comment)| (before, Some(comment)));
    let (peer, after) = quoted(before)?;
    let after = after.trim_start().strip_prefix('[')?;
    let (peer_port, _) = after.split_once(']')?;
    let valid = own && peer_port.bytes().all(|b| b.is_ascii_digit());
    let description = comment.and_then(quoted).map(|(text, _)| text);
    valid.then(|| (peer.to_owned(), description))
}

/// Remembers a name: that of a host is the first word; a managed switch is described as `MF0;NAME:MODEL/U1`.
fn describe(names: &mut BTreeMap<String, String>, id: &str, description: Option<&str>) {
    let Some(description) = description else { return };
    let name = if id.starts_with('S') {
        description.split_once(';').and_then(|(_, rest)| rest.split_once(':')).map_or("", |(name, _)| name)
    } else {
        description.split_whitespace().next().unwrap_or("")
    };
    if !name.is_empty() {
        names.insert(id.to_owned(), name.trim_matches('\'').to_owned());
    }
}

fn build(names: &BTreeMap<String, String>, links: Vec<(String, String)>) -> Result<Imported, TopologyError> {
    let is_switch = |id: &str| id.starts_with('S');
    let mut fabric = Fabric::default();
    let mut uses: HashMap<&str, u32> = HashMap::new();
    for (id, name) in names {
        if is_switch(id) {
            *uses.entry(name).or_default() += 1;
        }
    }
    let switch_name = |id: &str| -> String {
        match names.get(id) {
            Some(name) if !name.is_empty() && uses.get(name.as_str()) == Some(&1) => name.clone(),
            _ => id.to_owned(),
        }
    };
    for id in names.keys().filter(|id| is_switch(id)) {
        fabric.switch(&switch_name(id));
    }
    for (a, b) in links {
        match (is_switch(&a), is_switch(&b)) {
            (true, true) => fabric.link(&switch_name(&a), &switch_name(&b)),
            (false, false) => {}
            (on_a, _) => {
                let (switch, adapter) = if on_a { (&a, &b) } else { (&b, &a) };
                let host = names.get(adapter).unwrap_or(adapter);
                // Aggregation nodes of switches (SHARP) look like hosts.
                if host == "Mellanox" && names.contains_key(adapter) {
                    continue;
                }
                let host = super::names::valid(NodeName::new(host), 0)?;
                fabric.host(&switch_name(switch), host, adapter);
            }
        }
    }
    fabric.tree()
}
