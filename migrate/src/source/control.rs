//! The control connection to the destination.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::error::SourceError;
use super::session::Session;
use crate::proto::message::{ToDestination, ToSource};
use vmove_node::peer::codec::CodecError;
use vmove_node::peer::{Channel, LinkError, LinkKind, Token};

/// Keeps the destination from taking silence for death, and tells us when it is dead.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// The destination tells its progress ten times a second.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// A control connection.
#[derive(Debug)]
pub(super) struct Control {
    pub messages: Messages,
    pub pings: Pings,
}

/// What the destination says, and is told.
#[derive(Debug)]
pub(super) struct Messages {
    channel: Channel<ToSource>,
    /// That have come and were looked at, and are still to be dealt with.
    looked_at: VecDeque<ToSource>,
    heard: Instant,
}

/// When it is to be pinged.
#[derive(Debug)]
pub(super) struct Pings(Interval);

impl Control {
    /// Dials the destination.
    pub(super) async fn dial(session: &Session, token: Token) -> Result<Self, LinkError> {
        let hello = session.hello(LinkKind::Control, 0, token);
        let stream = session.node.config.dialer.stream(session.to(), &hello).await?;
        let mut ping = interval(PING_INTERVAL);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (channel, looked_at) = (Channel::new(stream), VecDeque::new());
        let messages = Messages { channel, looked_at, heard: Instant::now() };
        Ok(Self { messages, pings: Pings(ping) })
    }

    pub(super) async fn send(&mut self, message: &ToDestination) -> Result<(), CodecError> {
        self.messages.channel.send(message).await
    }

    /// The next message, whatever it is. Cancel-safe.
    pub(super) async fn receive(&mut self) -> Result<ToSource, CodecError> {
        self.messages.next().await
    }

    /// Looks at the messages that have come already. Each is to be dealt with all the same.
    pub(super) fn look_ahead(&mut self) -> Result<impl Iterator<Item = &ToSource>, CodecError> {
        let Messages { channel, looked_at, heard } = &mut self.messages;
        while let Some(message) = channel.received() {
            looked_at.push_back(message?);
            *heard = Instant::now();
        }
        Ok(looked_at.iter())
    }

    /// Keeps the destination from taking silence for death while we are busy.
    pub(super) async fn keep_alive(&mut self) -> Result<(), CodecError> {
        self.send(&ToDestination::Ping(0)).await
    }

    /// Fails if the destination has said nothing for too long.
    pub(super) fn look_at_silence(&self) -> Result<(), SourceError> {
        if self.messages.heard.elapsed() > SILENCE_TIMEOUT {
            return Err(SourceError::Silence(SILENCE_TIMEOUT.as_secs()));
        }
        Ok(())
    }
}

impl Messages {
    /// The next message. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<ToSource, CodecError> {
        if let Some(message) = self.looked_at.pop_front() {
            return Ok(message);
        }
        let message = self.channel.receive().await?;
        self.heard = Instant::now();
        Ok(message)
    }
}

impl Pings {
    /// Waits until the next is due. Cancel-safe.
    pub(super) async fn next(&mut self) {
        self.0.tick().await;
    }
}
