//! Another mapping in the place of guest RAM, inside QEMU: private for a fork, shared again afterwards.
//!
//! The new mapping is made aside and then moved over the old one. A kernel that lacks memory refuses the first step, which
//! changes nothing; mapping in place (`MAP_FIXED`) would have taken the old mapping away before it is refused.

use std::fs;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;

use super::Injector;
use crate::error::{MemoryError, Result};
use crate::process::Process;
use crate::qemu_mapping::QemuMapping;
use crate::units::{ByteLen, Hva, PageSize};

/// Whether writes through a mapping reach the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// They stay with the process: the file is frozen as far as this mapping goes (`MAP_PRIVATE`).
    Private,
    /// They reach it (`MAP_SHARED`).
    Shared,
}

/// What a program asked of the kernel for one mapping (`madvise`, `mlock`). It is lost when the mapping is replaced, so it is asked for
/// again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MappingHints {
    /// Arguments of `madvise`.
    advice: Vec<i32>,
    /// Kept in memory by `mlock`.
    pub locked: bool,
    /// Watched by a userfaultfd.
    pub watched: bool,
}

impl MappingHints {
    /// Reads the hints of the mapping that begins at `hva` (`VmFlags` in `smaps`). Takes as long as the kernel needs to walk
    /// all page tables of the process, so not while a guest is stopped.
    ///
    /// # Errors
    /// [`MemoryError::ProcessGone`], [`MemoryError::Proc`].
    pub fn read(process: &Process, hva: Hva) -> Result<Self> {
        let text = process.read("smaps")?;
        Ok(parse_hints(&String::from_utf8_lossy(&text), hva))
    }
}

fn parse_hints(smaps: &str, hva: Hva) -> MappingHints {
    let first = format!("{:x}-", hva.0);
    let mut hints = MappingHints::default();
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&first)).skip(1);
    let Some(flags) = lines.map_while(of_same_mapping).find_map(|l| l.strip_prefix("VmFlags:")) else {
        return hints;
    };
    for flag in flags.split_ascii_whitespace() {
        match flag {
            "hg" => hints.advice.push(libc::MADV_HUGEPAGE),
            "nh" => hints.advice.push(libc::MADV_NOHUGEPAGE),
            "dc" => hints.advice.push(libc::MADV_DONTFORK),
            "dd" => hints.advice.push(libc::MADV_DONTDUMP),
            "mg" => hints.advice.push(libc::MADV_MERGEABLE),
            "lo" => hints.locked = true,
            "um" | "uw" | "ui" => hints.watched = true,
            _ => {}
        }
    }
    hints
}

/// Lines about a mapping begin with a name and a colon; the first one of the next mapping with an address.
fn of_same_mapping(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().next().is_some_and(|word| word.ends_with(':')).then_some(line)
}

/// A mapping that is to be replaced.
#[derive(Clone, Debug)]
pub struct Replacement {
    /// Where, and which part of the file.
    pub at: QemuMapping,
    /// The file, by the number of its descriptor inside the process.
    pub fd_in_qemu: RawFd,
    /// How it is to be mapped.
    pub sharing: Sharing,
    /// What is asked of the kernel for it.
    pub hints: MappingHints,
}

/// Replaces mappings of the process, then makes `old` of each pair of descriptors `(new, old)` refer to the file of `new`. `new` stays
/// open: close it the way it came (QMP `remove-fd`).
///
/// The guest must be stopped and drained: of a page that a disk writes at this moment, one half would go to the old memory.
/// A replacement that was interrupted is completed by running it again. About 0.3 ms per GiB where huge pages are
/// mapped, up to 30 ms where 4 KiB pages are.
///
/// # Errors
/// [`MemoryError::Remote`], in particular for lack of memory: what was replaced before stays replaced, everything else is as
/// before. Those of [`Injector::attach`].
pub fn replace_in_qemu(
    process: &Process,
    replacements: &[Replacement],
    descriptors: &[(RawFd, RawFd)],
) -> Result<()> {
    let mut injector = Injector::attach(process)?;
    let done = replace(&mut injector, replacements, descriptors);
    injector.release()?;
    done
}

