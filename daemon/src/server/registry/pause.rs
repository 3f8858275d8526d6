//! `vmove pause` and `vmove resume`.

use std::sync::Arc;
use std::time::Duration;

use super::{Registry, store_problem};
use crate::api::problem::{Code, Problem};
use crate::api::types::{Running, VmDetail};

/// `stop` drains the disks, `cont` may wait for their locks.
const OBEYS: Duration = Duration::from_secs(30);

impl Registry {
    /// Lets a guest run, or stops its processors. To ask for what is so already is no error.
    pub async fn set_running(self: &Arc<Self>, name: &str, wanted: Running) -> Result<VmDetail, Problem> {
        let record = self.vms.get(name).map_err(|e| store_problem(&e))?;
        // A migration stops and resumes the guest by itself, and knows better when.
        self.not_in_session(name)?;
        let client = self.monitor(&record).await?;
        let command = match wanted {
            Running::Running => "cont",
            Running::Paused => "stop",
        };
        client
            .execute_raw(command, serde_json::Value::Null, OBEYS)
            .await
            .map_err(|e| Problem::from_error(Code::QmpFailed, &e))?;
        tracing::info!(vm = %name, command, "on request");
        self.show(name).await
    }
}
