//! The one form in which a request is refused, over HTTP and on the command line.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::progress::{GuestPlace, Outcome, Progress};

/// How `vmove` ends. A stable interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// It failed; the guest still runs where it was.
    Failed = 1,
    /// Wrong use of the command.
    Usage = 2,
    /// Blockers were found; nothing was changed.
    Refused = 3,
    /// The guest is not running where it was: it is paused and needs `vmove recover`, or an operator must look. Or it lacks a device.
    NeedsRecovery = 4,
    /// No answer from the daemon.
    Unreachable = 5,
}

impl Exit {
    /// The process exit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The exit code for the end of a migration, of which all is known.
    #[must_use]
    pub const fn of_progress(progress: &Progress) -> Self {
        match Self::of(&progress.outcome) {
            Self::Done | Self::Failed if !progress.missing_devices.is_empty() => Self::NeedsRecovery,
            other => other,
        }
    }

    /// The exit code for the end of a migration.
    #[must_use]
    pub const fn of(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Done { .. } => Self::Done,
            Outcome::Refused { .. } => Self::Refused,
            Outcome::Failed { guest: GuestPlace::Source, .. } => Self::Failed,
            // The guest is not where the caller left it, so "failed, still runs where it was" would be a lie.
            Outcome::Failed {
                guest:
                    GuestPlace::Destination
                    | GuestPlace::PausedAtSource
                    | GuestPlace::PausedAtDestination
                    | GuestPlace::Unknown,
                ..
            } => Self::NeedsRecovery,
            // Only seen when the daemon went away in the middle.
            Outcome::Running | Outcome::Reconnecting { .. } => Self::Unreachable,
        }
    }
}

/// Why a request was refused, as a stable word. New words may be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not well-formed.
    BadRequest,
    /// A VM name that cannot be used.
    BadName,
    /// A migration option is out of range.
    BadOption,
    /// The QEMU command line cannot be used.
    BadCommandLine,
    /// A node name that the configuration does not hold.
    UnknownNode,
    /// No VM of this name.
    UnknownVm,
    /// No disk of this name moves.
    UnknownDisk,
    /// No such migration.
    UnknownMigration,
    /// No such path in this API.
    UnknownPath,
    /// The path is there, the method is not.
    MethodNotAllowed,
    /// This port only answers questions: it has no TLS.
    ReadOnly,
    /// A VM of this name is here already.
    NameTaken,
    /// The VM is in a migration.
    Busy,
    /// The guest has been handed over.
    TooLate,
    /// Nothing to recover.
    NothingToRecover,
    /// The guest is not here for a visit, or cannot be.
    NotVisiting,
    /// The guest stays: it reads from afar in less time than it takes to go there. The details are the choice; nothing was changed.
    Stays,
    /// No template of this name.
    UnknownTemplate,
    /// A template is damaged, or made by another QEMU.
    BadTemplate,
    /// The configuration, or the role of the caller, does not allow it.
    Forbidden,
    /// The caller asks too often.
    RateLimited,
    /// The request is too large.
    TooLarge,
    /// No hook of this name.
    UnknownHook,
    /// A hook of the operator forbade it; nothing was changed.
    ForbiddenByHook,
    /// A migration of libvirt's, or a move of a VM of Proxmox VE, that cannot be carried, or has failed.
    DomainRefused,
    /// A fork failed; the parent runs.
    ForkFailed,
    /// A fork failed, and the parent could not be set running again yet.
    ParentNotBack,
    /// A fork failed, and the parent lacks a device that it had: the message has the command that gives it back.
    DeviceMissing,
    /// This QEMU could never be moved.
    NotMovable,
    /// It was adopted, and this is not done to adopted ones.
    Adopted,
    /// It was not adopted, and this is only done to adopted ones.
    NotAdopted,
    /// The user as whom QEMU runs may not open something.
    QemuUser,
    /// The VM has no grant of a bridge that this node needs, or its grant does not give what it wants.
    GrantRefused,
    /// The VM cannot have the processors or NUMA nodes that it is to have for itself.
    NotPinned,
    /// QEMU did not start or ended at once.
    QemuFailed,
    /// QEMU's monitor did not answer.
    QmpFailed,
    /// A device cannot be given to a VM.
    DeviceUnavailable,
    /// The kernel, or a driver, refused a change of a device.
    DeviceFailed,
    /// Memory for the guest could not be had.
    NoMemory,
    /// So many children could need more memory than the node has; nothing was begun.
    NoRoom,
    /// The daemon is about to end.
    ShuttingDown,
    /// A file or kernel interface failed.
    Internal,
    /// No daemon answers (only made by `vmove`).
    DaemonUnreachable,
    /// A local file could not be written (only made by `vmove`).
    LocalFile,
}