fn replace(
    injector: &mut Injector,
    replacements: &[Replacement],
    descriptors: &[(RawFd, RawFd)],
) -> Result<()> {
    let mut aside = Vec::new();
    for one in replacements {
        match map_aside(injector, one) {
            Ok(at) => aside.push(at),
            Err(error) => {
                // Nothing has been replaced yet, and nothing will be.
                for (at, one) in aside.iter().zip(replacements) {
                    unmap(injector, *at, one.at.len)?;
                }
                return Err(error);
            }
        }
    }
    for (at, one) in aside.iter().zip(replacements) {
        move_over(injector, *at, one.at.len, one.at.hva)?;
        advise(injector, one.at.hva.0, one.at.len, &one.hints)?;
    }
    for (new, old) in descriptors {
        injector.syscall(libc::SYS_dup3, [word(*new), word(*old), word(libc::O_CLOEXEC), 0, 0, 0])?;
    }
    Ok(())
}

/// Makes the new mapping, at an address where nothing is. Returns the address.
pub(crate) fn map_aside(injector: &mut Injector, one: &Replacement) -> Result<u64> {
    let prot = word(libc::PROT_READ | libc::PROT_WRITE);
    let args = [0, one.at.len.0, prot, flags(one), word(one.fd_in_qemu), one.at.file_offset.0];
    injector.syscall(libc::SYS_mmap, args)
}

/// Moves a mapping that was made aside, or a part of it, over what is mapped at `to`, in one step.
pub(crate) fn move_over(injector: &mut Injector, aside: u64, len: ByteLen, to: Hva) -> Result<()> {
    let how = word(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    injector.syscall(libc::SYS_mremap, [aside, len.0, len.0, how, to.0, 0]).map(drop)
}

/// Takes a mapping that was made aside away again.
pub(crate) fn unmap(injector: &mut Injector, at: u64, len: ByteLen) -> Result<()> {
    injector.syscall(libc::SYS_munmap, [at, len.0, 0, 0, 0, 0]).map(drop)
}

/// Asks of the kernel what was asked for the mapping before.
pub(crate) fn advise(injector: &mut Injector, at: u64, len: ByteLen, hints: &MappingHints) -> Result<()> {
    for advice in &hints.advice {
        // A hint that this kind of mapping cannot take (merging of shared pages) is none.
        match injector.syscall(libc::SYS_madvise, [at, len.0, word(*advice), 0, 0, 0]) {
            Err(MemoryError::Remote { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {}
            other => drop(other?),
        }
    }
    Ok(())
}

/// A private mapping of hugetlbfs reserves a page for each that may be written: without one, a write kills the process.
/// Elsewhere nothing is to be promised, since most pages will never be written.
fn flags(one: &Replacement) -> u64 {
    let sharing = match one.sharing {
        Sharing::Private => libc::MAP_PRIVATE,
        Sharing::Shared => libc::MAP_SHARED,
    };
    let reserve = if one.at.page_size == PageSize::Base4K { libc::MAP_NORESERVE } else { 0 };
    word(sharing | reserve)
}

fn word(value: i32) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Descriptors of the process that name the file with this device and inode (see [`RamFile::identity`](crate::RamFile::identity)).
///
/// # Errors
/// [`MemoryError::Proc`], [`MemoryError::ProcessGone`].
pub fn descriptors_of(process: &Process, identity: (u64, u64)) -> Result<Vec<RawFd>> {
    let path = process.path("fd");
    let entries = match fs::read_dir(&path) {
        Ok(entries) => entries,
        Err(_) if !process.alive() => return Err(MemoryError::ProcessGone { pid: process.pid() }),
        Err(source) => return Err(MemoryError::Proc { path, source }),
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Closed meanwhile: not one that stays open for guest RAM.
        let Ok(meta) = fs::metadata(entry.path()) else { continue };
        if (meta.dev(), meta.ino()) == identity {
            found.push(fd);
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_those_of_the_mapping_asked_for() {
        let smaps = "7f00-8000 rw-s 00000000 00:1a 42 /dev/shm/a\nSize: 4 kB\nVmFlags: rd wr sh lo \n\
                     9000-a000 rw-s 00000000 00:1a 43 /dev/shm/b\nRss: 0 kB\nVmFlags: rd wr sh mr dc hg mg um\n\
                     a000-b000 rw-p 00000000 00:00 0\nVmFlags: rd wr nh\n";
        let hints = parse_hints(smaps, Hva(0x9000));
        assert_eq!(hints.advice, [libc::MADV_DONTFORK, libc::MADV_HUGEPAGE, libc::MADV_MERGEABLE]);
        assert!(!hints.locked && hints.watched);
        assert!(parse_hints(smaps, Hva(0x7f00)).locked);
        assert_eq!(parse_hints(smaps, Hva(0xa000)).advice, [libc::MADV_NOHUGEPAGE]);
        assert_eq!(parse_hints(smaps, Hva(0xc000)), MappingHints::default());
    }
}
