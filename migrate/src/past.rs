//! What earlier migrations, and trials of the fabrics, have measured on the way to each node: in a file that outlives the daemon.
//!
//! Bounded: the last few of each node and fabric, of so many nodes, and none that are old. A file that cannot be read is as good as none, and one
//! that cannot be written costs the next daemon what was measured: no migration fails for it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use vmove_node::disk::Disk;
use vmove_node::files::write_durably_on;

/// Of each node and fabric.
const MOST_OF_ONE: usize = 20;
/// Of all.
const MOST: usize = 2560;
/// Links are rebuilt, and hosts get other work.
const KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// How something was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// By what crossed in a migration.
    Migration,
    /// By `vmove fabric check`.
    FabricCheck,
}

/// What was measured once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The other node, as it was named.
    pub node: String,
    /// The fabric.
    pub fabric: String,
    /// When. Unit: seconds since 1970-01-01 UTC, by this node's clock.
    pub at: u64,
    /// How.
    pub by: By,
    /// Page payload per second of the link, if enough crossed to say so and no limit held it back.
    pub link_bytes_per_s: Option<f64>,
    /// What a migration took beside the memory that crossed, if it came to its end.
    #[serde(default)]
    pub times: Option<MoveTimes>,
    /// What a visit of a guest brought, or its way home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub visit: Option<OfVisit>,
}

/// What crossed the link for the visit of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfVisit {
    /// The VM.
    pub vm: String,
    /// Which way it went.
    pub way: WayOfVisit,
    /// Bytes that followed it on that way.
    pub bytes: u64,
}

/// A way of a visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WayOfVisit {
    /// To the node that is visited.
    There,
    /// Home.
    Back,
}

/// What a migration took beside the memory that crossed. Unit: milliseconds, if not named.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MoveTimes {
    /// From the request to the first page.
    pub setup_ms: f64,
    /// From the request until the destination's QEMU waited for the guest.
    pub ready_ms: f64,
    /// The pause, without pages; `None` if most of it was pages.
    pub pause_ms: Option<f64>,
    /// From the guest's running there to the end, without pages.
    pub after_ms: f64,
    /// Page payload per second into memory that the destination had given pages before: what post-copy fetched, if that was enough to say so and no
    /// limit held it back.
    pub again_bytes_per_s: Option<f64>,
    /// Page payload that all processors of a host could move in a second, of the host at which that was less, if enough crossed to say so.
    #[serde(default)]
    pub host_bytes_per_s: Option<f64>,
}

impl Measured {
    /// Measured just now.
    #[must_use]
    pub fn now(node: &str, fabric: &str, by: By) -> Self {
        let (node, fabric) = (node.to_owned(), fabric.to_owned());
        Self { node, fabric, at: now(), by, link_bytes_per_s: None, times: None, visit: None }
    }

    /// How long ago that was.
    #[must_use]
    pub fn ago(&self) -> Duration {
        Duration::from_secs(now().saturating_sub(self.at))
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// All that is remembered, oldest first.
#[derive(Debug, Default)]
pub struct Past {
    all: Mutex<Vec<Measured>>,
    /// Held while the file is written, so that an older state does not come after a newer one. Lookups do not wait for the disk.
    writing: Mutex<()>,
    file: PathBuf,
}

impl Past {
    /// What an earlier process of the daemon has written into `file`.
    #[must_use]
    pub fn open(disk: &dyn Disk, file: PathBuf) -> Self {
        // Of a write that was broken off; mostly there is none.
        let _ = disk.remove_file(&file.with_extension("part"));
        let all = match disk.read(&file).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
            Ok(all) => all,
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(file = %file.display(), %error, "what earlier migrations measured is forgotten");
                }
                Vec::new()
            }
        };
        Self { all: Mutex::new(all), writing: Mutex::default(), file }
    }

    /// What was measured on the way to this node, newest first.
    #[must_use]
    pub fn of_node(&self, node: &str) -> Vec<Measured> {
        let all = self.lock();
        let same = |one: &&Measured| one.node == node && one.ago() <= KEPT_FOR;
        all.iter().rev().filter(same).cloned().collect()
    }

    /// The same of one fabric.
    fn of(&self, node: &str, fabric: &str) -> Vec<Measured> {
        self.of_node(node).into_iter().filter(|one| one.fabric == fabric).collect()
    }

    /// What the link carried last: as a migration has measured it, or else a trial, which reads over one connection and writes no memory.
    #[must_use]
    pub fn link(&self, node: &str, fabric: &str) -> Option<Measured> {
        let of = self.of(node, fabric);
        let by = |by| of.iter().find(|one| one.by == by && one.link_bytes_per_s.is_some());
        by(By::Migration).or_else(|| by(By::FabricCheck)).cloned()
    }

    /// What visits of a VM to any node have usually brought, there and back: bytes. `None` if none is remembered that came home.
    #[must_use]
    pub fn brought_by_visits(&self, vm: &str) -> Option<(u64, u64)> {
        let all = self.lock();
        let of = |way| {
            let visits = all.iter().filter(|one| one.ago() <= KEPT_FOR).filter_map(|one| one.visit.as_ref());
            let mut bytes: Vec<u64> =
                visits.filter(|visit| visit.vm == vm && visit.way == way).map(|visit| visit.bytes).collect();
            bytes.sort_unstable();
            bytes.get(bytes.len() / 2).copied()
        };
        Some((of(WayOfVisit::There)?, of(WayOfVisit::Back)?))
    }

    /// Remembers, and writes the file in the background.
    pub fn remember(self: &Arc<Self>, disk: &Arc<dyn Disk>, measured: Measured) {
        keep(&mut self.lock(), measured);
        let (past, disk) = (Arc::clone(self), Arc::clone(disk));
        drop(vmove_node::blocking::spawn_blocking(move || {
            if let Err(error) = past.write(&*disk) {
                let file = past.file.display();
                tracing::warn!(%file, %error, "what this migration has measured may be forgotten");
            }
        }));
    }

    fn write(&self, disk: &dyn Disk) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.lock().clone();
        write_durably_on(disk, &self.file, &all)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Measured>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where it is: beside the journals.
