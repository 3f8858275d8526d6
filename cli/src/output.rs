//! What commands print: tables for people, one JSON object for programs.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use serde::Serialize;
use serde_json::json;
use unicode_width::UnicodeWidthStr;

use vmove_types::problem::{Code, Problem};

use crate::failure::Failure;

/// Why a command ended early.
#[derive(Debug)]
pub enum End {
    /// It did not work.
    Failed(Failure),
    /// Nobody reads our output any more (`vmove list | head -1`): success.
    BrokenPipe,
    /// The operator does not want to wait for what goes on; that was said.
    Left,
}

impl<E: Into<Failure>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Output that cannot be written.
fn unwritten(error: &io::Error) -> End {
    if error.kind() == io::ErrorKind::BrokenPipe {
        End::BrokenPipe
    } else {
        End::Failed(Problem::from_error(Code::LocalFile, error).into())
    }
}

/// Prints to standard output.
pub fn say(text: &str) -> Result<(), End> {
    let mut out = io::stdout().lock();
    let end = if text.ends_with('\n') || text.is_empty() { "" } else { "\n" };
    write!(out, "{text}{end}").and_then(|()| out.flush()).map_err(|error| unwritten(&error))
}

/// Prints to standard error; that this fails is of no interest to anyone.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Prints one JSON object on one line.
pub fn say_json<T: Serialize>(value: &T) -> Result<(), End> {
    let text = serde_json::to_string(value).map_err(|e| Problem::from_error(Code::Internal, &e))?;
    say(&text)
}

/// Parses the arguments of this process. Gives the exit code if they cannot be used, which was said then: to programs as JSON.
pub fn parse<C: Parser>(program: &str) -> Result<C, ExitCode> {
    let wrong = match C::try_parse() {
        Ok(command) => return Ok(command),
        Err(wrong) => wrong,
    };
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // Help and versions are what was asked for.
    if !wrong.use_stderr() || !wants_json(&arguments) {
        wrong.exit();
    }
    let text = match wrong.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            lacks_command(C::command(), program, &arguments)
        }
        _ => wrong.to_string().trim_end().trim_start_matches("error: ").to_owned(),
    };
    Err(report(program, &Failure::bad_request(text), true))
}

/// Whether this command was asked for JSON. What follows `--` is for another program.
fn wants_json(arguments: &[OsString]) -> bool {
    arguments.iter().take_while(|argument| *argument != "--").any(|argument| argument == "--json")
}

/// Says that a command lacks the command behind it, and which there are.
fn lacks_command(mut command: clap::Command, program: &str, arguments: &[OsString]) -> String {
    let mut name = program.to_owned();
    for argument in arguments {
        if let Some(next) = command.find_subcommand(argument) {
            name = format!("{name} {}", next.get_name());
            command = next.clone();
        }
    }
    let there = command.get_subcommands().filter(|one| !one.is_hide_set()).map(clap::Command::get_name);
    let there: Vec<&str> = there.collect();
    format!("expected one of these behind `{name}`, found none: {}; see `{name} --help`", there.join(", "))
}

/// Says why a command failed: for people always, for programs when they asked.
pub fn report(program: &str, failure: &Failure, json: bool) -> ExitCode {
    note(&format!("{program}: {}", failure.message));
    if json {
        // Nobody could be told that this failed, too.
        let mut said =
            json!({ "error": failure.message, "code": failure.code, "exit_code": failure.exit_code });
        if let Some(details) = &failure.details {
            said["details"] = details.clone();
        }
        let _ = say_json(&said);
    }
    ExitCode::from(failure.exit_code)
}

/// Prints an answer: for programs as one JSON object with sorted keys, for people as a text.
pub fn say_either<T: Serialize>(value: &T, json: bool, text: impl FnOnce(&T) -> String) -> Result<(), End> {
    if !json {
        return say(&text(value));
    }
    let value = serde_json::to_value(value).map_err(|e| Problem::from_error(Code::Internal, &e))?;
    say_json(&value)
}

/// Columns as wide as their widest cell, on the screen: names may be of any script.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.width()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.width());
        }
    }
    let mut out = String::new();
    push_row(&mut out, &widths, head.iter().copied());
    for row in rows {
        push_row(&mut out, &widths, row.iter().map(String::as_str));
    }
    out
}

fn push_row<'a>(out: &mut String, widths: &[usize], cells: impl Iterator<Item = &'a str>) {
    let mut line = String::new();
    for (width, cell) in widths.iter().zip(cells) {
        if !line.is_empty() {
            line.push_str("  ");
        }
        line.push_str(cell);
        line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.width())));
    }
    out.push_str(line.trim_end());
    out.push('\n');
}

/// `key: value` lines, values aligned.
pub fn fields(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(key, _)| key.width()).max().unwrap_or(0);
    rows.iter().map(|(key, value)| format!("{key:<width$}  {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_for_wide_scripts() {
        let rows = [vec!["機械".to_owned(), "1".to_owned()], vec!["a".to_owned(), String::new()]];
        assert_eq!(table(&["NAME", "PID"], &rows), "NAME  PID\n機械  1\na\n");
    }

    #[test]
    fn an_option_of_another_program_is_not_ours() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(
            wants_json(&words("--json run --name a")) && wants_json(&words("run --bogus --json -- qemu"))
        );
        assert!(!wants_json(&words("run --bogus -- qemu --json")));
    }

    #[test]
    fn a_closed_pipe_is_not_a_problem() {
        assert!(matches!(unwritten(&io::ErrorKind::BrokenPipe.into()), End::BrokenPipe));
        assert!(matches!(unwritten(&io::ErrorKind::StorageFull.into()), End::Failed(_)));
    }
}
