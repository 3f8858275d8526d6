//! Decoders of what other nodes, guests and images say, each on any bytes: for `tests/fuzz` alone. A wrong result is a panic.

pub use crate::engine::fuzzing::{guest, to_host, to_host_seeds, to_parent, to_parent_seeds};

/// The first bytes of an image.
pub fn image(bytes: &[u8]) {
    crate::disk::any_head(bytes);
}
