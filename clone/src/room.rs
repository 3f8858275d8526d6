//! Whether there is memory for the children, before any is started.

use std::path::Path;

use serde::{Deserialize, Serialize};
use vmove_memory::{MemoryDir, MemoryError};
use vmove_node::reservations::{Rooms, Wanted};
use vmove_types::Backing;
use vmove_types::units::number_of;

use crate::CloneError;

/// What a QEMU needs beside guest memory: its own heap, page tables, buffers of its devices. Bytes; measured 17 to 25 MiB.
pub const QEMU_BYTES: u64 = 32 << 20;
/// Part of its memory that a child is expected to write, unless said otherwise: one of so many.
pub const WRITTEN_PART: u64 = 16;

/// What a fork would need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// Children.
    pub count: u64,
    /// Guest memory of each, in bytes.
    pub guest_bytes: u64,
    /// What each is expected to write of it, in bytes.
    pub written_bytes: u64,
    /// On hugetlbfs a write for which no page is left kills QEMU, so all that could be written must be there.
    pub reserved: bool,
    /// Bytes of a template that is not here yet; the parent is elsewhere then.
    pub template_bytes: Option<u64>,
    /// Guests, children and the parent, that get devices of the node: all of their memory is pinned, and so copied.
    #[serde(default)]
    pub pinned: Pinned,
}

/// Guests whose memory is pinned for devices of the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Children.
    pub children: u64,
    /// The parent, whose memory is private then.
    pub parent: bool,
    /// Bytes of the template without memory: reading what is not there for a copy gives it memory.
    pub hole_bytes: u64,
}

impl Demand {
    /// Of children that write `written` bytes each, or the usual part if that is not known.
    #[must_use]
    pub fn new(count: u64, guest_bytes: u64, written: Option<u64>, hugetlb: bool) -> Self {
        let usual = written.unwrap_or(guest_bytes / WRITTEN_PART).min(guest_bytes);
        let written_bytes = if hugetlb { guest_bytes } else { usual };
        Self {
            count,
            guest_bytes,
            written_bytes,
            reserved: hugetlb,
            template_bytes: None,
            pinned: Pinned::default(),
        }
    }

    /// The same where the template comes from another host first: `live` bytes of it, or all of it on huge pages.
    #[must_use]
    pub const fn with_template(self, live: u64) -> Self {
        Self { template_bytes: Some(live), ..self }
    }

    /// The same where so many children get devices of the node, and perhaps the parent its own back.
    #[must_use]
    pub const fn with_pinned(self, children: u64, parent: bool, hole_bytes: u64) -> Self {
        Self { pinned: Pinned { children, parent, hole_bytes }, ..self }
    }

    /// What pinned guests take beyond what is expected of all. On huge pages that is counted anyway.
    const fn pinned_bytes(&self) -> u64 {
        let Pinned { children, parent, hole_bytes } = self.pinned;
        if self.reserved || (children == 0 && !parent) {
            return 0;
        }
        let more = self.guest_bytes.saturating_sub(self.written_bytes).saturating_mul(children);
        let parent = if parent { self.guest_bytes } else { 0 };
        more.saturating_add(parent).saturating_add(hole_bytes)
    }

    /// Bytes of guest memory needed, on huge pages with those of the parent, or of a template that comes here.
    #[must_use]
    pub fn guest_total(&self) -> u64 {
        let holders = self.count + u64::from(self.reserved);
        self.written_bytes.saturating_mul(holders).saturating_add(self.pinned_bytes())
    }

    /// What is to be reserved for it.
    #[must_use]
    pub fn wanted(&self, backing: Backing) -> Wanted {
        let template = if self.reserved { 0 } else { self.template_bytes.unwrap_or(0) };
        let guest_bytes = self.guest_total().saturating_add(template);
        Wanted { backing, guest_bytes, host_bytes: QEMU_BYTES.saturating_mul(self.count) }
    }

    /// Compares with what is there for guest memory, and for QEMU itself. On tmpfs they are the same memory.
    ///
    /// # Errors
    /// [`CloneError::NoRoom`] with the arithmetic.
    pub fn fits(&self, rooms: &Rooms) -> Result<(), CloneError> {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let qemu = QEMU_BYTES.saturating_mul(self.count);
        let count = self.count;
        if self.reserved {
            let wanted = self.guest_total();
            if wanted > rooms.guest.left() {
                return Err(CloneError::NoRoom(format!(
                    "{} on huge pages needs ({count} + 1) x {} MiB = {} MiB of free huge pages, since each of them \
                     {}; found {}: take fewer children, or raise vm.nr_hugepages",
                    fork_of(count),
                    mib(self.written_bytes),
                    mib(wanted),
                    match self.template_bytes {
                        None => "and the parent may write all of its memory",
                        Some(_) => "may write all of its memory, and the template is here too",
                    },
                    rooms.guest
                )));
            }
        }
        let template = if self.reserved { 0 } else { self.template_bytes.unwrap_or(0) };
        let wanted = if self.reserved { qemu } else { qemu.saturating_add(self.guest_total()) };
        let wanted = wanted.saturating_add(template);
        if wanted > rooms.host.left() {
            let first = match self.template_bytes {
                Some(_) if !self.reserved => format!("{} MiB of template + ", mib(template)),
                _ => String::new(),
            };
            let pinned = match self.pinned_bytes() {
                0 => String::new(),
                bytes => format!(
                    " + {} MiB more, since {}{} get devices of the node, for which all guest memory is copied and pinned",
                    mib(bytes),
                    number_of(self.pinned.children, "child", "children"),
                    if self.pinned.parent { " and the parent" } else { "" }
                ),
            };
            return Err(CloneError::NoRoom(format!(
                "{} needs {first}{count} x ({} MiB of QEMU + {} MiB that each is expected to write){pinned} = {} MiB, found {} \
                 available: take fewer children, or say by --expect-written that they write less",
                fork_of(count),
                mib(QEMU_BYTES),
                if self.reserved { 0 } else { mib(self.written_bytes) },
                mib(wanted),
                rooms.host
            )));
        }
        Ok(())
    }
}

