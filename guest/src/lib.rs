//! For programs in a guest of vmove that forks itself: the whole machine is forked, and this process goes on in each child.
//!
//! ```no_run
//! use vmove_fork::{Port, Role};
//!
//! # fn main() -> Result<(), vmove_fork::Problem> {
//! let mut port = Port::open(None)?;
//! let role = port.fork(4)?;
//! if role.index > 0 {
//!     // In each of four machines. This one ends here, and leaves its result.
//!     return Err(port.exit(&role.ticket, &serde_json::json!(role.index * role.index)));
//! }
//! for end in port.join(&role.ticket)? {
//!     println!("child {}: {:?}", end.index, end.result);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The program `vmove-fork` offers the same to shell scripts. See `docs/guest-forks.md`.

mod port;
mod problem;
mod talk;

pub mod command;

pub use port::{Port, find};
pub use problem::Problem;
pub use talk::{End, Role};

/// The port's name, as the command line of QEMU gives it.
pub const NAME: &str = "org.vmove.fork";

/// Longest line that the host takes, in bytes without its end. A result with what is around it is one line.
pub const MAX_LINE: usize = 64 << 10;
