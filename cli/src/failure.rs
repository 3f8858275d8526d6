//! Why a command failed, and what to do: for people on standard error, for programs as JSON.

use std::io;

use vmove_bridge_types::problem::Code as BridgeCode;
use vmove_client::{Client, Endpoint, Error, bridge};
use vmove_types::problem::{Code, Problem, ProblemCode};
use vmove_types::progress::{Outcome, Progress, Role};

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Stable word for programs.
    pub code: String,
    /// For people: what was expected, what was found, what to do.
    pub message: String,
    /// What the process ends with.
    pub exit_code: u8,
    /// More for programs.
    pub details: Option<serde_json::Value>,
}

impl Failure {
    pub fn new<C: ProblemCode>(code: C, message: impl Into<String>) -> Self {
        Problem::new(code, message).into()
    }

    /// Input that cannot be used.
    pub fn bad_request(message: impl std::fmt::Display) -> Self {
        Problem::<Code>::bad_request(message).into()
    }
}

impl<C: ProblemCode> From<Problem<C>> for Failure {
    fn from(problem: Problem<C>) -> Self {
        Self {
            code: problem.code.word(),
            message: problem.message,
            exit_code: problem.exit_code,
            details: problem.details,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Problem::from_error(Code::LocalFile, &error).into()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let next = match &error {
            Error::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "; only the user that vmoved runs as (root, normally) may use it"
            }
            Error::Unreachable { endpoint: Endpoint::Tls(_), .. } => {
                "; is vmoved running there, and is this its peer port? Name it by --at or VMOVE_AT"
            }
            Error::Tls { .. } => "",
            Error::Unreachable { .. } => {
                "; start it (systemctl start vmoved), or name its socket by --control or VMOVE_CONTROL"
            }
            Error::Lost { .. } => {
                ": see its log (journalctl -u vmoved); guests and migrations go on, or are taken up when it runs again"
            }
            _ => ": check --control or --at",
        };
        match error {
            Error::Refused(problem) => problem.into(),
            error if error.is_unreachable() => Self::new(Code::DaemonUnreachable, format!("{error}{next}")),
            error => Problem::from_error(Code::Internal, &error).into(),
        }
    }
}

impl From<bridge::Error> for Failure {
    fn from(error: bridge::Error) -> Self {
        let next = match &error {
            bridge::Error::Unreachable { endpoint: Endpoint::Tcp(_) | Endpoint::Tls(_), .. } => {
                "; is it started with --listen? Name it by --bridge or VBRIDGE"
            }
            bridge::Error::Unreachable { .. } => {
                "; start it (systemctl start vbridged), or name it by --bridge or VBRIDGE"
            }
            bridge::Error::Lost { .. } => "; see its log (journalctl -u vbridged)",
            _ => "; check --bridge or VBRIDGE",
        };
        match error {
            bridge::Error::Refused(problem) => problem.into(),
            error if error.is_unreachable() => {
                Self::new(BridgeCode::BridgeUnreachable, format!("{error}{next}"))
            }
            error => Problem::from_error(BridgeCode::Internal, &error).into(),
        }
    }
}

/// Adds to the failure that a VM is not here where it went, if this node remembers that.
pub async fn where_it_went(client: &Client, mut failure: Failure) -> Failure {
    if failure.code != Code::UnknownVm.word() {
        return failure;
    }
    let Ok(known) = client.migrations().await else { return failure };
    let is_meant = |m: &&Progress| failure.message.contains(&format!("{:?}", m.vm));
    // The newest comes first: it may have come back and gone elsewhere.
    let newest = known.migrations.iter().filter(is_meant).find(|m| matches!(m.outcome, Outcome::Done { .. }));
    if let Some(Progress { vm, peer, id, .. }) = newest.filter(|m| m.role == Role::Source) {
        failure.message = format!(
            "{vm:?} is not on this node any more: it moved to {peer} (migration {id}). Ask vmoved there"
        );
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_do_depends_on_what_is_missing() {
        let unreachable = |kind: io::ErrorKind| {
            let endpoint = Endpoint::Unix("/run/x.sock".into());
            Failure::from(Error::<Code>::Unreachable { daemon: "vmoved", endpoint, source: kind.into() })
        };
        let stopped = unreachable(io::ErrorKind::ConnectionRefused);
        assert_eq!((stopped.code.as_str(), stopped.exit_code), ("daemon-unreachable", 5));
        assert!(
            stopped.message.contains("/run/x.sock") && stopped.message.contains("systemctl start vmoved")
        );
        assert!(unreachable(io::ErrorKind::PermissionDenied).message.contains("root"));
        let endpoint = Endpoint::Tcp("host:7430".into());
        let source = io::ErrorKind::ConnectionRefused.into();
        let bridge = Failure::from(bridge::Error::Unreachable { daemon: "vbridged", endpoint, source });
        assert_eq!((bridge.code.as_str(), bridge.exit_code), ("bridge-unreachable", 5));
        assert!(bridge.message.contains("--listen"), "{}", bridge.message);
    }
}
