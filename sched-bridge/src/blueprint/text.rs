//! Blueprints as YAML and XML.
//!
//! ```xml
//! <blueprint name="pipeline">
//!   <environment name="solver" kind="vm" count="8"><request>m1.large; xpus=1</request><artifact>image</artifact>
//!     <argument>qemu-system-x86_64</argument><argument>-drive</argument><argument>file={artifact:image}</argument></environment>
//!   <artifact name="image" source="/shared/solver.qcow2"/>
//!   <connection from="solver" to="viewer" network="private"/>
//! </blueprint>
//! ```

use quick_xml::Reader;
use quick_xml::events::Event;
use serde::Deserialize;
use vmove_types::typo;

use crate::model::NodeName;
use crate::unreadable::{Unreadable, place};

use super::{Artifact, Blueprint, BlueprintError, Connection, Environment, Kind, NetworkMode, one};

const EXPECTED: &str = "a blueprint: name, environments (name, kind, count, request, adapter, artifacts, command), artifacts (name, source), connections (from, to, network)";

/// Language of a blueprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// YAML.
    Yaml,
    /// XML.
    Xml,
}

impl Language {
    /// By the first character: `<` is XML.
    #[must_use]
    pub fn guess(text: &str) -> Self {
        if text.trim_start().starts_with('<') { Self::Xml } else { Self::Yaml }
    }
}

/// Reads a blueprint. Names are checked by [`super::decompose`].
///
/// # Errors
/// Text that is not a blueprint, with its line.
pub fn read(text: &str, language: Language) -> Result<Blueprint, BlueprintError> {
    match language {
        Language::Yaml => {
            serde_yaml_ng::from_str(text).map_err(|error| Unreadable::yaml(&error, EXPECTED).into())
        }
        Language::Xml => {
            well_formed(text)?;
            let mut xml = quick_xml::de::Deserializer::from_str(text);
            let blueprint = XmlBlueprint::deserialize(&mut xml).map_err(|error| {
                let reason = error.to_string();
                let read = offset(text, xml.get_ref().get_ref().buffer_position());
                let at = place(text, begin(text, read, &reason)).map(|(line, _)| (line, 0));
                BlueprintError::from(Unreadable::new(at, &reason, EXPECTED))
            })?;
            Ok(blueprint.into())
        }
    }
}

impl From<Unreadable> for BlueprintError {
    fn from(wrong: Unreadable) -> Self {
        Self::Syntax { place: wrong.place(), reason: wrong.reason, expected: wrong.expected }
    }
}

/// The byte of a text at which a reader is.
fn offset(text: &str, position: u64) -> usize {
    usize::try_from(position).unwrap_or(usize::MAX).min(text.len())
}

/// Where the name is that a mistake is about: the deserializer has `read` a little more.
fn begin(text: &str, read: usize, reason: &str) -> usize {
    let Some(name) = typo::unknown(reason).map(|name| name.trim_start_matches('@')) else { return read };
    let before = text.get(..read).unwrap_or(text);
    let is_begin = |at: usize| before[..at].ends_with(|c: char| c.is_whitespace() || "<\"'".contains(c));
    before.rmatch_indices(name).map(|(at, _)| at).find(|at| is_begin(*at)).unwrap_or(read)
}

/// Whether it is well-formed. The deserializer does not say where an error is; the reader does.
fn well_formed(text: &str) -> Result<(), BlueprintError> {
    let mut reader = Reader::from_str(text);
    let mut depth = 0_u32;
    let bad = |position: u64, reason: String| {
        let at = place(text, offset(text, position)).map(|(line, _)| (line, 0));
        Err(Unreadable::new(at, &reason, EXPECTED).into())
    };
    loop {
        match reader.read_event() {
            Err(error) => return bad(reader.error_position(), error.to_string()),
            Ok(Event::Start(_)) if depth >= 64 => {
                return bad(reader.buffer_position(), "elements are nested too deep".to_owned());
            }
            Ok(Event::Start(_)) => depth += 1,
            Ok(Event::End(_)) => depth = depth.saturating_sub(1),
            Ok(Event::Eof) if depth > 0 => {
                return bad(reader.buffer_position(), "an element is not closed".to_owned());
            }
            Ok(Event::Eof) => return Ok(()),
            Ok(_) => {}
        }
    }
}

#[derive(Deserialize)]
#[serde(rename = "blueprint", deny_unknown_fields)]
struct XmlBlueprint {
    #[serde(rename = "@name")]
    name: String,
    #[serde(rename = "environment", default)]
    environments: Vec<XmlEnvironment>,
    #[serde(rename = "artifact", default)]
    artifacts: Vec<XmlArtifact>,
    #[serde(rename = "connection", default)]
    connections: Vec<XmlConnection>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlEnvironment {
    #[serde(rename = "@name")]
    name: String,
    #[serde(rename = "@kind")]
    kind: Kind,
    #[serde(rename = "@count", default = "one")]
    count: u32,
    #[serde(rename = "@adapter")]
    adapter: Option<String>,
    #[serde(rename = "@node")]
    node: Option<NodeName>,
    request: Option<String>,
    #[serde(rename = "artifact", default)]
    artifacts: Vec<String>,
    #[serde(rename = "argument", default)]
    command: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlArtifact {
    #[serde(rename = "@name")]
    name: String,
    #[serde(rename = "@source")]
    source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct XmlConnection {
    #[serde(rename = "@from")]
    from: String,
    #[serde(rename = "@to")]
    to: String,
    #[serde(rename = "@network", default)]
    network: NetworkMode,
}

impl From<XmlEnvironment> for Environment {
    fn from(xml: XmlEnvironment) -> Self {
        let XmlEnvironment { name, kind, count, adapter, node, request, artifacts, command } = xml;
        Self { name, kind, count, request, adapter, node, artifacts, command }
    }
}

impl From<XmlBlueprint> for Blueprint {
    fn from(xml: XmlBlueprint) -> Self {
        let artifact = |XmlArtifact { name, source }| Artifact { name, source };
        let connection = |XmlConnection { from, to, network }| Connection { from, to, network };
        Self {
            name: xml.name,
            environments: xml.environments.into_iter().map(Environment::from).collect(),
            artifacts: xml.artifacts.into_iter().map(artifact).collect(),
            connections: xml.connections.into_iter().map(connection).collect(),
        }
    }
}
