//! Waiting for the end of a migration.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use vmove_migrate::progress::Progress;

use super::bar::Bar;
use super::client::{Client, Lines};
use super::output::End;
use crate::api::problem::{Code, Problem};
use crate::api::types::Taken;
use crate::api::{is_end, segment};

/// How long a daemon that went away is waited for: a restart takes up the migration where it stood.
const DAEMON_RETURNS: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(300);

/// What Ctrl-C means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupt {
    /// First: cancel. Second: leave.
    Cancels,
    /// Leave.
    Leaves,
}

/// How the waiting ended.
#[derive(Debug)]
pub enum Followed {
    /// The migration has ended.
    Ended(Box<Progress>),
    /// The operator does not want to wait.
    Left,
}

/// Follows a migration until it ends, showing its progress.
pub async fn follow(client: &Client, id: &str, interrupt: Interrupt) -> Result<Followed, End> {
    let bar = Bar::new();
    let ended = watch(client, id, interrupt, &bar).await;
    bar.clear();
    ended
}

async fn watch(client: &Client, id: &str, interrupt: Interrupt, bar: &Bar) -> Result<Followed, End> {
    let path = format!("/v1/migrations/{}/events", segment(id));
    let mut lines = client.lines(&path).await?;
    let mut presses = signal(SignalKind::interrupt())?;
    let mut cancelling: Option<JoinHandle<Result<Taken, Problem>>> = None;
    let mut asked = false;
    loop {
        tokio::select! {
            next = lines.next::<Progress>() => match next {
                Ok(Some(progress)) if is_end(&progress.outcome) => return Ok(Followed::Ended(Box::new(progress))),
                Ok(Some(progress)) => bar.update(&progress),
                Ok(None) | Err(_) => {
                    bar.note("vmove: lost the daemon, waiting for it to return; the migration is not lost");
                    lines = reconnect(client, &path, id, &mut presses).await?;
                }
            },
            _ = presses.recv() => {
                if asked || interrupt == Interrupt::Leaves {
                    bar.note(&format!("vmove: migration {id} goes on; follow it by: vmove status {id} --follow"));
                    return Ok(Followed::Left);
                }
                asked = true;
                bar.note("vmove: cancelling; press Ctrl-C again to leave the migration running");
                // It is answered when the session has decided, which may take a while.
                let (client, path) = (client.clone(), format!("/v1/migrations/{}", segment(id)));
                cancelling = Some(tokio::spawn(async move { client.delete::<Taken>(&path).await }));
            }
            answer = answered(&mut cancelling) => {
                if let Err(problem) = answer {
                    bar.note(&format!("vmove: {problem}"));
                }
            }
        }
    }
}

/// The answer to the request for the end, once; never if there was none.
async fn answered(cancelling: &mut Option<JoinHandle<Result<Taken, Problem>>>) -> Result<(), Problem> {
    let Some(task) = cancelling else { return std::future::pending().await };
    let answer = task.await;
    *cancelling = None;
    match answer {
        Ok(result) => result.map(drop),
        Err(error) => Err(Problem::new(Code::Internal, error.to_string())),
    }
}

async fn reconnect(client: &Client, path: &str, id: &str, presses: &mut Signal) -> Result<Lines, Problem> {
    let mut until = Instant::now() + DAEMON_RETURNS;
    loop {
        match client.lines(path).await {
            Ok(lines) => return Ok(lines),
            // It is back, and says no.
            Err(problem) if problem.code != Code::DaemonUnreachable => return Err(problem),
            Err(problem) if Instant::now() >= until => {
                let message = format!("{problem}. Once it is back: vmove status {id} --follow");
                return Err(Problem::new(Code::DaemonUnreachable, message));
            }
            Err(_) => {
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => {}
                    _ = presses.recv() => until = Instant::now(),
                }
            }
        }
    }
}
