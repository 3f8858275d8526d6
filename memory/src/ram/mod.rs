//! The RAM file, our own mapping of it, and where QEMU has it mapped.

mod file;
mod find;
mod holes;
mod mapping;
mod probe;

pub use file::RamFile;
pub use find::{find_mappings, is_shared_whole};
pub use mapping::Mapping;
