//! What is known of all nodes, and what of it the user looks at.

use std::collections::VecDeque;
use std::time::Instant;

use vmove_types::fork_report::ForkProgress;
use vmove_types::progress::Progress;
use vmove_types::vm::VmSummary;

use super::feed::News;

/// So many ended migrations of each node are shown.
const ENDED: usize = 20;
/// So many values of a trace are kept: some columns of the widest terminals.
const TRACE: usize = 200;
/// Values of a trace are so far apart, in milliseconds of the migration.
const TRACE_STEP_MS: f64 = 250.0;

/// See the [module](self).
#[derive(Debug)]
pub struct Board {
    /// In the order of the command line.
    pub nodes: Vec<NodeBoard>,
    /// What the user looks at.
    pub view: View,
    /// Chosen.
    pub chosen: Option<Key>,
    /// All that can be chosen, from above; the drawing of the list says so.
    pub choices: Vec<Key>,
}

/// What fills the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// All nodes.
    List,
    /// Everything about what is chosen, from this line on.
    Details(u16),
    /// What keys do.
    Help,
}

/// Something that can be chosen: the node's number, what it is, its name or id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Which node.
    pub node: usize,
    /// What.
    pub kind: Kind,
    /// Its name or id.
    pub id: String,
}

/// What can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A VM, by name.
    Vm,
    /// A migration.
    Migration,
    /// A fork.
    Fork,
}

/// Whether a daemon answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// It has not answered yet.
    Asked,
    /// It does.
    Here,
    /// It does not.
    Lost {
        /// Why.
        why: String,
        /// Since when.
        since: Instant,
    },
}

/// What is known of a node.
#[derive(Debug)]
pub struct NodeBoard {
    /// Its name.
    pub name: String,
    /// Whether its daemon answers. If not, all else is as it was.
    pub link: Link,
    /// By name.
    pub vms: Vec<VmSummary>,
    /// Migrations at work.
    pub at_work: Vec<Traced>,
    /// Migrations that have ended, the newest first.
    pub ended: Vec<Progress>,
    /// The newest first.
    pub forks: Vec<ForkProgress>,
}

/// A migration at work, and how it has been so far.
#[derive(Debug)]
pub struct Traced {
    /// Now.
    pub now: Progress,
    /// Bytes per second.
    pub rate: VecDeque<f64>,
    /// Bytes left.
    pub left: VecDeque<f64>,
    /// Pages per second that the guest dirties.
    pub dirtied: VecDeque<f64>,
    /// Faults per second for which a page was fetched, at the destination.
    pub faults: VecDeque<f64>,
    fetched: u64,
    traced_ms: f64,
}

impl Traced {
    fn new(now: Progress) -> Self {
        let mut new = Self {
            now: now.clone(),
            rate: VecDeque::new(),
            left: VecDeque::new(),
            dirtied: VecDeque::new(),
            faults: VecDeque::new(),
            fetched: 0,
            traced_ms: f64::NEG_INFINITY,
        };
        new.take(now);
        new
    }

    fn take(&mut self, now: Progress) {
        // A list may have been made before the newest event.
        if now.elapsed_ms < self.now.elapsed_ms && !now.outcome.is_end() {
            return;
        }
        self.now = now;
        if self.now.elapsed_ms - self.traced_ms < TRACE_STEP_MS {
            return;
        }
        let seconds = (self.now.elapsed_ms - self.traced_ms) / 1e3;
        self.traced_ms = self.now.elapsed_ms;
        let left = left_bytes(&self.now);
        let fetched = self.now.faults.map_or(0, |faults| faults.fetched);
        // Of the time before the first value nothing is known: it is infinite here, and the rate 0.
        let faults = vmove_types::units::to_f64(fetched.saturating_sub(self.fetched)) / seconds;
        self.fetched = fetched;
        let values = [
            (&mut self.rate, self.now.rate_bytes_per_s),
            (&mut self.left, vmove_types::units::to_f64(left)),
            (&mut self.dirtied, self.now.dirty_pages_per_s),
            (&mut self.faults, faults),
        ];
        for (trace, value) in values {
            trace.push_back(value);
            if trace.len() > TRACE {
                trace.pop_front();
            }
        }
    }
}

/// Bytes of guest memory that the destination lacks.
pub fn left_bytes(progress: &Progress) -> u64 {
    progress.bytes_total.saturating_sub(progress.bytes_done)
}

impl NodeBoard {
    fn new(name: String) -> Self {
        Self {
            name,
            link: Link::Asked,
            vms: Vec::new(),
            at_work: Vec::new(),
            ended: Vec::new(),
            forks: Vec::new(),
        }
    }

    fn take_migration(&mut self, progress: Progress) {
        let at = self.at_work.iter().position(|traced| traced.now.id == progress.id);
        match (at, progress.outcome.is_end()) {
            (Some(at), false) => self.at_work[at].take(progress),
            (None, false) => self.at_work.push(Traced::new(progress)),
            (at, true) => {
                if let Some(at) = at {
                    self.at_work.remove(at);
                }
                match self.ended.iter_mut().find(|ended| ended.id == progress.id) {
                    Some(ended) => *ended = progress,
                    None => self.ended.insert(0, progress),
                }
                self.ended.truncate(ENDED);
            }
        }
    }

