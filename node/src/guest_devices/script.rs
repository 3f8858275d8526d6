//! Programs that are run in the guest. Its agent is the guest's: it may hang, and what it says is no more than a claim.

use std::time::Duration;

use tokio::time::timeout;
use vmove_qmp::agent::{ExecRequest, Finish};

use super::{DeviceMonitor, InGuestError};

/// Bytes of a script's output that are looked at.
const OUTPUT: usize = 4 << 10;
/// What its answers may take longer than the script itself.
const GRACE: Duration = Duration::from_secs(5);

/// Why a script did not end as it should.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScriptError {
    /// The guest's agent did not run it.
    #[error("{script:?} could not be run in the guest")]
    NotRun {
        /// The script.
        script: String,
        /// Why.
        source: InGuestError,
    },
    /// It took too long, and may go on.
    #[error("{script:?} did not end in the guest within {limit:?}")]
    Hangs {
        /// The script.
        script: String,
        /// The time that it had.
        limit: Duration,
    },
    /// It did not end with 0.
    #[error("{script:?} ended in the guest with {how}: {said}")]
    Failed {
        /// The script.
        script: String,
        /// Its status, or the signal.
        how: String,
        /// The end of what it said.
        said: String,
    },
}

/// Runs a script in the guest by `/bin/sh`.
///
/// # Errors
/// [`ScriptError`].
pub async fn run(monitor: &dyn DeviceMonitor, script: &str, limit: Duration) -> Result<(), ScriptError> {
    let request = ExecRequest { time: limit, output: OUTPUT, ..ExecRequest::shell(script) };
    let script = || script.to_owned();
    let ran = timeout(limit + GRACE, monitor.run_in_guest(&request)).await;
    let ran = ran.map_err(|_| ScriptError::Hangs { script: script(), limit })?;
    let ran = ran.map_err(|source| ScriptError::NotRun { script: script(), source })?;
    let how = match ran.finish {
        Finish::Exit(0) => return Ok(()),
        Finish::Exit(status) => format!("status {status}"),
        Finish::Signal(signal) => format!("signal {signal}"),
    };
    let said = if ran.said.is_empty() { "it said nothing".to_owned() } else { ran.said };
    Err(ScriptError::Failed { script: script(), how, said })
}
