//! Two small guests that move between two daemons at one barrier, and blows on the way: the daemons or a QEMU are killed at moments that a seed chooses.
//! Afterwards both guests are at one node, whole and once, unless a QEMU was killed that had a guest.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::blows::deck::Dice;
use crate::daemon::{Node, NodeOptions};
use crate::fleet::qemu_pids;
use crate::guest::{Accel, Guest, failures};
use crate::payload::{self, KvmPages};
use crate::sandbox::Sandbox;
use crate::scene::{End, STEP_TIMEOUT, gone_from, vmove};

/// The guests.
pub const RANKS: [&str; 2] = ["rank0", "rank1"];
/// A moment that has not come by then will not.
const MOMENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Two nodes, and two guests at one of them.
#[derive(Debug)]
pub struct Pair {
    /// `a` and `b`.
    pub nodes: [Node; 2],
    /// Which of them has the guests.
    pub home: usize,
    guest: Guest,
    // Dropped last: it ends all processes that are left.
    sandbox: Sandbox,
}

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The daemon that the guests leave.
    Source,
    /// The daemon that they go to.
    Destination,
    /// A guest's QEMU there.
    QemuThere,
    /// A guest's QEMU here.
    QemuHere,
}

/// When.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// So long after the request.
    After(Duration),
    /// Once a journal of this move has this word.
    Line(&'static str, &'static str),
}

/// One try.
#[derive(Debug, Clone, Copy)]
pub struct Try {
    /// Who.
    pub victim: Victim,
    /// When.
    pub moment: Moment,
    /// Which of the two, where it is one of them.
    pub which: usize,
    /// Mode of each guest.
    pub modes: [&'static str; 2],
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Both are there.
    There,
    /// Both are back.
    Back,
    /// A guest ended with its own QEMU.
    Ended,
}

impl Try {
    /// The try of this number under a seed.
    #[must_use]
    pub fn of(seed: u64, number: u64) -> Self {
        let mut dice = Dice::new(seed, number);
        let daemons = [Victim::Source, Victim::Destination];
        let victim = match dice.roll(6) {
            4 => Victim::QemuThere,
            5 => Victim::QemuHere,
            _ => dice.pick(&daemons),
        };
        let lines = [
            ("source.jsonl", "\"state\":\"warm\""),
            ("destination.jsonl", "\"state\":\"filling\""),
            ("source.jsonl", "\"state\":\"stopped\""),
            ("destination.jsonl", "\"state\":\"loaded\""),
            ("group.jsonl", "\"state\":\"decided\""),
            ("source.jsonl", "\"state\":\"committed\""),
            ("destination.jsonl", "\"state\":\"owner\""),
            ("destination.jsonl", "\"state\":\"complete\""),
        ];
        let moment = match dice.roll(3) {
            0 => Moment::After(Duration::from_millis(dice.roll(1500))),
            _ => {
                let (file, word) = dice.pick(&lines);
                Moment::Line(file, word)
            }
        };
        let modes = ["precopy", "hybrid", "postcopy", "auto"];
        let which = if dice.roll(2) == 0 { 0 } else { 1 };
        Self { victim, moment, which, modes: [dice.pick(&modes), dice.pick(&modes)] }
    }
}

impl fmt::Display for Try {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.modes;
        let when = match self.moment {
            Moment::After(time) => format!("after {} ms", time.as_millis()),
            Moment::Line(file, word) => format!("at {file} {word}"),
        };
        write!(f, "{first} and {second}, {:?} of {} killed {when}", self.victim, RANKS[self.which])
    }
}

