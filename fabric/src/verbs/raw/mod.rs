//! libibverbs and librdmacm, owned: every object of the library is held by one value here whose drop destroys it.
//!
//! Drop order is the reverse of creation, by construction: a [`Qp`] owns its [`Cq`] and drops it after itself, both
//! hold the [`Domain`] they were made in, a [`Domain`] holds its [`Device`]. A [`Region`](crate::Region) holds its
//! [`Mr`], so memory is deregistered before it may be unmapped.
//!
//! Rules (for the `unsafe` in this folder):
//! 1. A pointer to an object of the library came from its constructor, is not null, belongs to exactly one value here,
//!    and is destroyed once, in that value's drop, while everything it was made from still exists (see above).
//! 2. The library may be called from any thread (its manual promises that); what it does not order for us is ordered by
//!    `&mut`.
//! 3. Structures given to a call are locals or buffers of ours that outlive it; all-zero is a valid value of each of
//!    those types (numbers and pointers only). The library keeps no pointer to them.
//! 4. Registered memory is valid as long as the [`Mr`]: whoever made the [`MemoryArea`](crate::MemoryArea) promised
//!    it. Only the device touches it, by addresses that are given as numbers.
//! 5. A function of the library is called by the type that its header gives it, and stays where it is: the library is
//!    never unloaded.
//! 6. Of a receive ring, a slot is the device's from its posting to its completion and ours from then until it is posted
//!    again. A slice of it is made only in between.
//! 7. A context whose `abi_compat` is all ones is the last field of a `verbs_context` (the header's `verbs_get_ctx`), of which those
//!    fields are there that its `sz` covers, counted from its end.
#![allow(unsafe_code)]

mod datagram;
mod device;
mod extended;
mod library;
mod list;
mod membership;
mod probe;
mod queue;
mod registered;

pub(super) use datagram::{Arrived, Outbox, Payload, Ring, Shape};
pub(super) use device::{Device, Domain, Limits, News};
pub(super) use membership::{Member, Route};
pub(super) use probe::Probe;
pub(super) use queue::{Cq, Ended, Outcome, Path, Post, Qp};
pub(super) use registered::{Held, Mr};
