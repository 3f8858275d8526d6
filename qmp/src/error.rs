//! What can go wrong on a QMP connection.

use std::{io, path::PathBuf, time::Duration};

/// Why a QMP connection, command or wait failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// The socket could not be reached.
    #[error(
        "Could not connect to the QMP socket {path}: check that QEMU runs with -qmp unix:PATH,server=on,wait=off"
    )]
    Connect {
        /// Socket that was dialled.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Something listens, but nothing was said. QEMU's monitor greets at once, unless it already serves a client.
    #[error(
        "No QMP greeting on {path} within {waited:?}: a monitor serves one client at a time, so another one may hold it; \
         disconnect that client or give this VM a second -qmp socket"
    )]
    NoGreeting {
        /// Socket that was dialled.
        path: PathBuf,
        /// How long the greeting was waited for.
        waited: Duration,
    },
    /// The first line was not a QMP greeting.
    #[error(
        "Expected a QMP greeting on {path}, found {found:?}: the socket may belong to a human monitor or to another program"
    )]
    NotQmp {
        /// Socket that was dialled.
        path: PathBuf,
        /// Start of what was read instead.
        found: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {description} ({class})")]
    Refused {
        /// Name of the command.
        command: String,
        /// QEMU's error class, such as `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's own words.
        description: String,
    },
    /// No reply in time. QEMU may still carry the command out.
    #[error(
        "QEMU did not answer {command} within {waited:?}: its main loop may be blocked; the command may still be carried out"
    )]
    Timeout {
        /// Name of the command, or the event waited for.
        command: String,
        /// The deadline that passed.
        waited: Duration,
    },
    /// The connection ended.
    #[error("The QMP connection is closed ({reason}): QEMU has ended, or the monitor dropped us")]
    Closed {
        /// What ended it.
        reason: String,
    },
    /// The reply to this command could not be read.
    #[error("QEMU's reply to {command} is not valid QMP: {detail}")]
    Malformed {
        /// Name of the command.
        command: String,
        /// What is wrong with it, and its start.
        detail: String,
    },
    /// The reply is valid QMP, but not of the form that this program knows.
    #[error("QEMU's reply to {command} has an unexpected form: this QEMU may be newer than vmove supports")]
    Decode {
        /// Name of the command.
        command: String,
        /// What did not fit.
        #[source]
        source: serde_json::Error,
    },
    /// A command could not be put into JSON.
    #[error("Could not encode the arguments of {command}")]
    Encode {
        /// Name of the command.
        command: String,
        /// What could not be encoded.
        #[source]
        source: serde_json::Error,
    },
    /// The monitor offers no out-of-band commands.
    #[error(
        "This monitor offers no out-of-band execution, {command} needs it: use a -qmp or -mon mode=control on a socket"
    )]
    NoOutOfBand {
        /// Name of the command.
        command: String,
    },
    /// A socket option or the like failed.
    #[error("QMP socket: {what}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl QmpError {
    /// Whether QEMU refused the command, as opposed to a connection or format problem: the connection is sound.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    /// Whether nothing more can come over this connection.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// QEMU's own words, if it refused.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        match self {
            Self::Refused { description, .. } => Some(description),
            _ => None,
        }
    }
}
