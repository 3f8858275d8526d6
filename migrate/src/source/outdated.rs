//! Which pages at the destination are outdated, as it is told: most of them before the guest stops, and what was written meanwhile after that.

use super::control::Control;
use crate::pending::PageSet;
use crate::proto::message::{Outdated, ToDestination};
use vmove_node::peer::codec::CodecError;

/// A message goes out when it is about this long.
const MESSAGE_BYTES: usize = 256 << 10;

impl Control {
    /// Tells the destination that what it has of these pages is outdated, in messages of a bounded length.
    pub(super) async fn tell_outdated(&mut self, sets: &[PageSet]) -> Result<(), CodecError> {
        let (mut parts, mut bytes) = (Vec::new(), 0);
        for (block, set) in (0_u16..).zip(sets) {
            for part in set.parts() {
                bytes += part.wire_len();
                parts.push(Outdated { block, part });
                if bytes >= MESSAGE_BYTES {
                    bytes = 0;
                    self.send(&ToDestination::Outdated(std::mem::take(&mut parts))).await?;
                }
            }
        }
        if parts.is_empty() { Ok(()) } else { self.send(&ToDestination::Outdated(parts)).await }
    }
}
