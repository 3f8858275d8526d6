//! Errors of forks as answers.

use vmove_clone::CloneError;

use crate::api::problem::{Code, Problem, chain};

pub fn clone_problem(error: &CloneError) -> Problem {
    let code = match error {
        CloneError::Refused(_) => Code::NotMovable,
        CloneError::NoRoom(_) => Code::NoRoom,
        CloneError::NotKept { .. } => Code::NoMemory,
        CloneError::Template { .. } => Code::BadTemplate,
        CloneError::Qmp(_) => Code::QmpFailed,
        CloneError::Process(_) => Code::QemuFailed,
        CloneError::CommandLine(_) => Code::BadCommandLine,
        _ => Code::ForkFailed,
    };
    Problem::new(code, chain(error))
}
