//! Deletes accounting records that are older than the configuration keeps them.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Bridge, BridgeError};
use crate::account::Record;
use crate::store::Txn;

/// Between two searches for old records.
const SEARCH_INTERVAL: Duration = Duration::from_secs(600);
/// Most records of one transaction: as many as etcd takes by default.
const BATCH: usize = 128;

/// How long accounting records are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// How long after the end of the lease, by the time of day.
    pub keep: Duration,
    /// Records are appended to this file as JSON lines, and synced to disk, before they are deleted.
    pub archive: Option<PathBuf>,
}

/// Why old records were not deleted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// The archive cannot be written.
    #[error("could not write to the archive {path}: {reason}; no record was deleted")]
    Archive {
        /// The file.
        path: PathBuf,
        /// The error.
        reason: io::Error,
    },
    /// The store does not answer.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

impl Bridge {
    /// Deletes old records, and returns their number. Every bridge does so; a record that two of them delete at the same time is in
    /// both archives.
    ///
    /// # Errors
    /// The archive cannot be written, or the store does not answer. The next call tries again.
    pub async fn delete_old_records(&self, retention: &Retention) -> Result<usize, RetentionError> {
        let keep = u64::try_from(retention.keep.as_millis()).unwrap_or(u64::MAX);
        let before = self.clock.stamp().wall_ms.saturating_sub(keep);
        let records = self.records().await?;
        let old = |text: &str| {
            serde_json::from_str::<Record>(text).is_ok_and(|record| record.ended_wall_ms < before)
        };
        let old: Vec<&(String, String)> = records.iter().filter(|(_, text)| old(text)).collect();
        let most = self.store.max_keys().min(BATCH);
        for batch in old.chunks(most) {
            if let Some(path) = &retention.archive {
                let lines: String = batch.iter().map(|(_, text)| format!("{text}\n")).collect();
                let failed = |reason| RetentionError::Archive { path: path.clone(), reason };
                append(path, &lines).map_err(failed)?;
            }
            let txn = batch.iter().fold(Txn::default(), |txn, (key, _)| txn.delete(key));
            self.store.commit(txn).await.map_err(BridgeError::from)?;
        }
        Ok(old.len())
    }

    /// Deletes old records from time to time until the task is dropped.
    pub async fn keep_deleting_old_records(self: Arc<Self>, retention: Retention) {
        loop {
            match self.delete_old_records(&retention).await {
                Ok(0) => {}
                Ok(count) => tracing::info!(count, "deleted old accounting records"),
                Err(error) => {
                    tracing::warn!(%error, "could not delete old accounting records; it is tried again");
                }
            }
            tokio::time::sleep(SEARCH_INTERVAL).await;
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
    use crate::testing::{TestBridge, exactly, id, one_gpu};

    const DAY: u64 = 86_400_000;

    #[tokio::test]
    async fn records_go_when_they_are_old_and_not_before_they_are_archived() {
        let dir = tempfile::tempdir().unwrap();
        let bridge = TestBridge::empty().await;
        bridge.put_nodes(&["n1"], 2).await;
        for at in 0..300 {
            let name = format!("l{at}");
            bridge.grant(exactly(&name, vec![one_gpu(&format!("{name}-0"), "n1", 0)])).await.unwrap();
            bridge.release(&id(&name)).await.unwrap();
            if at == 199 {
                bridge.manual_clock.pass(10 * DAY);
            }
        }
        let left = || async { bridge.records().await.unwrap().len() };
        let missing = dir.path().join("nowhere/archive.jsonl");
        let keep = |days: u64, archive| Retention { keep: Duration::from_millis(days * DAY), archive };
        assert_eq!(bridge.delete_old_records(&keep(30, None)).await.unwrap(), 0);
        let error = bridge.delete_old_records(&keep(5, Some(missing))).await.unwrap_err();
        assert!(error.to_string().contains("no record was deleted"), "{error}");
        assert_eq!(left().await, 300);
        let archive = dir.path().join("archive.jsonl");
        assert_eq!(bridge.delete_old_records(&keep(5, Some(archive.clone()))).await.unwrap(), 200);
        assert_eq!(left().await, 100);
        let text = std::fs::read_to_string(&archive).unwrap();
        let archived: Vec<Record> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(archived.len(), 200);
        let has = |name: &str| archived.iter().any(|own| own.lease == id(name));
        assert!(has("l199") && !has("l200"));
        assert_eq!(bridge.delete_old_records(&keep(5, Some(archive))).await.unwrap(), 0);
        // A lease of an old name is a new lease.
        bridge.grant(exactly("l0", vec![one_gpu("l0-0", "n1", 0)])).await.unwrap();
    }
}
