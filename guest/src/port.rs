//! The port: a line out, a line in.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

use crate::{MAX_LINE, NAME, Problem};

/// How long the port may be somebody else's, or nobody's on the host.
const PATIENCE: Duration = Duration::from_secs(10);
/// How soon a port is tried again that cannot be waited for.
const AGAIN: Duration = Duration::from_millis(20);
/// Read at once.
const CHUNK: usize = 16 << 10;

/// An open port.
#[derive(Debug)]
pub struct Port {
    file: File,
    /// Read, and not yet a line.
    buffer: Vec<u8>,
    pub(crate) patience: Duration,
}

impl Port {
    /// Opens the port: the device at `path`, or else the one that has the [name](NAME). Waits up to 10 s for a process that has it open.
    ///
    /// # Errors
    /// There is no such port, or it cannot be opened.
    pub fn open(path: Option<&Path>) -> Result<Self, Problem> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => find().ok_or(Problem::NoPort)?,
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let flags = OFlags::NONBLOCK.bits().cast_signed();
            match File::options().read(true).write(true).custom_flags(flags).open(&path) {
                Ok(file) => return Ok(Self { file, buffer: Vec::new(), patience: PATIENCE }),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    if Instant::now() > deadline {
                        return Err(Problem::InUse { path, seconds: PATIENCE.as_secs() });
                    }
                    std::thread::sleep(AGAIN);
                }
                Err(error) => return Err(Problem::Open { path, error }),
            }
        }
    }

    /// An open descriptor that does not block.
    #[cfg(test)]
    pub(crate) fn of(file: File, patience: Duration) -> Self {
        Self { file, buffer: Vec::new(), patience }
    }

    /// Writes a line. What is still there to be read answers what somebody asked who is gone: it is thrown away.
    pub(crate) fn say(&mut self, line: &str) -> Result<(), Problem> {
        if line.len() > MAX_LINE {
            return Err(Problem::TooLong(line.len()));
        }
        while self.take()? == Taken::Some {}
        self.buffer.clear();
        let bytes = [line.as_bytes(), b"\n"].concat();
        let mut left = &bytes[..];
        let mut deadline = Instant::now() + self.patience;
        while !left.is_empty() {
            match self.file.write(left) {
                Ok(count) if count > 0 => {
                    left = &left[count..];
                    deadline = Instant::now() + self.patience;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                // Nobody is connected, or is slow to read.
                _ if Instant::now() > deadline => {
                    return Err(Problem::NobodyListens { seconds: self.patience.as_secs() });
                }
                _ => self.wait(PollFlags::OUT, AGAIN)?,
            }
        }
        Ok(())
    }

    /// Reads a line, however long that takes.
    pub(crate) fn hear(&mut self) -> Result<String, Problem> {
        let (mut searched, mut gone) = (0, false);
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=searched + end).collect();
                return Ok(String::from_utf8_lossy(&line[..searched + end]).into_owned());
            }
            searched = self.buffer.len();
            match self.take()? {
                Taken::Some => {}
                // Who listens again knows nothing of what was asked.
                Taken::Nothing if gone => return Err(Problem::Lost),
                Taken::Nothing => self.wait(PollFlags::IN, Duration::from_secs(1))?,
                Taken::Gone => {
                    gone = true;
                    // Of a line that was broken off the rest does not come.
                    self.buffer.clear();
                    searched = 0;
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Reads what is there.
    fn take(&mut self) -> Result<Taken, Problem> {
        let mut part = [0; CHUNK];
        loop {
            return match self.file.read(&mut part) {
                Ok(0) => Ok(Taken::Gone),
                Ok(count) => {
                    self.buffer.extend_from_slice(&part[..count]);
                    Ok(Taken::Some)
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Taken::Nothing),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Until the port is ready, or the time is over.
    fn wait(&self, what: PollFlags, time: Duration) -> Result<(), Problem> {
        let mut ports = [PollFd::new(&self.file, what)];
        let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
        match poll(&mut ports, Some(&time)) {
            Ok(_) => {
                // Said at once and always while nobody is connected.
                if ports[0].revents().contains(PollFlags::HUP) {
                    std::thread::sleep(AGAIN);
                }
                Ok(())
            }
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Problem::Io(error.into())),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Taken {
    Some,
    /// For now.
    Nothing,
    /// Nobody is connected.
    Gone,
}

/// The device of the port: where udev gives names to devices, by that; else as the kernel tells it.
#[must_use]
pub fn find() -> Option<PathBuf> {
    find_below(Path::new("/"))
}

fn find_below(root: &Path) -> Option<PathBuf> {
    let named = root.join("dev/virtio-ports").join(NAME);
    if named.exists() {
        return Some(named);
    }
    let ports = std::fs::read_dir(root.join("sys/class/virtio-ports")).ok()?;
    let ours = |folder: &Path| {
        std::fs::read_to_string(folder.join("name")).is_ok_and(|name| name.trim_end() == NAME)
    };
    let port = ports.flatten().find(|port| ours(&port.path()))?;
    Some(root.join("dev").join(port.file_name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_found_by_its_name() {
        let root = std::env::temp_dir().join(format!("vmove-fork-find-{}", std::process::id()));
        for (port, name) in [("vport1p1", "org.qemu.guest_agent.0"), ("vport1p2", NAME)] {
            let folder = root.join("sys/class/virtio-ports").join(port);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("name"), format!("{name}\n")).unwrap();
        }
        assert_eq!(find_below(&root), Some(root.join("dev/vport1p2")));
        let named = root.join("dev/virtio-ports").join(NAME);
        std::fs::create_dir_all(named.parent().unwrap()).unwrap();
        std::fs::write(&named, "").unwrap();
        assert_eq!(find_below(&root), Some(named));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(find_below(&root), None);
    }
}
