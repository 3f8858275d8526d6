//! Lines of the kernel log, and errors of GPUs among them.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};

use super::{LOOK, map};
use crate::Hooks;
use crate::event::{Event, Name};

/// `/dev/kmsg` gives one record at a time, none longer than this.
const RECORD: usize = 8 << 10;
/// Records in one look: more wait for the next.
const RECORDS: usize = 2000;

/// The log, from its present end on.
#[derive(Debug)]
struct Log {
    file: File,
    /// The beginning of a line whose end has not come yet.
    part: Vec<u8>,
}

impl Log {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let mut file = File::options().read(true).custom_flags(flags).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, part: Vec::new() })
    }

    /// Lines that have come since the last look.
    fn read(&mut self) -> io::Result<Vec<String>> {
        let mut lines = Vec::new();
        let mut buffer = [0; RECORD];
        for _ in 0..RECORDS {
            match self.file.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => self.part.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Records were overwritten before they were read: the next are there.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.part.drain(..=end).collect();
                lines.extend(text(&String::from_utf8_lossy(&line[..end])));
            }
            if self.part.len() > RECORD {
                self.part.clear();
            }
        }
        Ok(lines)
    }
}

/// `4,1234,5678,-;NVRM: ...` without what comes before the text. Lines that begin with a space tell more of the one before.
fn text(line: &str) -> Option<String> {
    if line.is_empty() || line.starts_with(' ') {
        return None;
    }
    let head =
        |head: &str| head.contains(',') && head.chars().all(|c| c.is_ascii_digit() || ",-c".contains(c));
    match line.split_once(';') {
        Some((before, text)) if head(before) => Some(text.to_owned()),
        _ => Some(line.to_owned()),
    }
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.`
fn xid(line: &str) -> Option<Event> {
    let (_, rest) = line.split_once("NVRM: Xid (")?;
    let (place, rest) = rest.split_once("): ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let xid: u32 = rest[..digits].parse().ok()?;
    let pci = place.strip_prefix("PCI:").unwrap_or(place);
    Some(Event::of_host(Name::GpuXid, map(json!({ "xid": xid, "pci": pci, "line": line }))))
}

/// Tells of each line. The log is opened again when it cannot be read.
pub(super) async fn watch(hooks: Arc<Hooks>, path: PathBuf) {
    let mut log: Option<Log> = None;
    let mut warned = false;
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        let (mut open, at) = (log.take(), path.clone());
        let work = move || {
            let mut open = match open.take() {
                Some(open) => open,
                None => Log::open(&at)?,
            };
            let lines = open.read()?;
            io::Result::Ok((open, lines))
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(Ok((open, lines))) => {
                log = Some(open);
                lines.iter().for_each(|line| tell(&hooks, line));
            }
            Ok(Err(error)) if !std::mem::replace(&mut warned, true) => {
                tracing::warn!(path = %path.display(), %error, "hooks wait for lines of the kernel log, and it cannot be read");
            }
            _ => {}
        }
    }
}

fn tell(hooks: &Hooks, line: &str) {
    if let Some(event) = xid(line) {
        hooks.tell(event);
    }
    hooks.tell(Event::of_host(Name::KernelLog, map(json!({ "line": line }))));
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_xid_is_read() {
        let line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.";
        let event = xid(line).unwrap();
        assert_eq!((&event.data["xid"], &event.data["pci"]), (&json!(79), &json!("0000:3b:00")));
        for other in ["NVRM: loading", "NVRM: Xid (PCI:0000:3b:00): x", "Xid 79"] {
            assert!(xid(other).is_none(), "{other}");
        }
    }

    #[test]
    fn lines_since_the_opening_are_read_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "6,1,1,-;before").unwrap();
        let mut log = Log::open(file.path()).unwrap();
        assert!(log.read().unwrap().is_empty());
        write!(file, "6,2,2,-;first\n SUBSYSTEM=pci\n4,3,3,-;sec").unwrap();
        assert_eq!(log.read().unwrap(), ["first"]);
        writeln!(file, "ond; with more\nplain").unwrap();
        assert_eq!(log.read().unwrap(), ["second; with more", "plain"]);
    }
}
