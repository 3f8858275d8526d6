//! What the XML of a domain says.

use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};

use crate::{QEMU_NAMESPACE, SOCKETS};

/// Why a domain's XML cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// It is no XML.
    #[error("Expected the XML of a libvirt domain, found something else")]
    NotXml(#[from] roxmltree::Error),
    /// A part that every domain has.
    #[error("Expected the XML of a libvirt domain, found none with <{0}>")]
    Lacks(&'static str),
    /// It cannot be moved.
    #[error("Domain {domain} cannot be moved with vmove: {}", why.join("; "))]
    NotMovable {
        /// Its name.
        domain: String,
        /// All reasons.
        why: Vec<String>,
    },
    /// It was copied from another one that is enabled.
    #[error(
        "Domain {domain} names the monitor of another domain ({}), as a copy of that does (virt-clone, virsh dumpxml and define): \
         `vmove libvirt enable {domain}` gives it its own, from its next start on",
        path.display()
    )]
    Copied {
        /// Its name.
        domain: String,
        /// The socket.
        path: PathBuf,
    },
    /// Nothing to take away.
    #[error("Domain {0} is not enabled for vmove: nothing is to be undone")]
    NotEnabled(String),
}

/// Where the memory of a domain is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// In files, as vmove needs it.
    File,
    /// Elsewhere: `memfd`, `anonymous`, or what libvirt does by default.
    Other(String),
}

/// A domain.
#[derive(Debug, Clone)]
pub struct Domain {
    xml: String,
    name: String,
    uuid: String,
    monitor: Option<PathBuf>,
}

impl Domain {
    /// Reads the XML that `virsh dumpxml` prints, or that a hook gets.
    ///
    /// # Errors
    /// [`DomainError::NotXml`], [`DomainError::Lacks`].
    pub fn read(xml: &str) -> Result<Self, DomainError> {
        let document = Document::parse(xml)?;
        let root = root(&document)?;
        let text = |name: &'static str| {
            let found = child(root, name).and_then(|node| node.text());
            found.map(|text| text.trim().to_owned()).ok_or(DomainError::Lacks(name))
        };
        let (name, uuid) = (text("name")?, text("uuid")?);
        Ok(Self { monitor: monitor(root), xml: xml.to_owned(), name, uuid })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its UUID.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Its XML.
    #[must_use]
    pub fn xml(&self) -> &str {
        &self.xml
    }

    /// The socket of its monitor for vmove, if it is enabled.
    #[must_use]
    pub fn monitor(&self) -> Option<&Path> {
        self.monitor.as_deref()
    }

    /// The same, of a domain that is about to be started or moved.
    ///
    /// # Errors
    /// [`DomainError::Copied`]: the socket is that of another domain.
    pub fn own_monitor(&self) -> Result<Option<&Path>, DomainError> {
        let Some(path) = self.monitor() else { return Ok(None) };
        // As it is named now, and as it was at first.
        let names = [format!("libvirt-{}.qmp", self.uuid), format!("{}.qmp", self.uuid)];
        let is_own = path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| names.contains(&name.to_owned()));
        if is_own {
            return Ok(Some(path));
        }
        Err(DomainError::Copied { domain: self.name.clone(), path: path.to_owned() })
    }

    /// Whether vmove moves it.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.monitor.is_some()
    }

    /// Where its memory is.
    ///
    /// # Errors
    /// [`DomainError::NotXml`].
    pub fn source(&self) -> Result<Source, DomainError> {
        let document = Document::parse(&self.xml)?;
        let backing = root(&document).ok().and_then(|root| child(root, "memoryBacking"));
        let kind = backing.and_then(|backing| child(backing, "source")).and_then(|s| s.attribute("type"));
        Ok(match kind {
            Some("file") => Source::File,
            other => Source::Other(other.unwrap_or("anonymous").to_owned()),
        })
    }

    /// All that keeps its guest from ever being moved with vmove.
    ///
    /// # Errors
    /// [`DomainError::NotXml`].
    pub fn obstacles(&self) -> Result<Vec<String>, DomainError> {
        let document = Document::parse(&self.xml)?;
        let root = root(&document)?;
        let mut found = Vec::new();
        if let Some(devices) = child(root, "devices") {
            let has = |name: &str, attribute: &str, values: &[&str]| {
                let fits = |node: &Node<'_, '_>| {
                    node.has_tag_name(name) && node.attribute(attribute).is_some_and(|v| values.contains(&v))
                };
                devices.children().any(|node| fits(&node))
            };
            if devices.children().any(|node| node.has_tag_name("hostdev"))
                || has("interface", "type", &["hostdev"])
            {
                found.push(
                    "a device of the host is passed through (<hostdev>), which writes guest memory unseen"
                        .to_owned(),
                );
            }
            if has("interface", "type", &["vhostuser", "vdpa"])
                || has("disk", "type", &["vhostuser", "vhostvdpa"])
                || devices.children().any(|n| {
                    n.has_tag_name("filesystem")
                        && child(n, "driver").and_then(|d| d.attribute("type")) == Some("virtiofs")
                })
            {
                found.push(
                    "a program beside QEMU writes guest memory (vhost-user, vDPA or virtiofs)".to_owned(),
                );
            }
            if devices.children().any(|node| node.has_tag_name("shmem")) {
                found.push("memory is shared with others (<shmem>)".to_owned());
            }
        }
        let backing = |name: &str| child(root, "memoryBacking").is_some_and(|b| child(b, name).is_some());
        if backing("locked") {
            found.push("its memory is locked (<locked/>)".to_owned());
        }
        if backing("hugepages") {
            found.push(
                "for <hugepages/> libvirt has QEMU make memory files without a name, which end with QEMU: on all hosts put \
                 memory_backing_dir of /etc/libvirt/qemu.conf on a hugetlbfs mount, and take <hugepages/> out of the domain"
                    .to_owned(),
            );
        }
        Ok(found)
    }
}

