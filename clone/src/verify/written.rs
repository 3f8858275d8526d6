//! What is written into a guest's memory while its device state is loaded, by others than the guest.
//!
//! | By | What | When | Bytes |
//! |---|---|---|---|
//! | QEMU | VM Generation ID | the device `vmgenid` has been loaded | 16, the child's new id |
//! | KVM | clock of a virtual CPU (`struct pvclock_vcpu_time_info`) | its MSR is set, or the clock | 32; the firmware SeaBIOS asks for it, and leaves it on |
//! | KVM | wall clock (`struct pvclock_wall_clock`) | its MSR is set | 12 |
//!
//! QEMU and vmove cannot be asked where the guest has these: the addresses are in the device state. So they are known by what they must be.
//! Both begin with a version that is even whenever nobody writes, and that KVM makes larger at each write; so the version is the first
//! thing that differs. Everything that KVM never changes must be the template's, and the rest must be possible. A page that differs
//! in one bit more is damaged.

use vmove_types::fork_report::LoadWriteKind;

/// Bytes of a VM Generation ID.
const GENERATION: usize = 16;
/// Of `struct pvclock_vcpu_time_info`: version, 4 unused, TSC (8), nanoseconds (8), factor, shift (1), flags (1), 2 unused.
const CLOCK: usize = 32;
/// Of `struct pvclock_wall_clock`: version, seconds, nanoseconds.
const WALL_CLOCK: usize = 12;
/// KVM adds 2 at each write. It writes a few times at most until the state is loaded.
const MOST_WRITES: u32 = 8;
/// Seconds of a wall clock that was ever set: after 2001.
const ANY_TIME_AGO: u32 = 1_000_000_000;

/// Who may have written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Writers {
    /// The child's VM Generation ID, if it has one.
    pub(super) generation: Option<[u8; GENERATION]>,
    /// The guest runs under KVM.
    pub(super) kvm: bool,
}

/// Bytes that one of them wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) what: LoadWriteKind,
    /// Offset of the first.
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// What was written to a page: all that differs from the template's.
///
/// # Errors
/// Offset of the first byte that differs and that nobody is known to write.
pub(super) fn between(child: &[u8], template: &[u8], by: Writers) -> Result<Vec<Write>, usize> {
    let mut written = Vec::new();
    let mut from = 0;
    while let Some(next) = differs(&child[from..], &template[from..]) {
        let byte = from + next;
        let (what, at, bytes) = known(child, template, from, byte, by).ok_or(byte)?;
        written.push(Write { what, at: at as u64, bytes: bytes as u64 });
        from = at + bytes;
    }
    Ok(written)
}

fn differs(child: &[u8], template: &[u8]) -> Option<usize> {
    child.iter().zip(template).position(|(a, b)| a != b)
}

/// What covers the first byte that differs, beginning at `from` at the earliest.
fn known(
    child: &[u8],
    template: &[u8],
    from: usize,
    byte: usize,
    by: Writers,
) -> Option<(LoadWriteKind, usize, usize)> {
    let begin = (byte + 1).saturating_sub(GENERATION).max(from);
    let is_id =
        |at: &usize| child.get(*at..at + GENERATION).is_some_and(|id| by.generation.is_some_and(|g| id == g));
    if let Some(at) = (begin..=byte).find(is_id) {
        return Some((LoadWriteKind::GenerationId, at, GENERATION));
    }
    // KVM takes addresses that 4 divides.
    let at = byte / 4 * 4;
    if !by.kvm || at < from {
        return None;
    }
    let both = |len: usize| Some((child.get(at..at + len)?, template.get(at..at + len)?));
    if both(CLOCK).is_some_and(|(new, old)| is_clock(new, old)) {
        return Some((LoadWriteKind::KvmClock, at, CLOCK));
    }
    let wall_clock = both(WALL_CLOCK).is_some_and(|(new, old)| is_wall_clock(new, old));
    wall_clock.then_some((LoadWriteKind::KvmWallClock, at, WALL_CLOCK))
}

