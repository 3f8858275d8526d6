//! `vmove libvirt enable` and `disable`: by virsh, which asks whatever libvirt has been told to ask.

use std::path::Path;
use std::process::Stdio;

use serde::Serialize;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use vmove_libvirt::{Domain, DomainError};
use vmove_types::problem::{Code, Exit, chain};

use super::host;
use crate::args::libvirt::DomainArgs;
use crate::changed_lines::changed_lines;
use crate::failure::Failure;
use crate::output::{End, say, say_json};

/// What was, or would be, changed.
#[derive(Debug, Default, Serialize)]
struct Changes {
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    /// Lines of the domain's XML, with `+` or `-` before.
    lines: Vec<String>,
    /// What else is made on this host.
    host: Vec<String>,
    /// What must be done by hand first.
    lacks: Vec<String>,
    /// False if nothing was changed.
    done: bool,
}

impl Changes {
    fn of_domain(domain: &Domain, text: &str) -> Self {
        let lines = changed_lines(domain.xml(), text);
        Self { domain: Some(domain.name().to_owned()), lines, ..Self::default() }
    }

    fn of_host(&mut self) {
        if !host::has_hook() {
            self.host.push(format!("{} (restart libvirtd if it is the first hook of this host)", host::HOOK));
        }
    }
}

/// Makes a host ready to take guests, whether it has the domain or not.
pub fn host(check: bool, control: &Path, json: bool) -> Result<Exit, End> {
    let mut changes = Changes::default();
    changes.lacks.extend(host::memory_problem());
    changes.of_host();
    if !check {
        install_hook(control)?;
        changes.done = true;
    }
    show(&changes, check, json)
}

fn install_hook(control: &Path) -> Result<(), Failure> {
    if host::has_hook() {
        return Ok(());
    }
    let made = host::hook_text(control).and_then(|text| host::install_hook(&text));
    made.map_err(|error| Failure::new(Code::LocalFile, format!("{} could not be made: {error}", host::HOOK)))
}

pub async fn enable(args: &DomainArgs, control: &Path, json: bool) -> Result<Exit, End> {
    let domain = read(args).await?;
    let text = domain.enabled().map_err(|error| refused(&error))?;
    let mut changes = Changes::of_domain(&domain, &text);
    changes.lacks.extend(host::memory_problem());
    changes.of_host();
    if args.check || !changes.lacks.is_empty() {
        return show(&changes, args.check, json);
    }
    install_hook(control)?;
    define(args, &text).await?;
    changes.done = true;
    show(&changes, false, json)
}

pub async fn disable(args: &DomainArgs, json: bool) -> Result<Exit, End> {
    let domain = read(args).await?;
    let text = domain.disabled().map_err(|error| refused(&error))?;
    let mut changes = Changes::of_domain(&domain, &text);
    if !args.check {
        define(args, &text).await?;
        changes.done = true;
    }
    show(&changes, args.check, json)
}

fn show(changes: &Changes, check: bool, json: bool) -> Result<Exit, End> {
    let ended = if changes.lacks.is_empty() { Exit::Done } else { Exit::Refused };
    if json {
        say_json(changes)?;
        return Ok(ended);
    }
    let mut out: Vec<String> = changes.lines.clone();
    out.extend(changes.host.iter().map(|what| format!("+ {what}")));
    out.extend(changes.lacks.iter().map(|what| format!("lacks: {what}")));
    out.push(match &changes.domain {
        _ if check => "nothing was changed (--check)".to_owned(),
        _ if !changes.done => "nothing was changed".to_owned(),
        Some(domain) if !changes.lines.is_empty() => {
            format!(
                "{domain} is changed; that counts from its next start (a restart in the guest is not enough)"
            )
        }
        Some(domain) => format!("{domain} was as it should be"),
        None if changes.lacks.is_empty() => "this host can take guests".to_owned(),
        None => "this host cannot take guests yet".to_owned(),
    });
    say(&out.join("\n"))?;
    Ok(ended)
}

fn refused(error: &DomainError) -> Failure {
    Failure::new(Code::NotMovable, chain(error))
}

/// What is to be stored, which is what counts at the next start.
async fn read(args: &DomainArgs) -> Result<Domain, Failure> {
    let xml = virsh(args, &["dumpxml", "--inactive", "--security-info", &args.domain], None).await?;
    Domain::read(&xml).map_err(|error| refused(&error))
}

async fn define(args: &DomainArgs, xml: &str) -> Result<(), Failure> {
    virsh(args, &["define", "/proc/self/fd/0"], Some(xml)).await.map(drop)
}

async fn virsh(args: &DomainArgs, words: &[&str], input: Option<&str>) -> Result<String, Failure> {
    let failed = |why: String| Failure::new(Code::LocalFile, format!("virsh {}: {why}", words.join(" ")));
    let mut command = Command::new("virsh");
    command.args(["--quiet", "--connect", &args.connect]).args(words).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|error| {
        failed(format!("it could not be started ({error}): is libvirt-clients installed?"))
    })?;
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        stdin.write_all(input.as_bytes()).await.map_err(|error| failed(error.to_string()))?;
    }
    let output = child.wait_with_output().await.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
