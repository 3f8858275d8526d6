//! Control messages over an endpoint.

use std::collections::VecDeque;

use vmove_fabric::{CompletionKind, Completions, Endpoint, FabricError, PostError, WrId};

use crate::message::{Assembly, HostId, Message, frames};

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
                messages.extend(self.assembly.push(&bytes).map_err(protocol)?);
            }
        }
    }
}

fn protocol(what: String) -> FabricError {
    FabricError::Protocol { what }
}
