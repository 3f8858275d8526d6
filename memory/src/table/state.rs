//! The byte of one page.

/// Where one page stands. The only legal moves are the methods of [`PageTable`](super::PageTable) and its tickets.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// The file has no bytes for it yet (a hole, or zeros that mean nothing).
    Absent = 0,
    /// The file has bytes, but old or partial ones: to be fetched.
    Stale = 1,
    /// Somebody holds a ticket and is fetching it.
    Asked = 2,
    /// The file has the final bytes; QEMU does not map them yet.
    Landed = 3,
    /// The final bytes are all zero; the file has a hole or zeros there. QEMU does not map it yet.
    Zero = 4,
    /// QEMU maps it; the guest may have written to it, so it is never fetched again.
    ///
    /// Such a page can fault once more (the kernel may drop page-table entries of a shared mapping at any time):
    /// the answer is to map it again, or to give zeros if it was discarded since.
    Mapped = 5,
    /// It can never be had; the guest gets an error when it touches it.
    Poisoned = 6,
}

/// Somebody waits for the page to be mapped.
pub(super) const WANTED: u8 = 0x80;
/// The bytes on the way are already old.
pub(super) const SUPERSEDED: u8 = 0x40;
/// QEMU discarded the page while its bytes were on the way: it must become zero.
pub(super) const DISCARDED: u8 = 0x20;
/// What remains when the flags are taken off.
pub(super) const STATE: u8 = 0x0f;

impl PageState {
    pub(super) const ALL: [Self; 7] =
        [Self::Absent, Self::Stale, Self::Asked, Self::Landed, Self::Zero, Self::Mapped, Self::Poisoned];

    /// From the byte in the table. A byte no version ever wrote reads as `Stale`: fetching it again is safe unless
    /// the guest has it mapped, which such a byte cannot say.
    pub(super) const fn of(byte: u8) -> Self {
        match byte & STATE {
            0 => Self::Absent,
            2 => Self::Asked,
            3 => Self::Landed,
            4 => Self::Zero,
            5 => Self::Mapped,
            6 => Self::Poisoned,
            _ => Self::Stale,
        }
    }

    /// True if it can be claimed.
    #[must_use]
    pub const fn is_claimable(self) -> bool {
        matches!(self, Self::Absent | Self::Stale)
    }

    /// True if its bytes are final (or it never will have any): nothing more has to be fetched.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Landed | Self::Zero | Self::Mapped | Self::Poisoned)
    }
}
