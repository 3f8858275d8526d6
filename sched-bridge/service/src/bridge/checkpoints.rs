//! Checkpoints of clusters in the store.

use std::sync::Arc;

use sched_bridge::model::NodeName;

use super::transactions::json;
use super::{Attempt, Bridge, BridgeError};
use crate::checkpoint::Checkpoint;
use crate::keys;
use crate::lease::LeaseId;
use crate::store::{Expect, Txn};

impl Bridge {
    /// A checkpoint.
    ///
    /// # Errors
    /// There is no such checkpoint, or the store does not answer.
    pub fn checkpoint(&self, name: &LeaseId) -> Result<Arc<Checkpoint>, BridgeError> {
        let view = self.view()?;
        let found = view.checkpoints().get(name).map(|(checkpoint, _)| Arc::clone(checkpoint));
        found.ok_or_else(|| BridgeError::UnknownCheckpoint(name.clone()))
    }

    /// Writes a new checkpoint.
    ///
    /// # Errors
    /// There is another one of this name, or the store does not answer.
    pub async fn put_checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), BridgeError> {
        let name = &checkpoint.info.name;
        self.change(|view| match view.checkpoints().get(name) {
            // After a lost answer.
            Some((known, _)) if **known == *checkpoint => Ok(Attempt::Done(())),
            Some(_) => Err(BridgeError::CheckpointExists(name.clone())),
            None => {
                let key = keys::checkpoint(name);
                let txn = Txn::default().expect(&key, Expect::Absent).put(key, json(checkpoint));
                Ok(Attempt::Commit(txn, ()))
            }
        })
        .await
    }

    /// Notes nodes that are lost: VMs of the checkpoint's moment do not run there any more.
    ///
    /// # Errors
    /// There is no such checkpoint, or the store does not answer.
    pub async fn note_lost(&self, name: &LeaseId, lost: &[NodeName]) -> Result<(), BridgeError> {
        self.change(|view| {
            let found = view.checkpoints().get(name);
            let (known, revision) = found.ok_or_else(|| BridgeError::UnknownCheckpoint(name.clone()))?;
            let mut checkpoint = Checkpoint::clone(known);
            checkpoint.lost.extend(lost.iter().cloned());
            if checkpoint == **known {
                return Ok(Attempt::Done(()));
            }
            let key = keys::checkpoint(name);
            let txn = Txn::default().expect(&key, Expect::At(*revision)).put(key, json(&checkpoint));
            Ok(Attempt::Commit(txn, ()))
        })
        .await
    }

    /// Deletes a checkpoint.
    ///
    /// # Errors
    /// There is no such checkpoint, or the store does not answer.
    pub async fn remove_checkpoint(&self, name: &LeaseId) -> Result<(), BridgeError> {
        self.change(|view| {
            let found = view.checkpoints().get(name);
            let (_, revision) = found.ok_or_else(|| BridgeError::UnknownCheckpoint(name.clone()))?;
            let key = keys::checkpoint(name);
            Ok(Attempt::Commit(Txn::default().expect(&key, Expect::At(*revision)).delete(key), ()))
        })
        .await
    }
}
