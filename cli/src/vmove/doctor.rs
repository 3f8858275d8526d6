//! `vmove doctor`: shows what `vmoved --doctor` finds. The checks are the daemon's, so they are in its program.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use tokio::process::Command;
use vmove_types::doctor::{Area, Diagnosis, Finding, FindingState};
use vmove_types::node::DEFAULT_CONTROL;
use vmove_types::problem::{Code, Exit};

use crate::args::doctor::Doctor;
use crate::failure::Failure;
use crate::output::{End, say, say_json};

/// The settings of the unit.
const SETTINGS: &str = "/etc/vmove/vmoved.toml";
const PROGRAM: &str = "vmoved";

pub async fn doctor(args: &Doctor, control: &Path, json: bool) -> Result<Exit, End> {
    let mut diagnosis = look(args, control).await?;
    diagnosis.findings.retain(|finding| args.areas.is_empty() || args.areas.contains(&finding.area));
    if json {
        say_json(&diagnosis)?;
    } else {
        say(&describe(&diagnosis))?;
    }
    Ok(if diagnosis.moving { Exit::Done } else { Exit::Failed })
}

async fn look(args: &Doctor, control: &Path) -> Result<Diagnosis, Failure> {
    let program = installed();
    let mut command = Command::new(&program);
    command.arg("--doctor");
    let usual = Some(PathBuf::from(SETTINGS)).filter(|path| path.exists());
    if let Some(settings) = args.config.clone().or(usual) {
        command.arg("--config").arg(settings);
    }
    // Otherwise the settings say where the daemon answers.
    if control != Path::new(DEFAULT_CONTROL) {
        command.arg("--control").arg(control);
    }
    let output = command.output().await.map_err(|error| {
        let next =
            "install it beside vmove or into PATH (install -m 0755 target/release/vmoved /usr/local/bin/)";
        Failure::new(Code::LocalFile, format!("could not run {}: {error}; {next}", program.display()))
    })?;
    serde_json::from_slice(&output.stdout).map_err(|_| {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let message = format!(
            "expected findings from {} --doctor, found {} and {said:?}; is it of the same version as vmove?",
            program.display(),
            output.status
        );
        Failure::new(Code::Internal, message)
    })
}

/// The daemon's program: beside this one, or in `PATH`.
fn installed() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PROGRAM.into())
}

/// A line for each finding, by area, and below those that are not well what was expected, and how to mend it.
fn describe(diagnosis: &Diagnosis) -> String {
    let mut text = String::new();
    let width = diagnosis.findings.iter().map(|finding| finding.topic.len()).max().unwrap_or(0);
    for area in Area::ALL {
        let mut findings = diagnosis.findings.iter().filter(|finding| finding.area == area).peekable();
        if findings.peek().is_some() {
            let _ = writeln!(text, "{area}");
        }
        findings.for_each(|finding| push(&mut text, finding, width));
    }
    text.push_str(if diagnosis.moving {
        "Guests can be moved from and to this host."
    } else {
        "Guests can NOT be moved: see what is missing under moving."
    });
    text
}

fn push(text: &mut String, finding: &Finding, width: usize) {
    let state = match finding.state {
        FindingState::Ok => "ok",
        FindingState::Limited => "limited",
        FindingState::Missing => "missing",
    };
    let _ = writeln!(text, "  {state:<7}  {:<width$}  {}", finding.topic, finding.found);
    let indent = 13 + width;
    if let Some(expected) = &finding.expected {
        let _ = writeln!(text, "{:indent$}expected: {expected}", "");
    }
    if let Some(mend) = &finding.mend {
        let _ = writeln!(text, "{:indent$}mend: {mend}", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_has_its_remedy_below_and_the_end_says_whether_guests_move() {
        let state = FindingState::Missing;
        let mut diagnosis = Diagnosis {
            version: "1".to_owned(),
            protocol: 8,
            control: "/run/x".to_owned(),
            moving: false,
            findings: vec![
                Finding::wrong(Area::Moving, "qemu", state, "none in PATH", "QEMU 7.2", "apt-get install it"),
                Finding::ok(Area::Rdma, "device", "mlx5_0"),
            ],
        };
        let text = describe(&diagnosis);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["moving", "  missing  qemu    none in PATH"]);
        assert!(
            lines[2].ends_with(" expected: QEMU 7.2") && lines[3].ends_with(" mend: apt-get install it"),
            "{text}"
        );
        assert_eq!(lines[4..6], ["rdma", "  ok       device  mlx5_0"]);
        assert!(lines[6].contains("NOT be moved"));
        diagnosis.moving = true;
        assert!(describe(&diagnosis).ends_with("Guests can be moved from and to this host."));
    }
}
