//! The side the guest comes from.
//!
//! A session is one task that runs one phase after the other ([`phases`]): [`asking`] (with [`promised`] and [`watch`], if there are goals), [`warm`] (with [`head_start`], [`sample`] and [`rounds`]),
//! [`stopping`], [`stopped`], [`committed`], [`released`]. Each phase is a struct with what there is in it, and becomes the next one by
//! value; up to the commit it can be undone at any point ([`aborted`]). What outlives the phases is in [`session`]; [`conversation`] talks
//! to the destination, [`page_service`] lets it read the guest's memory.

mod aborted;
mod asking;
mod by_libvirt;
mod check;
mod choosing;
mod classify;
mod committed;
mod control;
mod conversation;
mod copying_disks;
mod copying_frames;
mod detach;
mod devices;
pub(crate) mod disk_choice;
pub(crate) mod disk_copies;
mod disk_hashes;
pub(crate) mod disks_aside;
mod error;
mod exposure;
mod final_pages;
mod followed;
mod frames;
mod gate;
mod gathering;
mod head_start;
mod hold;
mod link_rate;
mod memory;
mod outdated;
mod page_service;
mod pause;
mod phases;
mod promised;
mod registering;
mod released;
mod rounds;
mod sample;
mod served_disks;
mod session;
mod steering;
mod stopped;
mod stopped_qemu;
mod stopping;
mod visits;
mod warm;
mod watch;

pub(crate) use aborted::{put_back, tell_later};
pub(crate) use check::check;
pub(crate) use choosing::choose;
pub(crate) use followed::take_up_domain;
pub(crate) use hold::{guard, let_domain_on};
pub(crate) use phases::{Begun, begin, go_on};
