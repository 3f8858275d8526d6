//! `vmove-fork run`: a command in each child, its output to the parent.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{LOST, say};
use crate::{End, MAX_LINE, Port, Problem, Role};

/// Around a result in its line: `{"exit":"…","result":…}`, the ticket and some room.
const AROUND: usize = 256;
/// A command that cannot be started, as a shell says it.
const NOT_FOUND: u8 = 127;

/// What a child's command left.
#[derive(Debug, PartialEq, Eq, Deserialize, Serialize)]
struct Left {
    code: u8,
    /// The beginning, if all of it would not fit in a line. What is no UTF-8 is replaced.
    stdout: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
    /// Why the command could not be started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Forks. In a child: runs the command and ends the machine. In the parent: prints what all left, and gives the exit code.
pub fn share(mut port: Port, count: u32, command: &[OsString], json: bool) -> Result<u8, Problem> {
    let role = port.fork(count)?;
    if role.index > 0 {
        let left = left_by(command, &role);
        return Err(port.exit(&role.ticket, &json!(left)));
    }
    let ends = port.join(&role.ticket)?;
    Ok(told(&role, &ends, json))
}

/// Runs the command.
fn left_by(command: &[OsString], role: &Role) -> Left {
    let mut process = Command::new(&command[0]);
    process
        .args(&command[1..])
        .env("VMOVE_FORK_ROLE", "child")
        .env("VMOVE_FORK_INDEX", role.index.to_string())
        .env("VMOVE_FORK_SIZE", role.size.to_string())
        .env("VMOVE_FORK_TICKET", &role.ticket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let ended = process.spawn().and_then(|mut process| {
        let mut output = Vec::new();
        let mut cut = false;
        if let Some(mut from) = process.stdout.take() {
            from.by_ref().take(MAX_LINE as u64).read_to_end(&mut output)?;
            // The command may say more, and does not wait for a reader.
            cut = std::io::copy(&mut from, &mut std::io::sink())? > 0;
        }
        Ok((process.wait()?, output, cut))
    });
    match ended {
        Ok((status, output, cut)) => {
            let signal = 128 + status.signal().unwrap_or_default();
            let code = u8::try_from(status.code().unwrap_or(signal)).unwrap_or(u8::MAX);
            let stdout = String::from_utf8_lossy(&output).into_owned();
            fitting(Left { code, stdout, truncated: cut, error: None })
        }
        Err(error) => {
            let error = format!("{}: {error}", command[0].to_string_lossy());
            Left { code: NOT_FOUND, stdout: String::new(), truncated: false, error: Some(error) }
        }
    }
}

/// Cuts the output so that the result is a line. Escapes make it up to six times as long.
fn fitting(mut left: Left) -> Left {
    loop {
        let over = json!(left).to_string().len().saturating_sub(MAX_LINE - AROUND);
        if over == 0 {
            return left;
        }
        left.truncated = true;
        let most = left.stdout.len().saturating_sub(over.div_ceil(6));
        while left.stdout.len() > most {
            left.stdout.pop();
        }
    }
}

/// Prints what the children left. Gives the largest of their exit codes.
fn told(role: &Role, ends: &[End], json: bool) -> u8 {
    let mut worst = 0;
    let mut lines = Vec::new();
    for end in ends {
        let index = end.index;
        let left = serde_json::from_value::<Left>(end.result.clone());
        let line = match (&end.lost, left) {
            (None, Ok(left)) => {
                worst = worst.max(left.code);
                if !json {
                    say(&left.stdout);
                    complain(index, &left);
                }
                json!(left)
            }
            (lost, _) => {
                let why = lost.as_deref().unwrap_or("it left what is no result of a command");
                worst = worst.max(LOST);
                eprintln!("vmove-fork: child {index} is lost: {why}");
                json!({ "lost": why })
            }
        };
        lines.push(with_index(line, index));
    }
    if json {
        say(&format!("{}\n", json!({ "ticket": role.ticket, "size": role.size, "children": lines })));
    }
    worst
}

fn with_index(mut line: Value, index: u32) -> Value {
    line["index"] = json!(index);
    line
}

fn complain(index: u32, left: &Left) {
    if let Some(error) = &left.error {
        eprintln!("vmove-fork: child {index}: {error}");
    } else if left.code != 0 {
        eprintln!("vmove-fork: child {index} ended with exit code {}", left.code);
    }
    if left.truncated {
        eprintln!(
            "vmove-fork: child {index} printed more than a line of {MAX_LINE} bytes holds; its end is missing"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(script: &str) -> Left {
        let role = Role { index: 2, size: 5, ticket: "t".to_owned() };
        left_by(&["sh", "-c", script].map(Into::into), &role)
    }

    #[test]
    fn a_command_leaves_its_output_and_its_exit_code() {
        let found = left("echo $VMOVE_FORK_INDEX of $VMOVE_FORK_SIZE, $VMOVE_FORK_TICKET; exit 3");
        let stdout = "2 of 5, t\n".to_owned();
        assert_eq!(found, Left { code: 3, stdout, truncated: false, error: None });
        assert_eq!(left("kill -9 $$").code, 137);
        let role = Role { index: 1, size: 1, ticket: "t".to_owned() };
        let missing = left_by(&["/no/such/program".into()], &role);
        assert_eq!(missing.code, NOT_FOUND);
        assert!(missing.error.unwrap().contains("/no/such/program"));
    }

    #[test]
    fn output_is_cut_to_what_a_line_holds() {
        for script in [
            "head -c 200000 /dev/zero",
            "yes 'a\"b' | head -c 70000",
            "yes ä | head -c 65535",
            "head -c 65536 /dev/zero | tr '\\0' x",
        ] {
            let found = left(script);
            let length = json!(found).to_string().len();
            assert!(found.truncated && length <= MAX_LINE - AROUND, "{script}: {length}");
            assert!(length > MAX_LINE / 2, "{script}: {length}");
        }
        assert!(!left("head -c 60000 /dev/zero | tr '\\0' x").truncated);
    }

    #[test]
    fn the_largest_exit_code_counts() {
        let end = |index, code| {
            let left = Left { code, stdout: String::new(), truncated: false, error: None };
            End { index, result: json!(left), lost: None }
        };
        let role = Role { index: 0, size: 2, ticket: "t".to_owned() };
        assert_eq!(told(&role, &[end(1, 0), end(2, 0)], false), 0);
        assert_eq!(told(&role, &[end(1, 4), end(2, 3)], true), 4);
        let lost = End { index: 2, result: Value::Null, lost: Some("killed".to_owned()) };
        assert_eq!(told(&role, &[end(1, 0), lost], false), LOST);
    }
}
