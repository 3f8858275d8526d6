//! Where the state is kept: an embedded database for one bridge, etcd for several.
//!
//! A store is a map from keys to texts in which every change has a [`Revision`], and in which several keys change at once or not at
//! all, provided that others are still as they were expected to be (compare and swap). That is all that leases need so that two
//! bridges never give away one device twice, and it is what etcd offers.

pub mod embedded;
pub mod etcd;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use async_trait::async_trait;
use tokio::sync::mpsc;

pub use embedded::Embedded;
pub use etcd::Etcd;

/// Counts the changes of a store. Starts at 0 and never repeats; several keys of one transaction have the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A value, and when it was last written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: String,
    /// The transaction that wrote it.
    pub revision: Revision,
}

/// What is in a store at one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The moment.
    pub revision: Revision,
    /// The keys.
    pub entries: BTreeMap<String, Entry>,
}

/// What of a store is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Everything.
    All,
    /// Keys that begin so.
    Below(&'static str),
    /// All other keys.
    AllBut(&'static str),
}

impl Part {
    /// Ranges of keys, each from its first key up to the one after its last, or to the end.
    pub(crate) fn ranges(self) -> Vec<(String, Option<String>)> {
        let after = |prefix: &str| {
            let mut end = prefix.to_owned();
            // Prefixes are of ASCII, and end in a slash.
            let last = end.pop().map_or('\u{1}', |last| char::from_u32(u32::from(last) + 1).unwrap_or(last));
            end.push(last);
            end
        };
        match self {
            Self::All => vec![(String::new(), None)],
            Self::Below(prefix) => vec![(prefix.to_owned(), Some(after(prefix)))],
            Self::AllBut(prefix) => {
                vec![(String::new(), Some(prefix.to_owned())), (after(prefix), None)]
            }
        }
    }
}

/// A key that was written, or deleted if there is no entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// What it is now.
    pub entry: Option<Entry>,
}

/// The changes of one or more whole transactions, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The last transaction among them.
    pub revision: Revision,
    /// What it and those before changed.
    pub changes: Vec<Change>,
}

/// What must be true of a key for a transaction to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// It is not there.
    Absent,
    /// It was last written by this transaction.
    At(Revision),
}

impl Expect {
    /// As it was last seen: at a revision, or absent.
    #[must_use]
    pub fn seen(revision: Option<Revision>) -> Self {
        revision.map_or(Self::Absent, Self::At)
    }
}

/// Changes that happen together, if all expectations hold.
#[derive(Debug, Clone, Default)]
pub struct Txn {
    /// What must be true. One per key.
    pub expect: Vec<(String, Expect)>,
    /// Writes a value (`Some`) or deletes the key (`None`). One per key.
    pub set: Vec<(String, Option<String>)>,
}

impl Txn {
    /// Requires something of a key.
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
    /// It happened.
    At(Revision),
    /// An expectation did not hold; nothing was changed.
    Conflict,
}

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nobody answers. Nothing was changed.
    #[error("the store {store} cannot be reached: {reason}; nothing was changed. {hint}")]
    Unreachable {
        /// Which store.
        store: String,
        /// What the system said.
        reason: String,
        /// What to do.
        hint: &'static str,
    },
    /// The connection broke after a transaction was sent. It may have happened; ask again to find out.
    #[error(
        "the store {store} stopped answering in the middle of a transaction ({reason}): whether it happened is not known. \
         Repeat the request with the same id: it is answered from what is there"
    )]
    Unknown {
        /// Which store.
        store: String,
        /// What happened.
        reason: String,
    },
    /// More keys than a transaction may have.
    #[error(
        "a transaction of {found} keys is larger than the {limit} that the store takes at once; start etcd with \
         --max-txn-ops={found} or more and tell vbridged by --etcd-max-txn-ops, or ask for fewer nodes at once"
    )]
    TooLarge {
        /// Keys of the transaction.
        found: usize,
        /// What the store takes.
        limit: usize,
    },
    /// The watch fell so far behind that the store has forgotten what came next: read everything again.
    #[error("the store {store} no longer has the changes after revision {after}")]
    Compacted {
        /// Which store.
        store: String,
        /// Where the watch stood.
        after: Revision,
    },
    /// It answered something that makes no sense, or refused.
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
        "the store {store} failed: {reason}. Check the disk and who may write there; nothing was changed"
    )]
    Disk {
        /// The file.
        store: String,
        /// What the system said.
        reason: String,
    },
}

/// A map with revisions, compare-and-swap and a watch. See the [module](self).
#[async_trait]
pub trait Store: fmt::Debug + Send + Sync {
    /// What it is and where, for messages (`redb /var/lib/vbridged/state.redb`).
    fn name(&self) -> String;

    /// Most keys that one transaction may expect or set.
    fn max_keys(&self) -> usize;

    /// Whether others may change it, so that a view of it may be behind.
    fn is_shared(&self) -> bool;

    /// A part of what there is.
    ///
    /// # Errors
    /// The store does not answer.
    async fn read(&self, part: Part) -> Result<Snapshot, StoreError>;

    /// Everything there is.
    ///
    /// # Errors
    /// The store does not answer.
    async fn snapshot(&self) -> Result<Snapshot, StoreError> {
        self.read(Part::All).await
    }

    /// Changes keys together, if all expectations hold.
    ///
    /// # Errors
    /// The store does not answer; only with [`StoreError::Unknown`] may anything have changed.
    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError>;

    /// Every change after `after`, in order, none left out. The channel ends with an error, after which the caller takes a
    /// new snapshot and watches from there.
    ///
    /// # Errors
    /// The store does not answer.
    async fn watch(&self, after: Revision)
    -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError>;
}

/// Refuses what is larger than a store takes.
fn check_size(txn: &Txn, limit: usize) -> Result<(), StoreError> {
    let found = txn.expect.len().max(txn.set.len());
    if found > limit { Err(StoreError::TooLarge { found, limit }) } else { Ok(()) }
}
