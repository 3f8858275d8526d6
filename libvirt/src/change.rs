//! The changes that enable a domain, and their undoing.
//!
//! Everything else in the XML stays as it is, to the byte. What was replaced is noted in an attribute of an element of ours in `<metadata>`, which libvirt
//! keeps, so that it can be put back.

use std::ops::Range;
use std::path::Path;

use roxmltree::{Document, Node};

use crate::domain::{Domain, DomainError, arguments, child, root, socket_of};
use crate::{QEMU_NAMESPACE, SOCKETS};

/// Of our element in `<metadata>`.
const NAMESPACE: &str = "https://vmove.example/libvirt/1";
/// What is noted of an element that was not there.
const NONE: &str = "none";

/// Pieces of the text that are replaced.
#[derive(Debug, Default)]
struct Edits(Vec<(Range<usize>, String)>);

impl Edits {
    fn replace(&mut self, range: Range<usize>, by: impl Into<String>) {
        self.0.push((range, by.into()));
    }

    fn made(mut self, xml: &str) -> String {
        let mut out = xml.to_owned();
        // From the end, so that the places before stay. Of two at one place the first comes first.
        self.0.sort_by_key(|(range, _)| range.start);
        for (range, by) in self.0.into_iter().rev() {
            out.replace_range(range, &by);
        }
        out
    }
}

impl Domain {
    /// Its XML with what vmove needs. Of a domain that is enabled nothing changes.
    ///
    /// # Errors
    /// [`DomainError::NotMovable`].
    pub fn enabled(&self) -> Result<String, DomainError> {
        let why = self.obstacles()?;
        if !why.is_empty() {
            return Err(DomainError::NotMovable { domain: self.name().to_owned(), why });
        }
        if let Some(monitor) = self.monitor() {
            return self.with_own_monitor(monitor);
        }
        let document = Document::parse(self.xml())?;
        let root = root(&document)?;
        let mut edits = Edits::default();
        let noted = memory(root, self.xml(), &mut edits);
        note(root, self.xml(), &noted, &mut edits);
        monitor(root, self.xml(), self.uuid(), &mut edits);
        Ok(edits.made(self.xml()))
    }

    /// Its XML with the monitor named after itself, which is another one in a copy of an enabled domain, and in one that was enabled long ago.
    fn with_own_monitor(&self, now: &Path) -> Result<String, DomainError> {
        let document = Document::parse(self.xml())?;
        let mut edits = Edits::default();
        for (node, _) in arguments(root(&document)?)
            .into_iter()
            .filter(|(_, value)| socket_of(value).is_some_and(|socket| socket == now))
        {
            let text = &self.xml()[node.range()];
            edits.replace(node.range(), text.replace(&*now.to_string_lossy(), &socket(self.uuid())));
        }
        Ok(edits.made(self.xml()))
    }

    /// Its XML without it.
    ///
    /// # Errors
    /// [`DomainError::NotEnabled`].
    pub fn disabled(&self) -> Result<String, DomainError> {
        if !self.is_enabled() {
            return Err(DomainError::NotEnabled(self.name().to_owned()));
        }
        let document = Document::parse(self.xml())?;
        let root = root(&document)?;
        let mut edits = Edits::default();
        let ours = child(root, "metadata")
            .and_then(|all| all.children().find(|node| node.has_tag_name((NAMESPACE, "enabled"))));
        if let Some(ours) = ours {
            put_memory_back(root, ours, self.xml(), &mut edits);
            let metadata =
                ours.parent().filter(|parent| parent.children().filter(Node::is_element).count() == 1);
            edits.replace(with_line(self.xml(), metadata.unwrap_or(ours).range()), "");
        }
        let all = arguments(root);
        for pair in all.windows(2).filter(|pair| pair[0].1 == "-qmp" && socket_of(pair[1].1).is_some()) {
            if all.len() == 2
                && let Some(line) = pair[0].0.parent()
            {
                edits.replace(with_line(self.xml(), line.range()), "");
            } else {
                pair.iter().for_each(|(node, _)| edits.replace(with_line(self.xml(), node.range()), ""));
            }
        }
        Ok(edits.made(self.xml()))
    }
}

