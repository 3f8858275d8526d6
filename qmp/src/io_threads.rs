//! QEMU's I/O threads run before its other threads while it stops the guest.
//!
//! An I/O thread (`-object iothread`) counts a request of the guest as done first, and tells the guest by an event descriptor after that.
//! Between the two, QEMU's main thread may see that nothing is under way, go on with the stop, and close the descriptor: then the guest
//! never hears of its request (QEMU 10.0: `virtio_blk_stop_ioeventfd` and `virtio_notify_irqfd`). On a busy host that happens in one of some
//! 30 stops of a guest that always has a request under way, when the main thread takes the processor of the I/O thread that has just woken
//! it. It cannot from a thread with real-time priority.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use vmove_tuning::ahead::{Ahead, put_back};
use vmove_types::vm::Running;

use crate::client::COMMAND_TIMEOUT;
use crate::{Client, QmpError};

/// The I/O threads of a QEMU that is to stop its guest. They are as before when this is dropped.
#[derive(Debug, Default)]
pub struct IoThreads {
    /// Their numbers on this host.
    threads: Vec<u32>,
    ahead: Mutex<Vec<Ahead>>,
}

impl IoThreads {
    /// Asks QEMU. None of a QEMU that has none, or that runs in a PID namespace of its own: its numbers are not ours.
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn of(client: &Client) -> Result<Self, QmpError> {
        let told = match client.execute_raw("query-iothreads", Value::Null, COMMAND_TIMEOUT).await {
            Err(error) if error.is_refusal() => return Ok(Self::default()),
            other => other?,
        };
        let Some(pid) = client.peer_pid() else { return Ok(Self::default()) };
        let number = |one: &Value| one.get("thread-id").and_then(Value::as_u64)?.try_into().ok();
        let is_its = |thread: &u32| std::fs::exists(format!("/proc/{pid}/task/{thread}")).unwrap_or(false);
        let threads = told.as_array().into_iter().flatten().filter_map(number).filter(is_its).collect();
        Ok(Self { threads, ahead: Mutex::default() })
    }

    /// From now on they run before QEMU's other threads.
    pub fn go_ahead(&self) {
        let put = |thread: &u32| match Ahead::put(*thread) {
            Ok(ahead) => ahead,
            Err(error) => {
                tracing::warn!(
                    thread,
                    %error,
                    "an I/O thread of QEMU gets no priority while the guest stops: on a busy host the guest may wait for a disk for ever; \
                     CAP_SYS_NICE would allow it"
                );
                None
            }
        };
        let ahead = self.threads.iter().filter_map(put).collect();
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) = ahead;
    }

    /// The guest is stopped, and nothing of it is under way: they are as before.
    pub fn step_back(&self) {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Those that an earlier life of this program left ahead are as all others again.
    pub(crate) fn take_back(&self) {
        for thread in &self.threads {
            let _ = put_back(*thread);
        }
    }
}

impl Client {
    /// Lets the guest's processors run (`cont`), or stops them (`stop`); then nothing of the guest is under way any more when this returns.
    ///
    /// # Errors
    /// As [`Client::execute_raw`].
    pub async fn set_running(&self, wanted: Running, deadline: Duration) -> Result<(), QmpError> {
        let io_threads = match wanted {
            Running::Paused => IoThreads::of(self).await?,
            Running::Running => IoThreads::default(),
        };
        io_threads.go_ahead();
        self.execute_raw(wanted.command(), Value::Null, deadline).await.map(drop)
    }
}
