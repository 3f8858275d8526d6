//! `vmove pause` and `vmove resume`.

use std::sync::Arc;
use std::time::Duration;

use super::{Registry, RegistryError};
use vmove_types::vm::{Running, VmDetail};

/// `stop` drains the disks, `cont` may wait for their locks.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Between looks whether the copy of a disk has begun, for which the guest stands still.
const BEGINS_AGAIN: Duration = Duration::from_millis(10);
/// Between two attempts to let a guest run on.
const AGAIN: Duration = Duration::from_secs(1);

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

    /// Stops the processors of a guest for a time, after which it runs on by itself, unless somebody pauses it again or lets it run before.
    ///
    /// # Errors
    /// As [`Registry::set_running`].
    pub async fn pause_for(self: &Arc<Self>, name: &str, time: Duration) -> Result<VmDetail, RegistryError> {
        let paused = self.set_running(name, Running::Paused).await?;
        let number = {
            let mut state = self.lock();
            state.pauses += 1;
            let number = state.pauses;
            state.paused_for.insert(name.to_owned(), number);
            number
        };
        let (registry, vm) = (Arc::clone(self), name.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            while registry.lock().paused_for.get(&vm) == Some(&number) && registry.vms.get(&vm).is_ok() {
                match registry.set_running(&vm, Running::Running).await {
                    Ok(_) => {
                        tracing::warn!(%vm, "nobody let this guest run within the time for which it was paused: it runs on");
                    }
                    Err(error) => {
                        // A migration of it may have begun.
                        tracing::warn!(%vm, %error, "a guest that was paused for a time does not run on yet");
                        tokio::time::sleep(AGAIN).await;
                    }
                }
            }
        });
        Ok(paused)
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
        while self.migrations.begins_disk_move(name) {
            tokio::time::sleep(BEGINS_AGAIN).await;
        }
        let held = self.hold_running(name).await;
        client.set_running(wanted, COMMAND_TIMEOUT).await?;
        drop(held);
        self.lock().paused_for.remove(name);
        tracing::info!(vm = %name, command = wanted.command(), "on request");
        self.show(name).await
    }
}