/// Guest memory in shared files. Returns what was there, as (attribute, value).
fn memory(root: Node<'_, '_>, xml: &str, edits: &mut Edits) -> Vec<(&'static str, String)> {
    let wanted = [("source", "type", "file"), ("access", "mode", "shared")];
    let mut noted = Vec::new();
    let Some(backing) = child(root, "memoryBacking") else {
        let inside: String = wanted
            .iter()
            .map(|(name, attribute, value)| format!("    <{name} {attribute}='{value}'/>\n"))
            .collect();
        insert(root, xml, &format!("  <memoryBacking>\n{inside}  </memoryBacking>\n"), edits);
        return vec![("backing", NONE.to_owned())];
    };
    let mut missing = String::new();
    for (name, attribute, value) in wanted {
        match child(backing, name) {
            Some(node) if node.attribute(attribute) == Some(value) => {}
            Some(node) => {
                noted.push((name, node.attribute(attribute).unwrap_or_default().to_owned()));
                edits.replace(node.range(), format!("<{name} {attribute}='{value}'/>"));
            }
            None => {
                noted.push((name, NONE.to_owned()));
                missing.push_str(&format!("    <{name} {attribute}='{value}'/>\n"));
            }
        }
    }
    if !missing.is_empty() {
        let text = &xml[backing.range()];
        if text.ends_with("/>") {
            let open = text.trim_end_matches("/>").to_owned();
            edits.replace(backing.range(), format!("{open}>\n{missing}  </memoryBacking>"));
        } else {
            let end = backing.range().end - "</memoryBacking>".len();
            edits.replace(line_start(xml, end)..line_start(xml, end), missing);
        }
    }
    noted
}

fn put_memory_back(root: Node<'_, '_>, ours: Node<'_, '_>, xml: &str, edits: &mut Edits) {
    let Some(backing) = child(root, "memoryBacking") else { return };
    if ours.attribute("backing") == Some(NONE) {
        return edits.replace(with_line(xml, backing.range()), "");
    }
    for (name, attribute) in [("source", "type"), ("access", "mode")] {
        let (Some(was), Some(node)) = (ours.attribute(name), child(backing, name)) else { continue };
        if was == NONE {
            edits.replace(with_line(xml, node.range()), "");
        } else {
            edits.replace(node.range(), format!("<{name} {attribute}='{was}'/>"));
        }
    }
}

