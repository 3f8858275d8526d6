//! Lines of the agent's protocol, bounded.

use std::io;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::AgentError;

/// Stands before the answer to `guest-sync-delimited`; no JSON contains it.
const DELIMITER: u8 = 0xff;

/// The socket, and what was read beyond the last line.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    pub(super) async fn write(&mut self, request: &Value) -> Result<(), AgentError> {
        self.send(format!("{request}\n").as_bytes()).await
    }

    /// With a delimiter in front, at which the agent forgets half a request of whoever was here before.
    pub(super) async fn write_delimited(&mut self, request: &Value) -> Result<(), AgentError> {
        let mut bytes = vec![DELIMITER];
        bytes.extend_from_slice(format!("{request}\n").as_bytes());
        self.send(&bytes).await
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(bytes).await.map_err(ended)
    }

    /// Reads up to the next delimiter, and drops what is before it. Without one, this goes on until the caller's time limit; it keeps
    /// nothing of what it reads.
    pub(super) async fn skip_to_delimiter(&mut self) -> Result<(), AgentError> {
        loop {
            if let Some(at) = self.buffer.iter().position(|byte| *byte == DELIMITER) {
                self.buffer.drain(..=at);
                return Ok(());
            }
            self.buffer.clear();
            self.fill().await?;
        }
    }

    /// The next line that is not empty, without its end. Of one that is longer than `limit` nothing is kept.
    pub(super) async fn line(&mut self, command: &str, limit: usize) -> Result<Vec<u8>, AgentError> {
        let mut looked = 0;
        loop {
            if let Some(at) = self.buffer[looked..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=looked + at).collect();
                let line = line.trim_ascii();
                if line.len() <= limit && !line.is_empty() {
                    return Ok(line.to_vec());
                }
                if !line.is_empty() {
                    return Err(AgentError::TooMuch { command: command.to_owned(), limit });
                }
                looked = 0;
                continue;
            }
            looked = self.buffer.len();
            if looked > limit {
                self.buffer.clear();
                return Err(AgentError::TooMuch { command: command.to_owned(), limit });
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), AgentError> {
        self.buffer.reserve(16 << 10);
        match self.stream.read_buf(&mut self.buffer).await.map_err(ended)? {
            0 => Err(AgentError::Closed),
            _ => Ok(()),
        }
    }
}

fn ended(source: io::Error) -> AgentError {
    match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => AgentError::Closed,
        _ => AgentError::Io { source },
    }
}
