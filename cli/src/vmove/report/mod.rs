//! `vmove report`: where the time and the pause of a migration or a fork went, as text, as a picture, or as a page.

mod account;
mod of_fork;
mod of_migration;
mod page;
mod picture;
mod text;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;

use vmove_client::{Client, Error};
use vmove_types::fork_report::ForkProgress;
use vmove_types::problem::{Code, Exit, Problem};
use vmove_types::progress::Progress;

use self::account::Account;
pub(super) use self::text::sparks;
use super::migrations::is_unknown;
use crate::args::report::ReportArgs;
use crate::failure::Failure;
use crate::output::{End, say, say_json};

/// Columns where there is no terminal.
const COLUMNS: u16 = 100;

/// What an id is of.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Subject {
    /// A migration.
    Migration(Box<Progress>),
    /// A fork.
    Fork(Box<ForkProgress>),
}

impl Subject {
    fn account(&self) -> Account {
        match self {
            Self::Migration(progress) => of_migration::account(progress),
            Self::Fork(progress) => of_fork::account(progress),
        }
    }

    fn id(&self) -> &str {
        match self {
            Self::Migration(progress) => &progress.id,
            Self::Fork(progress) => &progress.id,
        }
    }
}

/// A migration as lines of at most so many columns.
pub(super) fn of_migration(progress: &Progress, columns: u16) -> String {
    text::write(&of_migration::account(progress), usize::from(columns))
}

/// A fork as lines of at most so many columns.
pub(super) fn of_fork(progress: &ForkProgress, columns: u16) -> String {
    text::write(&of_fork::account(progress), usize::from(columns))
}

pub async fn report(client: &Client, args: &ReportArgs, json: bool) -> Result<Exit, End> {
    let subject = find(client, &args.id).await?;
    let (kind, path, drawn): (_, _, fn(&Account) -> String) = match (&args.svg, &args.html) {
        (Some(path), _) => ("svg", path, picture::draw),
        (None, Some(path)) => ("html", path, page::write),
        (None, None) if json => {
            say_json(&subject)?;
            return Ok(Exit::Done);
        }
        (None, None) => {
            say(&text::write(&subject.account(), usize::from(columns())))?;
            return Ok(Exit::Done);
        }
    };
    let drawn = drawn(&subject.account());
    if path == Path::new("-") {
        if json {
            let message =
                format!("expected a file with --json, found --{kind} -: both would be on standard output");
            return Err(Failure::bad_request(message).into());
        }
        say(&drawn)?;
        return Ok(Exit::Done);
    }
    write(path, &drawn)?;
    if json {
        say_json(&json!({ "id": subject.id(), kind: path }))?;
    } else {
        say(&format!("The report of {} is in {}", subject.id(), path.display()))?;
    }
    Ok(Exit::Done)
}

fn write(path: &PathBuf, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|error| {
        let message = format!(
            "could not write the report to {}: {error}; name a file in a folder that is there",
            path.display()
        );
        Failure::new(Code::LocalFile, message)
    })
}

/// A migration, or else the fork whose id begins so.
async fn find(client: &Client, id: &str) -> Result<Subject, End> {
    let unknown = match client.migration(id).await {
        Ok(progress) => return Ok(Subject::Migration(Box::new(progress))),
        Err(error) if is_unknown(&error) => error,
        Err(error) => return Err(error.into()),
    };
    let mut forks = client.forks().await?.forks;
    forks.retain(|fork| !id.is_empty() && fork.id.starts_with(id));
    match (forks.pop(), forks.is_empty()) {
        (Some(fork), true) => Ok(Subject::Fork(Box::new(fork))),
        (Some(_), false) => {
            Err(Failure::bad_request(format!("several forks begin with {id:?}; give more of the id")).into())
        }
        (None, _) => Err(nothing(client, id, unknown).await.into()),
    }
}

/// Says that there is neither, and what to ask for if it is a group.
async fn nothing(client: &Client, id: &str, unknown: Error) -> Failure {
    if let Ok(group) = client.group(id).await {
        let members: Vec<_> =
            group.members.iter().map(|member| format!("{} ({})", member.id, member.vm)).collect();
        return Failure::bad_request(format!(
            "{id} is a group; report its migrations one by one: {}",
            members.join(", ")
        ));
    }
    let Error::Refused(problem) = unknown else { return unknown.into() };
    let message = format!("{}; nor is there such a fork: `vfork list` shows those", problem.message);
    Problem { message, ..problem }.into()
}

fn columns() -> u16 {
    if !std::io::stdout().is_terminal() {
        return COLUMNS;
    }
    ratatui::crossterm::terminal::size().map_or(COLUMNS, |(columns, _)| columns)
}

#[cfg(test)]
pub(super) mod tests {
    use vmove_types::progress::{Phase, Progress, Role};
    use vmove_types::report::PhaseTime;

    /// Of a real guest, as `vmove --json status` showed it.
    pub fn finished() -> Progress {
        serde_json::from_str(include_str!("testdata/finished.json")).expect("it was recorded")
    }

    /// One in its rounds.
    pub fn snapshot() -> Progress {
        let phase =
            |name: &str, start_ms, duration_ms| PhaseTime { name: name.to_owned(), start_ms, duration_ms };
        let mut progress = Progress::begun("3f2a", "web", Role::Source, "b");
        progress.phases = vec![phase("check", 0.0, 12.0), phase("prepare", 12.0, 200.0)];
        (progress.phase, progress.elapsed_ms) = (Phase::Rounds, 300.0);
        (progress.bytes_total, progress.bytes_done) = (4 << 20, 1 << 20);
        progress
    }
}
