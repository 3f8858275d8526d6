//! `on`: which event a hook waits for.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use vmove_types::typo;

use crate::event::{Event, Name};
use crate::own::Own;

/// Words of `on` for signals of the host.
pub(crate) const HOST: [&str; 5] = ["file", "gpu-xid", "kernel-log", "memory-error", "timer"];

/// The event that a hook waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trigger {
    /// A QMP event.
    Qmp(String),
    /// One of our own.
    Own(Own),
    /// Memory errors of the host.
    MemoryError,
    /// Errors of a GPU.
    GpuXid,
    /// Lines of the kernel log.
    KernelLog,
    /// A file appears.
    File(PathBuf),
    /// Again and again.
    Timer(Duration),
}

impl Trigger {
    /// Whether this is the event.
    pub(crate) fn fits(&self, hook: &str, event: &Event) -> bool {
        match (self, &event.name) {
            (Self::Qmp(wanted), Name::Qmp(name)) => wanted == name,
            (Self::Own(wanted), Name::Own(own)) => wanted == own,
            (Self::File(wanted), Name::File(path)) => wanted == path,
            (Self::Timer(_), Name::Timer { hook: name }) => name == hook,
            (Self::MemoryError, Name::MemoryError)
            | (Self::GpuXid, Name::GpuXid)
            | (Self::KernelLog, Name::KernelLog) => true,
            _ => false,
        }
    }

    /// An event that fits, for trials.
    pub(crate) fn example(&self, hook: &str) -> Name {
        match self {
            Self::Qmp(name) => Name::Qmp(name.clone()),
            Self::Own(own) => Name::Own(*own),
            Self::MemoryError => Name::MemoryError,
            Self::GpuXid => Name::GpuXid,
            Self::KernelLog => Name::KernelLog,
            Self::File(path) => Name::File(path.clone()),
            Self::Timer(_) => Name::Timer { hook: hook.to_owned() },
        }
    }

    /// Whether somebody waits for the hook's word.
    #[must_use]
    pub const fn is_asked(&self) -> bool {
        matches!(self, Self::Own(own) if own.may_be_forbidden())
    }

    /// Whether it is about the host, not about one VM.
    #[must_use]
    pub const fn is_of_host(&self) -> bool {
        !matches!(self, Self::Qmp(_) | Self::Own(_))
    }
}

impl fmt::Display for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qmp(name) => f.write_str(name),
            Self::Own(own) => f.write_str(own.as_str()),
            Self::MemoryError => f.write_str("memory-error"),
            Self::GpuXid => f.write_str("gpu-xid"),
            Self::KernelLog => f.write_str("kernel-log"),
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Timer(every) => write!(f, "timer, every {every:?}"),
        }
    }
}

/// What a word of `on` names.
pub(crate) enum Word {
    Qmp(String),
    Own(Own),
    /// One of [`HOST`].
    Host(&'static str),
}

/// Reads a word of `on`: QMP events have capital letters.
pub(crate) fn word(text: &str) -> Result<Word, String> {
    if let Some(own) = Own::ALL.into_iter().find(|own| own.as_str() == text) {
        return Ok(Word::Own(own));
    }
    if let Some(host) = HOST.into_iter().find(|host| *host == text) {
        return Ok(Word::Host(host));
    }
    let qmp = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    if text.starts_with(|c: char| c.is_ascii_uppercase()) && text.chars().all(qmp) {
        return Ok(Word::Qmp(text.to_owned()));
    }
    let ours = Own::ALL.into_iter().map(Own::as_str).chain(HOST);
    let known = ours.chain(vmove_qmp::known_events().iter().map(String::as_str));
    let hint = typo::nearest(text, known).map(|name| format!("; did you mean \"{name}\"?"));
    Err(format!(
        "expected the name of a QMP event in capital letters (MEMORY_FAILURE), or one of {}, found \"{text}\"{}",
        Own::ALL.into_iter().map(Own::as_str).chain(HOST).collect::<Vec<_>>().join(", "),
        hint.unwrap_or_default()
    ))
}

/// What to say of the name of a QMP event that is not in the schema that we know.
pub(crate) fn unknown_qmp(name: &str) -> Option<String> {
    let known = vmove_qmp::known_events();
    if known.iter().any(|one| one == name) {
        return None;
    }
    let hint = typo::nearest(name, known.iter().map(String::as_str));
    let hint = hint.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
    Some(format!(
        "QMP event {name} is not known: a newer QEMU may have it, otherwise this hook never runs{hint}"
    ))
}
