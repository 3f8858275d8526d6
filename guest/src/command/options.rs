//! What is asked for on the command line.

use std::ffi::OsString;

use lexopt::prelude::*;
use serde_json::Value;

pub const HELP: &str = "\
Forks the virtual machine in which it runs, and gathers what the copies find.

Usage: vmove-fork run --count N [--json] -- COMMAND [ARGUMENT...]
       vmove-fork fork N [--json]
       vmove-fork join [TICKET] [--json]
       vmove-fork kill [TICKET] [--json]
       vmove-fork exit [TICKET] [--result TEXT | --result-json JSON]

  run    Forks this machine into N children. Each runs COMMAND, with VMOVE_FORK_INDEX (1 to N), VMOVE_FORK_SIZE and
         VMOVE_FORK_TICKET in its environment, and ends. The parent waits, prints what the commands have printed, in the
         order of their indexes, and ends with the largest of their exit codes. Standard error is the child's console.
  fork   Forks this machine. Prints in each which it is, as a shell reads it: VMOVE_FORK_ROLE (parent or child),
         VMOVE_FORK_INDEX (0 in the parent), VMOVE_FORK_SIZE, VMOVE_FORK_TICKET.
  join   Waits until all children have ended, and prints a line for each: its index, a tab, and its result.
  kill   Ends all children of the ticket, and prints how many lived. `join` tells how they ended.
  exit   In a child: ends this machine and leaves a result to `join`.

Options:
      --count N           children, 1 or more
      --json              print JSON
      --result TEXT       the result of this child, a text
      --result-json JSON  the result of this child, any JSON. A line with it has at most 65536 bytes
      --port PATH         the port's device [the virtio-serial port named org.vmove.fork]
  -h, --help              print this
  -V, --version           print the version
TICKET is that of VMOVE_FORK_TICKET unless it is given.

Exit codes: 0 done; 1 a child ended without a result; 2 wrong usage; 125 the host did not do it, the message says why.
`run`: the largest exit code of the commands (128 + N for one that signal N ended, 127 for one that was not found).

Examples:
  vmove-fork run --count 4 -- sh -c 'seq $VMOVE_FORK_INDEX $VMOVE_FORK_SIZE 1000 | awk \"{ s += \\$1 } END { print s }\"'
  eval \"$(vmove-fork fork 8)\"
  if [ $VMOVE_FORK_ROLE = child ]; then vmove-fork exit --result \"$(work $VMOVE_FORK_INDEX)\"; fi
  vmove-fork join
";

/// What to do, and how.
#[derive(Debug, PartialEq)]
pub struct Options {
    pub asked: Asked,
    pub json: bool,
    pub port: Option<OsString>,
}

#[derive(Debug, PartialEq)]
pub enum Asked {
    Run { count: u32, command: Vec<OsString> },
    Fork { count: u32 },
    Join { ticket: String },
    Kill { ticket: String },
    Exit { ticket: String, result: Value },
}

#[derive(Debug, PartialEq)]
pub enum Parsed {
    Help,
    Version,
    Options(Options),
}

/// Given so far.
#[derive(Default)]
struct Given {
    words: Vec<OsString>,
    count: Option<u32>,
    json: bool,
    port: Option<OsString>,
    result: Option<Value>,
}

/// Reads the arguments behind the program's name. `ticket` stands for one that is not given.
pub fn parse(
    arguments: impl Iterator<Item = OsString>,
    ticket: Option<&str>,
) -> Result<Parsed, lexopt::Error> {
    let mut parser = lexopt::Parser::from_args(arguments);
    let mut given = Given::default();
    while let Some(argument) = parser.next()? {
        match argument {
            Short('h') | Long("help") => return Ok(Parsed::Help),
            Short('V') | Long("version") => return Ok(Parsed::Version),
            Long("count") => given.count = Some(children(&parser.value()?)?),
            Long("json") => given.json = true,
            Long("port") => given.port = Some(parser.value()?),
            Long("result") => given.result = Some(Value::String(parser.value()?.string()?)),
            Long("result-json") => {
                let text = parser.value()?.string()?;
                let value = serde_json::from_str(&text);
                given.result =
                    Some(value.map_err(|error| format!("expected JSON, found {text:?}: {error}"))?);
            }
            Value(word) => {
                given.words.push(word);
                // What follows the command is the command's.
                if given.words.len() > 1 && given.words[0] == "run" {
                    given.words.extend(parser.raw_args()?);
                }
            }
            other => return Err(other.unexpected()),
        }
    }
    asked(given, ticket).map(Parsed::Options)
}

