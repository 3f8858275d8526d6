//! Waiting for the end of a migration.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use vmove_types::progress::Progress;

use super::bar::Bar;
use super::snapshots::{Reader, Snapshots};
use crate::output::End;
use vmove_client::{Client, Error, Stream};
use vmove_types::migration::Taken;
use vmove_types::problem::Code;

use crate::failure::Failure;

/// A request to call a migration off, which is answered when the session has decided.
type Cancelling = JoinHandle<Result<Taken, Error>>;

/// How long a daemon that went away is waited for: a restart takes up what it did where that stood.
pub(super) const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_INTERVAL: Duration = Duration::from_millis(300);

/// What Ctrl-C means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupt {
    /// First: cancel. Second: leave.
    Cancels,
    /// Leave.
    Leaves,
}

impl Interrupt {
    /// Only `status --follow` leaves at the first Ctrl-C.
    pub(super) fn only_follows(self) -> bool {
        self == Self::Leaves
    }
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
pub async fn follow(client: &Client, id: &str, interrupt: Interrupt, json: bool) -> Result<Followed, End> {
    follow_until(client, id, interrupt, json, |_| false).await
}

/// The same, or until `enough` is true.
pub async fn follow_until(
    client: &Client,
    id: &str,
    interrupt: Interrupt,
    json: bool,
    enough: impl Fn(&Progress) -> bool,
) -> Result<Followed, End> {
    let reader = Reader::of(interrupt.only_follows(), json);
    let bar = match reader {
        Reader::Waiting if json => Bar::new(),
        Reader::Waiting => Bar::or_lines(),
        Reader::Lines => Bar::lines_on_stdout(),
        Reader::Objects => Bar::default(),
    };
    let ended = watch(client, id, interrupt, (&bar, &Snapshots::of(reader)), &enough).await;
    bar.clear();
    ended
}

async fn watch(
    client: &Client,
    id: &str,
    interrupt: Interrupt,
    (bar, told): (&Bar, &Snapshots),
    enough: &impl Fn(&Progress) -> bool,
) -> Result<Followed, End> {
    let mut snapshots = client.follow_migration(id).await?;
    let mut presses = signal(SignalKind::interrupt())?;
    let mut cancelling: Option<Cancelling> = None;
    let mut asked = false;
    loop {
        tokio::select! {
            next = snapshots.next() => match next {
                Ok(Some(progress)) if progress.outcome.is_end() || enough(&progress) => return Ok(Followed::Ended(Box::new(progress))),
                Ok(Some(progress)) => {
                    bar.update(&progress)?;
                    told.add(&progress, progress.phase)?;
                }
                Ok(None) | Err(_) => {
                    bar.note("vmove: lost the daemon, waiting for it to return; the migration is not lost");
                    snapshots = reconnect(|| client.follow_migration(id), id, &mut presses).await?;
                }
            },
            _ = presses.recv() => {
                if asked || interrupt == Interrupt::Leaves {
                    bar.note(&format!("vmove: migration {id} goes on; follow it by: vmove status {id} --follow"));
                    return Ok(Followed::Left);
                }
                asked = true;
                bar.note("vmove: cancelling; press Ctrl-C again to leave the migration running");
                let (client, id) = (client.clone(), id.to_owned());
                cancelling = Some(tokio::spawn(async move { client.cancel_migration(&id).await }));
            }
            answer = answered(&mut cancelling) => {
                if let Err(failure) = answer {
                    bar.note(&format!("vmove: {}", failure.message));
                }
            }
        }
    }
}

/// The answer to the request for the end, once; never if there was none.
async fn answered(cancelling: &mut Option<Cancelling>) -> Result<(), Failure> {
    let Some(task) = cancelling else { return std::future::pending().await };
    let answer = task.await;
    *cancelling = None;
    match answer {
        Ok(result) => result.map(drop).map_err(Failure::from),
        Err(error) => Err(Failure::new(Code::Internal, error.to_string())),
    }
}

/// Follows it again once its daemon is back; `id` is of a migration or of a group. Ctrl-C ends the waiting.
pub(super) async fn reconnect<T>(
    again: impl AsyncFn() -> Result<Stream<T>, Error>,
    id: &str,
    presses: &mut Signal,
) -> Result<Stream<T>, Failure> {
    let mut until = Instant::now() + RESTART_TIMEOUT;
    loop {
        match again().await {
            Ok(snapshots) => return Ok(snapshots),
            // It is back, and says no.
            Err(error) if !error.is_unreachable() => return Err(error.into()),
            Err(error) if Instant::now() >= until => {
                let message = Failure::from(error).message;
                let message = format!("{message}. Once it is back: vmove status {id} --follow");
                return Err(Failure::new(Code::DaemonUnreachable, message));
            }
            Err(_) => {
                tokio::select! {
                    () = tokio::time::sleep(RETRY_INTERVAL) => {}
                    _ = presses.recv() => until = Instant::now(),
                }
            }
        }
    }
}
