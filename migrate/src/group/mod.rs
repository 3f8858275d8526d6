//! Guests that move at one barrier: all of them, or none (`docs/decisions/0018-groups.md`).
//!
//! All members leave this node, so this daemon decides for all of them. [`barrier`] is where their sessions wait for each other; [`record`] is what the
//! group's journal says, whose line `decided` commits every member at once; [`journals`] reads a member's journal with that in mind; [`resuming`] is where the
//! scripts wait that tell the guests to go on.

pub(crate) mod barrier;
mod board;
pub(crate) mod handles;
pub(crate) mod journals;
pub(crate) mod record;
pub(crate) mod resuming;