/// Whether arguments that cannot be used ask for JSON. What follows `--` is for another program.
pub fn want_json(arguments: &[OsString]) -> bool {
    arguments.iter().take_while(|argument| *argument != "--").any(|argument| argument == "--json")
}

fn asked(given: Given, ticket: Option<&str>) -> Result<Options, lexopt::Error> {
    let Given { mut words, count, json, port, result } = given;
    if words.is_empty() {
        return Err("expected run, fork, join, kill or exit, found nothing".into());
    }
    let verb = words.remove(0).string()?;
    if result.is_some() && verb != "exit" {
        return Err(format!("only exit has a result, found one with {verb}").into());
    }
    if count.is_some() && !["run", "fork"].contains(&verb.as_str()) {
        return Err(format!("only run and fork have --count, found it with {verb}").into());
    }
    let ticket_of = |words: &mut Vec<OsString>| match words.first() {
        Some(_) => words.remove(0).string(),
        None => ticket
            .map(str::to_owned)
            .ok_or_else(|| "expected a TICKET, found none, nor VMOVE_FORK_TICKET".into()),
    };
    let asked = match verb.as_str() {
        "run" => {
            let count = count.ok_or("expected --count N")?;
            if words.is_empty() {
                return Err("expected a COMMAND behind --, found none".into());
            }
            Asked::Run { count, command: std::mem::take(&mut words) }
        }
        "fork" => {
            let word = if words.is_empty() { None } else { Some(children(&words.remove(0))?) };
            Asked::Fork { count: word.or(count).ok_or("expected the number of children")? }
        }
        "join" => Asked::Join { ticket: ticket_of(&mut words)? },
        "kill" => Asked::Kill { ticket: ticket_of(&mut words)? },
        "exit" => Asked::Exit { ticket: ticket_of(&mut words)?, result: result.unwrap_or(Value::Null) },
        other => return Err(format!("expected run, fork, join, kill or exit, found {other:?}").into()),
    };
    match words.first() {
        Some(word) => Err(lexopt::Error::UnexpectedArgument(word.clone())),
        None => Ok(Options { asked, json, port }),
    }
}

fn children(word: &OsString) -> Result<u32, lexopt::Error> {
    let number = word.to_str().and_then(|word| word.parse().ok()).filter(|number| *number > 0);
    number.ok_or_else(|| format!("expected a number of children, 1 or more, found {word:?}").into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(line: &str) -> Result<Parsed, String> {
        let words = line.split(' ').filter(|word| !word.is_empty()).map(Into::into);
        parse(words, Some("env")).map_err(|error| error.to_string())
    }

    fn asked(line: &str) -> Asked {
        match read(line) {
            Ok(Parsed::Options(options)) => options.asked,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn what_is_asked_for_is_read() {
        let command = ["sh", "-c", "--count"].map(Into::into).to_vec();
        assert_eq!(
            asked("run --count 4 -- sh -c --count"),
            Asked::Run { count: 4, command: command.clone() }
        );
        assert_eq!(asked("run --count=4 sh -c --count"), Asked::Run { count: 4, command });
        assert_eq!(asked("fork 3"), Asked::Fork { count: 3 });
        assert_eq!(asked("fork --count 3"), Asked::Fork { count: 3 });
        assert_eq!(asked("join t"), Asked::Join { ticket: "t".to_owned() });
        assert_eq!(asked("kill"), Asked::Kill { ticket: "env".to_owned() });
        assert_eq!(asked("exit --result 7"), Asked::Exit { ticket: "env".to_owned(), result: json!("7") });
        assert_eq!(
            asked("exit t --result-json [7]"),
            Asked::Exit { ticket: "t".to_owned(), result: json!([7]) }
        );
        assert_eq!(asked("exit t"), Asked::Exit { ticket: "t".to_owned(), result: Value::Null });
        assert_eq!(read("join --help"), Ok(Parsed::Help));
    }

    #[test]
    fn wrong_usage_says_what_was_expected() {
        for (line, words) in [
            ("", "expected run, fork"),
            ("spawn", "found \"spawn\""),
            ("run -- sh", "expected --count"),
            ("run --count 0 -- sh", "1 or more"),
            ("run --count 2", "expected a COMMAND"),
            ("fork", "the number of children"),
            ("fork -3", "invalid option '-3'"),
            ("join a b", "b"),
            ("join t --result x", "only exit has a result"),
            ("kill t --count 2", "only run and fork have --count"),
            ("exit t --result-json {", "expected JSON"),
        ] {
            let error = read(line).expect_err(line);
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
