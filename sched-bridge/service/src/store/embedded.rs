//! The store of a single bridge: a file, kept by redb.

#![allow(clippy::result_large_err, reason = "the errors of redb are, and come once in a blue moon")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use redb::{Database, ReadableTable, Table, TableDefinition};
use tokio::sync::{mpsc, oneshot};

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
type Keys<'a> = Table<'a, &'static str, (u64, &'static str)>;

/// A database file. Only one process opens it at a time; redb locks it. Every commit is on disk (fsync) when it returns. Transactions that wait
/// while another is written go to the disk together: one fsync for all of them.
#[derive(Debug, Clone)]
pub struct Embedded(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    database: Database,
    /// In the order in which they came.
    waiting: Mutex<Vec<Waiting>>,
    /// Held over commits and their announcement, so that watchers see transactions in order.
    watchers: Mutex<Watchers>,
}

/// A transaction that is to be written, and who waits for that.
#[derive(Debug)]
struct Waiting {
    txn: Txn,
    answer: oneshot::Sender<Result<Committed, StoreError>>,
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
        let (path, waiting, watchers) = (path.to_owned(), Mutex::default(), Mutex::default());
        let inner = Inner { path, database, waiting, watchers };
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

    /// Commits what waits. Nothing does if another has just taken it along.
    fn commit_waiting(&self) {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        let (txns, answers): (Vec<_>, Vec<_>) = waiting.into_iter().map(|w| (w.txn, w.answer)).unzip();
        if txns.is_empty() {
            return;
        }
        let committed = self.commit(txns);
        // A watcher that does not read is dropped; it sees the end of its channel and starts over.
        for changes in committed.iter().flatten().flatten() {
            watchers.retain(|watcher| watcher.try_send(Ok(changes.clone())).is_ok());
        }
        for (number, answer) in answers.into_iter().enumerate() {
            let done = committed.as_ref().map_err(|error| self.failed(error));
            let answered = done.map(|all| match &all[number] {
                Some(changes) => Committed::At(changes.revision),
                None => Committed::Conflict,
            });
            // Whoever waited may have gone away: what it wanted is done all the same.
            let _ = answer.send(answered);
        }
    }

    /// Writes transactions one after the other, and all of them to the disk at once. What each has changed; nothing if it met a conflict.
    fn commit(&self, txns: Vec<Txn>) -> Result<Vec<Option<Changes>>, redb::Error> {
        let write = self.database.begin_write()?;
        let mut done = Vec::with_capacity(txns.len());
        {
            let (mut keys, mut meta) = (write.open_table(KEYS)?, write.open_table(META)?);
            let mut revision = meta.get(REVISION)?.map_or(0, |v| v.value());
            for txn in txns {
                let holds = holds(&keys, &txn)?;
                done.push(if holds { Some(apply(&mut keys, txn, revision + 1)?) } else { None });
                revision += u64::from(holds);
            }
            meta.insert(REVISION, revision)?;
        }
        if done.iter().all(Option::is_none) {
            write.abort()?;
        } else {
            write.commit()?;
        }
        Ok(done)
    }
}

/// Whether the store is as a transaction expects it.
fn holds(keys: &Keys<'_>, txn: &Txn) -> Result<bool, redb::Error> {
    for (key, expect) in &txn.expect {
        let found = keys.get(key.as_str())?.map(|row| row.value().0);
        let holds = match expect {
            Expect::Absent => found.is_none(),
            Expect::At(revision) => found == Some(revision.0),
        };
        if !holds {
            return Ok(false);
        }
    }
    Ok(true)
}

fn apply(keys: &mut Keys<'_>, txn: Txn, revision: u64) -> Result<Changes, redb::Error> {
    let mut changes = Vec::with_capacity(txn.set.len());
    for (key, value) in txn.set {
        match &value {
            Some(value) => drop(keys.insert(key.as_str(), (revision, value.as_str()))?),
            None => drop(keys.remove(key.as_str())?),
        }
        let entry = value.map(|value| Entry { value, revision: Revision(revision) });
        changes.push(Change { key, entry });
    }
    Ok(Changes { revision: Revision(revision), changes })
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
        let (answer, committed) = oneshot::channel();
        inner.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(Waiting { txn, answer });
        blocking(move || {
            inner.commit_waiting();
            Ok(())
        })
        .await?;
        // It was written by now: by us, or by whoever held the turn before us.
        committed.await.unwrap_or_else(|error| Err(worker_ended(error)))
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
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(worker_ended(error)))
}

fn worker_ended(error: impl std::fmt::Display) -> StoreError {
    StoreError::Disk { store: "redb".to_owned(), reason: format!("its worker ended: {error}") }
}
