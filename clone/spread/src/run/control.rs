//! Control messages over an endpoint.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use vmove_fabric::{CompletionKind, Completions, Endpoint, FabricError, PostError, WrId};

use crate::error::SpreadError;
use crate::host_id::HostId;
use crate::message::{Assembly, Message, Welcome, frames};

/// How long the root may take to let a host in: it may wait for others.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(60);

/// A control connection.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) peer: HostId,
    pub(super) endpoint: Box<dyn Endpoint>,
    found: Completions,
    assembly: Assembly,
    /// Frames that the endpoint had no room for.
    queued: VecDeque<Vec<u8>>,
}

impl Control {
    pub(super) fn new(peer: HostId, endpoint: Box<dyn Endpoint>) -> Self {
        let found = Completions::default();
        Self { peer, endpoint, found, assembly: Assembly::default(), queued: VecDeque::new() }
    }

    /// Queues a message; [`poll`](Self::poll) sends it.
    pub(super) fn send(&mut self, message: &Message) {
        self.queued.extend(frames(message));
    }

    /// Sends what is queued, as far as there is room.
    pub(super) fn flush(&mut self) -> Result<(), FabricError> {
        while let Some(frame) = self.queued.front() {
            match self.endpoint.post_send(WrId(0), frame) {
                Ok(()) => drop(self.queued.pop_front()),
                // `poll` makes room, or says why the connection failed.
                Err(PostError::Full { .. } | PostError::Dead) => break,
                Err(error) => return Err(protocol(error.to_string())),
            }
        }
        self.endpoint.flush()
    }

    /// Sends what is queued and takes what has come.
    pub(super) fn poll(&mut self, messages: &mut Vec<Message>) -> Result<(), FabricError> {
        loop {
            self.flush()?;
            if self.endpoint.poll(&mut self.found)? == 0 {
                return Ok(());
            }
            for completion in self.found.drain() {
                let CompletionKind::Received(bytes) = completion.kind else { continue };
                messages.extend(self.assembly.push(&bytes).map_err(|error| protocol(error.to_string()))?);
            }
        }
    }

    /// At a host: waits for the root's first message; returns what came with it, too.
    pub(super) fn welcomed(&mut self) -> Result<(Box<Welcome>, Vec<Message>), SpreadError> {
        let begin = Instant::now();
        loop {
            let mut messages = Vec::new();
            self.poll(&mut messages)?;
            if !messages.is_empty() {
                let rest = messages.split_off(1);
                return match messages.pop() {
                    Some(Message::Welcome(welcome)) => Ok((welcome, rest)),
                    _ => {
                        let what = "a message before its welcome".to_owned();
                        Err(SpreadError::Protocol { from: self.peer, what })
                    }
                };
            }
            if begin.elapsed() > WELCOME_TIMEOUT {
                let waited_ms = u64::try_from(WELCOME_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
                let what = "the root's welcome";
                return Err(FabricError::Timeout { what, waited_ms }.into());
            }
            self.endpoint.wait(Some(Duration::from_millis(100)))?;
        }
    }
}

fn protocol(what: String) -> FabricError {
    FabricError::Protocol { what }
}
