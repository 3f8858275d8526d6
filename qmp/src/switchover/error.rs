//! What can go wrong while device state moves.

use std::{io, time::Duration};

use super::MigrationStatus;
use crate::QmpError;

/// Why a step of the switch-over failed. After an error on the source call [`super::Source::cancel`]: it finds out
/// where QEMU stands and brings the guest back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchoverError {
    /// A command failed.
    #[error("Switch-over, {step}")]
    Qmp {
        /// What was being done.
        step: &'static str,
        /// Why the command failed.
        #[source]
        source: QmpError,
    },
    /// The capability is not known to this QEMU.
    #[error("QEMU {version} lacks the migration capability {capability}: version 4.0 or newer is needed")]
    NoCapability {
        /// Name of the capability.
        capability: &'static str,
        /// QEMU's version.
        version: String,
    },
    /// QEMU is migrating already.
    #[error("This QEMU is in another migration ({status}): let it end, or cancel it")]
    Busy {
        /// Where that migration stands.
        status: MigrationStatus,
    },
    /// The guest is in a state that cannot be moved.
    #[error("The guest cannot be moved in run state {run_state:?}: it must be running or paused")]
    RunState {
        /// QEMU's name for it.
        run_state: String,
    },
    /// QEMU gave the migration up.
    #[error("QEMU's migration ended as {status} while vmove waited for {waiting_for}: {reason}")]
    Failed {
        /// The status it ended in.
        status: MigrationStatus,
        /// The step that was awaited.
        waiting_for: &'static str,
        /// QEMU's own words, or where to look.
        reason: String,
    },
    /// QEMU, or its monitor, went away.
    #[error("QEMU's monitor closed while vmove waited for {waiting_for}: QEMU has exited, its log says why")]
    Gone {
        /// The step that was awaited.
        waiting_for: &'static str,
    },
    /// It took too long.
    #[error("No {waiting_for} within {waited:?}, the migration is {status}")]
    Timeout {
        /// The step that was awaited.
        waiting_for: &'static str,
        /// The deadline that passed.
        waited: Duration,
        /// Where the migration stands.
        status: MigrationStatus,
    },
    /// A step was asked for out of order.
    #[error("{step} is not possible now, the migration is {status}")]
    Order {
        /// What was asked for.
        step: &'static str,
        /// Where the migration stands.
        status: MigrationStatus,
    },
    /// The guest could not be brought back.
    #[error(
        "The guest is in run state {run_state:?} and did not resume: inspect it, then send cont to its monitor"
    )]
    NotResumed {
        /// QEMU's name for it.
        run_state: String,
    },
    /// The stream between the QEMUs.
    #[error("Device-state stream: {what}")]
    Stream {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl SwitchoverError {
    /// For a command that failed in this step.
    pub fn at(step: &'static str) -> impl FnOnce(QmpError) -> Self {
        move |source| Self::Qmp { step, source }
    }
}
