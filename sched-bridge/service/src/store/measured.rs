//! A store whose latency is measured.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::{Changes, Committed, KeyRange, Revision, Snapshot, Store, StoreError, Txn};
use crate::metrics;

/// Passes everything on to a store, and measures how long reads and commits take.
#[derive(Debug)]
pub(crate) struct Measured(pub Arc<dyn Store>);

#[async_trait]
impl Store for Measured {
    fn name(&self) -> String {
        self.0.name()
    }

    fn max_keys(&self) -> usize {
        self.0.max_keys()
    }

    fn is_shared(&self) -> bool {
        self.0.is_shared()
    }

    async fn read(&self, range: KeyRange) -> Result<Snapshot, StoreError> {
        let start = Instant::now();
        let read = self.0.read(range).await;
        metrics::store_answered("read", if read.is_ok() { "ok" } else { "error" }, start.elapsed());
        read
    }

    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError> {
        let start = Instant::now();
        let committed = self.0.commit(txn).await;
        let outcome = match &committed {
            Ok(Committed::At(_)) => "ok",
            Ok(Committed::Conflict) => "conflict",
            Err(_) => "error",
        };
        metrics::store_answered("commit", outcome, start.elapsed());
        committed
    }

    async fn watch(
        &self,
        after: Revision,
    ) -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError> {
        self.0.watch(after).await
    }
}