#[must_use]
pub fn file(sessions_dir: &Path) -> PathBuf {
    sessions_dir.with_file_name("past.json")
}

/// Adds one, and forgets what is too much or too old.
fn keep(all: &mut Vec<Measured>, measured: Measured) {
    let of = |one: &Measured| one.visit.as_ref().map(|visit| (visit.vm.clone(), visit.way));
    let visit = of(&measured);
    // Visits do not push out what is known of the link, nor those of another VM.
    let same =
        |one: &Measured| one.node == measured.node && one.fabric == measured.fabric && of(one) == visit;
    let mut room = MOST_OF_ONE - 1;
    let mut kept: Vec<Measured> = Vec::with_capacity(all.len() + 1);
    for one in all.drain(..).rev().filter(|one| one.ago() <= KEPT_FOR) {
        if same(&one) {
            if room == 0 {
                continue;
            }
            room -= 1;
        }
        kept.push(one);
    }
    kept.truncate(MOST - 1);
    kept.reverse();
    kept.push(measured);
    *all = kept;
}

#[cfg(test)]
mod tests {
    use vmove_node::disk::KernelDisk;

    use super::*;

    fn measured(node: &str, rate: f64) -> Measured {
        Measured { link_bytes_per_s: Some(rate), ..Measured::now(node, "tcp", By::Migration) }
    }

    fn rate(past: &Past, node: &str) -> Option<f64> {
        past.link(node, "tcp").and_then(|one| one.link_bytes_per_s)
    }

    #[test]
    fn the_newest_of_each_node_and_fabric_counts() {
        let past = Past::default();
        keep(&mut past.lock(), measured("b", 1e9));
        keep(&mut past.lock(), measured("c", 2e9));
        keep(&mut past.lock(), measured("b", 3e9));
        assert_eq!((rate(&past, "b"), rate(&past, "c"), rate(&past, "d")), (Some(3e9), Some(2e9), None));
        assert_eq!(past.link("b", "verbs"), None);
        // One whose link was held back says nothing of it.
        keep(&mut past.lock(), Measured::now("b", "tcp", By::Migration));
        assert_eq!(rate(&past, "b"), Some(3e9));
    }

    #[test]
    fn visits_are_remembered_by_their_guest_and_push_out_nothing_else() {
        let past = Past::default();
        keep(&mut past.lock(), measured("b", 1e9));
        let visit = |vm: &str, way, bytes| Measured {
            visit: Some(OfVisit { vm: vm.to_owned(), way, bytes }),
            ..Measured::now("b", "tcp", By::Migration)
        };
        for bytes in [20, 900, 30] {
            keep(&mut past.lock(), visit("web", WayOfVisit::There, bytes));
        }
        assert_eq!(past.brought_by_visits("web"), None);
        keep(&mut past.lock(), visit("web", WayOfVisit::Back, 7));
        for _ in 0..2 * MOST_OF_ONE {
            keep(&mut past.lock(), visit("db", WayOfVisit::There, 5));
        }
        assert_eq!((past.brought_by_visits("web"), past.brought_by_visits("db")), (Some((30, 7)), None));
        assert_eq!(rate(&past, "b"), Some(1e9));
        assert_eq!(past.lock().len(), 1 + 4 + MOST_OF_ONE);
    }

    #[test]
    fn a_trial_counts_only_where_no_migration_was() {
        let past = Past::default();
        let tried = |rate| Measured { by: By::FabricCheck, ..measured("b", rate) };
        keep(&mut past.lock(), tried(9e9));
        assert_eq!(rate(&past, "b"), Some(9e9));
        keep(&mut past.lock(), measured("b", 1e9));
        keep(&mut past.lock(), tried(9e9));
        assert_eq!(rate(&past, "b"), Some(1e9));
    }

    #[test]
    fn it_is_bounded_and_ages() {
        let past = Past::default();
        for number in 0..40 {
            keep(&mut past.lock(), measured("b", f64::from(number)));
        }
        assert_eq!(past.of("b", "tcp").len(), MOST_OF_ONE);
        assert_eq!(rate(&past, "b"), Some(39.0));
        for number in 0..2 * MOST {
            keep(&mut past.lock(), measured(&number.to_string(), 1.0));
        }
        assert_eq!(past.lock().len(), MOST);
        let old = Measured { at: now() - KEPT_FOR.as_secs() - 60, ..measured("old", 1.0) };
        past.lock().push(old);
        assert_eq!(rate(&past, "old"), None);
        keep(&mut past.lock(), measured("b", 1.0));
        assert!(past.lock().iter().all(|one| one.node != "old"));
    }

    #[test]
    fn it_outlives_the_daemon_and_a_damaged_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("past.json");
        let past = Past::open(&KernelDisk, file.clone());
        keep(&mut past.lock(), measured("b", 1e9));
        past.write(&KernelDisk).unwrap();
        assert_eq!(rate(&Past::open(&KernelDisk, file.clone()), "b"), Some(1e9));
        std::fs::write(&file, "[{\"node\":").unwrap();
        let anew = Past::open(&KernelDisk, file.clone());
        assert_eq!(rate(&anew, "b"), None);
        keep(&mut anew.lock(), measured("b", 2e9));
        anew.write(&KernelDisk).unwrap();
        assert_eq!(rate(&Past::open(&KernelDisk, file), "b"), Some(2e9));
    }
}
