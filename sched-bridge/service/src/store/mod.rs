//! Where the state is kept: an embedded database for one bridge, etcd for several.
//!
//! A store maps keys to texts. Every change has a [`Revision`]. A transaction changes several keys or none, on condition that other
//! keys have not changed (compare and swap). Leases need no more than that, so that two bridges never grant one device twice, and
//! etcd offers it.

pub mod embedded;
pub mod etcd;
pub(crate) mod measured;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;
use tokio::sync::mpsc;

pub use embedded::Embedded;
pub use etcd::Etcd;

/// Number of a transaction. Starts at 0 and never repeats; all keys that one transaction writes have the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A value and its revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: String,
    /// The transaction that wrote it.
    pub revision: Revision,
}

/// The contents of a store at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The last transaction that it contains.
    pub revision: Revision,
    /// The values by key.
    pub entries: BTreeMap<String, Entry>,
}

/// The keys that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRange {
    /// Every key.
    All,
    /// Keys with this prefix.
    Prefix(&'static str),
    /// Keys without this prefix.
    AllBut(&'static str),
}

impl KeyRange {
    /// The half-open ranges that it consists of; one without an end reaches to the last key.
    pub(super) fn ranges(self) -> Vec<(String, Option<String>)> {
        let after = |prefix: &str| {
            let mut end = prefix.to_owned();
            // Prefixes are ASCII and end in a slash.
            let last = end.pop().map_or('\u{1}', |last| char::from_u32(u32::from(last) + 1).unwrap_or(last));
            end.push(last);
            end
        };
        match self {
            Self::All => vec![(String::new(), None)],
            Self::Prefix(prefix) => vec![(prefix.to_owned(), Some(after(prefix)))],
            Self::AllBut(prefix) => {
                vec![(String::new(), Some(prefix.to_owned())), (after(prefix), None)]
            }
        }
    }
}

/// A key that was written or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// The new value; none if the key was deleted.
    pub entry: Option<Entry>,
}

/// The changes of one or more whole transactions, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The last transaction among them.
    pub revision: Revision,
    /// Written and deleted keys.
    pub changes: Vec<Change>,
}

/// Condition on a key, without which a transaction fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key was last written by this transaction.
    At(Revision),
}

impl Expect {
    /// As it was last seen: at a revision, or absent.
    #[must_use]
    pub fn seen(revision: Option<Revision>) -> Self {
        revision.map_or(Self::Absent, Self::At)
    }
}

/// A transaction: changes that happen together if all conditions hold.
#[derive(Debug, Clone, Default)]
pub struct Txn {
    /// Conditions, at most one for each key.
    pub expect: Vec<(String, Expect)>,
    /// Writes a value (`Some`) or deletes the key (`None`); at most one for each key.
    pub set: Vec<(String, Option<String>)>,
}

impl Txn {
    /// Adds a condition.
    #[must_use]
    pub fn expect(mut self, key: impl Into<String>, expect: Expect) -> Self {
        self.expect.push((key.into(), expect));
        self
    }

    /// Writes a key.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.set.push((key.into(), Some(value.into())));
        self
    }

    /// Deletes a key.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.set.push((key.into(), None));
        self
    }
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Committed {
    /// It was committed.
    At(Revision),
    /// A condition did not hold; nothing was changed.
    Conflict,
}

/// Why a store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store does not answer. Nothing was changed.
    #[error("the store {store} cannot be reached: {reason}; nothing was changed. {hint}")]
    Unreachable {
        /// Which store.
        store: String,
        /// The error.
        reason: String,
        /// What an operator can do.
        hint: &'static str,
    },
    /// The connection broke after a transaction was sent. It may have happened; ask again to find out.
    #[error(
        "the store {store} stopped answering during a transaction ({reason}): it is not known whether the transaction was \
         committed. Repeat the request with the same id: it then returns what exists"
    )]
    Unknown {
        /// Which store.
        store: String,
        /// The error.
        reason: String,
    },
    /// More keys than a transaction may have.
    #[error(
        "a transaction has {found} keys, but the store takes at most {limit}; start etcd with --max-txn-ops={found} or more and \
         vbridged with the same --etcd-max-txn-ops, or request fewer nodes at once"
    )]
    TooLarge {
        /// Keys of the transaction.
        found: usize,
        /// What the store takes.
        limit: usize,
    },
    /// The store no longer has the changes that a watch needs next: read everything again.
    #[error("the store {store} no longer has the changes after revision {after}")]
    Compacted {
        /// Which store.
        store: String,
        /// Where the watch stood.
        after: Revision,
    },
    /// It refused, or its answer has an unexpected form.
    #[error("the store {store} answered {found}; expected {expected}")]
    Protocol {
        /// Which store.
        store: String,
        /// The answer.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The file cannot be read or written.
    #[error(
        "the store {store} failed: {reason}; nothing was changed. Check the disk and the permissions of the file"
    )]
    Disk {
        /// The file.
        store: String,
        /// The error.
        reason: String,
    },
}

/// A map with revisions, compare-and-swap and a watch. See the [module](self).
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync {
    /// Its kind and address, for messages (`redb /var/lib/vbridged/state.redb`).
    fn name(&self) -> String;

    /// Most keys that one transaction may have in its conditions, and most that it may change.
    fn max_keys(&self) -> usize;

    /// Whether other bridges may change it, so that a view of it may be behind.
    fn is_shared(&self) -> bool;

    /// Reads a range of keys, all at one moment.
    ///
    /// # Errors
    /// The store does not answer.
    async fn read(&self, range: KeyRange) -> Result<Snapshot, StoreError>;

    /// Reads every key.
    ///
    /// # Errors
    /// The store does not answer.
    async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        self.read(KeyRange::All).await
    }

    /// Commits a transaction if all its conditions hold.
    ///
    /// # Errors
    /// The store does not answer. Something may have changed only if the error is [`StoreError::Unknown`].
    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError>;

    /// Sends every change after revision `after`, in order. The channel ends with an error; the caller then reads everything again
    /// and watches from there.
    ///
    /// # Errors
    /// The store does not answer.
    async fn watch(&self, after: Revision)
    -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError>;
}

/// Refuses a transaction with more keys than a store takes.
fn check_size(txn: &Txn, limit: usize) -> Result<(), StoreError> {
    let found = txn.expect.len().max(txn.set.len());
    if found > limit { Err(StoreError::TooLarge { found, limit }) } else { Ok(()) }
}
