//! `[qemu]`: with which rights QEMUs run.

use clap::Args;
use serde::Deserialize;
use vmove_qmp::confine::{Confinement, DEFAULT_ID, DEFAULT_USER, QemuUser};
use vmove_qmp::inspect::find_program;

use super::{ConfigError, value};

/// Changes the user before QEMU's first instruction.
const PROGRAM: &str = "setpriv";

/// The table in the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct QemuConfig {
    user: Option<String>,
    sandbox: Option<bool>,
}

/// The same as flags.
#[derive(Debug, Default, Args)]
pub struct QemuFlags {
    /// User as whom QEMUs run, by name or number; root for none [default: vmove-qemu, or 60742 where there is no such user]
    #[arg(long, value_name = "USER")]
    pub qemu_user: Option<String>,
    /// Whether QEMUs refuse system calls that they do not need (-sandbox) [default: true]
    #[arg(long, value_name = "BOOL")]
    pub qemu_sandbox: Option<bool>,
}

impl QemuConfig {
    /// What both say, looked up. A daemon that is not root starts QEMUs as its own user.
    pub(super) fn overridden(self, flags: QemuFlags) -> Result<Confinement, ConfigError> {
        let sandbox = flags.qemu_sandbox.or(self.sandbox).unwrap_or(true);
        if !rustix::process::geteuid().is_root() {
            return Ok(Confinement { user: None, sandbox });
        }
        let found = match flags.qemu_user.or(self.user) {
            // As the example has it: the same as not to say it.
            Some(name) if name != DEFAULT_USER => QemuUser::find(&name),
            _ => QemuUser::usual().map(Some),
        };
        let user = found.map_err(|why| value("qemu.user", vmove_types::problem::chain(&why)))?;
        if user.is_some() && find_program(PROGRAM).is_none() {
            let why = format!(
                "expected the program {PROGRAM} (util-linux) in PATH, found none: install it, or set user = \"root\""
            );
            return Err(value("qemu.user", why));
        }
        Ok(Confinement { user, sandbox })
    }
}

/// What the operator should know of the user as whom QEMUs run, and do about it.
pub fn qemu_user_note(confinement: &Confinement) -> Option<String> {
    match &confinement.user {
        Some(user) if user.uid == DEFAULT_ID && user.name != DEFAULT_USER => Some(format!(
            "there is no user {DEFAULT_USER} on this node, so QEMUs run as number {DEFAULT_ID}, which has no name: to give it one, install \
             vmove.sysusers as /usr/lib/sysusers.d/vmove.conf and run systemd-sysusers"
        )),
        None if rustix::process::geteuid().is_root() => Some(
            "QEMUs run as root: a guest that breaks out of QEMU has this node; remove user = \"root\" from [qemu]".to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::configured;

    #[test]
    fn qemus_are_confined_unless_the_operator_says_otherwise() {
        let config = |text: &str| configured(text).qemu;
        assert!(config("").sandbox);
        assert!(!config("[qemu]\nsandbox = false").sandbox);
        if !rustix::process::geteuid().is_root() {
            return vmove_skip::skip!("not root: QEMU runs as whoever runs this");
        }
        let user = config("").user.expect("not root");
        assert_ne!(user.uid, 0);
        assert_eq!(config("[qemu]\nuser = 'vmove-qemu'").user, Some(user));
        let note = |text: &str| qemu_user_note(&config(text)).unwrap_or_default();
        assert!(note("[qemu]\nuser = 'root'").contains("breaks out"));
        assert!(
            note("[qemu]\nuser = '60742'").contains("systemd-sysusers")
                || QemuUser::find(DEFAULT_USER).is_ok()
        );
        assert_eq!(note("[qemu]\nuser = 'daemon'"), "");
        assert_eq!(config("[qemu]\nuser = 'root'").user, None);
        assert_eq!(config("[qemu]\nuser = 'daemon'").user.map(|user| user.name).as_deref(), Some("daemon"));
    }
}
