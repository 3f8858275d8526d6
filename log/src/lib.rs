//! The logs of `vmoved` and `vbridged`, on standard error.
//!
//! ```
//! use vmove_log::LogFormat;
//!
//! vmove_log::start("VMOVE_LOG", LogFormat::Text);
//! tracing::info!("lines like this one are for people");
//! ```
#![forbid(unsafe_code)]

use std::io::{self, IsTerminal};

use serde::Deserialize;
use tracing_subscriber::EnvFilter;

/// Form of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line, with the spans that the event is part of.
    Json,
}

/// Logs from now on what the environment variable `filter` selects (`info` if it is not set).
pub fn start(filter: &str, format: LogFormat) {
    let filter = EnvFilter::try_from_env(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Json => log.json().init(),
        LogFormat::Text => {
            // Colours are for terminals; they make files and journals hard to search.
            let log = log.with_ansi(io::stderr().is_terminal());
            // The journal has a time for each line.
            if std::env::var_os("JOURNAL_STREAM").is_some() { log.without_time().init() } else { log.init() }
        }
    }
}
