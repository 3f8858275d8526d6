//! Instructions of the target that an injected call runs on.
//!
//! They are searched for rather than assumed: where the thread happens to stand there may be none.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use memchr::memmem;

use crate::error::{MemoryError, Result};
use crate::maps::MapEntry;
use crate::process::Process;

/// Addresses in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code {
    /// A `syscall` instruction.
    pub syscall: u64,
    /// `mov $15, %rax; syscall`, which is `rt_sigreturn`, if the instruction above is followed by `ret` and there is
    /// one. Both are needed for a call that cleans up after itself.
    pub sigreturn: Option<u64>,
}

const SYSCALL: &[u8] = &[0x0f, 0x05];
const SYSCALL_RET: &[u8] = &[0x0f, 0x05, 0xc3];
/// The restorer that every C library gives to `rt_sigaction`, in its two encodings.
const SIGRETURN: [&[u8]; 2] =
    [&[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05], &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]];
const CHUNK: usize = 64 << 10;
const LONGEST: usize = 9;

/// Where in a file the instructions were found: device, inode, offset of the mapping.
type Known = HashMap<(u64, u64, u64), Found>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Found {
    syscall: Option<u64>,
    syscall_ret: Option<u64>,
    sigreturn: Option<u64>,
}

/// Searches the readable executable mappings, the C library's first. Its answer for a library is remembered and
/// checked against the memory of the process at each use.
pub(super) fn find(process: &Process, maps: &[MapEntry], memory: &File) -> Result<Code> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();

    let mut plain = None;
    let mut candidates: Vec<_> = maps.iter().filter(|m| m.executable && m.readable).collect();
    candidates
        .sort_by_key(|m| !m.path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"libc")));
    for map in candidates {
        let key = (map.dev, map.inode, map.file_offset.0);
        let found = match known.get(&key) {
            Some(found) if confirm(*found, map, memory) => *found,
            _ => search(map, memory),
        };
        if map.inode != 0 {
            known.insert(key, found);
        }
        let at = |offset: u64| map.hva.0 + offset;
        if let (Some(syscall), Some(sigreturn)) = (found.syscall_ret, found.sigreturn) {
            return Ok(Code { syscall: at(syscall), sigreturn: Some(at(sigreturn)) });
        }
        plain = plain.or(found.syscall.map(at));
    }
    plain
        .map(|syscall| Code { syscall, sigreturn: None })
        .ok_or(MemoryError::NoSyscallInstruction { pid: process.pid() })
}

/// True if the instruction is where it was found.
pub(super) fn is_there(code: Code, memory: &File) -> bool {
    let mut text = [0; 2];
    memory.read_exact_at(&mut text, code.syscall).is_ok() && text == SYSCALL
}

fn search(map: &MapEntry, memory: &File) -> Found {
    let mut found = Found::default();
    let mut buffer = vec![0; CHUNK + LONGEST];
    for offset in (0..map.len.0).step_by(CHUNK) {
        let want = usize::try_from(map.len.0 - offset).map_or(buffer.len(), |left| left.min(buffer.len()));
        let Ok(got) = memory.read_at(&mut buffer[..want], map.hva.0 + offset) else { break };
        let text = &buffer[..got];
        let position = |pattern: &[u8]| memmem::find(text, pattern).map(|at| offset + at as u64);
        found.syscall = found.syscall.or_else(|| position(SYSCALL));
        found.syscall_ret = found.syscall_ret.or_else(|| position(SYSCALL_RET));
        found.sigreturn = found.sigreturn.or_else(|| SIGRETURN.into_iter().find_map(position));
        if found.syscall_ret.is_some() && found.sigreturn.is_some() {
            break;
        }
    }
    found
}

/// True if the process has there what was found in another one.
fn confirm(found: Found, map: &MapEntry, memory: &File) -> bool {
    let has = |offset: Option<u64>, pattern: &[u8]| {
        let mut text = [0; LONGEST];
        let text = &mut text[..pattern.len()];
        offset.is_none_or(|offset| memory.read_exact_at(text, map.hva.0 + offset).is_ok() && text == pattern)
    };
    has(found.syscall, SYSCALL)
        && has(found.syscall_ret, SYSCALL_RET)
        && SIGRETURN.into_iter().any(|pattern| has(found.sigreturn, pattern))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_code_has_what_is_needed() {
        let us = Process::open(std::process::id()).expect("ourselves");
        let memory = File::open("/proc/self/mem").expect("our memory");
        let maps = us.maps().expect("our maps");
        let code = find(&us, &maps, &memory).expect("libc is mapped");
        let again = find(&us, &maps, &memory).expect("libc is mapped");
        assert_eq!(code, again, "the second time from memory");
        let mut text = [0; 3];
        memory.read_exact_at(&mut text, code.syscall).expect("readable");
        assert_eq!(text, SYSCALL_RET);
        let mut text = [0; 9];
        memory.read_exact_at(&mut text, code.sigreturn.expect("a C library has one")).expect("readable");
        assert_eq!(text, SIGRETURN[0]);
    }
}
