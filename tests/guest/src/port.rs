//! The port over which a machine asks to be forked: a line out, a line in.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

const NAME: &str = "org.vmove.fork";
/// The host connects when it has found the port, and again after it let go.
const AGAIN: Duration = Duration::from_millis(20);

pub struct Port {
    file: File,
    buffer: Vec<u8>,
}

impl Port {
    pub fn open() -> Result<Self, String> {
        let path = find()?;
        let file = File::options().read(true).write(true).open(&path);
        Ok(Self { file: file.map_err(|e| format!("{}: {e}", path.display()))?, buffer: Vec::new() })
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, line: &str) -> Result<String, String> {
        self.say(line)?;
        self.hear()
    }

    pub fn say(&mut self, line: &str) -> Result<(), String> {
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(|e| format!("write: {e}"))
    }

    pub fn hear(&mut self) -> Result<String, String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let mut part = [0; 4096];
            match self.file.read(&mut part) {
                // Nobody is connected.
                Ok(0) => std::thread::sleep(AGAIN),
                Ok(count) => self.buffer.extend_from_slice(&part[..count]),
                Err(error) => return Err(format!("read: {error}")),
            }
        }
    }
}

/// There is no udev that would give it its name.
fn find() -> Result<PathBuf, String> {
    let folder = "/sys/class/virtio-ports";
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{folder}: {e}"))?;
    for entry in entries.flatten() {
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == NAME {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    Err(format!("no port {NAME}"))
}
