//! Events of a QMP connection, and a stream of them.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};
use vmove_types::time::Mono;

use serde::Serialize;
use serde_json::Value;
use tokio::sync::broadcast;

/// QEMU's own time stamp of an event: `CLOCK_REALTIME` of its host when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct QemuTime {
    /// Whole seconds since 1970; -1 if QEMU could not tell.
    pub seconds: i64,
    /// Microseconds, 0..=999_999; -1 if QEMU could not tell.
    pub micros: i64,
}

impl QemuTime {
    /// The same as a time of this host; `None` if QEMU could not tell.
    #[must_use]
    pub fn wall(self) -> Option<SystemTime> {
        let (seconds, micros) = (u64::try_from(self.seconds).ok()?, u64::try_from(self.micros).ok()?);
        Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros))
    }

    /// Time from `earlier` to `self` by QEMU's wall clock; zero if it went backwards.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        let micros = |t: Self| t.seconds.saturating_mul(1_000_000).saturating_add(t.micros);
        let span = micros(self).saturating_sub(micros(earlier));
        Duration::from_micros(u64::try_from(span).unwrap_or(0))
    }
}

/// One event.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// Name, such as `STOP` or `MIGRATION`.
    pub name: String,
    /// Its data; `Null` if it has none.
    pub data: Value,
    /// The event in types, where the schema knows it. Events of a newer QEMU come with `None` and are not lost.
    pub known: Option<qapi::qmp::Event>,
    /// When the end of its line was read from the socket, on this host.
    pub at: Mono,
    /// When QEMU made it.
    pub qemu_time: QemuTime,
}

impl Event {
    /// A text field of the data.
    #[must_use]
    pub fn text(&self, field: &str) -> Option<&str> {
        self.data.get(field).and_then(Value::as_str)
    }
}

/// Names of the events in the schema that this crate was built with. A newer QEMU may have more.
#[must_use]
pub fn known_events() -> &'static [String] {
    static NAMES: LazyLock<Vec<String>> = LazyLock::new(|| {
        // The types do not list their names, but the refusal of a name that is none does: `expected one of `SHUTDOWN`, `POWERDOWN`, ...`.
        let none = serde_json::json!({ "event": "" });
        let told = serde_json::from_value::<qapi::qmp::Event>(none).err().map(|error| error.to_string());
        let told = told.unwrap_or_default();
        told.split('`')
            .filter(|word| word.starts_with(|c: char| c.is_ascii_uppercase()))
            .map(str::to_owned)
            .collect()
    });
    &NAMES
}

/// All events from the moment of subscription on.
#[derive(Debug)]
pub struct Events(pub(crate) broadcast::Receiver<Arc<Event>>);

/// Why no event can be given.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventsError {
    /// The subscriber was too slow; the oldest events were dropped.
    #[error("{0} QMP events were dropped before they were read: query the state again")]
    Missed(u64),
    /// The connection has ended.
    #[error("The QMP connection is closed, no more events will come")]
    Closed,
}

impl Events {
    /// The next event.
    ///
    /// # Errors
    /// [`EventsError::Missed`] once after an overflow (1024 events are kept), [`EventsError::Closed`] at the end.
    pub async fn next(&mut self) -> Result<Arc<Event>, EventsError> {
        self.0.recv().await.map_err(|error| match error {
            broadcast::error::RecvError::Lagged(count) => EventsError::Missed(count),
            broadcast::error::RecvError::Closed => EventsError::Closed,
        })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_events_of_the_schema_are_known_by_name() {
        let names = super::known_events();
        for name in ["MEMORY_FAILURE", "GUEST_PANICKED", "BLOCK_IO_ERROR", "WATCHDOG", "STOP", "RTC_CHANGE"] {
            assert!(names.iter().any(|known| known == name), "{name} is not among {names:?}");
        }
    }
}
