//! Deletes accounting records that are older than they are to be kept.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Bridge, BridgeError};
use crate::account::Record;
use crate::store::Txn;

/// Between two looks at the records.
const EVERY: Duration = Duration::from_secs(600);
/// Most records of one transaction: as many as etcd takes by default.
const BATCH: usize = 128;

/// How long accounting records are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// From the end of the lease, by the time of day.
    pub keep: Duration,
    /// JSON lines are written to the end of this file, and reach the disk, before records are deleted.
    pub archive: Option<PathBuf>,
}

/// Why records stay.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RetainError {
    /// The archive.
    #[error("could not write to the archive {path}: {reason}; no record was deleted")]
    Archive {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// The store.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

impl Bridge {
    /// Deletes the records that are too old. Says how many those were. Of several bridges each may delete; a record that two of them
    /// delete at the same time is in the archives of both.
    ///
    /// # Errors
    /// The archive or the store; records that were not deleted are tried again.
    pub async fn forget_records(&self, retention: &Retention) -> Result<usize, RetainError> {
        let keep = u64::try_from(retention.keep.as_millis()).unwrap_or(u64::MAX);
        let before = self.clock.stamp().wall_ms.saturating_sub(keep);
        let records = self.records().await?;
        let old =
            |text: &str| serde_json::from_str::<Record>(text).is_ok_and(|own| own.ended_wall_ms < before);
        let old: Vec<&(String, String)> = records.iter().filter(|(_, text)| old(text)).collect();
        let most = self.store.max_keys().min(BATCH);
        for batch in old.chunks(most) {
            if let Some(path) = &retention.archive {
                let lines: String = batch.iter().map(|(_, text)| format!("{text}\n")).collect();
                let failed = |reason| RetainError::Archive { path: path.clone(), reason };
                append(path, &lines).map_err(failed)?;
            }
            let txn = batch.iter().fold(Txn::default(), |txn, (key, _)| txn.delete(key));
            self.store.commit(txn).await.map_err(BridgeError::from)?;
        }
        Ok(old.len())
    }

    /// Deletes old records forever; the task ends when it is dropped.
    pub async fn keep_forgetting(self: Arc<Self>, retention: Retention) {
        loop {
            match self.forget_records(&retention).await {
                Ok(0) => {}
                Ok(count) => tracing::info!(count, "accounting records were too old, and are deleted"),
                Err(error) => tracing::warn!(%error, "old accounting records stay; it is tried again"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

fn append(path: &std::path::Path, lines: &str) -> io::Result<()> {
    let mut file = std::fs::File::options().create(true).append(true).open(path)?;
    file.write_all(lines.as_bytes())?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bridge::tests::{ask, embedded, id, node, one_gpu};
    use crate::clock::ManualClock;

    const DAY: u64 = 86_400_000;

    #[tokio::test]
    async fn records_go_when_they_are_old_and_not_before_they_are_archived() {
        let dir = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::new());
        let running = embedded(dir.path(), &clock).await;
        let bridge = &running.0;
        bridge.put_node(node("n1", 2)).await.unwrap();
        for at in 0..300 {
            let name = format!("l{at}");
            bridge.grant(ask(&name, vec![one_gpu(&format!("{name}-0"), "n1", 0)])).await.unwrap();
            bridge.release(&id(&name)).await.unwrap();
            if at == 199 {
                clock.pass(10 * DAY);
            }
        }
        let left = || async { bridge.records().await.unwrap().len() };
        let missing = dir.path().join("nowhere/archive.jsonl");
        let keep = |days: u64, archive| Retention { keep: Duration::from_millis(days * DAY), archive };
        assert_eq!(bridge.forget_records(&keep(30, None)).await.unwrap(), 0);
        let error = bridge.forget_records(&keep(5, Some(missing))).await.unwrap_err();
        assert!(error.to_string().contains("no record was deleted"), "{error}");
        assert_eq!(left().await, 300);
        let archive = dir.path().join("archive.jsonl");
        assert_eq!(bridge.forget_records(&keep(5, Some(archive.clone()))).await.unwrap(), 200);
        assert_eq!(left().await, 100);
        let text = std::fs::read_to_string(&archive).unwrap();
        let archived: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(archived.len(), 200);
        let has = |name: &str| archived.iter().any(|own| own.lease == id(name));
        assert!(has("l199") && !has("l200"));
        assert_eq!(bridge.forget_records(&keep(5, Some(archive))).await.unwrap(), 0);
        // A lease of an old name is a new lease.
        bridge.grant(ask("l0", vec![one_gpu("l0-0", "n1", 0)])).await.unwrap();
    }
}
