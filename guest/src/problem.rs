//! What can go wrong: what was expected, what was found, and what to do.

use std::io;
use std::path::PathBuf;

use crate::{MAX_LINE, NAME};

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The machine has no such port.
    #[error(
        "expected a virtio-serial port named {NAME}, found none: start the VM with a virtserialport of this name, and load virtio_console"
    )]
    NoPort,
    /// Its device cannot be opened.
    #[error("{}: {error}", path.display())]
    Open {
        /// The device.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// One process at a time may have the port open.
    #[error(
        "{}: another process has had it open for {seconds} s, a join that waits, perhaps: one at a time can use it", path.display()
    )]
    InUse {
        /// The device.
        path: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
    /// Nobody takes what is written.
    #[error(
        "nobody on the host has listened to the port for {seconds} s: vmoved must run there, and the port's socket be {{vmdir}}/fork.sock"
    )]
    NobodyListens {
        /// How long was waited.
        seconds: u64,
    },
    /// The host let go of the port before it answered.
    #[error(
        "the host let go of the port before it answered, as when vmoved restarts: whether it did what was asked is not known"
    )]
    Lost,
    /// The host does not do it.
    #[error("the host refuses ({code}): {message}{}", advice(code))]
    Refused {
        /// `forbidden`, `bad-request`, `busy` and others, as in `docs/errors.md`.
        code: String,
        /// Why.
        message: String,
    },
    /// What would be written is too long.
    #[error(
        "expected a line of {MAX_LINE} bytes at most, found {0}: leave less as the result, or write it to storage"
    )]
    TooLong(usize),
    /// An answer that is none.
    #[error("expected an answer in JSON, found {0:?}")]
    Answer(String),
    /// Reading or writing the port failed.
    #[error("the port failed: {0}")]
    Io(#[from] io::Error),
}

impl Problem {
    /// A word for programs: the host's own, or one of `no-port`, `port-in-use`, `nobody-listens`, `lost`, `too-long`, `io`.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::NoPort => "no-port",
            Self::InUse { .. } => "port-in-use",
            Self::NobodyListens { .. } => "nobody-listens",
            Self::Lost => "lost",
            Self::Refused { code, .. } => code,
            Self::TooLong(_) => "too-long",
            Self::Open { .. } | Self::Answer(_) | Self::Io(_) => "io",
        }
    }
}

/// What to do about a refusal, where its message does not say that.
fn advice(code: &str) -> &'static str {
    match code {
        "forbidden" => {
            ". The host's operator allows it: from-guest and max-children in [fork] of vmoved.toml"
        }
        "busy" => ". Try again later",
        _ => "",
    }
}
