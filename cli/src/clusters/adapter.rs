//! `vmove adapter`, and where the programs of adapters are.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use vmove_adapter::call::Adapter;
use vmove_adapter::conformance::{Line, Subject, check};
use vmove_adapter::network::names;
use vmove_adapter::schema;
use vmove_bridge_types::adapter::{Environment, Member};
use vmove_bridge_types::problem::Code;

use crate::args::blueprint::{AdapterAction, AdapterArgs, CheckArgs, FoundArgs, ProgramArgs};
use crate::failure::Failure;
use crate::output::{End, say, say_either, table};

/// Within it, what was stopped must have ended.
pub const STOP_PATIENCE: Duration = Duration::from_secs(30);

pub async fn run(args: AdapterArgs, json: bool) -> Result<(), End> {
    match args.action {
        AdapterAction::Schema => {
            let text = serde_json::to_string_pretty(&schema::of_contract());
            say(&text.map_err(|e| Failure::new(Code::Internal, e.to_string()))?)
        }
        AdapterAction::Check(args) => conformance(args, json).await,
    }
}

async fn conformance(args: CheckArgs, json: bool) -> Result<(), End> {
    let by_name =
        (!args.program.contains(['/', ' '])).then(|| in_folder(&args.found.adapter_dir, &args.program));
    let adapter = adapter(&args.found, by_name.flatten().as_deref().unwrap_or(&args.program));
    let cluster = args.cluster.clone().unwrap_or_else(|| format!("vmove-check-{}", std::process::id()));
    let environment = |name: &String| Environment {
        name: name.clone(),
        kind: args.kind.clone(),
        artifact: args.artifact.clone(),
        nodes: args.node.clone(),
        cores: 1,
        mode: if args.kind == "network" { "private".to_owned() } else { String::new() },
        members: if args.kind == "network" { members(&cluster, name, &args.node) } else { Vec::new() },
        ..Environment::default()
    };
    let [first, second] = &args.names[..] else {
        return Err(Failure::bad_request("--names needs two names").into());
    };
    let subject = Subject {
        cluster: cluster.clone(),
        environments: [environment(first), environment(second)],
        patience: STOP_PATIENCE,
    };
    let lines = check(&adapter, &subject).await;
    let broken = lines.iter().filter(|line| !line.holds).count();
    if broken == 0 {
        return say_either(&serde_json::json!({ "lines": lines }), json, |_| told(&lines));
    }
    if !json {
        say(&told(&lines))?;
    }
    let message = format!("{} breaks {broken} of {} rules of the contract", args.program, lines.len());
    let details = Some(serde_json::json!({ "lines": lines }));
    Err(Failure { details, ..Failure::new(Code::AdapterFailed, message) }.into())
}

/// A VM on each node of a network.
fn members(cluster: &str, network: &str, nodes: &[String]) -> Vec<Member> {
    let member = |(number, node): (usize, &String)| {
        let name = format!("vm-{number}");
        Member {
            interface: names::tap(cluster, network, &name),
            mac: names::mac(cluster, network, &name),
            address: names::address(number).map(|address| address.to_string()).unwrap_or_default(),
            node: node.clone(),
            aliases: Vec::new(),
            namespace: String::new(),
            name,
        }
    };
    nodes.iter().enumerate().map(member).collect()
}

fn told(lines: &[Line]) -> String {
    let row = |line: &Line| {
        let holds = if line.holds { "ok" } else { "BROKEN" };
        vec![holds.to_owned(), line.rule.to_owned(), line.found.clone()]
    };
    table(&["", "RULE", "FOUND"], &lines.iter().map(row).collect::<Vec<_>>())
}

fn adapter(found: &FoundArgs, command: &str) -> Adapter {
    let command = command.split_whitespace().map(str::to_owned).collect();
    Adapter { command, limit: Duration::from_millis(found.adapter_limit) }
}

/// The executable of this name in a folder.
fn in_folder(folder: &Path, name: &str) -> Option<String> {
    let path = folder.join(name);
    let is_program = |file: &std::fs::Metadata| file.is_file() && file.permissions().mode() & 0o111 != 0;
    // A name with a slash would leave the folder.
    let is_name = !name.is_empty() && !name.contains('/');
    (is_name && std::fs::metadata(&path).is_ok_and(|file| is_program(&file)))
        .then(|| path.to_string_lossy().into_owned())
}

impl ProgramArgs {
    /// The adapter of this name: that of an option, else the executable in the folder.
    pub fn named(&self, name: &str) -> Result<Adapter, String> {
        if let Some((_, command)) = self.adapter.iter().find(|(own, _)| own == name) {
            return Ok(adapter(&self.found, command));
        }
        let folder = &self.found.adapter_dir;
        let path = in_folder(folder, name).ok_or_else(|| {
            format!(
                "no adapter {name:?}: expected an executable of that name in {}; put it there, or name its program by --adapter {name}=COMMAND",
                folder.display()
            )
        })?;
        Ok(Adapter { command: vec![path], limit: Duration::from_millis(self.found.adapter_limit) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_comes_before_the_folder_and_what_is_no_program_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("lxc");
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        let found = FoundArgs { adapter_dir: folder.path().to_owned(), adapter_limit: 1000 };
        let mut args = ProgramArgs { adapter: Vec::new(), found };
        assert!(args.named("lxc").unwrap_err().contains("--adapter lxc=COMMAND"), "not executable");
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(args.named("lxc").unwrap().command, [program.to_string_lossy()]);
        let up = format!("../{}/lxc", folder.path().file_name().unwrap().to_string_lossy());
        args.named(&up).unwrap_err();
        args.adapter.push(("lxc".to_owned(), "other --with option".to_owned()));
        assert_eq!(args.named("lxc").unwrap().command, ["other", "--with", "option"]);
    }
}
