//! Deriving the destination's command line from the source's.

use std::{ffi::OsString, path::PathBuf};

use super::{CommandLine, CommandLineError, Item, Obstacle, RamFileSpec, RunLayout, options::Options};

/// A destination's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationCommand {
    /// Argument vector, the program first.
    pub argv: Vec<OsString>,
    /// RAM files; same ids and sizes as on the source.
    pub ram: Vec<RamFileSpec>,
    /// Sockets and files that both QEMUs name by the same absolute path: on one and the same host they would take them
    /// from each other.
    pub same_paths: Vec<PathBuf>,
    /// It locks its memory as it starts ([`CommandLine::locks_memory`]).
    pub locks_memory: bool,
}

/// Options that a destination must not have: how the source got its state, or how it was watched from its start.
const DROPPED: &[&str] = &["incoming", "loadvm", "S", "daemonize", "mem-prealloc"];

/// A process id file that both QEMUs would lock, if they are on one host.
fn is_fixed_pidfile(item: &Item) -> bool {
    let value = item.value().to_string_lossy();
    item.name() == "pidfile" && value.starts_with('/') && !value.contains("{vmdir}")
}

impl CommandLine {
    /// The command line of the QEMU that waits for this guest on another node. `self` is the original, with its
    /// placeholders.
    ///
    /// All RAM files are placed in the layout's memory directory. `prealloc` is switched off there: it would touch all
    /// memory before it has arrived.
    ///
    /// # Errors
    /// As [`CommandLine::rewrite_movable`]; also for descriptors that the source QEMU got from whoever started it.
    pub fn derive_destination(&self, layout: &RunLayout) -> Result<DestinationCommand, CommandLineError> {
        let mut line = self.clone();
        line.items.retain(|item| !DROPPED.contains(&item.name()) && !is_fixed_pidfile(item));
        line.drop_inherited_monitors()?;
        let mut obstacles = line.obstacles()?;
        obstacles.extend(line.inherited_descriptors()?);
        if !obstacles.is_empty() {
            return Err(CommandLineError::NotMovable(obstacles));
        }
        let same_paths = line.listening_paths()?;
        let ram = line.rewrite(layout, true)?;
        line.switch_off_prealloc()?;
        line.items.push(Item::new("-incoming", "defer"));
        line.items.push(Item::bare("-S"));
        let locks_memory = line.locks_memory()?;
        Ok(DestinationCommand { argv: line.to_argv(), ram, same_paths, locks_memory })
    }

    fn switch_off_prealloc(&mut self) -> Result<(), CommandLineError> {
        for item in self.items.iter_mut().filter(|item| item.name() == "object") {
            let mut options = item.options()?;
            let is_ram =
                options.get("qom-type", true).is_some_and(|kind| kind.starts_with("memory-backend-"));
            if is_ram && options.flag("prealloc") == Some(true) {
                options.set_flag("prealloc", false);
                item.set_options(&options);
            }
        }
        Ok(())
    }

    /// Removes monitors on descriptors that a launcher handed over: their other end is not ours to have.
    fn drop_inherited_monitors(&mut self) -> Result<(), CommandLineError> {
        let mut on_descriptor = Vec::new();
        for item in self.named("chardev") {
            let options = item.options()?;
            if options.get("fd", false).is_some() {
                on_descriptor.extend(options.get("id", false));
            }
        }
        let monitors: Vec<String> = self
            .named("mon")
            .filter_map(|item| item.options().ok()?.get("chardev", true))
            .filter(|id| on_descriptor.contains(id))
            .collect();
        self.items.retain(|item| {
            let refers = |key: &str, implied| {
                let id = item.options().ok().and_then(|options| options.get(key, implied));
                id.is_some_and(|id| monitors.contains(&id))
            };
            !match item.name() {
                "mon" => refers("chardev", true),
                "chardev" => refers("id", false),
                _ => false,
            }
        });
        Ok(())
    }

    fn inherited_descriptors(&self) -> Result<Vec<Obstacle>, CommandLineError> {
        const KEYS: [&str; 6] = ["fd", "fds", "vhostfd", "vhostfds", "sockfd", "execfd"];
        let mut found = Vec::new();
        for item in &self.items {
            let given = match item.name() {
                "add-fd" => true,
                "netdev" | "chardev" | "device" | "object" | "nic" | "net" | "vnc" | "spice" => {
                    let options = item.options()?;
                    KEYS.iter().any(|key| options.get(key, false).is_some())
                }
                _ => false,
            };
            if given || item.value().to_string_lossy().contains("/dev/fdset/") {
                let reason = "it uses a descriptor that QEMU got from its launcher";
                found.push(Obstacle::of(item, reason, "give a name or a path (ifname=, path=) instead"));
            }
        }
        Ok(found)
    }

    /// Absolute paths on which QEMU listens or writes, the same on every node.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn listening_paths(&self) -> Result<Vec<PathBuf>, CommandLineError> {
        let mut found = Vec::new();
        for item in &self.items {
            let path = listening_path(item)?;
            found.extend(path.filter(|path| path.is_absolute()));
        }
        Ok(found)
    }
}

/// The path on which QEMU listens or writes by this option.
pub(super) fn listening_path(item: &Item) -> Result<Option<PathBuf>, CommandLineError> {
    let path = match item.name() {
        "chardev" => {
            let options = item.options()?;
            let is_server = options.flag("server").unwrap_or(false);
            let is_file = options.get("backend", true).as_deref() == Some("file");
            options.get("path", false).filter(|_| is_server || is_file)
        }
        "qmp" | "qmp-pretty" | "monitor" | "serial" | "parallel" | "debugcon" => {
            let options = item.options()?;
            let first = match &options {
                Options::Pairs(pairs) => pairs.first(),
                Options::Json(_) => None,
            };
            first.and_then(|first| {
                let path = ["unix:", "file:", "pipe:"].iter().find_map(|kind| first.strip_prefix(kind));
                path.map(str::to_owned)
            })
        }
        "D" => Some(item.text()?.to_owned()),
        _ => None,
    };
    Ok(path.map(PathBuf::from))
}
