//! Programs that are run in the guest. Its agent is the guest's: it may hang, and what it says is no more than a claim.

use std::time::Duration;

use tokio::time::timeout;
use vmove_qmp::agent::{ExecRequest, Finish};

use crate::vmm::{DeviceMonitor, InGuestError};

/// Bytes of a script's output that are looked at.
const OUTPUT: usize = 4 << 10;
/// What its answers may take longer than the script itself.
const GRACE: Duration = Duration::from_secs(5);

/// Why a script did not end as it should.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScriptError {
    #[error("{script:?} could not be run in the guest")]
    NotRun { script: String, source: InGuestError },
    #[error("{script:?} did not end in the guest within {limit:?}")]
    Hangs { script: String, limit: Duration },
    #[error("{script:?} ended in the guest with {how}: {said}")]
    Failed { script: String, how: String, said: String },
}

/// Runs a script in the guest by `/bin/sh`.
pub(crate) async fn run(
    monitor: &dyn DeviceMonitor,
    script: &str,
    limit: Duration,
) -> Result<(), ScriptError> {
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
