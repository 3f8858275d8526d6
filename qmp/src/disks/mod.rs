//! Disks that move with their guest: what a running QEMU has, copies of them to another QEMU (`blockdev-mirror` over NBD), and the other
//! QEMU's side of that.
//!
//! ```text
//! guest - disk - mirror - NBD client === socket … socket === NBD server - image      QEMU with -incoming
//! ```
//!
//! Once the guest has moved, both images can be compared ([`compared`]).
//!
//! A disk can also get another image on its own host ([`begin_move`]).
//!
//! A copy is *in step* when the target holds all but what the guest is writing. It is ended by [`finish`] once the guest stands still: then
//! it holds everything, and neither QEMU touches it any more.

use std::time::Duration;

mod compare;
mod copy;
mod counters;
mod export;
mod fact;
mod mirror;
mod relocate;
mod stream;

pub use compare::{
    PIECE, compared, end_comparison, export_left, export_present, export_writes, note_writes, writes_context,
    writes_of,
};
pub use copy::{CopyError, CopyOrder, CopyState, begin, finish, give_up, hold_in_step, set_speed, states};
pub use counters::{DiskCounters, begin_histograms, counters, end_histograms};
pub use export::{ExportOrder, end_exports, export, flush};
pub use fact::{DiskFact, disks};
pub use mirror::{Writes, loses_writes};
pub use relocate::{
    MoveOrder, MoveState, OldImage, begin_move, close_old, has_moved, hold_move_in_step, move_state,
    set_move_speed, switch, undo_move,
};
pub use stream::{StreamState, stream};

/// QEMU answers within milliseconds, unless a server that it connects to does not.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Names of what is made in a QEMU for copies begin so: whoever finds them later knows whose they are.
const PREFIX: &str = "vmove-disk";

/// The block node of a disk that has got another image: nobody gave the disk this name.
const MOVED_NODE: &str = "vmove-to-";

/// The name of the export of the disk of this number.
fn export_name(number: usize) -> String {
    format!("{PREFIX}{number}")
}