/// The stable words of one daemon: why it refuses requests.
pub trait ProblemCode: Copy + fmt::Debug + Serialize + DeserializeOwned + 'static {
    /// The request is not well-formed.
    const BAD_REQUEST: Self;

    /// HTTP status and exit code.
    fn mapping(self) -> (u16, Exit);

    /// The word, as it is in JSON.
    #[must_use]
    fn word(self) -> String {
        serde_json::to_value(self).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
    }
}

impl Code {
    /// The word, as it is in JSON.
    #[must_use]
    pub fn word(self) -> String {
        ProblemCode::word(self)
    }
}

impl ProblemCode for Code {
    const BAD_REQUEST: Self = Self::BadRequest;

    // One match, without a wildcard: a new code cannot be forgotten.
    fn mapping(self) -> (u16, Exit) {
        match self {
            Self::BadRequest | Self::BadName | Self::BadOption | Self::BadCommandLine => (400, Exit::Usage),
            Self::UnknownNode => (422, Exit::Usage),
            Self::UnknownPath => (404, Exit::Usage),
            Self::MethodNotAllowed => (405, Exit::Usage),
            Self::ReadOnly => (403, Exit::Usage),
            Self::UnknownVm
            | Self::UnknownDisk
            | Self::UnknownMigration
            | Self::UnknownTemplate
            | Self::UnknownHook => (404, Exit::Failed),
            Self::Stays => (409, Exit::Refused),
            Self::BadTemplate => (422, Exit::Failed),
            Self::RateLimited => (429, Exit::Refused),
            Self::TooLarge => (413, Exit::Usage),
            Self::Forbidden | Self::GrantRefused | Self::NotPinned | Self::ForbiddenByHook => {
                (403, Exit::Refused)
            }
            Self::ForkFailed | Self::ParentNotBack => (500, Exit::Failed),
            Self::DeviceMissing => (500, Exit::NeedsRecovery),
            Self::NameTaken
            | Self::Busy
            | Self::TooLate
            | Self::NothingToRecover
            | Self::NotVisiting
            | Self::DomainRefused
            | Self::Adopted
            | Self::NotAdopted => (409, Exit::Failed),
            Self::NotMovable | Self::QemuUser | Self::DeviceUnavailable => (422, Exit::Refused),
            Self::QemuFailed | Self::QmpFailed => (502, Exit::Failed),
            Self::DeviceFailed => (500, Exit::Failed),
            Self::NoMemory => (507, Exit::Failed),
            Self::NoRoom => (507, Exit::Refused),
            Self::ShuttingDown => (503, Exit::Unreachable),
            Self::Internal | Self::LocalFile => (500, Exit::Failed),
            Self::DaemonUnreachable => (503, Exit::Unreachable),
        }
    }
}

/// A refused request. `C` are the words of the daemon that refused it; without it, those of `vmoved`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound = "C: ProblemCode")]
pub struct Problem<C = Code> {
    /// Stable word for programs.
    pub code: C,
    /// What was expected, what was found, what to do next: for people.
    pub message: String,
    /// What `vmove` exits with.
    pub exit_code: u8,
    /// HTTP status.
    pub status: u16,
    /// More for programs; which fields there are depends on the code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<serde_json::Value>,
}

