//! A control group (cgroup 2) for each VM, below the one that was delegated to the daemon.
//!
//! ```text
//! /system.slice/vmoved.service        delegated: no process is here, since groups below it have controllers
//! /system.slice/vmoved.service/vmoved the daemon, and what it starts beside QEMUs
//! /system.slice/vmoved.service/vm-web the QEMU of VM "web"
//! ```
//!
//! A group counts what its VM takes, by each controller that was delegated, and an operator may bound that by its files. vmove sets no bound. A
//! group outlives the daemon with its QEMU, and is removed when no QEMU is in it any more.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

/// The daemon's own group.
const LEAF: &str = "vmoved";
/// Before the name of a VM.
const PREFIX: &str = "vm-";
/// A group that was made for a QEMU is not removed so soon, though no QEMU is in it yet.
const STARTS_WITHIN: Duration = Duration::from_secs(120);

/// `[control-groups]` of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct GroupPolicy {
    /// Whether VMs get groups where the host allows it.
    pub enabled: bool,
}

impl Default for GroupPolicy {
    fn default() -> Self {
        Self { enabled: true }
    }
}

/// Why VMs get no groups.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupsError {
    /// It is configured so.
    #[error("enabled = false in [control-groups]")]
    Off,
    /// The host has no cgroup 2.
    #[error("no cgroup 2 is mounted")]
    NotMounted,
    /// Nothing was delegated.
    #[error("vmoved is in the root group: nothing is delegated to it")]
    NotDelegated,
    /// Where systemd puts the daemon, it must be able to put the next one.
    #[error(
        "vmoved is in {0}, which belongs to systemd: groups below it would keep the next vmoved from being started there. The unit needs \
         Delegate=memory and DelegateSubgroup={LEAF} (systemd 254)"
    )]
    NoSubgroup(PathBuf),
    /// A file of the file system of groups.
    #[error("could not use {path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// The groups of a node's VMs.
#[derive(Debug)]
pub struct ControlGroups {
    /// The group below which they are, if there are any.
    root: Option<PathBuf>,
    /// Controllers that count in each of them.
    controllers: String,
    /// Groups whose QEMUs are about to start.
    made: Mutex<HashMap<String, Instant>>,
}

/// Where the daemon stands among groups, as paths of the file system.
#[derive(Debug, PartialEq, Eq)]
enum Stand {
    /// It is in the leaf of this group already.
    InLeaf(PathBuf),
    /// The group is the daemon's own, and it is to move to a leaf.
    InRoot(PathBuf),
}

impl ControlGroups {
    /// VMs get no groups.
    #[must_use]
    pub fn none() -> Arc<Self> {
        Arc::new(Self { root: None, controllers: String::new(), made: Mutex::default() })
    }

    /// Takes the group that was delegated to this process, which moves to a leaf of it. Call this before other processes are started.
    ///
    /// # Errors
    /// [`GroupsError`]: why there are none.
    pub fn take(policy: &GroupPolicy) -> Result<Arc<Self>, GroupsError> {
        if !policy.enabled {
            return Err(GroupsError::Off);
        }
        let read = |path: &str| std::fs::read_to_string(path).map_err(io(Path::new(path)));
        let (mounts, own) = (read("/proc/self/mountinfo")?, read("/proc/self/cgroup")?);
        let (root, leaf) = match stand(&mounts, &own)? {
            Stand::InLeaf(root) => (root, None),
            Stand::InRoot(root) => {
                let leaf = root.join(LEAF);
                make_dir(&leaf)?;
                write(&leaf.join("cgroup.procs"), "0")?;
                (root, Some(leaf))
            }
        };
        match count_below(&root) {
            Ok(controllers) => Ok(Arc::new(Self { root: Some(root), controllers, made: Mutex::default() })),
            Err(error) => {
                // Another process is in the group, say: then we stay where we were.
                if let Some(leaf) = leaf {
                    write(&root.join("cgroup.procs"), "0")?;
                    let _ = std::fs::remove_dir(leaf);
                }
                Err(error)
            }
        }
    }

    /// The group below which those of VMs are, if there are any.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// Controllers that count what each VM takes, with spaces between them.
    #[must_use]
    pub fn controllers(&self) -> &str {
        &self.controllers
    }

    /// The group of a VM, if it has one.
    #[must_use]
    pub fn of(&self, vm: &str) -> Option<PathBuf> {
        self.path(vm).filter(|dir| dir.exists())
    }

    /// Makes the group of a VM whose QEMU is about to start. Nothing if there are no groups, or this one cannot be made: then QEMU starts where the
    /// daemon is.
    #[must_use]
    pub fn make(&self, vm: &str) -> Option<PathBuf> {
        let dir = self.path(vm)?;
        self.lock().insert(vm.to_owned(), Instant::now());
        // Of an earlier VM of this name: its counters and bounds are not this one's.
        let _ = std::fs::remove_dir(&dir);
        match make_dir(&dir) {
            Ok(()) => Some(dir),
            Err(error) => {
                let error = vmove_types::problem::chain(&error);
                tracing::warn!(vm, error, "this VM gets no control group");
                None
            }
        }
    }

