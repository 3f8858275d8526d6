//! Frames that come for a guest while it stands still.
//!
//! Until switches have learned where the guest is, its network brings frames to the source. QEMU there takes them from the tap and gives them to
//! nobody, since the guest is stopped: a client whose only segment is lost waits for its retransmission, 200 ms and more, for a pause of ten. So
//! the source keeps a copy of what goes to the guest's taps, from a moment before the stop, and once the guest is given up passes it on to the
//! destination, which puts it into the guest's taps there. Nothing is taken from the tap: a guest that stays has all of its frames.
//!
//! A frame that came within [`DOUBT`] before the stop may have reached the guest already, and reaches it twice then, as networks may do. Frames to
//! all or to many are not passed on: the destination's own tap gets them from the same network.
//!
//! Each tap has a connection of kind [`Frames`](vmove_node::peer::LinkKind::Frames), whose index is that of the back end in QEMU's order:
//!
//! ```text
//! u8 length and that many bytes: QEMU's id of the network back end
//! for each frame: u32 little-endian length, then that many bytes: a header as in `struct virtio_net_hdr` (10 bytes), and the frame
//! ```

mod copies;
mod deliveries;
mod link;
mod packet_socket;
mod stale;

use std::time::Duration;

pub(crate) use copies::Copies;
pub(crate) use deliveries::Deliveries;

/// QEMU tells when the guest stopped, which is some time after its processors did: what came within that time before may not have reached it.
const DOUBT: Duration = Duration::from_millis(2);
/// Before the stop, frames are kept for so long.
const BEFORE: Duration = Duration::from_millis(20);
/// What is kept for one tap at most, in bytes: 8 MiB, which is 60 ms of 1 Gbit/s.
const MOST_KEPT: usize = 8 << 20;
/// The longest frame: one that the network card is to take apart, with its headers.
const MAX_FRAME: usize = 68 << 10;
/// Length of the header before each frame: `struct virtio_net_hdr`.
const HEADER: usize = 10;

/// Whether a frame with its header goes to one receiver: the lowest bit of the address, which it begins with, is clear.
fn to_one(frame: &[u8]) -> bool {
    frame.get(HEADER).is_some_and(|first| first & 1 == 0)
}