fn fork_of(count: u64) -> String {
    format!("a fork into {}", number_of(count, "child", "children"))
}

/// Why memory could not be mapped privately: where no huge page is left for what may be written, that is said in words.
pub fn huge_pages(error: MemoryError, needed: u64, dir: &Path, backing: Backing) -> CloneError {
    let none_left = matches!(&error, MemoryError::Remote { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory);
    let free = MemoryDir::prepare(dir, backing).and_then(|dir| dir.free());
    match free {
        Ok(free) if none_left && backing != Backing::Thp => CloneError::NoRoom(format!(
            "{} MiB of free huge pages are needed for what it may write, found {} MiB: others have taken them since this fork began; raise \
             vm.nr_hugepages, or wait until they are given back",
            needed.div_ceil(1 << 20),
            free.0 >> 20
        )),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use vmove_node::reservations::Room;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn rooms(guest: u64, host: u64) -> Rooms {
        Rooms { guest: Room::of(guest), host: Room::of(host) }
    }

    #[test]
    fn too_many_children_are_refused_with_the_arithmetic() {
        let demand = Demand::new(32, GIB, None, false);
        demand.fits(&rooms(u64::MAX, 3 * GIB)).unwrap();
        let error = demand.fits(&rooms(u64::MAX, 3 * GIB - 1)).unwrap_err().to_string();
        assert!(error.contains("32 x (32 MiB of QEMU + 64 MiB"), "{error}");
        assert!(error.contains("= 3072 MiB, found 3071 MiB"), "{error}");
    }

    #[test]
    fn huge_pages_must_be_there_for_all_that_could_be_written() {
        let demand = Demand::new(3, GIB, Some(1), true);
        demand.fits(&rooms(4 * GIB, GIB)).unwrap();
        let error = demand.fits(&rooms(4 * GIB - 1, GIB)).unwrap_err().to_string();
        assert!(error.contains("(3 + 1) x 1024 MiB = 4096 MiB"), "{error}");
    }

    #[test]
    fn a_template_that_comes_from_elsewhere_counts() {
        let demand = Demand::new(4, GIB, None, false).with_template(GIB);
        demand.fits(&rooms(u64::MAX, GIB + 4 * (96 << 20))).unwrap();
        let error = demand.fits(&rooms(u64::MAX, GIB)).unwrap_err().to_string();
        assert!(error.contains("1024 MiB of template + 4 x (32 MiB"), "{error}");
        let error =
            Demand::new(3, GIB, None, true).with_template(1).fits(&rooms(4 * GIB - 1, GIB)).unwrap_err();
        assert!(error.to_string().contains("template is here too"), "{error}");
    }

    #[test]
    fn guests_that_get_devices_take_all_of_their_memory() {
        // Two of three children, the parent, and what the template had no memory for.
        let demand = Demand::new(3, GIB, None, false).with_pinned(2, true, GIB / 2);
        let wanted = 3 * (32 << 20) + (64 << 20) + 3 * GIB + GIB / 2;
        demand.fits(&rooms(u64::MAX, wanted)).unwrap();
        let error = demand.fits(&rooms(u64::MAX, wanted - 1)).unwrap_err().to_string();
        assert!(error.contains("2 children and the parent get devices"), "{error}");
        let same = Demand::new(3, GIB, None, false).with_pinned(0, false, GIB);
        assert_eq!(same.guest_total(), Demand::new(3, GIB, None, false).guest_total());
        let huge = Demand::new(3, GIB, None, true);
        assert_eq!(huge.with_pinned(3, true, GIB).guest_total(), huge.guest_total(), "counted anyway");
    }

    #[test]
    fn numbers_beyond_all_bounds_do_not_wrap() {
        let error =
            Demand::new(u64::MAX, GIB, None, false).fits(&rooms(u64::MAX - 1, u64::MAX - 1)).unwrap_err();
        assert!(matches!(error, CloneError::NoRoom(_)));
    }
}
