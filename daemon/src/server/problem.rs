//! Errors of the engines as answers: the one place where they get their code, and with it their HTTP status and exit code.

use vmove_clone::engine::ForkError;
use vmove_migrate::disk_moves::MoveDiskError;
use vmove_migrate::domains::CarryError;
use vmove_migrate::engine::EngineError;
use vmove_migrate::mend::AttachError;
use vmove_node::blocking::TaskFailed;
use vmove_node::devices::DevicesError;
use vmove_node::migrations::AbandonError;
use vmove_node::peer::UnknownPeer;
use vmove_node::registry::RegistryError;
use vmove_types::problem::{Code, Problem};

/// An error that a request can be answered with.
pub trait IntoProblem {
    /// The answer: the error's code, and its message with those of its causes.
    fn into_problem(self) -> Problem;
}

impl IntoProblem for Problem {
    fn into_problem(self) -> Problem {
        self
    }
}

impl IntoProblem for EngineError {
    fn into_problem(self) -> Problem {
        let code = match &self {
            Self::Vm(inner) => inner.code(),
            Self::Busy { .. } | Self::DisksFollow { .. } | Self::DiskMoves { .. } => Code::Busy,
            Self::UnknownSession(_) | Self::UnknownGroup(_) => Code::UnknownMigration,
            Self::TooLate(_) | Self::GroupTooLate(_) => Code::TooLate,
            Self::BadSpec(_) => Code::BadOption,
            Self::NothingToRecover(..) | Self::NotReclaimable(..) => Code::NothingToRecover,
            Self::NotVisiting { .. } | Self::NotTurned { .. } => Code::NotVisiting,
            Self::Stays { .. } => Code::Stays,
            Self::Abandon(AbandonError::AtWork { .. }) => Code::Busy,
            // I/O, and what newer engines may add.
            _ => Code::Internal,
        };
        let problem = Problem::from_error(code, &self);
        match self {
            Self::Stays { choice, .. } => Problem { details: serde_json::to_value(choice).ok(), ..problem },
            _ => problem,
        }
    }
}

impl IntoProblem for MoveDiskError {
    fn into_problem(self) -> Problem {
        let code = match &self {
            Self::Vm(inner) => inner.code(),
            Self::InMigration { .. } | Self::Moving { .. } | Self::Starting => Code::Busy,
            Self::NotMoving { .. } => Code::UnknownDisk,
            Self::TooLate { .. } => Code::TooLate,
            Self::Libvirt(_) | Self::Refused { .. } => Code::NotMovable,
            Self::BadPath(_) => Code::BadOption,
            Self::NotOpened { .. } | Self::Monitor(_) => Code::QmpFailed,
            _ => Code::Internal,
        };
        let problem = Problem::from_error(code, &self);
        match self {
            Self::Refused { blockers, .. } => {
                Problem { details: serde_json::to_value(blockers).ok(), ..problem }
            }
            _ => problem,
        }
    }
}

impl IntoProblem for CarryError {
    fn into_problem(self) -> Problem {
        Problem::from_error(Code::DomainRefused, &self)
    }
}

impl IntoProblem for AttachError {
    fn into_problem(self) -> Problem {
        let code = match &self {
            Self::Vm(inner) => inner.code(),
            Self::Busy { .. } => Code::Busy,
            Self::NoSuchRole { .. } => Code::DeviceUnavailable,
            Self::Devices(inner) => inner.code(),
            Self::Monitor(_) => Code::QmpFailed,
            _ => Code::DeviceFailed,
        };
        Problem::from_error(code, &self)
    }
}

impl IntoProblem for ForkError {
    fn into_problem(self) -> Problem {
        Problem::from_error(self.code(), &self)
    }
}

impl IntoProblem for UnknownPeer {
    fn into_problem(self) -> Problem {
        Problem::from_error(Code::UnknownNode, &self)
    }
}

impl IntoProblem for RegistryError {
    fn into_problem(self) -> Problem {
        Problem::from_error(self.code(), &self)
    }
}

impl IntoProblem for DevicesError {
    fn into_problem(self) -> Problem {
        Problem::from_error(self.code(), &self)
    }
}

impl IntoProblem for TaskFailed {
    fn into_problem(self) -> Problem {
        Problem::from_error(Code::Internal, &self)
    }
}
