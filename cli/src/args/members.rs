//! Options of `migrate` that are about one of several VMs.

use std::str::FromStr;

use vmove_types::device::{BadRequest, DeviceChoice};
use vmove_types::spec::ModeRequest;

/// What is said about a member cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMember {
    #[error("expected VM=…, found {0:?}")]
    Nobody(String),
    #[error("expected a grant, or VM:GRANT, found {0:?}")]
    Grant(String),
    #[error(transparent)]
    Device(#[from] BadRequest),
    #[error("{0}")]
    Mode(String),
}

/// A device for a role of a VM; of the only VM if it names none.
#[derive(Debug, Clone)]
pub struct DeviceOfMember {
    pub(super) vm: Option<String>,
    pub(super) choice: DeviceChoice,
}

impl FromStr for DeviceOfMember {
    type Err = BadMember;

    fn from_str(text: &str) -> Result<Self, BadMember> {
        let (vm, choice) = match text.split_once('=').and_then(|(head, _)| head.split_once(':')) {
            Some((vm, _)) => (Some(vm.to_owned()), &text[vm.len() + 1..]),
            None => (None, text),
        };
        Ok(Self { vm, choice: choice.parse()? })
    }
}

/// A grant for a VM; for the only VM if it names none. Grants have no colon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantOfMember {
    pub(super) vm: Option<String>,
    pub(super) grant: String,
}

/// `[VM:]GRANT`.
pub fn grant_of_member(text: &str) -> Result<GrantOfMember, BadMember> {
    let (vm, grant) = match text.split_once(':') {
        Some((vm, grant)) => (Some(vm.to_owned()), grant),
        None => (None, text),
    };
    if grant.is_empty() || vm.as_ref().is_some_and(String::is_empty) {
        return Err(BadMember::Grant(text.to_owned()));
    }
    Ok(GrantOfMember { vm, grant: grant.to_owned() })
}

/// `VM=SOMETHING`.
pub fn of_member(text: &str) -> Result<(String, String), BadMember> {
    match text.split_once('=') {
        Some((vm, what)) if !vm.is_empty() && !what.is_empty() => Ok((vm.to_owned(), what.to_owned())),
        _ => Err(BadMember::Nobody(text.to_owned())),
    }
}

/// `VM=MODE`.
pub fn mode_of_member(text: &str) -> Result<(String, ModeRequest), BadMember> {
    let (vm, mode) = of_member(text)?;
    Ok((vm, mode.parse().map_err(BadMember::Mode)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_nobody_is_refused() {
        assert!(of_member("a").is_err() && mode_of_member("a=fast").is_err());
        assert!(grant_of_member(":g").is_err() && grant_of_member("a:").is_err());
        assert_eq!(mode_of_member("a=precopy"), Ok(("a".to_owned(), ModeRequest::Precopy)));
    }
}
