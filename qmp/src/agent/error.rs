//! What can go wrong with a guest agent.

use std::{io, path::PathBuf, time::Duration};

/// Why the agent did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// Nobody has the other end of the port.
    #[error(
        "Could not connect to the guest agent's socket {path}: the guest needs -device virtserialport,name=org.qemu.guest_agent.0 with \
         a -chardev socket,server=on,wait=off"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// No answer in time.
    #[error(
        "The guest agent did not answer {command} within {waited:?}: qemu-ga does not run in the guest, hangs, or the guest is stopped"
    )]
    Silent {
        /// The command.
        command: String,
        /// The time limit.
        waited: Duration,
    },
    /// The socket closed.
    #[error("The guest agent's connection has ended: QEMU has exited, or another client took the port")]
    Closed,
    /// Reading or writing failed.
    #[error("The guest agent's socket failed")]
    Io {
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Its answer exceeded the limit.
    #[error("The guest agent answered {command} with more than {limit} bytes: the rest was not read")]
    TooMuch {
        /// The command.
        command: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// It said something that cannot be an answer.
    #[error(
        "The guest agent's answer to {command} is invalid: {detail}; check that the program at the port is qemu-ga"
    )]
    Nonsense {
        /// The command.
        command: String,
        /// What was found, and expected.
        detail: String,
    },
    /// It refused.
    #[error(
        "The guest agent refused {command}: {description}; 'qemu-ga --block-rpcs' or the guest's policy may forbid it"
    )]
    Refused {
        /// The command.
        command: String,
        /// The agent's own words.
        description: String,
    },
    /// A program did not end in time.
    #[error("{program} still runs in the guest (process {pid}) after {waited:?}")]
    StillRuns {
        /// What runs.
        program: String,
        /// Its process id in the guest.
        pid: i64,
        /// The time limit.
        waited: Duration,
    },
}
