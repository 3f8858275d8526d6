//! What is fed: one target for each reader of what others wrote.

mod command_line;
mod forks;
mod image;
mod migration;
mod peer;
mod placement;
mod units;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// A reader of what others wrote.
#[derive(Debug)]
pub struct Target {
    /// Its name, and that of its folder with inputs.
    pub name: &'static str,
    /// What it feeds.
    pub what: &'static str,
    /// Feeds an input. What is not right is a panic.
    pub feed: fn(&[u8]),
    /// Valid input, as the real encoders write it.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Of a text: words of its language.
    pub words: &'static [&'static str],
    /// Mutations that a test feeds: as many as take about a second.
    pub mutations: u64,
}

/// All targets.
pub static ALL: [Target; 23] = [
    peer::GREETING,
    peer::ANSWER,
    peer::NEGOTIATION,
    peer::CONTROL_FRAMES,
    peer::FRAMES,
    peer::HEADERS,
    peer::HELLOS,
    peer::DATAGRAMS,
    migration::TO_DESTINATION,
    migration::TO_SOURCE,
    migration::PAGE_SETS,
    forks::TO_HOST,
    forks::TO_PARENT,
    forks::OPENING,
    forks::SPREAD_MESSAGES,
    forks::SPREAD_ENGINES,
    forks::GUEST_LINES,
    command_line::QMP,
    command_line::COMMAND_LINES,
    image::IMAGE_HEADERS,
    placement::TOPOLOGIES,
    placement::REQUESTS,
    units::UNITS,
];

/// The target of this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Target> {
    ALL.iter().find(|target| target.name == name)
}

/// What a future gives that reads from bytes: it never waits.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("it waits, and reads from bytes"),
    }
}

fn text(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}