fn is_clock(new: &[u8], old: &[u8]) -> bool {
    let possible = |clock: &[u8]| {
        word(clock, 24) != 0 && i8::from_le_bytes([clock[28]]).unsigned_abs() < 32 && clock[29] < 4
    };
    written_again(new, old)
        && new[4..8] == old[4..8]
        && new[30..] == old[30..]
        && possible(new)
        && possible(old)
}

fn is_wall_clock(new: &[u8], old: &[u8]) -> bool {
    let possible = |clock: &[u8]| word(clock, 4) > ANY_TIME_AGO && word(clock, 8) < 1_000_000_000;
    written_again(new, old) && possible(new) && possible(old)
}

/// Whether the versions say that KVM has written since.
fn written_again(new: &[u8], old: &[u8]) -> bool {
    let (new, old) = (word(new, 0), word(old, 0));
    let writes = new.wrapping_sub(old) / 2;
    new % 2 == 0 && old % 2 == 0 && (1..=MOST_WRITES).contains(&writes)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY: Writers = Writers { generation: Some([7; GENERATION]), kvm: true };

    fn clock(version: u32, tsc: u64) -> Vec<u8> {
        let mut clock = [version.to_le_bytes(), [0; 4]].concat();
        clock.extend(tsc.to_le_bytes());
        clock.extend((tsc / 3).to_le_bytes());
        clock.extend(0xcccc_cccc_u32.to_le_bytes());
        clock.extend([0xff, 1, 0, 0]);
        clock
    }

    fn wall_clock(version: u32, seconds: u32) -> Vec<u8> {
        [version, seconds, 999_999_999].into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn page(parts: &[(usize, Vec<u8>)]) -> Vec<u8> {
        let mut page = vec![1; 4096];
        for (at, bytes) in parts {
            page[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        page
    }

    #[test]
    fn what_qemu_and_kvm_write_is_known() {
        let old = page(&[(0x40, wall_clock(2, 1_800_000_000)), (0x380, clock(254, 1 << 40))]);
        let new =
            page(&[(0x40, wall_clock(4, 1_800_000_007)), (0x100, vec![7; 16]), (0x380, clock(256, 1 << 41))]);
        let write = |what, at, bytes| Write { what, at, bytes };
        let expected = [
            write(LoadWriteKind::KvmWallClock, 0x40, 12),
            write(LoadWriteKind::GenerationId, 0x100, 16),
            write(LoadWriteKind::KvmClock, 0x380, 32),
        ];
        assert_eq!(between(&new, &old, BY).as_deref(), Ok(&expected[..]));
        assert_eq!(between(&old, &old, BY), Ok(Vec::new()));
        // At the end of a page.
        let (old, new) = (page(&[(4064, clock(4, 9))]), page(&[(4064, clock(6, 10))]));
        assert_eq!(between(&new, &old, BY), Ok(vec![write(LoadWriteKind::KvmClock, 4064, 32)]));
    }

    #[test]
    fn one_bit_more_is_damage() {
        let old = page(&[(0x380, clock(4, 1 << 40))]);
        let new = page(&[(0x380, clock(6, 1 << 41))]);
        for (byte, found) in [(0, 0), (0x37f, 0x37f), (0x3a0, 0x3a0), (4095, 4095)] {
            let mut damaged = new.clone();
            damaged[byte] ^= 1;
            assert_eq!(between(&damaged, &old, BY), Err(found));
        }
        // Within it: what KVM never writes, or cannot have written.
        for byte in [0x380, 0x384, 0x387, 0x39d, 0x39e, 0x39f] {
            let mut damaged = new.clone();
            damaged[byte] ^= 0x85;
            assert_eq!(between(&damaged, &old, BY), Err(0x380), "{byte:#x}");
        }
    }

    #[test]
    fn a_clock_that_goes_back_or_without_kvm_is_damage() {
        let (old, new) = (page(&[(0x380, clock(4, 9))]), page(&[(0x380, clock(6, 10))]));
        assert_eq!(between(&old, &new, BY), Err(0x380), "an older version");
        assert_eq!(between(&new, &old, Writers { kvm: false, ..BY }), Err(0x380));
        let zeros = page(&[(0x380, vec![0; 32])]);
        assert_eq!(between(&zeros, &old, BY), Err(0x380), "zeroed");
        assert_eq!(between(&new, &zeros, BY), Err(0x380), "from nothing");
    }
}
