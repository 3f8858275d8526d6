//! The audit log: who asked for what, and how it ended. One JSON object a line.
//!
//! A thread of its own writes the file, so that no request waits for a disk. What it cannot take in time, or write, is counted and told: in the log, by
//! the metric `vmove_audit_lost_total`, and by `lost` of the next line.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime};

use metrics::counter;
use serde::Serialize;

/// Lines that wait to be written.
const WAITING_LINES: usize = 4096;

/// Who asked.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Who {
    /// `socket`, `tls` or `plain`.
    pub from: &'static str,
    /// The user of the control socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Address and port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Subject of the certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The entry of the configuration that knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Its role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
}

/// One request.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// When it was answered, by the time of day (UTC, RFC 3339).
    pub time: String,
    /// Who asked.
    #[serde(flatten)]
    pub who: Who,
    /// The operation, as the OpenAPI description names it.
    pub operation: &'static str,
    /// The method.
    pub method: String,
    /// The path, with the names in it.
    pub path: String,
    /// HTTP status.
    pub status: u16,
    /// Why it was refused, as the stable word of the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// How long it took. Unit: milliseconds.
    pub ms: f64,
    /// Lines before this one that could not be written.
    #[serde(skip_serializing_if = "is_zero")]
    pub lost: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

enum Order {
    Write(Box<Line>),
    Reopen,
}

/// The end of the audit log that takes lines.
#[derive(Debug)]
pub struct Audit {
    orders: SyncSender<Order>,
    lost: Arc<AtomicU64>,
}

impl Audit {
    /// Opens the file, or makes it, readable by its owner alone, and starts the thread that writes it.
    ///
    /// # Errors
    /// It cannot be opened for writing, or there is no thread.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let file = append(path)?;
        let (orders, waiting) = sync_channel(WAITING_LINES);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = Writer { path: path.to_owned(), file: Some(file), lost: lost.clone(), told: false };
        std::thread::Builder::new().name("vmove-audit".to_owned()).spawn(move || writer.run(&waiting))?;
        Ok(Self { orders, lost })
    }

    /// Takes a line. Never waits.
    pub fn tell(&self, line: Line) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.orders.try_send(Order::Write(Box::new(line)))
        {
            lose(&self.lost);
        }
    }

    /// Opens the file anew: the old one was renamed. Waits for a place in the queue: not for use in a request.
    pub fn reopen(&self) {
        // The thread ends with the daemon only.
        let _ = self.orders.send(Order::Reopen);
    }
}

fn lose(lost: &AtomicU64) {
    lost.fetch_add(1, Ordering::Relaxed);
    counter!("vmove_audit_lost_total").increment(1);
}

fn append(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// The thread's own.
struct Writer {
    path: PathBuf,
    file: Option<File>,
    lost: Arc<AtomicU64>,
    /// That it fails was said.
    told: bool,
}

impl Writer {
    fn run(mut self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            match order {
                Order::Write(line) => self.write(*line),
                Order::Reopen => {
                    self.file = None;
                    match append(&self.path) {
                        Ok(file) => self.file = Some(file),
                        Err(error) => self.failed(&error),
                    }
                }
            }
        }
    }

    fn write(&mut self, mut line: Line) {
        if self.file.is_none() {
            // The folder may be there again.
            self.file = append(&self.path).ok();
        }
        let lost = self.lost.swap(0, Ordering::Relaxed);
        line.lost = lost;
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        let written = match &mut self.file {
            // One write: lines of two daemons do not mix.
            Some(file) => file.write_all(&text),
            None => Err(std::io::ErrorKind::NotFound.into()),
        };
        match written {
            Ok(()) => self.told = false,
            Err(error) => {
                self.lost.fetch_add(lost, Ordering::Relaxed);
                lose(&self.lost);
                self.failed(&error);
            }
        }
    }

    fn failed(&mut self, error: &std::io::Error) {
        if !std::mem::replace(&mut self.told, true) {
            tracing::error!(%error, path = %self.path.display(), "the audit log cannot be written: lines are lost until it can");
        }
    }
}

/// Now, for a line.
pub fn now() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

/// A time in milliseconds, for a line.
pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(path: &str) -> Line {
        Line {
            time: now(),
            who: Who { from: "socket", uid: Some(0), ..Who::default() },
            operation: "stopVm",
            method: "DELETE".to_owned(),
            path: path.to_owned(),
            status: 200,
            code: None,
            ms: 1.5,
            lost: 0,
        }
    }

    fn until(what: &str, is: impl Fn() -> bool) {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while !is() {
            assert!(std::time::Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted_in_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, path) = (dir.path().join("log"), dir.path().join("log/audit"));
        std::fs::create_dir(&folder).unwrap();
        let audit = Audit::open(&path).unwrap();
        audit.tell(line("/v1/vms/a"));
        until("a line", || lines(&path).len() == 1);
        assert_eq!(
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions()) & 0o777,
            0o600
        );
        // Renamed, as logrotate does, and no folder to write to.
        std::fs::rename(&folder, dir.path().join("old")).unwrap();
        audit.reopen();
        audit.tell(line("/v1/vms/b"));
        audit.tell(line("/v1/vms/c"));
        until("both are lost", || audit.lost.load(Ordering::Relaxed) == 2);
        std::fs::create_dir(&folder).unwrap();
        audit.tell(line("/v1/vms/d"));
        until("the next one", || lines(&path).len() == 1);
        assert_eq!((&lines(&path)[0]["path"], &lines(&path)[0]["lost"]), (&"/v1/vms/d".into(), &2.into()));
        audit.tell(line("/v1/vms/e"));
        until("and one without a loss", || lines(&path).len() == 2);
        assert!(lines(&path)[1].get("lost").is_none());
    }
}