fn note(root: Node<'_, '_>, xml: &str, noted: &[(&'static str, String)], edits: &mut Edits) {
    let attributes: String = noted.iter().map(|(name, was)| format!(" {name}='{was}'")).collect();
    let ours = format!("    <vmove:enabled xmlns:vmove='{NAMESPACE}'{attributes}/>\n");
    match child(root, "metadata") {
        Some(metadata) if !xml[metadata.range()].ends_with("/>") => {
            let end = line_start(xml, metadata.range().end - "</metadata>".len());
            edits.replace(end..end, ours);
        }
        Some(metadata) => edits.replace(metadata.range(), format!("<metadata>\n{ours}  </metadata>")),
        None => insert(root, xml, &format!("  <metadata>\n{ours}  </metadata>\n"), edits),
    }
}

/// The monitor. Named as libvirt's profile of AppArmor is, by the UUID: one rule then allows each QEMU its own and no other. A name may also be too long for a
/// socket, and hold what QEMU takes for another option.
fn monitor(root: Node<'_, '_>, xml: &str, uuid: &str, edits: &mut Edits) {
    let values = ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", socket(uuid))];
    let line = root.children().find(|node| node.has_tag_name((QEMU_NAMESPACE, "commandline")));
    if let Some(line) = line.filter(|line| !xml[line.range()].ends_with("/>")) {
        let text = &xml[line.range()];
        let prefix = text[1..].split(':').next().filter(|_| text.starts_with('<')).unwrap_or("qemu");
        let more: String =
            values.iter().map(|value| format!("    <{prefix}:arg value='{value}'/>\n")).collect();
        let end = xml[..line.range().end].rfind("</").unwrap_or(line.range().end);
        edits.replace(line_start(xml, end)..line_start(xml, end), more);
        return;
    }
    let more: String = values.iter().map(|value| format!("    <qemu:arg value='{value}'/>\n")).collect();
    let element =
        format!("  <qemu:commandline xmlns:qemu='{QEMU_NAMESPACE}'>\n{more}  </qemu:commandline>\n");
    let end = line_start(xml, root.range().end - "</domain>".len());
    edits.replace(end..end, element);
}

fn socket(uuid: &str) -> String {
    format!("{SOCKETS}/libvirt-{uuid}.qmp")
}

/// After `<uuid>`, on a line of its own. libvirt takes elements in any order.
fn insert(root: Node<'_, '_>, xml: &str, text: &str, edits: &mut Edits) {
    let after = child(root, "uuid").map_or(root.range().end, |uuid| uuid.range().end);
    let rest = &xml[after..];
    let newline = rest.len() - rest.trim_start_matches([' ', '\t', '\r']).len();
    if rest[newline..].starts_with('\n') {
        let at = after + newline + 1;
        edits.replace(at..at, text);
    } else {
        edits.replace(after..after, format!("\n{text}"));
    }
}

/// Where the line of this place begins, if there is nothing but blanks before; otherwise the place itself.
fn line_start(xml: &str, at: usize) -> usize {
    let before = xml[..at].trim_end_matches([' ', '\t']);
    if before.ends_with('\n') { before.len() } else { at }
}

/// The range, and its line if there is nothing else on it.
fn with_line(xml: &str, range: Range<usize>) -> Range<usize> {
    let start = line_start(xml, range.start);
    let rest = xml[range.end..].trim_start_matches([' ', '\t']);
    if start < range.start && rest.starts_with('\n') { start..xml.len() - rest.len() + 1 } else { range }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;

    fn there_and_back(xml: &str) -> Domain {
        let before = Domain::read(xml).unwrap();
        let enabled = Domain::read(&before.enabled().unwrap()).unwrap();
        assert!(enabled.is_enabled(), "{}", enabled.xml());
        assert_eq!(enabled.source().unwrap(), Source::File);
        assert_eq!(enabled.enabled().unwrap(), enabled.xml(), "a second time changes nothing");
        assert_eq!(enabled.disabled().unwrap(), xml);
        enabled
    }

    const PLAIN: &str = "<domain type='kvm'>\n  <name>web</name>\n  <uuid>u-1</uuid>\n  <memory>1</memory>\n  <devices>\n  </devices>\n</domain>\n";

    #[test]
    fn what_enables_is_undone_to_the_byte() {
        let enabled = there_and_back(PLAIN);
        assert!(enabled.xml().contains("<access mode='shared'/>"));
        assert_eq!(enabled.monitor().unwrap().to_str(), Some("/run/libvirt/vmove/libvirt-u-1.qmp"));
    }

    #[test]
    fn a_copy_gets_a_monitor_of_its_own() {
        let enabled = there_and_back(PLAIN);
        for of in ["u-2", "other-than-both"] {
            let copy = Domain::read(&enabled.xml().replace("<uuid>u-1<", &format!("<uuid>{of}<"))).unwrap();
            let error = copy.own_monitor().unwrap_err().to_string();
            assert!(
                error.contains("libvirt-u-1.qmp") && error.contains("vmove libvirt enable web"),
                "{error}"
            );
            let mended = Domain::read(&copy.enabled().unwrap()).unwrap();
            assert!(mended.own_monitor().unwrap().is_some(), "{}", mended.xml());
            assert_eq!(mended.disabled().unwrap(), PLAIN.replace("<uuid>u-1<", &format!("<uuid>{of}<")));
        }
        // As the first release of this named it.
        let older = enabled.xml().replace("libvirt-u-1.qmp", "u-1.qmp");
        assert_eq!(Domain::read(&older).unwrap().enabled().unwrap(), enabled.xml());
    }

    #[test]
    fn memory_that_was_elsewhere_is_put_back() {
        for inside in [
            "<source type='memfd'/>\n    <access mode='private'/>",
            "<source type='file'/>",
            "<nosharepages/>",
        ] {
            let backing = format!("  <memoryBacking>\n    {inside}\n  </memoryBacking>\n  <memory>");
            there_and_back(&PLAIN.replace("  <memory>", &backing));
        }
    }

    #[test]
    fn other_metadata_and_arguments_stay() {
        let metadata = "  <metadata>\n    <x:y xmlns:x='urn:x'/>\n  </metadata>\n  <memory>";
        let line = format!(
            "  <qemu:commandline xmlns:qemu='{QEMU_NAMESPACE}'>\n    <qemu:arg value='-no-hpet'/>\n  </qemu:commandline>\n</domain>"
        );
        let xml = PLAIN.replace("  <memory>", metadata).replace("</domain>", &line);
        let enabled = there_and_back(&xml);
        assert!(enabled.xml().contains("-no-hpet") && enabled.xml().contains("urn:x"));
    }

    #[test]
    fn a_domain_of_one_line_can_be_enabled() {
        let xml = "<domain><name>n</name><uuid>u</uuid></domain>";
        let enabled = Domain::read(&Domain::read(xml).unwrap().enabled().unwrap()).unwrap();
        assert!(enabled.is_enabled());
        let disabled = Domain::read(&enabled.disabled().unwrap()).unwrap();
        assert!(!disabled.is_enabled() && disabled.source().unwrap() != Source::File);
    }

    #[test]
    fn what_cannot_move_is_not_enabled() {
        let xml = PLAIN.replace("<devices>", "<devices><hostdev/>");
        let error = Domain::read(&xml).unwrap().enabled().unwrap_err();
        assert!(error.to_string().contains("<hostdev>"), "{error}");
        assert!(matches!(Domain::read(PLAIN).unwrap().disabled(), Err(DomainError::NotEnabled(_))));
    }
}