    /// A migration of which it is known.
    pub fn migration(&self, id: &str) -> Option<&Progress> {
        let at_work = self.at_work.iter().map(|traced| &traced.now);
        at_work.chain(&self.ended).find(|progress| progress.id == id)
    }
}

impl Board {
    /// Of nodes with these names, of which nothing is known yet.
    pub fn new(names: Vec<String>) -> Self {
        let nodes = names.into_iter().map(NodeBoard::new).collect();
        Self { nodes, view: View::List, chosen: None, choices: Vec::new() }
    }

    /// Takes news in.
    pub fn take(&mut self, news: News, now: Instant) {
        match news {
            News::Lists { node, vms, live, forks } => {
                let board = &mut self.nodes[node];
                board.link = Link::Here;
                (board.vms, board.forks) = (vms, forks);
                // One that the daemon does not know any more.
                board.at_work.retain(|traced| live.iter().any(|progress| progress.id == traced.now.id));
                // The oldest first, so that the newest is above.
                let mut live = live;
                live.sort_by(|a, b| a.began_at.cmp(&b.began_at));
                live.into_iter().for_each(|progress| board.take_migration(progress));
            }
            News::Past(node, migrations) => {
                let board = &mut self.nodes[node];
                board.ended =
                    migrations.into_iter().filter(|progress| progress.outcome.is_end()).take(ENDED).collect();
            }
            News::Snapshot(node, progress) => self.nodes[node].take_migration(*progress),
            News::Lost(node, why) => {
                let board = &mut self.nodes[node];
                let since = if let Link::Lost { since, .. } = board.link { since } else { now };
                board.link = Link::Lost { why, since };
            }
        }
    }

    /// Chooses the one so many below (above, if negative) what is chosen.
    pub fn choose(&mut self, by: isize) {
        let at = self.chosen.as_ref().and_then(|key| self.choices.iter().position(|choice| choice == key));
        let index = |at: usize| isize::try_from(at).unwrap_or(isize::MAX);
        let last = index(self.choices.len().saturating_sub(1));
        // Nothing is chosen: as if it were the one above the first.
        let to = at.map_or(-1, index).saturating_add(by).clamp(0, last);
        let to = usize::try_from(to).unwrap_or(0);
        self.chosen = self.choices.get(to).cloned();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmove_types::progress::{Outcome, Phase, Role};
    use vmove_types::report::Report;

    use super::*;

    fn at(elapsed_ms: f64) -> Progress {
        let begun = Progress::begun("1", "web", Role::Source, "b");
        Progress { elapsed_ms, phase: Phase::Rounds, rate_bytes_per_s: 1e6, ..begun }
    }

    fn lists(live: Vec<Progress>) -> News {
        News::Lists { node: 0, vms: Vec::new(), live, forks: Vec::new() }
    }

    #[test]
    fn a_migration_is_at_work_and_then_has_ended() {
        let mut board = Board::new(vec!["a".to_owned()]);
        let now = Instant::now();
        board.take(lists(vec![at(100.0)]), now);
        for ms in 1..=40 {
            board.take(News::Snapshot(0, Box::new(at(f64::from(ms) * 100.0))), now);
        }
        let traced = &board.nodes[0].at_work[0];
        assert!((10..=17).contains(&traced.rate.len()), "{}", traced.rate.len());
        // An older list does not bring it back to where it was.
        board.take(lists(vec![at(3000.0)]), now);
        assert!((board.nodes[0].at_work[0].now.elapsed_ms - 4000.0).abs() < 1e-9);
        let done = Progress { outcome: Outcome::Done { report: Box::new(Report::default()) }, ..at(4100.0) };
        board.take(News::Snapshot(0, Box::new(done.clone())), now);
        board.take(lists(vec![done]), now);
        assert_eq!((board.nodes[0].at_work.len(), board.nodes[0].ended.len()), (0, 1));
    }

    #[test]
    fn a_lost_daemon_is_lost_since_the_first_time() {
        let mut board = Board::new(vec!["a".to_owned()]);
        let first = Instant::now();
        board.take(News::Lost(0, "gone".to_owned()), first);
        board.take(News::Lost(0, "still gone".to_owned()), first + Duration::from_secs(3));
        assert_eq!(board.nodes[0].link, Link::Lost { why: "still gone".to_owned(), since: first });
        board.take(lists(Vec::new()), first + Duration::from_secs(4));
        assert_eq!(board.nodes[0].link, Link::Here);
    }

    #[test]
    fn the_choice_stays_within_what_there_is() {
        let mut board = Board::new(vec!["a".to_owned()]);
        let key = |id: &str| Key { node: 0, kind: Kind::Vm, id: id.to_owned() };
        board.choose(1);
        assert_eq!(board.chosen, None);
        board.choices = vec![key("x"), key("y"), key("z")];
        for (by, id) in [(1, "x"), (1, "y"), (5, "z"), (1, "z"), (-1, "y"), (-9, "x")] {
            board.choose(by);
            assert_eq!(board.chosen, Some(key(id)));
        }
        board.choices.remove(0);
        board.choose(1);
        assert_eq!(board.chosen, Some(key("y")), "what was chosen is gone");
    }
}
