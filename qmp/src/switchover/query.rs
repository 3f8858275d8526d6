//! Asking where a migration stands.

use std::time::Duration;

use serde_json::Value;

use super::{MigrationInfo, SwitchoverError};
use crate::Client;

/// Asks QEMU where a migration stands. Read field by field, so that a newer QEMU's additions do no harm.
///
/// # Errors
/// [`SwitchoverError::Qmp`].
pub async fn query_migration(client: &Client, deadline: Duration) -> Result<MigrationInfo, SwitchoverError> {
    let reply = client
        .execute_raw("query-migrate", Value::Null, deadline)
        .await
        .map_err(SwitchoverError::at("asking for the state of the migration"))?;
    Ok(MigrationInfo::from_reply(&reply))
}
