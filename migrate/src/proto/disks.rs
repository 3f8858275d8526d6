//! Disks in messages: those that both nodes see, those that move, and what `--verify` says of these.

use serde::{Deserialize, Serialize};

/// A disk image that both nodes must see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Block node.
    pub node: String,
    /// Path as QEMU opened it at the source.
    pub path: String,
    /// Length in bytes: the cheapest check that the file of the same name is the same file.
    pub size: u64,
    /// Read-only media need only exist.
    pub read_only: bool,
    /// `Some(false)`: on a file system that only the source's host sees; the message says which.
    pub shared: Option<bool>,
    /// File system at the source.
    pub fs: String,
}

/// A disk that moves with its guest. Its place among the others is its number in connections and exports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedDisk {
    /// Its name at the source.
    pub name: String,
    /// Its image as the command line names it, with the placeholders.
    pub image: String,
    /// Format of the image: `raw` or `qcow2`.
    pub format: String,
    /// Size that the guest sees, in bytes.
    pub size: u64,
    /// Bytes that its image takes at the source, those of images below it included.
    pub allocated: u64,
    /// Cluster size in bytes; 0 where the format has none.
    pub cluster: u64,
    /// Where the operator wants it at the destination. The destination notes here where it is.
    pub to: Option<String>,
}

/// Hashes of chunks of 64 KiB of a disk as the guest has left it, for `--verify`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHashes {
    /// Which disk: its place among those that move.
    pub disk: u8,
    /// First chunk.
    pub first: u64,
    /// Of the chunks from there on.
    pub hashes: ChunkHashes,
}

/// What chunks of a disk hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChunkHashes {
    /// So many chunks read as zeros.
    Zeros(u64),
    /// XXH3 of each; 1 for one of zeros.
    Of(Vec<u64>),
}

/// A disk was hashed, or could not be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRead {
    /// Which disk.
    pub disk: u8,
    /// Bytes that were read of it.
    pub read_bytes: u64,
    /// Why not all of it was hashed.
    pub problem: Option<String>,
}
