//! What a node needs: folders for monitors and for guest memory, at every boot before its VMs start.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use serde::Serialize;
use vmove_pve::MEMORY;
use vmove_types::problem::{Code, Exit};
use vmove_types::proxmox::MONITORS;

use crate::failure::Failure;
use crate::mounts;
use crate::output::{End, say, say_json};

/// Makes the folders at every boot.
const AT_BOOT: &str = "/etc/tmpfiles.d/vmove-pve.conf";

/// What a node lacks.
#[derive(Debug, Default, Serialize)]
pub struct Lacks {
    /// What `vmove-pve host` makes.
    pub made: Vec<String>,
    /// What must be done by hand.
    pub lacks: Vec<String>,
}

fn boot_text() -> String {
    format!(
        "# Made by `vmove-pve host`: folders of VMs that vmove moves.\nd {MONITORS} 0700 root root\nd {MEMORY} 0700 root root\n"
    )
}

/// Looks what this node lacks.
pub fn lacks() -> Lacks {
    let mut found = Lacks::default();
    let mounted = Path::new(MEMORY).parent().unwrap_or(Path::new("/"));
    if let Some(is) = mounts::not_huge_tmpfs(mounted) {
        found.lacks.push(format!(
            "guest memory must be on tmpfs with huge=advise, and {} is on {is}: add this line to /etc/fstab, and run `mkdir -p {0} && mount {0}`\n\
             \x20   tmpfs {0} tmpfs huge=advise,mode=0700,size=90% 0 0",
            mounted.display()
        ));
    }
    if std::fs::read_to_string(AT_BOOT).unwrap_or_default() != boot_text() {
        found.made.push(AT_BOOT.to_owned());
    }
    found
        .made
        .extend([MONITORS, MEMORY].into_iter().filter(|path| !Path::new(path).is_dir()).map(str::to_owned));
    found
}

/// `vmove-pve host`.
pub fn prepare(check: bool, json: bool) -> Result<Exit, End> {
    let found = lacks();
    // The folder for memory is below a mount point that is to come.
    if !check && found.lacks.is_empty() {
        make().map_err(|error| {
            Failure::new(
                Code::LocalFile,
                format!("{AT_BOOT}, {MONITORS} or {MEMORY} could not be made: {error}; are you root?"),
            )
        })?;
    }
    let ended = match check {
        true if !found.lacks.is_empty() || !found.made.is_empty() => Exit::Failed,
        false if !found.lacks.is_empty() => Exit::Refused,
        _ => Exit::Done,
    };
    if json {
        say_json(&found)?;
        return Ok(ended);
    }
    let mark = if check { "lacks, and `vmove-pve host` makes:" } else { "+" };
    let mut out: Vec<String> = found.made.iter().map(|path| format!("{mark} {path}")).collect();
    out.extend(found.lacks.iter().map(|what| format!("lacks: {what}")));
    out.push(
        match (check, found.lacks.is_empty()) {
            (true, _) if ended == Exit::Done => "this node can take VMs",
            (true, _) => "nothing was changed (--check): this node cannot take VMs yet",
            (false, true) => "this node can take VMs",
            (false, false) => "nothing was changed",
        }
        .to_owned(),
    );
    say(&out.join("\n"))?;
    Ok(ended)
}

fn make() -> io::Result<()> {
    if let Some(folder) = Path::new(AT_BOOT).parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(AT_BOOT, boot_text())?;
    for path in [MONITORS, MEMORY] {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    }
    Ok(())
}
