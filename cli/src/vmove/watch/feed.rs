//! What a node does, as news: lists once a second, and of each migration at work its events.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tokio::task::JoinSet;
use tokio::time::timeout;

use vmove_client::{Client, Error};
use vmove_types::fork_report::ForkProgress;
use vmove_types::problem::Code;
use vmove_types::progress::Progress;
use vmove_types::vm::VmSummary;

use crate::failure::Failure;

/// How often lists are asked for.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often what it remembers is asked for at least.
const PAST_INTERVAL: Duration = Duration::from_secs(30);
/// A daemon that does not answer for so long is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is new at a node, which is told by its number.
#[derive(Debug)]
pub enum News {
    /// All that it has now.
    Lists {
        /// Which node.
        node: usize,
        /// By name.
        vms: Vec<VmSummary>,
        /// Migrations at work, and those that have just ended.
        live: Vec<Progress>,
        /// The newest first.
        forks: Vec<ForkProgress>,
    },
    /// Migrations that it remembers.
    Past(usize, Vec<Progress>),
    /// A migration has gone on.
    Snapshot(usize, Box<Progress>),
    /// It does not answer.
    Lost(usize, String),
}

/// An answer, or why there is none.
pub async fn in_time<T>(answer: impl Future<Output = Result<T, Error>>) -> Result<T, Failure> {
    match timeout(PATIENCE, answer).await {
        Ok(answer) => answer.map_err(Failure::from),
        Err(_) => {
            let message = format!(
                "the daemon has not answered for {} s: see its log (journalctl -u vmoved)",
                PATIENCE.as_secs()
            );
            Err(Failure::new(Code::DaemonUnreachable, message))
        }
    }
}

/// Tells all news of a node until nobody listens. One that goes away is waited for.
pub async fn follow(node: usize, client: Client, news: Sender<News>) {
    let mut followed = Followed::default();
    let mut memory = Memory::default();
    loop {
        let told = match look(node, &client, &mut memory).await {
            Ok(all) => {
                for new in &all {
                    followed.begin(new, &client, &news);
                }
                all
            }
            Err(failure) => {
                memory = Memory::default();
                vec![News::Lost(node, failure.message)]
            }
        };
        for new in told {
            if news.send(new).await.is_err() {
                return;
            }
        }
        followed.sleep(INTERVAL).await;
    }
}

/// What the last lists were: what the node remembers is read from its disk, and so only when it may have changed.
#[derive(Default)]
struct Memory {
    vms: Vec<String>,
    past_read: Option<Instant>,
}

impl Memory {
    /// Whether a migration may have come and gone between two lists: VMs are others now, or nobody has looked for long.
    fn is_old(&mut self, vms: &[VmSummary]) -> bool {
        let names: Vec<String> = vms.iter().map(|vm| vm.name.clone()).collect();
        let others = std::mem::replace(&mut self.vms, names) != self.vms;
        let old = others || self.past_read.is_none_or(|at| at.elapsed() >= PAST_INTERVAL);
        if old {
            self.past_read = Some(Instant::now());
        }
        old
    }
}

/// Lists, and what the node remembers if that may have changed.
async fn look(node: usize, client: &Client, memory: &mut Memory) -> Result<Vec<News>, Failure> {
    let vms = in_time(client.vms()).await?.vms;
    let live = in_time(client.live_migrations()).await?.migrations;
    let forks = in_time(client.forks()).await?.forks;
    let past = match memory.is_old(&vms) {
        true => Some(News::Past(node, in_time(client.migrations()).await?.migrations)),
        false => None,
    };
    Ok(past.into_iter().chain([News::Lists { node, vms, live, forks }]).collect())
}

/// Migrations whose events are being read. A stream that breaks is begun anew with the next list; its first event is the newest state.
#[derive(Default)]
struct Followed {
    ids: HashSet<String>,
    streams: JoinSet<String>,
}

impl Followed {
    fn begin(&mut self, new: &News, client: &Client, news: &Sender<News>) {
        let News::Lists { node, live, .. } = new else { return };
        for progress in live.iter().filter(|progress| !progress.outcome.is_end()) {
            if self.ids.insert(progress.id.clone()) {
                self.streams.spawn(stream(*node, client.clone(), progress.id.clone(), news.clone()));
            }
        }
    }

    /// Waits; streams that end meanwhile may be begun anew.
    async fn sleep(&mut self, time: Duration) {
        let end = tokio::time::sleep(time);
        tokio::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return,
                Some(ended) = self.streams.join_next() => match ended {
                    Ok(id) => drop(self.ids.remove(&id)),
                    // Nobody knows which: all are begun anew.
                    Err(_) => {
                        self.streams.shutdown().await;
                        self.ids.clear();
                    }
                },
            }
        }
    }
}

/// Tells the events of a migration until it has ended or the stream breaks.
async fn stream(node: usize, client: Client, id: String, news: Sender<News>) -> String {
    if let Ok(mut snapshots) = client.follow_migration(&id).await {
        while let Ok(Some(progress)) = snapshots.next().await {
            if news.send(News::Snapshot(node, Box::new(progress))).await.is_err() {
                break;
            }
        }
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_past_is_read_again_when_vms_have_come_or_gone() {
        let vm = |name: &str| -> VmSummary {
            let json = serde_json::json!({
                "name": name, "pid": 1, "status": "running", "memory": "thp", "memory_bytes": 0, "adopted": false
            });
            serde_json::from_value(json).expect("a VM")
        };
        let mut memory = Memory::default();
        assert!(memory.is_old(&[]), "it has never been read");
        assert!(!memory.is_old(&[]) && memory.is_old(&[vm("a")]) && !memory.is_old(&[vm("a")]));
        assert!(memory.is_old(&[vm("b")]) && !memory.is_old(&[vm("b")]));
        memory.past_read = Instant::now().checked_sub(PAST_INTERVAL);
        assert!(memory.is_old(&[vm("b")]) && !memory.is_old(&[vm("b")]));
    }
}