impl<C: ProblemCode> Problem<C> {
    /// A problem with the status and exit code of its word.
    #[must_use]
    pub fn new(code: C, message: impl Into<String>) -> Self {
        let (status, exit) = code.mapping();
        Self { code, message: message.into(), exit_code: exit.code(), status, details: None }
    }

    /// A malformed request.
    #[must_use]
    pub fn bad_request(message: impl fmt::Display) -> Self {
        Self::new(C::BAD_REQUEST, message.to_string())
    }

    /// A problem whose message is that of an error and all its sources.
    #[must_use]
    pub fn from_error(code: C, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(code, chain(error))
    }
}

impl<C> fmt::Display for Problem<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<C: fmt::Debug> std::error::Error for Problem<C> {}

/// Described by hand: a derived description would repeat the words instead of naming their type.
#[cfg(feature = "schema")]
mod schema {
    use std::borrow::Cow;

    use utoipa::openapi::schema::{Ref, RefBuilder, Schema};
    use utoipa::openapi::{ObjectBuilder, RefOr};
    use utoipa::{PartialSchema, ToSchema};

    use super::Problem;

    impl<C: ToSchema> PartialSchema for Problem<C> {
        fn schema() -> RefOr<Schema> {
            let described = |schema: RefOr<Schema>, text: &str| match schema {
                RefOr::T(Schema::Object(mut object)) => {
                    object.description = Some(text.to_owned());
                    RefOr::T(Schema::Object(object))
                }
                other => other,
            };
            let code = RefBuilder::new()
                .ref_location(Ref::from_schema_name(C::name()).ref_location)
                .description(Some("Stable word for programs."))
                .build();
            let message = "What was expected, what was found, what to do next: for people.";
            ObjectBuilder::new()
                .description(Some("A refused request."))
                .property("code", code)
                .required("code")
                .property("message", described(String::schema(), message))
                .required("message")
                .property("exit_code", described(u8::schema(), "What `vmove` exits with."))
                .required("exit_code")
                .property("status", described(u16::schema(), "HTTP status."))
                .required("status")
                .property(
                    "details",
                    ObjectBuilder::new()
                        .description(Some("More for programs; which fields there are depends on the code.")),
                )
                .into()
        }
    }

    impl<C: ToSchema> ToSchema for Problem<C> {
        fn name() -> Cow<'static, str> {
            Cow::Borrowed("Problem")
        }

        fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
            schemas.push((C::name().into_owned(), C::schema()));
            C::schemas(schemas);
        }
    }
}

/// The message of an error followed by those of its sources, each once.
#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut out = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !out.contains(&text) {
            out.push_str(": ");
            out.push_str(&text);
        }
        next = source.source();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(guest: GuestPlace) -> Outcome {
        Outcome::Failed { error: "x".to_owned(), guest, cancelled: false }
    }

    #[test]
    fn the_exit_code_says_where_the_guest_is() {
        assert_eq!(Exit::of(&Outcome::Done { report: Box::default() }).code(), 0);
        assert_eq!(Exit::of(&failed(GuestPlace::Source)).code(), 1);
        assert_eq!(Exit::of(&Outcome::Refused { blockers: Vec::new() }).code(), 3);
        for place in [GuestPlace::PausedAtSource, GuestPlace::PausedAtDestination, GuestPlace::Destination] {
            assert_eq!(Exit::of(&failed(place)).code(), 4, "{place:?}");
        }
        assert_eq!(Exit::of(&Outcome::Running).code(), 5);
    }

    #[test]
    fn a_problem_carries_status_and_exit_code_of_its_word() {
        let json = serde_json::to_value(Problem::new(Code::UnknownVm, "No VM")).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"code": "unknown-vm", "message": "No VM", "exit_code": 1, "status": 404})
        );
    }

    #[test]
    fn sources_are_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("Could not read /x{}", if *.told { ": disk on fire" } else { "" })]
        struct Outer {
            told: bool,
            #[source]
            source: std::io::Error,
        }
        for told in [false, true] {
            let outer = Outer { told, source: std::io::Error::other("disk on fire") };
            assert_eq!(chain(&outer), "Could not read /x: disk on fire");
        }
    }
}
