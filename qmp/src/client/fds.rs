//! Descriptors handed to QEMU.

use std::{os::fd::BorrowedFd, time::Duration};

use serde_json::{Value, json};

use super::{COMMAND_TIMEOUT, Client};
use crate::QmpError;

/// Where a descriptor ended up in QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdSetEntry {
    /// Set number, for paths such as `/dev/fdset/3`.
    pub set: u64,
    /// The descriptor's number inside QEMU.
    pub fd: i32,
}

impl Client {
    /// Puts `fd` into one of QEMU's descriptor sets: set `set`, or a new one. It stays open there until `remove-fd`.
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn add_fd(
        &self,
        set: Option<u64>,
        fd: BorrowedFd<'_>,
        deadline: Duration,
    ) -> Result<FdSetEntry, QmpError> {
        let arguments = set.map_or_else(|| json!({}), |set| json!({ "fdset-id": set }));
        let reply = self.execute_with_fd("add-fd", arguments, fd, deadline).await?;
        let number = |field: &str| reply.get(field).and_then(Value::as_i64);
        match (number("fdset-id"), number("fd")) {
            (Some(set), Some(fd)) => Ok(FdSetEntry {
                set: u64::try_from(set).unwrap_or_default(),
                fd: i32::try_from(fd).unwrap_or(-1),
            }),
            _ => Err(QmpError::Malformed { command: "add-fd".to_owned(), detail: reply.to_string() }),
        }
    }

    /// Closes what [`Client::add_fd`] gave. QEMU does so once the guest runs.
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn remove_fd(&self, entry: FdSetEntry) -> Result<(), QmpError> {
        self.execute_raw("remove-fd", json!({ "fdset-id": entry.set }), COMMAND_TIMEOUT).await.map(drop)
    }

    /// Gives QEMU `fd` under `name`, for one command that takes `fd:name`. Names belong to this connection.
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn get_fd(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        self.execute_with_fd("getfd", json!({ "fdname": name }), fd, COMMAND_TIMEOUT).await.map(drop)
    }
}
