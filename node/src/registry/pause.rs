//! `vmove pause` and `vmove resume`.

use std::sync::Arc;
use std::time::Duration;

use super::{Registry, RegistryError};
use vmove_types::vm::{Running, VmDetail};

/// `stop` drains the disks, `cont` may wait for their locks.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

impl Registry {
    /// Until this is dropped, nobody else stops or resumes the VM: for those who stop it for a moment, and would undo it.
    pub async fn hold_running(&self, name: &str) -> tokio::sync::OwnedMutexGuard<()> {
        let lock = {
            let mut state = self.lock();
            // Those of VMs that are no more.
            state.stopping.retain(|_, lock| Arc::strong_count(lock) > 1);
            state.stopping.entry(name.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// Lets a guest run, or stops its processors. To ask for what is so already is no error.
    pub async fn set_running(
        self: &Arc<Self>,
        name: &str,
        wanted: Running,
    ) -> Result<VmDetail, RegistryError> {
        let record = self.vms.get(name)?;
        // A migration stops and resumes the guest by itself, and knows better when.
        self.not_in_session(name)?;
        let client = self.monitor(&record).await?;
        let command = match wanted {
            Running::Running => "cont",
            Running::Paused => "stop",
        };
        let held = self.hold_running(name).await;
        client.execute_raw(command, serde_json::Value::Null, COMMAND_TIMEOUT).await?;
        drop(held);
        tracing::info!(vm = %name, command, "on request");
        self.show(name).await
    }
}