    /// Removes groups in which nobody is any more.
    pub fn sweep(&self) {
        let Some(root) = &self.root else { return };
        self.lock().retain(|_, made| made.elapsed() < STARTS_WITHIN);
        let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
        for dir in entries.map(|entry| entry.path()) {
            let Some(vm) = dir.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix(PREFIX))
            else {
                continue;
            };
            if is_populated(&dir) {
                self.lock().remove(vm);
                continue;
            }
            let starts = self.lock().contains_key(vm);
            // Somebody may have moved in just now: then it cannot be removed.
            if !starts && let Err(error) = std::fs::remove_dir(&dir) {
                tracing::debug!(dir = %dir.display(), %error, "a control group stays");
            }
        }
    }

    fn path(&self, vm: &str) -> Option<PathBuf> {
        self.root.as_ref().map(|root| root.join(format!("{PREFIX}{vm}")))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has each controller of a group count in the groups below it. Gives their names.
fn count_below(root: &Path) -> Result<String, GroupsError> {
    let path = root.join("cgroup.controllers");
    let names = std::fs::read_to_string(&path).map_err(io(&path))?;
    let names: Vec<&str> = names.split_whitespace().collect();
    for name in &names {
        write(&root.join("cgroup.subtree_control"), &format!("+{name}"))?;
    }
    Ok(names.join(" "))
}

/// Finds the daemon's group in `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn stand(mounts: &str, own: &str) -> Result<Stand, GroupsError> {
    let (top, mount) = mounts.lines().find_map(mount_of).ok_or(GroupsError::NotMounted)?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).ok_or(GroupsError::NotMounted)?;
    // Of a group above the mount nothing can be seen.
    let below = Path::new(own).strip_prefix(top).map_err(|_| GroupsError::NotDelegated)?;
    let dir = Path::new(mount).join(below);
    let Some(name) = below.file_name().and_then(OsStr::to_str) else { return Err(GroupsError::NotDelegated) };
    let is_root = below.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    if name == LEAF && !is_root {
        return Ok(Stand::InLeaf(dir.parent().unwrap_or(&dir).to_owned()));
    }
    if [".service", ".scope", ".slice"].iter().any(|kind| name.ends_with(kind)) {
        return Err(GroupsError::NoSubgroup(own.into()));
    }
    Ok(Stand::InRoot(dir))
}

/// Which group a cgroup 2 mount shows, and where.
fn mount_of(line: &str) -> Option<(&str, &str)> {
    let (before, after) = line.split_once(" - ")?;
    let mut words = before.split(' ').skip(3);
    let found = (words.next()?, words.next()?);
    after.starts_with("cgroup2 ").then_some(found)
}

fn is_populated(dir: &Path) -> bool {
    // What cannot be read is left alone.
    std::fs::read_to_string(dir.join("cgroup.events"))
        .map_or(true, |events| field(&events, "populated") != Some(0))
}

/// `name 7` in a file of such lines.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn make_dir(dir: &Path) -> Result<(), GroupsError> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(self::io(dir)(error)),
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), GroupsError> {
    std::fs::write(path, text).map_err(io(path))
}

fn io(path: &Path) -> impl FnOnce(io::Error) -> GroupsError {
    let path = path.to_owned();
    move |source| GroupsError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_daemon_finds_what_was_delegated_to_it() {
        let at = |own: &str| stand(MOUNT, &format!("1:memory:/x\n0::{own}\n"));
        let leaf = at("/system.slice/vmoved.service/vmoved").unwrap();
        assert_eq!(leaf, Stand::InLeaf("/sys/fs/cgroup/system.slice/vmoved.service".into()));
        assert_eq!(at("/vmove").unwrap(), Stand::InRoot("/sys/fs/cgroup/vmove".into()));
        // In the root group a daemon of this name would take the whole host.
        assert_eq!(at("/vmoved").unwrap(), Stand::InRoot("/sys/fs/cgroup/vmoved".into()));
        assert!(matches!(at("/").unwrap_err(), GroupsError::NotDelegated));
        for systemds in ["/system.slice/vmoved.service", "/user.slice/user-0.slice/session-3.scope"] {
            let error = at(systemds).unwrap_err();
            assert!(error.to_string().contains("DelegateSubgroup=vmoved"), "{error}");
        }
    }

    #[test]
    fn a_mount_may_show_a_part_of_the_groups() {
        let mount = "30 23 0:26 /box /cg rw - cgroup2 none rw\n";
        assert_eq!(stand(mount, "0::/box/vmove\n").unwrap(), Stand::InRoot("/cg/vmove".into()));
        for outside in ["/box", "/other"] {
            assert!(matches!(stand(mount, &format!("0::{outside}\n")), Err(GroupsError::NotDelegated)));
        }
        assert!(matches!(
            stand("30 23 0:26 / /x rw - tmpfs none rw\n", "0::/a\n"),
            Err(GroupsError::NotMounted)
        ));
    }

    #[test]
    fn counters_are_read_by_their_whole_names() {
        assert_eq!(field("oom 3\noom_kill 2\noom_group_kill 1\n", "oom_kill"), Some(2));
        assert_eq!(field("oom_group_kill 1\n", "oom_kill"), None);
    }

    #[test]
    fn without_groups_nothing_is_made_or_swept() {
        let none = ControlGroups::none();
        assert_eq!((none.make("web"), none.of("web")), (None, None));
        none.sweep();
    }
}
