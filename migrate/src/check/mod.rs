//! Everything that stands in the way of a migration, found before anything is changed.

pub(crate) mod destination;
mod libvirt;
pub(crate) mod moved_disks;
pub(crate) mod network;
pub(crate) mod source;
