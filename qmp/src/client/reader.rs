//! The task that reads.

use std::{collections::VecDeque, io, sync::Arc};
use vmove_types::time::Mono;

use tokio::net::UnixStream;

use super::Shared;
use crate::{
    Event, QemuTime, QmpError,
    codec::{Framer, Incoming},
};

/// Bytes read at a time. QEMU's replies are mostly under 1 KiB.
const CHUNK: usize = 64 << 10;

/// Reads until one whole message is there; what follows it stays in `framer` only if it is incomplete, which QEMU
/// guarantees: it says nothing after its greeting before it is spoken to.
pub(super) async fn first_message(stream: &UnixStream, framer: &mut Framer) -> io::Result<Option<Incoming>> {
    let mut found = VecDeque::new();
    let mut chunk = vec![0; CHUNK];
    while found.is_empty() {
        let count = read_some(stream, &mut chunk).await?;
        if count == 0 {
            framer.finish(|message| found.push_back(message));
            break;
        }
        framer.push(&chunk[..count], |message| found.push_back(message));
    }
    Ok(found.pop_front())
}

async fn read_some(stream: &UnixStream, chunk: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(chunk) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

/// Reads until the end of the stream and gives each message to whom it belongs.
pub(super) async fn run(shared: Arc<Shared>, stream: Arc<UnixStream>, mut framer: Framer) {
    let _end = CloseOnDrop(&shared);
    let mut chunk = vec![0; CHUNK];
    let reason = loop {
        match read_some(&stream, &mut chunk).await {
            Ok(0) => break "QEMU closed it".to_owned(),
            Ok(count) => {
                let at = Mono::now();
                framer.push(&chunk[..count], |message| shared.deliver(message, at));
            }
            Err(error) => break error.to_string(),
        }
    };
    framer.finish(|message| shared.deliver(message, Mono::now()));
    tracing::debug!(path = %shared.path.display(), reason, "QMP connection closed");
    shared.close(&reason);
}

/// Also if a callback panics, those who wait learn that nobody reads any more.
struct CloseOnDrop<'s>(&'s Shared);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close("the reader has ended");
    }
}

impl Shared {
    fn deliver(&self, message: Incoming, at: Mono) {
        match message {
            Incoming::Return { id: Some(id), value } => {
                if !self.pending.answer(id, at, |_| Ok(value)) {
                    tracing::debug!(id, "QMP reply to an unknown command");
                }
            }
            Incoming::Refused { id: Some(id), class, description } => {
                let refused = |command: &str| {
                    Err(QmpError::Refused { command: command.to_owned(), class, description })
                };
                if !self.pending.answer(id, at, refused) {
                    tracing::debug!(id, "QMP refusal of an unknown command");
                }
            }
            Incoming::Event { name, data, seconds, micros, whole } => {
                let event = Arc::new(Event {
                    name,
                    data,
                    known: serde_json::from_value(whole).ok(),
                    at,
                    qemu_time: QemuTime { seconds, micros },
                });
                tracing::trace!(name = event.name, data = %event.data, "QMP event");
                self.hooks.run(&event);
                if let Some(sender) = &*self.lock_events() {
                    // Nobody subscribed is fine.
                    let _ = sender.send(event);
                }
            }
            Incoming::Malformed { id, detail } => {
                tracing::warn!(path = %self.path.display(), detail, "malformed QMP message skipped");
                if let Some(id) = id {
                    self.pending.answer(id, at, |command| {
                        Err(QmpError::Malformed { command: command.to_owned(), detail })
                    });
                }
            }
            Incoming::Refused { id: None, class, description } => {
                tracing::warn!(class, description, "QMP error that names no command");
            }
            Incoming::Return { id: None, .. } | Incoming::Greeting(_) => {
                tracing::warn!(path = %self.path.display(), "unexpected QMP message skipped");
            }
        }
    }
}
