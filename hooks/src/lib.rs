//! Hooks: what an operator wants done when something happens to a guest, a migration, a fork or a host.
//!
//! This crate knows events, conditions, order, rate limits, loops, a journal and programs. It knows nothing of engines: what a hook does to a
//! VM is carried out by a [`Node`].
//!
//! | Module | Owns |
//! |---|---|
//! | [`config`] | `[[hook]]` as it is written, and checked |
//! | [`event`], [`own`], [`trigger`] | what hooks hear of, the events of this daemon, and what they wait for |
//! | `condition`, `rate` | whether a hook runs for an event |
//! | [`action`], [`node`] | what it does, and who does that |
//! | [`hooks`] | all hooks of a node: events in, runs out |
//! | `asked`, `queue`, `run` | the word of a hook that somebody waits for; events that nobody waits for; one run |
//! | `loops` | events that a hook's own action has caused |
//! | `trial` | `vmove hook test` |
//! | `journal` | runs that a daemon which was killed has begun |
//! | [`program`] | an operator's program: time limit, process group, output |
//! | [`signals`] | what the host tells: memory errors, kernel log, files, timers |

pub mod action;
mod asked;
mod condition;
pub mod config;
pub mod event;
mod facts;
pub mod hooks;
mod journal;
mod loops;
pub mod metrics;
pub mod node;
pub mod own;
pub mod program;
mod queue;
mod rate;
mod run;
pub mod signals;
mod state;
mod trial;
pub mod trigger;

pub use action::Action;
pub use asked::ForbiddenByHook;
pub use event::Event;
pub use hooks::Hooks;
pub use node::{ActError, Node, Order, Vm};
pub use own::Own;
pub use rate::{AtMost, Rate};
pub use trial::TrialError;
