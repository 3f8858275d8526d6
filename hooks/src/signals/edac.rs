//! Memory errors as the kernel counts them: `mc/mcN/ce_count` and `ue_count`. Machine checks of memory come here, too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};

use super::{LOOK, map};
use crate::Hooks;
use crate::event::{Event, Name};

/// Counts by memory controller and kind.
type Counts = BTreeMap<(String, Kind), u64>;

/// The kind of a memory error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The memory has given the right bytes; more of these announce worse.
    Corrected,
    /// Bytes are lost.
    Uncorrected,
}

impl Kind {
    const fn word(self) -> &'static str {
        match self {
            Self::Corrected => "corrected",
            Self::Uncorrected => "uncorrected",
        }
    }

    const fn file(self) -> &'static str {
        match self {
            Self::Corrected => "ce_count",
            Self::Uncorrected => "ue_count",
        }
    }
}

/// The host counts no memory errors.
#[derive(Debug, thiserror::Error)]
#[error("no memory controller in {}: expected mc/mc0 and others there, from an EDAC driver of the kernel", .0.display())]
pub struct EdacError(PathBuf);

/// All counts now.
///
/// # Errors
/// There is no memory controller.
pub fn counts(dir: &Path) -> Result<Counts, EdacError> {
    let mut counts = Counts::new();
    for controller in std::fs::read_dir(dir.join("mc")).into_iter().flatten().flatten() {
        let name = controller.file_name().to_string_lossy().into_owned();
        for kind in [Kind::Corrected, Kind::Uncorrected] {
            let text = std::fs::read_to_string(controller.path().join(kind.file()));
            if let Some(count) = text.ok().and_then(|text| text.trim().parse().ok()) {
                counts.insert((name.clone(), kind), count);
            }
        }
    }
    if counts.is_empty() { Err(EdacError(dir.to_owned())) } else { Ok(counts) }
}

/// Tells of each count that has grown. What was counted before the start of the daemon is not told.
pub(super) async fn watch(hooks: Arc<Hooks>, dir: PathBuf) {
    let mut before: Option<Counts> = None;
    let mut warned = false;
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let folder = dir.clone();
        let now = match tokio::task::spawn_blocking(move || counts(&folder)).await {
            Ok(Ok(now)) => now,
            Ok(Err(error)) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!("hooks wait for memory errors, and this host tells of none: {error}");
                }
                continue;
            }
            Err(_) => continue,
        };
        for event in before.iter().flat_map(|before| grown(before, &now)) {
            hooks.tell(event);
        }
        before = Some(now);
    }
}

/// A count that a driver has set back to zero begins anew.
fn grown(before: &Counts, now: &Counts) -> Vec<Event> {
    let mut events = Vec::new();
    for ((controller, kind), count) in now {
        let known = before.get(&(controller.clone(), *kind)).copied().unwrap_or(0);
        let new = if *count < known { *count } else { count - known };
        if new > 0 {
            let data = json!({ "controller": controller, "kind": kind.word(), "new": new, "count": count });
            events.push(Event::of_host(Name::MemoryError, map(data)));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_grow_are_told() {
        let folder = tempfile::tempdir().unwrap();
        assert!(counts(folder.path()).unwrap_err().to_string().contains("mc/mc0"));
        let write = |name: &str, kind: Kind, count: u64| {
            let dir = folder.path().join("mc").join(name);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(kind.file()), format!("{count}\n")).unwrap();
        };
        write("mc0", Kind::Corrected, 5);
        write("mc0", Kind::Uncorrected, 0);
        let first = counts(folder.path()).unwrap();
        assert!(grown(&first, &first).is_empty());
        write("mc0", Kind::Corrected, 7);
        write("mc1", Kind::Uncorrected, 1);
        let second = counts(folder.path()).unwrap();
        let told: Vec<_> =
            grown(&first, &second).into_iter().map(|event| serde_json::Value::Object(event.data)).collect();
        assert_eq!(
            told,
            [
                json!({"controller": "mc0", "kind": "corrected", "new": 2, "count": 7}),
                json!({"controller": "mc1", "kind": "uncorrected", "new": 1, "count": 1}),
            ]
        );
        write("mc0", Kind::Corrected, 1);
        let told = grown(&second, &counts(folder.path()).unwrap());
        assert_eq!(told[0].data["new"], 1, "it was set back");
    }
}