impl Pair {
    /// Starts two daemons with their defaults, and two guests on the first. `accel`: how the guests run.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(accel: Accel) -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let (a, b) = Node::pair(&sandbox, &NodeOptions::default())?;
        let guest = payload::guest(sandbox.path(), accel, &payload::light(), KvmPages::None)?;
        let pair = Self { nodes: [a, b], home: 0, guest, sandbox };
        pair.begin_at_home(&RANKS)?;
        Ok(pair)
    }

    fn begin_at_home(&self, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| self.here().run_guest(name, "thp", &self.guest).map(drop))
    }

    /// Starts another guest at the other node.
    ///
    /// # Errors
    /// When it does not start.
    pub fn begin_there(&self, name: &str) -> Result<()> {
        self.there().run_guest(name, "thp", &self.guest).map(drop)
    }

    /// The node that has the guests.
    #[must_use]
    pub fn here(&self) -> &Node {
        &self.nodes[self.home]
    }

    /// The other.
    #[must_use]
    pub fn there(&self) -> &Node {
        &self.nodes[1 - self.home]
    }

    /// Keeps the logs.
    pub fn keep(&mut self) -> PathBuf {
        self.sandbox.keep();
        self.sandbox.path().to_owned()
    }

    /// `vmove --json migrate rank0 rank1` to the other node, to its end.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn migrate(&self, options: &[&str]) -> Result<End> {
        let words = [&["migrate", RANKS[0], RANKS[1], "--to", self.there().name()], options].concat();
        vmove(self.here(), &words)
    }

    /// Checks that a guest works at a node and that each of its pages is right.
    ///
    /// # Errors
    /// When that is not so.
    pub fn sound(&self, name: &str, node: &Node) -> Result<()> {
        let vm = node.vm(name)?;
        ensure!(vm.status == "running", "{name} at {} is {}", node.name(), vm.status);
        let page = vm.beacon()?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        let mut first = None;
        loop {
            if let Some(now) = page.read() {
                ensure!(now.errors == 0, "{name} at {} found wrong memory: {}", node.name(), now.verdict());
                let (work, verified) = *first.get_or_insert((now.work, now.verified));
                let pages = u64::from(self.guest.config.working_pages() + self.guest.config.cold_pages());
                if now.work > work + 50 && now.verified > verified + pages {
                    break;
                }
            }
            ensure!(Instant::now() < deadline, "{name} stands still at {}: {}", node.name(), node.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        let told = failures(&vm.console());
        ensure!(told.is_empty(), "{name} told of {told:?}");
        Ok(())
    }

    /// Checks that both guests are at this node, whole, and that the other has nothing.
    ///
    /// # Errors
    /// When that is not so.
    pub fn both_at(&self, node: usize) -> Result<()> {
        RANKS.iter().try_for_each(|name| self.sound(name, &self.nodes[node]))?;
        gone_from(&self.nodes[1 - node])
    }

    /// One try, from two guests at rest to two guests at rest.
    ///
    /// # Errors
    /// What must not be, and is.
    pub fn strike(&mut self, planned: &Try) -> Result<Fate> {
        let before = self.journals();
        let modes = [0, 1].map(|rank| format!("{}={}", RANKS[rank], planned.modes[rank]));
        let words = ["--json", "migrate", RANKS[0], RANKS[1], "--to", self.there().name()];
        let options = ["--mode-of", &modes[0], "--mode-of", &modes[1]];
        let at_home = qemu_pids(self.here());
        let mut command = self.here().vmove_in_background(&[&words[..], &options].concat())?;
        self.wait_for(planned.moment, &before, &mut command)?;
        let killed = self.kill(planned, &at_home)?;
        for node in self.nodes.iter_mut().filter(|node| node.pid().is_none()) {
            node.run()?;
        }
        let ended = self.wait_for_end(&mut command, killed);
        let said = command.wait_with_output()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        ended.with_context(|| format!("vmove said {said}"))?;
        self.judge(killed).with_context(|| format!("vmove said {said}"))
    }

    /// Journals that there are, on both nodes.
    fn journals(&self) -> BTreeSet<PathBuf> {
        let of = |node: &Node| {
            let folders = ["sessions", "groups"].map(|name| node.folder().join("state").join(name));
            let below = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
            let folders: Vec<PathBuf> = folders.iter().flat_map(|dir| below(dir)).collect();
            folders.iter().flat_map(|dir| below(dir).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        self.nodes.iter().flat_map(of).collect()
    }

    fn wait_for(&self, moment: Moment, before: &BTreeSet<PathBuf>, command: &mut Child) -> Result<()> {
        let began = Instant::now();
        let (file, word) = match moment {
            Moment::After(time) => {
                std::thread::sleep(time);
                return Ok(());
            }
            Moment::Line(file, word) => (file, word),
        };
        loop {
            let new =
                self.journals().into_iter().filter(|path| !before.contains(path) && path.ends_with(file));
            let has = |path: PathBuf| std::fs::read_to_string(path).is_ok_and(|text| text.contains(word));
            // It has ended without that: the blow comes at rest.
            if new.into_iter().any(has) || command.try_wait()?.is_some() {
                return Ok(());
            }
            ensure!(began.elapsed() < MOMENT_TIMEOUT, "{file} {word} never came: {}", self.here().log());
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Strikes. Whether a QEMU was killed.
    fn kill(&mut self, planned: &Try, at_home: &BTreeSet<i32>) -> Result<bool> {
        let (home, there) = (self.home, 1 - self.home);
        let pids = match planned.victim {
            Victim::Source => {
                self.nodes[home].crash();
                return Ok(false);
            }
            Victim::Destination => {
                self.nodes[there].crash();
                return Ok(false);
            }
            Victim::QemuHere => at_home.intersection(&qemu_pids(self.here())).copied().collect(),
            Victim::QemuThere => {
                // Looking for it takes longer than the daemon needs for its next steps: it stands still meanwhile.
                let daemon = self.there().pid().map(Pid::from_raw).context("no daemon there")?;
                kill(daemon, Signal::SIGSTOP)?;
                let killed = kill_one(qemu_pids(self.there()), planned.which);
                kill(daemon, Signal::SIGCONT)?;
                return Ok(killed);
            }
        };
        Ok(kill_one(pids, planned.which))
    }

    /// Waits until nothing is at work on either node.
    fn wait_for_end(&self, command: &mut Child, qemu_killed: bool) -> Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let open = self.nodes.iter().map(open).collect::<Result<Vec<_>>>()?.concat();
            if open.is_empty() && command.try_wait()?.is_some() {
                return Ok(());
            }
            if qemu_killed && Instant::now() > deadline - STEP_TIMEOUT + Duration::from_secs(15) {
                // A guest whose memory was lost with its QEMU: an operator ends what waits for it.
                for node in &self.nodes {
                    for name in RANKS {
                        let alive = node.vm(name).is_ok_and(|vm| vm.status == "running");
                        let held = open.iter().any(|line| line.contains(name));
                        if held && !(alive && self.works(name, node)) {
                            let _ = vmove(node, &["stop", "--force", name])?;
                        }
                    }
                }
            }
            ensure!(Instant::now() < deadline, "still at work: {open:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether a guest does something.
    fn works(&self, name: &str, node: &Node) -> bool {
        let beats = || node.vm(name).ok()?.beacon().ok()?.read().map(|beacon| beacon.beats);
        let first = beats();
        std::thread::sleep(Duration::from_millis(300));
        first.is_some() && beats() > first
    }

    fn judge(&mut self, qemu_killed: bool) -> Result<Fate> {
        let mut at = [None; 2];
        for (rank, name) in RANKS.iter().enumerate() {
            let places: Vec<usize> = (0..2)
                .filter(|node| self.nodes[*node].vm(name).is_ok_and(|vm| vm.status == "running"))
                .collect();
            at[rank] = match places[..] {
                [] if qemu_killed => None,
                [one] => Some(one),
                _ => bail!("{name} runs at {places:?}: {}", self.logs()),
            };
        }
        match at {
            [Some(first), Some(second)] => {
                ensure!(first == second, "the group is parted, {first} and {second}: {}", self.logs());
                self.both_at(first)?;
                let fate = if first == self.home { Fate::Back } else { Fate::There };
                self.home = first;
                Ok(fate)
            }
            _ => self.begin_anew(at),
        }
    }

    /// A guest is lost with its QEMU: another takes its place.
    fn begin_anew(&mut self, at: [Option<usize>; 2]) -> Result<Fate> {
        for (rank, name) in RANKS.iter().enumerate() {
            match at[rank] {
                Some(node) => {
                    self.sound(name, &self.nodes[node])?;
                    self.home = node;
                }
                None => {
                    for node in &self.nodes {
                        let _ = vmove(node, &["stop", "--force", name])?;
                    }
                }
            }
        }
        gone_from(self.there())?;
        let lost = RANKS.into_iter().zip(at).filter(|(_, at)| at.is_none()).map(|(name, _)| name);
        self.begin_at_home(&lost.collect::<Vec<_>>())?;
        Ok(Fate::Ended)
    }

    fn logs(&self) -> String {
        self.nodes.iter().map(|node| format!("\n{}:\n{}", node.name(), node.log())).collect()
    }
}

/// Kills one of these processes. Whether there was one.
fn kill_one(pids: BTreeSet<i32>, which: usize) -> bool {
    pids.into_iter().nth(which).is_some_and(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok())
}

/// What is at work at a node.
fn open(node: &Node) -> Result<Vec<String>> {
    let mut open = Vec::new();
    for (path, key) in [("/v1/migrations", "migrations"), ("/v1/groups", "groups")] {
        let (_, answer) = node.rest("GET", path, &Value::Null)?;
        let all = answer[key].as_array().with_context(|| format!("no {key} in {answer}"))?;
        let at_work = |one: &&Value| {
            matches!(
                one["outcome"]["state"].as_str(),
                Some("running" | "reconnecting" | "gathering" | "decided")
            )
        };
        open.extend(all.iter().filter(at_work).map(ToString::to_string));
    }
    Ok(open)
}

/// So many tries under a seed; `say` is told of each.
///
/// # Errors
/// What must not be, and is, with the try that led to it. The logs are kept.
pub fn tries(accel: Accel, seed: u64, count: u64, mut say: impl FnMut(&str)) -> Result<()> {
    let mut pair = Pair::start(accel)?;
    let mut fates = Vec::new();
    for number in 0..count {
        let planned = Try::of(seed, number);
        let began = Instant::now();
        match pair.strike(&planned) {
            Ok(fate) => {
                say(&format!("{number:3} {planned}: {fate:?}, {:.1} s", began.elapsed().as_secs_f64()));
                fates.push(fate);
            }
            Err(error) => {
                let logs = pair.keep();
                return Err(error).with_context(|| {
                    format!("seed {seed}, try {number}: {planned}; logs are in {}", logs.display())
                });
            }
        }
    }
    let count = |fate| fates.iter().filter(|found| **found == fate).count();
    say(&format!(
        "{} tries: {} both there, {} both back, {} with a guest that ended with its QEMU",
        fates.len(),
        count(Fate::There),
        count(Fate::Back),
        count(Fate::Ended)
    ));
    Ok(())
}
