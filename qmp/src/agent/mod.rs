//! A client of the QEMU guest agent (`qemu-ga`), which runs commands inside the guest.
//!
//! The agent is a program of the guest and not trusted. It may be missing, hang, lie, or be a different program. So every command has a
//! timeout, every answer has a maximum length, and its form is checked. Its content is only a claim of the guest.
//!
//! The port is a byte pipe that outlives its clients, so an answer may belong to a command of an earlier client. Therefore each
//! [`Agent`] sends `guest-sync-delimited` at its start, and again after each command that got no answer.

mod error;
mod exec;
mod port;
mod wire;

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use tokio::time::Instant;

pub use error::AgentError;
pub use exec::{ExecRequest, Executed, Finish};
pub use port::socket_of;

use crate::client::connect_unix;
use wire::Wire;

/// Maximum length of an answer in bytes, except that of `guest-exec-status`.
const MAX_ANSWER: usize = 256 << 10;

/// A connection to a guest's agent.
#[derive(Debug)]
pub struct Agent {
    wire: Wire,
    /// Whether an answer to an earlier command may still arrive.
    stale: bool,
    next_sync: u64,
}

impl Agent {
    /// Connects to the socket of the agent's port, and waits until the agent answers.
    ///
    /// # Errors
    /// [`AgentError::Connect`]; [`AgentError::Silent`] if no agent runs in the guest; what [`Agent::ask`] gives.
    pub async fn connect(socket: &Path, deadline: Duration) -> Result<Self, AgentError> {
        let until = Instant::now() + deadline;
        let failed = |source| AgentError::Connect { path: socket.to_owned(), source };
        let stream = tokio::time::timeout_at(until, connect_unix(socket))
            .await
            .map_err(|_| failed(std::io::ErrorKind::TimedOut.into()))?
            .map_err(failed)?;
        // Hard to guess, so that no answer of an earlier life fits.
        let next_sync = u64::from(rand_u32());
        let mut agent = Self { wire: Wire::new(stream), stale: true, next_sync };
        agent.sync(until, deadline).await?;
        Ok(agent)
    }

    /// Whether the agent answers.
    ///
    /// # Errors
    /// As [`Agent::ask`].
    pub async fn ping(&mut self, deadline: Duration) -> Result<(), AgentError> {
        self.ask("guest-ping", &Value::Null, deadline).await.map(drop)
    }

    /// The agent's version, and whether it may run programs.
    ///
    /// # Errors
    /// As [`Agent::ask`].
    pub async fn info(&mut self, deadline: Duration) -> Result<AgentInfo, AgentError> {
        const COMMAND: &str = "guest-info";
        let reply = self.ask(COMMAND, &Value::Null, deadline).await?;
        let version = reply.get("version").and_then(Value::as_str);
        let commands = reply.get("supported_commands").and_then(Value::as_array);
        let (Some(version), Some(commands)) = (version, commands) else {
            return Err(nonsense(COMMAND, "expected version and supported_commands", &reply));
        };
        let enabled = |name: &str| {
            let row = commands.iter().find(|row| row.get("name").and_then(Value::as_str) == Some(name));
            row.and_then(|row| row.get("enabled")).and_then(Value::as_bool).unwrap_or(false)
        };
        Ok(AgentInfo {
            version: version.chars().take(64).collect(),
            can_execute: enabled("guest-exec") && enabled("guest-exec-status"),
        })
    }

    /// Asks for a command by name; `arguments` is an object, or `Null` for none. Gives what the agent returned.
    ///
    /// # Errors
    /// [`AgentError::Silent`], [`AgentError::Closed`], [`AgentError::Io`], [`AgentError::TooMuch`], [`AgentError::Nonsense`],
    /// [`AgentError::Refused`].
    pub async fn ask(
        &mut self,
        command: &str,
        arguments: &Value,
        deadline: Duration,
    ) -> Result<Value, AgentError> {
        self.ask_bounded(command, arguments, MAX_ANSWER, deadline).await
    }

    async fn ask_bounded(
        &mut self,
        command: &str,
        arguments: &Value,
        limit: usize,
        deadline: Duration,
    ) -> Result<Value, AgentError> {
        let until = Instant::now() + deadline;
        if self.stale {
            self.sync(until, deadline).await?;
        }
        let mut request = json!({ "execute": command });
        if !arguments.is_null() {
            request["arguments"] = arguments.clone();
        }
        let late = || AgentError::Silent { command: command.to_owned(), waited: deadline };
        // Whatever goes wrong from here on, an answer may still come.
        self.stale = true;
        let exchange = async {
            self.wire.write(&request).await?;
            self.wire.line(command, limit).await
        };
        let line = tokio::time::timeout_at(until, exchange).await.map_err(|_| late())??;
        let reply: Value = serde_json::from_slice(&line)
            .map_err(|error| nonsense(command, &error.to_string(), &String::from_utf8_lossy(&line)))?;
        self.stale = false;
        if let Some(error) = reply.get("error") {
            let description = error.get("desc").and_then(Value::as_str).unwrap_or("it gave no reason");
            let description = description.chars().take(500).collect();
            return Err(AgentError::Refused { command: command.to_owned(), description });
        }
        reply.get("return").cloned().ok_or_else(|| nonsense(command, "expected return or error", &reply))
    }

    /// Brings both ends together: what the agent says before the answer with our number belongs to others.
    async fn sync(&mut self, until: Instant, waited: Duration) -> Result<(), AgentError> {
        const COMMAND: &str = "guest-sync-delimited";
        self.next_sync = (self.next_sync + 1) & 0x7fff_ffff;
        let number = self.next_sync;
        let late = || AgentError::Silent { command: COMMAND.to_owned(), waited };
        let exchange = async {
            self.wire.write_delimited(&json!({ "execute": COMMAND, "arguments": { "id": number } })).await?;
            loop {
                self.wire.skip_to_delimiter().await?;
                let line = self.wire.line(COMMAND, MAX_ANSWER).await?;
                let reply: Option<Value> = serde_json::from_slice(&line).ok();
                if reply.and_then(|reply| reply.get("return")?.as_u64()) == Some(number) {
                    return Ok(());
                }
            }
        };
        tokio::time::timeout_at(until, exchange).await.map_err(|_| late())??;
        self.stale = false;
        Ok(())
    }
}

/// What an agent says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AgentInfo {
    /// Its version, such as `10.0.2`.
    pub version: String,
    /// Whether it runs programs (`guest-exec`): many distributions forbid that.
    pub can_execute: bool,
}

fn nonsense(command: &str, expected: &str, found: &impl ToString) -> AgentError {
    let found: String = found.to_string().chars().take(200).collect();
    AgentError::Nonsense { command: command.to_owned(), detail: format!("{expected}, found {found:?}") }
}

/// From the kernel's seed of this process's hash maps; differs from process to process and from call to call.
fn rand_u32() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    let hash = RandomState::new().hash_one(std::process::id());
    u32::try_from(hash & 0x7fff_ffff).unwrap_or(1)
}
