//! Answers that come as a stream.

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use vmove_http::client::Lines;

use crate::Error;
use crate::connection::Connection;

/// Values that a daemon sends as they come. Dropped, the stream is closed.
#[derive(Debug)]
pub struct Stream<T> {
    lines: Lines,
    connection: Connection,
    values: PhantomData<fn() -> T>,
}

impl<T> Stream<T> {
    pub(crate) fn new(lines: Lines, connection: Connection) -> Self {
        Self { lines, connection, values: PhantomData }
    }
}

impl<T: DeserializeOwned> Stream<T> {
    /// The next value; `None` when the daemon has ended the stream.
    ///
    /// # Errors
    /// The connection broke, or what came is not a value.
    pub async fn next(&mut self) -> Result<Option<T>, Error> {
        let line = self.lines.next().await.map_err(|error| self.connection.failed(error))?;
        let value = line.map(|line| serde_json::from_slice(&line)).transpose();
        value.map_err(|error| self.connection.unexpected(error.to_string()))
    }
}
