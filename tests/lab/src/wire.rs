//! Lines of JSON between the commands, the supervisor and the agents.

use serde::{Deserialize, Serialize};

use crate::switch::rules::Rule;

/// What a client asks of the supervisor. One request per connection; the answers are [`Event`]s.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// Run a command in a host. Answered by `Output`s and one `Exit`.
    Exec {
        /// Number of the host, from 1.
        host: usize,
        /// What to run.
        command: Command,
    },
    /// Set a rule of the switch. Answered by `Done`.
    Rule {
        /// Number of the sending host; `None`: all.
        from: Option<usize>,
        /// Number of the receiving host; `None`: all.
        to: Option<usize>,
        /// What happens to frames between them.
        rule: Rule,
    },
    /// What the switch has done so far. Answered by `Text`.
    Stats,
    /// End the lab. Answered by `Done` when everything has ended.
    Down,
}

/// A command for an agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; the program is looked up in `PATH`.
    pub argv: Vec<String>,
    /// Added to the environment.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Working directory; `None`: `/`.
    #[serde(default)]
    pub folder: Option<String>,
    /// The command's process group is killed after so many milliseconds.
    pub timeout_ms: u64,
}

/// A command with the number by which its events are told from others'.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Chosen by the supervisor.
    pub id: u64,
    /// The command or event.
    pub what: T,
}

/// What an agent or the supervisor answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// Something the command wrote to standard output.
    Out(String),
    /// Something the command wrote to standard error.
    Err(String),
    /// The command has ended.
    Exit {
        /// Exit status; 128 + number of the signal that killed it; 124 when its time was over; 127 when it could not
        /// be started.
        status: i32,
    },
    /// Done as asked.
    Done,
    /// An answer for people.
    Text(String),
    /// Not done, and why.
    Failed(String),
}

/// One line, newline included.
///
/// # Errors
/// Never for the types of this file.
pub fn line<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}
