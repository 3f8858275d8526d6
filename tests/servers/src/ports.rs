//! Ports that a server keeps over a restart.

use std::fs::File;
use std::net::TcpListener;

use rustix::fs::FlockOperation::NonBlockingLockExclusive;
use rustix::fs::flock;

/// Ports of one block, and the number of blocks below those that Linux gives out by itself (32768 and up).
pub(crate) const BLOCK: u16 = 200;
const BLOCKS: u16 = 60;
const LOWEST: u16 = 20_000;

/// Consecutive ports that no other test has while this value exists, and that Linux gives to nobody by itself: a server can be
/// restarted on them.
#[derive(Debug)]
pub struct Ports {
    /// The first of them.
    pub first: u16,
    _lock: File,
}

impl Ports {
    /// Takes a block of 200 ports.
    ///
    /// # Panics
    /// If all blocks are taken.
    #[must_use]
    pub fn take() -> Self {
        let start = u16::try_from(std::process::id() % u32::from(BLOCKS)).unwrap_or(0);
        for turn in 0..BLOCKS {
            let first = LOWEST + (start + turn) % BLOCKS * BLOCK;
            let path = std::env::temp_dir().join(format!("vmove-test-ports-{first}"));
            let lock = File::options().create(true).truncate(false).write(true).open(path);
            let Ok(lock) = lock else { continue };
            // Somebody without the lock may listen there.
            let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
            if flock(&lock, NonBlockingLockExclusive).is_ok() && (first..first + BLOCK).all(free) {
                return Self { first, _lock: lock };
            }
        }
        panic!("none of {BLOCKS} blocks of ports from {LOWEST} on is free")
    }
}
