//! The program `vmove-fork`.

mod options;
mod work;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};

use self::options::{Asked, Options, Parsed};
use crate::{End, Port, Problem};

/// Wrong usage.
const USAGE: u8 = 2;
/// The host did not do it, as `env` and `timeout` say it of themselves.
const NOT_DONE: u8 = 125;
/// A child has left no result.
const LOST: u8 = 1;

/// Does what the arguments say. They are those behind the program's name.
#[must_use]
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let ticket = std::env::var("VMOVE_FORK_TICKET").ok();
    let arguments: Vec<OsString> = arguments.collect();
    let options = match options::parse(arguments.iter().cloned(), ticket.as_deref()) {
        Ok(Parsed::Help) => {
            say(options::HELP);
            return ExitCode::SUCCESS;
        }
        Ok(Parsed::Version) => {
            say(&format!("vmove-fork {}\n", env!("CARGO_PKG_VERSION")));
            return ExitCode::SUCCESS;
        }
        Ok(Parsed::Options(options)) => options,
        Err(error) => {
            if options::want_json(&arguments) {
                say(&format!("{}\n", json!({ "error": "usage", "message": error.to_string() })));
            }
            eprintln!("vmove-fork: {error}\nTry 'vmove-fork --help'.");
            return ExitCode::from(USAGE);
        }
    };
    match act(&options) {
        Ok(code) => ExitCode::from(code),
        Err(problem) => {
            if options.json {
                say(&format!("{}\n", json!({ "error": problem.code(), "message": problem.to_string() })));
            }
            eprintln!("vmove-fork: {problem}");
            ExitCode::from(NOT_DONE)
        }
    }
}

fn act(options: &Options) -> Result<u8, Problem> {
    let mut port = Port::open(options.port.as_deref().map(Path::new))?;
    match &options.asked {
        Asked::Run { count, command } => work::share(port, *count, command, options.json),
        Asked::Fork { count } => {
            let role = port.fork(*count)?;
            let word = if role.index == 0 { "parent" } else { "child" };
            if options.json {
                let mut line = json!(role);
                line["role"] = json!(word);
                say(&format!("{line}\n"));
            } else {
                let (index, size, ticket) = (role.index, role.size, role.ticket);
                say(&format!(
                    "export VMOVE_FORK_ROLE={word} VMOVE_FORK_INDEX={index} VMOVE_FORK_SIZE={size} VMOVE_FORK_TICKET={ticket}\n"
                ));
            }
            Ok(0)
        }
        Asked::Join { ticket } => {
            let ends = port.join(ticket)?;
            if options.json {
                say(&format!("{}\n", json!({ "ticket": ticket, "children": ends })));
            } else {
                ends.iter().for_each(|end| say(&shown(end)));
            }
            Ok(if ends.iter().any(|end| end.lost.is_some()) { LOST } else { 0 })
        }
        Asked::Kill { ticket } => {
            let children = port.kill(ticket)?;
            if options.json {
                say(&format!("{}\n", json!({ "ticket": ticket, "children": children })));
            } else {
                say(&format!("{children}\n"));
            }
            Ok(0)
        }
        Asked::Exit { ticket, result } => Err(port.exit(ticket, result)),
    }
}

/// A line of `join`: texts as they are, all else as JSON.
fn shown(end: &End) -> String {
    let index = end.index;
    match (&end.lost, &end.result) {
        (Some(why), _) => format!("{index}\tlost: {why}\n"),
        (None, Value::String(text)) => format!("{index}\t{text}\n"),
        (None, result) => format!("{index}\t{result}\n"),
    }
}

/// Prints. Who does not listen any more needs no error.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
    let _ = std::io::stdout().flush();
}
