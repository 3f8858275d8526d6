//! `vmove watch`: what nodes do, on a terminal.

mod board;
mod details;
mod draw;
mod feed;
mod keys;
mod screen;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use vmove_client::Client;
use vmove_types::problem::{Code, Exit};

use self::board::Board;
use self::draw::Palette;
use self::feed::News;
use self::screen::{Input, Screen};
use crate::args::Global;
use crate::args::watch::WatchArgs;
use crate::failure::Failure;
use crate::output::End;

/// How often the screen is drawn at most.
const FRAME: Duration = Duration::from_millis(100);
/// How often it is drawn though nothing has changed: times go on.
const IDLE_FRAMES: u32 = 10;
/// News that wait to be shown; the nodes' tasks wait beyond that.
const NEWS: usize = 256;

pub async fn watch(client: &Client, args: &WatchArgs, global: &Global) -> Result<Exit, End> {
    if global.json || !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let message = "expected a terminal as standard input and output, without --json; programs and logs ask by \
                       `vmove status ID --follow`, or by `vmove --json list`, `status` and `history`";
        return Err(Failure::bad_request(message).into());
    }
    let mut ends = Ends::new()?;
    let nodes = if args.all { all(client, global).await? } else { named(client, args, global)? };
    // Of all nodes one has answered already: it has named the others.
    let names = if args.all { names(&nodes) } else { reached(&nodes).await? };
    let board = Board::new(names);
    let (sender, news) = mpsc::channel(NEWS);
    let mut feeds = JoinSet::new();
    for (number, (_, client)) in nodes.into_iter().enumerate() {
        feeds.spawn(feed::follow(number, client, sender.clone()));
    }
    let mut screen = Screen::open().map_err(|error| terminal_failed(&error))?;
    // The screen is given back before anything is said.
    let shown = show(&mut screen, board, news, &mut feeds, &mut ends).await;
    drop(screen);
    shown?;
    Ok(Exit::Done)
}

/// Name and client of each node of the command line.
fn named(client: &Client, args: &WatchArgs, global: &Global) -> Result<Vec<(String, Client)>, Failure> {
    if args.nodes.is_empty() {
        let name = global.elsewhere.at.clone().unwrap_or_else(|| global.control.display().to_string());
        return Ok(vec![(name, client.clone())]);
    }
    args.nodes.iter().map(|node| Ok((node.clone(), global.client_of(node)?))).collect()
}

/// The node that was asked, and all others that its configuration names.
async fn all(client: &Client, global: &Global) -> Result<Vec<(String, Client)>, Failure> {
    global.elsewhere.tls_files("--all")?;
    let own = feed::in_time(client.node()).await?;
    // One file may serve all nodes, and then names this one, too.
    let others: Vec<_> = own.nodes.iter().filter(|(name, _)| **name != own.node).collect();
    if others.is_empty() {
        return Err(Failure::bad_request(format!(
            "--all: expected other nodes in [nodes] of the configuration of {}, found none; name them there (/etc/vmove/vmoved.toml) and \
             restart vmoved, or give their HOST:PORT to `vmove watch`",
            own.node
        )));
    }
    let mut nodes = vec![(own.node.clone(), client.clone())];
    for (name, at) in others {
        let certified = own.server_names.get(name).map(String::as_str);
        let what = format!("--all: node {name} ({at})");
        nodes.push((name.clone(), global.elsewhere.client_for(&what, at, certified)?));
    }
    Ok(nodes)
}

fn names(nodes: &[(String, Client)]) -> Vec<String> {
    nodes.iter().map(|(name, _)| name.clone()).collect()
}

/// Names of the nodes, as they call themselves if they answer. At least one has to: otherwise it is more likely that the command is wrong.
async fn reached(nodes: &[(String, Client)]) -> Result<Vec<String>, Failure> {
    let mut names = Vec::new();
    let mut failure = None;
    let mut any = false;
    for (name, client) in nodes {
        match feed::in_time(client.node()).await {
            Ok(node) => {
                any = true;
                names.push(node.node);
            }
            Err(error) => {
                failure = failure.or(Some(error));
                names.push(name.clone());
            }
        }
    }
    failure.filter(|_| !any).map_or(Ok(names), Err)
}

fn terminal_failed(error: &std::io::Error) -> Failure {
    Failure::new(Code::LocalFile, format!("the terminal cannot be used: {error}"))
}

/// Signals that end the command.
struct Ends([Signal; 3]);

impl Ends {
    fn new() -> std::io::Result<Self> {
        Ok(Self([
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        ]))
    }

    async fn any(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Shows what comes until somebody ends it.
async fn show(
    screen: &mut Screen,
    mut board: Board,
    mut news: mpsc::Receiver<News>,
    feeds: &mut JoinSet<()>,
    ends: &mut Ends,
) -> Result<(), Failure> {
    let palette = Palette::of_environment();
    let mut inputs = screen::inputs();
    let mut frames = tokio::time::interval(FRAME);
    frames.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut changed, mut idle) = (true, 0);
    loop {
        tokio::select! {
            _ = frames.tick() => {
                idle += 1;
                if changed || idle >= IDLE_FRAMES {
                    screen.draw(&mut board, &palette, Instant::now()).map_err(|error| terminal_failed(&error))?;
                    (changed, idle) = (false, 0);
                }
            }
            Some(news) = news.recv() => {
                board.take(news, Instant::now());
                changed = true;
            }
            input = inputs.recv() => match input {
                Some(Input::Key(key)) if keys::press(&mut board, key) == keys::Then::End => return Ok(()),
                Some(Input::Key(_) | Input::Resized) => changed = true,
                // The terminal is gone.
                None => return Ok(()),
            },
            Some(ended) = feeds.join_next() => {
                let why = ended.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
                return Err(Failure::new(Code::Internal, format!("a node is not watched any more: {why}")));
            }
            () = ends.any() => return Ok(()),
        }
    }
}
