//! `/proc/PID/maps`.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use crate::units::{ByteLen, FileOffset, Hva};

/// One line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First address.
    pub hva: Hva,
    /// Bytes.
    pub len: ByteLen,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// `MAP_SHARED` rather than `MAP_PRIVATE`.
    pub shared: bool,
    /// Offset in the mapped file.
    pub file_offset: FileOffset,
    /// Device of the mapped file, 0 if there is none.
    pub dev: u64,
    /// Inode of the mapped file, 0 if there is none.
    pub inode: u64,
    /// Path of the file or a name like `[vdso]`; empty for anonymous memory. Ends in ` (deleted)` if unlinked.
    pub path: PathBuf,
}

/// Parses the whole file. Paths may hold any byte.
pub(crate) fn parse_maps(text: &[u8]) -> io::Result<Vec<MapEntry>> {
    text.split(|&b| b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                let line = String::from_utf8_lossy(line);
                io::Error::new(io::ErrorKind::InvalidData, format!("line not understood: {line}"))
            })
        })
        .collect()
}

/// `55d0c000-55d0d000 r-xp 00001000 08:01 1234     /path with spaces`
fn parse_line(line: &[u8]) -> Option<MapEntry> {
    let mut fields = line.splitn(6, |&b| b == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = text()?.split_once('-')?;
    let flags = text()?.as_bytes();
    let offset = text()?;
    let (major, minor) = text()?.split_once(':')?;
    let inode = text()?.parse().ok()?;
    let path = fields.next().unwrap_or_default();
    let path = &path[path.iter().position(|&b| b != b' ').unwrap_or(path.len())..];

    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let hex32 = |digits| u32::from_str_radix(digits, 16).ok();
    let start = hex(start)?;
    Some(MapEntry {
        hva: Hva(start),
        len: ByteLen(hex(end)?.checked_sub(start)?),
        readable: *flags.first()? == b'r',
        writable: *flags.get(1)? == b'w',
        executable: *flags.get(2)? == b'x',
        shared: *flags.get(3)? == b's',
        file_offset: FileOffset(hex(offset)?),
        dev: rustix::fs::makedev(hex32(major)?, hex32(minor)?),
        inode,
        path: PathBuf::from(OsString::from_vec(path.to_vec())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let text = b"7f00-8000 rw-s 00001000 00:1a 42                         /dev/shm/a b (deleted)\n\
            ffff0000-ffff1000 r-xp 00000000 00:00 0                          [vdso]\n\
            1000-2000 ---p 00000000 00:00 0 \n";
        let maps = parse_maps(text).expect("valid");
        assert_eq!(maps.len(), 3);
        assert_eq!(maps[0].len, ByteLen(0x100));
        assert!(maps[0].shared && maps[0].writable && !maps[0].executable);
        assert_eq!((maps[0].file_offset, maps[0].inode), (FileOffset(0x1000), 42));
        assert_eq!(maps[0].path, PathBuf::from("/dev/shm/a b (deleted)"));
        assert!(maps[1].executable && !maps[1].shared);
        assert_eq!(maps[2].path, PathBuf::new());
    }

    #[test]
    fn nonsense_is_an_error_that_quotes_the_line() {
        let error = parse_maps(b"2000-1000 r-xp 0 00:00 0 x\n").expect_err("end before start");
        assert!(error.to_string().contains("2000-1000"));
        parse_maps(b"hello\n").expect_err("not a mapping");
    }

    #[test]
    fn device_matches_stat() {
        let exe = std::env::current_exe().expect("our binary");
        let stat = rustix::fs::stat(&exe).expect("stat");
        let maps = parse_maps(&std::fs::read("/proc/self/maps").expect("maps")).expect("valid");
        assert!(maps.iter().any(|m| m.inode == stat.st_ino && m.dev == stat.st_dev && m.executable));
    }
}
