//! A control connection: messages out, messages in.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::mpsc;

use super::codec::{self, CodecError};
use super::link::BoxedStream;

/// Messages read ahead of the session. A full queue stops the reading, and with it the peer.
const AHEAD: usize = 64;

/// One end of a control connection. Receiving is cancel-safe: a task of its own reads whole messages.
#[derive(Debug)]
pub struct Channel<In> {
    writer: WriteHalf<BoxedStream>,
    incoming: mpsc::Receiver<Result<In, CodecError>>,
    reader: tokio::task::JoinHandle<()>,
}

impl<In: DeserializeOwned + Send + 'static> Channel<In> {
    /// Takes a stream whose greeting is over.
    #[must_use]
    pub fn new(stream: BoxedStream) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let (sender, incoming) = mpsc::channel(AHEAD);
        Self { writer, incoming, reader: crate::task::spawn(read_all(reader, sender)) }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`CodecError::Io`].
    pub async fn send<Out: Serialize + Sync>(&mut self, message: &Out) -> Result<(), CodecError> {
        codec::send(&mut self.writer, message).await
    }

    /// The next message. After an error there are no more.
    ///
    /// # Errors
    /// [`CodecError`].
    pub async fn receive(&mut self) -> Result<In, CodecError> {
        self.incoming.recv().await.unwrap_or(Err(CodecError::Closed))
    }

    /// A message that has come already.
    pub fn received(&mut self) -> Option<Result<In, CodecError>> {
        self.incoming.try_recv().ok()
    }
}

impl<In> Drop for Channel<In> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read_all<In: DeserializeOwned>(
    mut from: ReadHalf<BoxedStream>,
    to: mpsc::Sender<Result<In, CodecError>>,
) {
    loop {
        let message = codec::receive(&mut from).await;
        let last = message.is_err();
        if to.send(message).await.is_err() || last {
            return;
        }
    }
}
