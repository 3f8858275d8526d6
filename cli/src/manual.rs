//! Man pages and completions, from the definition that also parses.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use serde_json::json;

use crate::args::{pve, vfork, vmove};
use crate::output::{End, say, say_json};
use vmove_types::problem::{Code, Exit, Problem};

/// Prints a completion script.
pub fn completions_of<C: CommandFactory>(name: &str, shell: Shell) -> Result<Exit, End> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut C::command(), name, &mut script);
    say(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Done)
}

/// Of the daemons and adapters, whose command lines are in their own crates. Tests there keep them current.
const OTHER_PAGES: [(&str, &str); 6] = [
    ("vmoved.1", include_str!("../../daemon/dist/vmoved.1")),
    ("vbridged.1", include_str!("../../sched-bridge/service/dist/vbridged.1")),
    ("vmove-slurm-adapter.1", include_str!("../../sched-bridge/service/dist/vmove-slurm-adapter.1")),
    ("vmove-network-adapter.1", include_str!("../../sched-bridge/adapter/dist/vmove-network-adapter.1")),
    ("vmove-podman-adapter.1", include_str!("../../sched-bridge/adapter/dist/vmove-podman-adapter.1")),
    ("vmove-redfish-adapter.1", include_str!("../../sched-bridge/adapter/dist/vmove-redfish-adapter.1")),
];

/// Writes one page per command of vmove, vfork and vmove-pve, and those of vmoved, vbridged and adapters.
pub fn man(dir: &Path, json: bool) -> Result<Exit, End> {
    let failed = |path: &Path, error: std::io::Error| {
        Problem::new(Code::LocalFile, format!("Could not write man pages to {}: {error}", path.display()))
    };
    std::fs::create_dir_all(dir).map_err(|e| failed(dir, e))?;
    for command in [vmove::Cli::command(), vfork::Cli::command(), pve::Cli::command()] {
        clap_mangen::generate_to(command.disable_help_subcommand(true), dir).map_err(|e| failed(dir, e))?;
    }
    for (name, text) in OTHER_PAGES {
        let page = dir.join(name);
        std::fs::write(&page, text).map_err(|e| failed(&page, e))?;
    }
    if json {
        say_json(&json!({ "dir": dir }))?;
    } else {
        say(&format!(
            "Man pages of vmove, vfork, vmove-pve, vmoved, vbridged and adapters are in {}",
            dir.display()
        ))?;
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_page_for_every_command() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(man(dir.path(), true), Ok(Exit::Done)));
        for command in vmove::Cli::command().get_subcommands() {
            let page = dir.path().join(format!("vmove-{}.1", command.get_name()));
            let text = std::fs::read_to_string(&page).unwrap();
            assert!(text.contains("vmove"), "{}", page.display());
        }
        let of_vfork = [
            "vfork.1",
            "vfork-create.1",
            "vfork-simulate.1",
            "vfork-template-save.1",
            "vmove-pve.1",
            "vmove-pve-move.1",
        ];
        for name in OTHER_PAGES.map(|(name, _)| name).into_iter().chain(of_vfork) {
            assert!(dir.path().join(name).exists(), "{name}");
        }
    }
}
