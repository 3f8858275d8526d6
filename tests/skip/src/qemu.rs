//! The QEMU of tests that attach to one.

use std::process::{Command, Stdio};

/// Variables that may name a QEMU, in the order in which they are tried.
const VARIABLES: [&str; 3] = ["VMOVE_QEMU", "VMOVE_QEMU_10_0", "VMOVE_QEMU_7_2"];

/// The path of a QEMU that can be run, for a test that mounts guest memory and attaches to QEMU.
///
/// # Errors
/// What is missing: the rights of root, or a QEMU.
pub fn qemu() -> Result<String, String> {
    if !rustix::process::geteuid().is_root() {
        return Err("needs root, to mount guest memory and attach to QEMU".to_owned());
    }
    let named = VARIABLES.iter().find_map(|variable| std::env::var(variable).ok());
    let program =
        named.filter(|program| !program.is_empty()).unwrap_or_else(|| "qemu-system-x86_64".to_owned());
    let works = Command::new(&program).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        return Err(format!("{program} cannot be run; set VMOVE_QEMU"));
    }
    Ok(program)
}
