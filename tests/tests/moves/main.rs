//! Guests that move between two daemons, and what a guest may be like that does. To run one after the other: the figures of some of these
//! tests suffer from others beside them.

mod balloon;
mod blockers;
mod direct_io;
mod guest;
mod history;
mod locked;
mod modes;
mod old_kernel;
