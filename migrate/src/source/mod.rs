//! The side the guest comes from.
//!
//! [`session`] holds what a session owns and talks to the destination; [`before`] leads up to the hand-over and can be dropped at any
//! point, after which [`giving_up`] puts everything back; [`after`] serves memory until the destination has all of it.

mod after;
mod before;
mod classify;
mod exposure;
mod giving_up;
mod memory;
mod pages;
mod registering;
mod rounds;
mod sample;
mod session;

pub(crate) use giving_up::{put_back, tell_later};
pub(crate) use session::{Begun, begin, check, go_on};
