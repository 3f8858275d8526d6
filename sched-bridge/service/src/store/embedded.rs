//! The store of a single bridge: a file, kept by redb.

#![allow(clippy::result_large_err, reason = "the errors of redb are, and come once in a blue moon")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use redb::{Database, ReadableTable, TableDefinition};
use tokio::sync::mpsc;

use super::{
    Change, Changes, Committed, Entry, Expect, KeyRange, Revision, Snapshot, Store, StoreError, Txn,
    check_size,
};

/// Key to revision and value.
const KEYS: TableDefinition<&str, (u64, &str)> = TableDefinition::new("keys");
/// One row, the number of the last transaction.
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const REVISION: &str = "revision";
/// Transactions that a watcher may be behind before it is dropped, and starts over.
const BACKLOG: usize = 4096;

type Watchers = Vec<mpsc::Sender<Result<Changes, StoreError>>>;

/// A database file. Only one process opens it at a time; redb locks it. Every commit is on disk (fsync) when it returns.
#[derive(Debug, Clone)]
pub struct Embedded(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    database: Database,
    /// Held over a commit and its announcement, so that watchers see transactions in order.
    watchers: Mutex<Watchers>,
}

impl Embedded {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// It cannot be made or read, is no database, or another process has it open.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |reason: String| StoreError::Disk { store: path.display().to_string(), reason };
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| failed(e.to_string()))?;
        }
        let database = Database::create(path).map_err(|e| match e {
            redb::DatabaseError::DatabaseAlreadyOpen => failed(
                "another vbridged has it open; several bridges share state through etcd (--store etcd:URL)"
                    .into(),
            ),
            other => failed(other.to_string()),
        })?;
        let inner = Inner { path: path.to_owned(), database, watchers: Mutex::default() };
        inner.prepare().map_err(|e| failed(e.to_string()))?;
        Ok(Self(Arc::new(inner)))
    }
}

impl Inner {
    fn failed(&self, error: &redb::Error) -> StoreError {
        StoreError::Disk { store: self.path.display().to_string(), reason: error.to_string() }
    }

    fn prepare(&self) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        write.open_table(KEYS)?;
        write.open_table(META)?;
        write.commit()?;
        Ok(())
    }

    fn revision(&self) -> Result<Revision, redb::Error> {
        let read = self.database.begin_read()?;
        Ok(Revision(read.open_table(META)?.get(REVISION)?.map_or(0, |v| v.value())))
    }

    fn read(&self, range: KeyRange) -> Result<Snapshot, redb::Error> {
        let read = self.database.begin_read()?;
        let revision = read.open_table(META)?.get(REVISION)?.map_or(0, |v| v.value());
        let mut snapshot = Snapshot { revision: Revision(revision), ..Snapshot::default() };
        let keys = read.open_table(KEYS)?;
        for (first, end) in range.ranges() {
            let rows = match &end {
                Some(end) => keys.range(first.as_str()..end.as_str())?,
                None => keys.range(first.as_str()..)?,
            };
            for row in rows {
                let (key, value) = row?;
                let (revision, value) = value.value();
                let entry = Entry { value: value.to_owned(), revision: Revision(revision) };
                snapshot.entries.insert(key.value().to_owned(), entry);
            }
        }
        Ok(snapshot)
    }

    fn commit(&self, txn: Txn) -> Result<Committed, redb::Error> {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        let write = self.database.begin_write()?;
        let changes = {
            let mut keys = write.open_table(KEYS)?;
            for (key, expect) in &txn.expect {
                let found = keys.get(key.as_str())?.map(|row| row.value().0);
                let holds = match expect {
                    Expect::Absent => found.is_none(),
                    Expect::At(revision) => found == Some(revision.0),
                };
                if !holds {
                    return Ok(Committed::Conflict);
                }
            }
            let mut meta = write.open_table(META)?;
            let revision = meta.get(REVISION)?.map_or(0, |v| v.value()) + 1;
            meta.insert(REVISION, revision)?;
            let mut changes = Vec::with_capacity(txn.set.len());
            for (key, value) in txn.set {
                match &value {
                    Some(value) => drop(keys.insert(key.as_str(), (revision, value.as_str()))?),
                    None => drop(keys.remove(key.as_str())?),
                }
                let entry = value.map(|value| Entry { value, revision: Revision(revision) });
                changes.push(Change { key, entry });
            }
            Changes { revision: Revision(revision), changes }
        };
        write.commit()?;
        let revision = changes.revision;
        // A watcher that does not read is dropped; it sees the end of its channel and starts over.
        watchers.retain(|watcher| watcher.try_send(Ok(changes.clone())).is_ok());
        Ok(Committed::At(revision))
    }
}

#[async_trait]
impl Store for Embedded {
    fn name(&self) -> String {
        format!("redb {}", self.0.path.display())
    }

    fn max_keys(&self) -> usize {
        usize::MAX
    }

    fn is_shared(&self) -> bool {
        false
    }

    async fn read(&self, range: KeyRange) -> Result<Snapshot, StoreError> {
        let inner = Arc::clone(&self.0);
        blocking(move || inner.read(range).map_err(|e| inner.failed(&e))).await
    }

    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError> {
        check_size(&txn, self.max_keys())?;
        let inner = Arc::clone(&self.0);
        blocking(move || inner.commit(txn).map_err(|e| inner.failed(&e))).await
    }

    async fn watch(
        &self,
        after: Revision,
    ) -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError> {
        let inner = Arc::clone(&self.0);
        blocking(move || {
            let mut watchers = inner.watchers.lock().unwrap_or_else(PoisonError::into_inner);
            let now = inner.revision().map_err(|e| inner.failed(&e))?;
            // This store keeps no history: whoever missed something reads everything again.
            if now != after {
                return Err(StoreError::Compacted { store: inner.path.display().to_string(), after });
            }
            let (sender, receiver) = mpsc::channel(BACKLOG);
            watchers.push(sender);
            Ok(receiver)
        })
        .await
    }
}

/// Disk work, off the workers of the runtime.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(StoreError::Disk { store: "redb".to_owned(), reason: format!("its worker ended: {error}") })
    })
}