pub(crate) fn root<'a, 'input>(document: &'a Document<'input>) -> Result<Node<'a, 'input>, DomainError> {
    Some(document.root_element())
        .filter(|root| root.has_tag_name("domain"))
        .ok_or(DomainError::Lacks("domain"))
}

pub(crate) fn child<'a, 'input>(of: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    of.children().find(|node| node.is_element() && node.tag_name().name() == name)
}

/// QEMU's own arguments, and the elements that give them.
pub(crate) fn arguments<'a, 'input>(root: Node<'a, 'input>) -> Vec<(Node<'a, 'input>, &'a str)> {
    let line = root.children().find(|node| node.has_tag_name((QEMU_NAMESPACE, "commandline")));
    let all = line.into_iter().flat_map(|line| line.children());
    all.filter(|node| node.has_tag_name((QEMU_NAMESPACE, "arg")))
        .filter_map(|node| Some((node, node.attribute("value")?)))
        .collect()
}

/// Whether this is the value of `-qmp` for vmove; the socket in it.
pub(crate) fn socket_of(value: &str) -> Option<PathBuf> {
    let path = value.strip_prefix("unix:")?.split(',').next()?;
    let path = Path::new(path);
    (path.parent() == Some(Path::new(SOCKETS))).then(|| path.to_owned())
}

fn monitor(root: Node<'_, '_>) -> Option<PathBuf> {
    let all = arguments(root);
    all.windows(2).find_map(|pair| (pair[0].1 == "-qmp").then(|| socket_of(pair[1].1)).flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(inside: &str) -> Domain {
        Domain::read(&format!("<domain type='kvm'><name>web</name><uuid>u</uuid>{inside}</domain>")).unwrap()
    }

    #[test]
    fn memory_is_where_the_xml_says() {
        assert_eq!(of("").source().unwrap(), Source::Other("anonymous".to_owned()));
        let memfd = of("<memoryBacking><source type='memfd'/></memoryBacking>");
        assert_eq!(memfd.source().unwrap(), Source::Other("memfd".to_owned()));
        let file = of("<memoryBacking><source type='file'/></memoryBacking>");
        assert_eq!(file.source().unwrap(), Source::File);
    }

    #[test]
    fn all_obstacles_are_named_at_once() {
        let inside = "<memoryBacking><locked/><hugepages/></memoryBacking><devices><hostdev mode='subsystem'/><interface type='vhostuser'/><shmem name='x'/></devices>";
        assert_eq!(of(inside).obstacles().unwrap().len(), 5);
        assert_eq!(
            of("<devices><interface type='bridge'/></devices>").obstacles().unwrap(),
            Vec::<String>::new()
        );
    }

    #[test]
    fn what_is_no_domain_is_refused() {
        assert!(matches!(Domain::read("no xml"), Err(DomainError::NotXml(_))));
        assert!(matches!(
            Domain::read("<network><name>n</name></network>"),
            Err(DomainError::Lacks("domain"))
        ));
        assert!(matches!(Domain::read("<domain><name>n</name></domain>"), Err(DomainError::Lacks("uuid"))));
    }

    #[test]
    fn another_monitor_does_not_enable() {
        let line = |value: &str| {
            format!(
                "<qemu:commandline xmlns:qemu='{QEMU_NAMESPACE}'><qemu:arg value='-qmp'/><qemu:arg value='{value}'/></qemu:commandline>"
            )
        };
        assert!(!of(&line("unix:/tmp/x.qmp,server=on")).is_enabled());
        let socket = format!("{SOCKETS}/web.qmp");
        let enabled = of(&line(&format!("unix:{socket},server=on,wait=off")));
        assert_eq!(enabled.monitor(), Some(Path::new(&socket)));
        assert!(matches!(enabled.own_monitor(), Err(DomainError::Copied { .. })));
        for own in ["u.qmp", "libvirt-u.qmp"] {
            let enabled = of(&line(&format!("unix:{SOCKETS}/{own},server=on,wait=off")));
            assert_eq!(enabled.own_monitor().unwrap(), Some(Path::new(SOCKETS).join(own).as_path()));
        }
        assert_eq!(of("").own_monitor().unwrap(), None);
    }
}
