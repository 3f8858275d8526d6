//! Work on a disk: blocks are written and read back, past the guest's page cache, and memory knows what each must hold. A machine
//! whose disk and memory are not of the same moment, or whose disk is written by another, is found out by itself.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use vmove_guest::pattern::mix;

use crate::sys;

const BLOCK: usize = 4096;
/// A pause between two blocks.
const PACE: Duration = Duration::from_millis(4);
/// Blocks between two lines on the console.
const TELL: u64 = 64;
/// After so many wrong blocks no more are told.
const LINES: u64 = 8;

/// As O_DIRECT wants it.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// The disk, and what each of its blocks must hold: 0 for zeros, which it held when the machine was new.
pub struct Disk {
    file: File,
    values: Vec<u64>,
}

fn word(value: u64, at: usize) -> u64 {
    if value == 0 { 0 } else { mix(value ^ at as u64) }
}

impl Disk {
    pub fn open(mib: u32) -> io::Result<Self> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open("/dev/vda")?;
        Ok(Self { file, values: vec![0; (mib as usize) << 8] })
    }

    /// Works until the machine ends.
    pub fn work(mut self) {
        let mut block = Box::new(Block([0; BLOCK]));
        let (mut written, mut checked, mut wrong) = (0_u64, 0_u64, 0_u64);
        for turn in 1_u64.. {
            // Clones do not write the same: they do not read the clock at the same time.
            let value = mix(sys::now() ^ turn);
            let at = usize::try_from(mix(turn)).unwrap_or(usize::MAX) % self.values.len();
            let done = self.check(&mut block, at).and_then(|found| {
                checked += 1;
                if let Some(found) = found {
                    wrong += 1;
                    if wrong <= LINES {
                        let expected = word(self.values[at], found);
                        println!("VMOVE-GUEST FAIL disk block {at} word {found}: expected {expected:#x}");
                    }
                }
                written += 1;
                self.write(&mut block, at, value)
            });
            if let Err(error) = done {
                println!("VMOVE-GUEST ERROR disk block {at}: {error}");
                return;
            }
            if turn % TELL == 0 {
                println!("VMOVE-GUEST DISK written={written} checked={checked} wrong={wrong}");
            }
            std::thread::sleep(PACE);
        }
    }

    /// The first word that is wrong.
    fn check(&self, block: &mut Block, at: usize) -> io::Result<Option<usize>> {
        self.file.read_exact_at(&mut block.0, (at * BLOCK) as u64)?;
        let words =
            block.0.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()));
        Ok(words
            .enumerate()
            .find(|(place, found)| *found != word(self.values[at], *place))
            .map(|(place, _)| place))
    }

    fn write(&mut self, block: &mut Block, at: usize, value: u64) -> io::Result<()> {
        for (place, bytes) in block.0.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(value, place).to_le_bytes());
        }
        self.values[at] = value;
        self.file.write_all_at(&block.0, (at * BLOCK) as u64)
    }
}
