//! Virtual clusters that are started, resized, moved and stopped at random on eight nodes, while bridges and daemons are killed. After each step everything
//! is counted on the nodes themselves: their QEMUs, and what these take.

use std::collections::BTreeMap;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::blows::deck::Dice;
use crate::bridge::Bridge;
use crate::daemon::Node;
use crate::fleet;
use crate::guest::{Accel, Guest, failures};
use crate::networks::Networks;
use crate::payload::{self, KvmPages};
use crate::places;
use crate::sandbox::Sandbox;

const NODES: u8 = 8;
/// VMs that a node has room for.
const ROOM: u64 = 2;
/// Clusters at a time.
const CLUSTERS: u64 = 4;
/// Within it everything that a step has begun, and a blow has broken, is right again.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(90);
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Of a sequence.
pub const STEPS: u64 = 8;

/// Something that an operator asks for.
#[derive(Debug, Clone)]
enum Act {
    Start {
        cluster: String,
        count: u64,
    },
    Resize {
        cluster: String,
        count: u64,
    },
    Stop {
        cluster: String,
    },
    /// All VMs leave the node by a plan; afterwards it is taken into use again.
    Run {
        plan: String,
        moves: u64,
    },
}

/// What is drawn: of an evacuation the plan is made first.
#[derive(Debug, Clone)]
enum Drawn {
    Act(Act),
    Evacuate { node: String },
}

/// What is killed meanwhile, and started again.
#[derive(Debug, Clone, Copy)]
enum Blow {
    None,
    Bridge,
    Node(usize),
}

/// What happened in all sequences.
#[derive(Debug, Default, Clone, Copy)]
pub struct Summary {
    /// Sequences.
    pub sequences: u64,
    /// Steps that were done.
    pub done: u64,
    /// Steps that were refused since they did not fit.
    pub refused: u64,
    /// Steps that a blow broke: done when they were asked for again, or undone.
    pub broken: u64,
    /// Kills of the bridge, and of daemons of nodes.
    pub kills: (u64, u64),
    /// VMs that were started, and those that moved.
    pub started: u64,
    /// See `started`.
    pub moved: u64,
}

/// Eight nodes, and a bridge that knows them.
#[derive(Debug)]
pub struct Walk {
    bridge: Bridge,
    nodes: Vec<Node>,
    guest: Guest,
    memory_mib: u64,
    /// Clusters that run, and how many VMs each has.
    clusters: BTreeMap<String, u64>,
    named: u64,
    summary: Summary,
    _networks: Networks,
    // Last: it ends whatever is left.
    _sandbox: Sandbox,
}

impl Walk {
    /// Starts everything, with guests that check their memory.
    ///
    /// # Errors
    /// Something does not start.
    pub fn new(accel: Accel) -> Result<Self> {
        let networks = Networks::new(NODES)?;
        let sandbox = Sandbox::new()?;
        let nodes = fleet::daemons(&sandbox, &networks, |_| String::new())?;
        let bridge = Bridge::start(&sandbox, &nodes)?;
        let config = payload::light();
        let guest = payload::guest(sandbox.path(), accel, &config, KvmPages::None)?;
        let memory_mib = u64::from(payload::memory_mib(&config));
        let (cores, memory) = (u32::try_from(ROOM)?, u32::try_from(ROOM * memory_mib)?);
        nodes.iter().try_for_each(|node| bridge.publish(node, cores, memory))?;
        bridge.publish_topology(
            "SwitchName=l1 Nodes=n[1-4]\nSwitchName=l2 Nodes=n[5-8]\nSwitchName=s Switches=l[1-2]\n",
        )?;
        Ok(Self {
            bridge,
            nodes,
            guest,
            memory_mib,
            clusters: BTreeMap::new(),
            named: 0,
            summary: Summary::default(),
            _networks: networks,
            _sandbox: sandbox,
        })
    }

    /// One sequence of so many steps, by a seed. At its end nothing is left.
    ///
    /// # Errors
    /// What is not as it must be, and after which step.
    pub fn sequence(&mut self, seed: u64, steps: u64) -> Result<()> {
        let mut dice = Dice::new(seed, 0);
        for step in 0..steps {
            let (drawn, blow) = (self.draw(&mut dice), draw_blow(&mut dice));
            let after = Duration::from_millis(dice.roll(1500));
            let told = format!("seed {seed}, step {step}: {drawn:?}, {blow:?} after {after:?}");
            println!("  {told}");
            self.one(drawn, blow, after).with_context(|| told.clone())?;
            self.is_right().with_context(|| told)?;
        }
        for cluster in self.clusters.keys().cloned().collect::<Vec<_>>() {
            self.step(&Act::Stop { cluster }, Blow::None, Duration::ZERO)?;
        }
        self.is_right().with_context(|| format!("seed {seed}, at its end"))?;
        self.summary.sequences += 1;
        Ok(())
    }

    /// What has happened so far.
    #[must_use]
    pub const fn summary(&self) -> Summary {
        self.summary
    }

    fn draw(&mut self, dice: &mut Dice) -> Drawn {
        let running: Vec<String> = self.clusters.keys().cloned().collect();
        let of_these =
            |dice: &mut Dice| running[usize::try_from(dice.roll(running.len() as u64)).unwrap_or(0)].clone();
        match dice.roll(10) {
            0..=3 if (running.len() as u64) < CLUSTERS => {
                self.named += 1;
                Drawn::Act(Act::Start { cluster: format!("c{}", self.named), count: 1 + dice.roll(4) })
            }
            4 | 5 if !running.is_empty() => {
                Drawn::Act(Act::Resize { cluster: of_these(dice), count: 1 + dice.roll(6) })
            }
            6 if !running.is_empty() => Drawn::Act(Act::Stop { cluster: of_these(dice) }),
            _ => Drawn::Evacuate { node: format!("n{}", 1 + dice.roll(u64::from(NODES))) },
        }
    }

    fn one(&mut self, drawn: Drawn, blow: Blow, after: Duration) -> Result<()> {
        let node = match drawn {
            Drawn::Act(act) => return self.step(&act, blow, after),
            Drawn::Evacuate { node } => node,
        };
        let output = self.bridge.command(&["plan", "evacuate", &node])?.output()?;
        match output.status.code() {
            Some(0) => {}
            Some(3) => {
                self.summary.refused += 1;
                return Ok(());
            }
            code => bail!("no plan ({code:?}): {}", said(&output)),
        }
        let made: Value = serde_json::from_slice(&output.stdout)?;
        let plan = made["id"].as_str().context("an id")?.to_owned();
        let moves = made["steps"].as_array().map_or(0, Vec::len) as u64;
        self.step(&Act::Run { plan, moves }, blow, after)?;
        let vms = self.nodes.iter().find(|one| one.name() == node).context("a node")?.vms()?;
        ensure!(vms.is_empty(), "{node} was emptied, and has {vms:?}");
        self.bridge.ask(&["fleet", "resume", &node]).map(drop)
    }

    /// Does it, while something is killed, and again until it is done, refused, or undone.
    fn step(&mut self, act: &Act, blow: Blow, after: Duration) -> Result<()> {
        let mut output = self.under(act, blow, after)?;
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let mut again = false;
        loop {
            match output.status.code() {
                Some(0) => {
                    self.done(act, again);
                    return Ok(());
                }
                Some(3) => {
                    self.summary.refused += 1;
                    return Ok(());
                }
                code if matches!(blow, Blow::None) => bail!("ended with {code:?}: {}", said(&output)),
                // Broken: an operator asks again. What does not come about then is undone.
                code => ensure!(Instant::now() < deadline, "no way out ({code:?}): {}", said(&output)),
            }
            again = true;
            std::thread::sleep(LOOK_INTERVAL);
            if let Act::Start { cluster, .. } = act {
                self.undo(cluster)?;
                self.summary.broken += 1;
                return Ok(());
            }
            output = self.ask(act)?.output()?;
        }
    }

    fn under(&mut self, act: &Act, blow: Blow, after: Duration) -> Result<Output> {
        let child = self.ask(act)?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        match blow {
            Blow::None => {}
            Blow::Bridge => {
                std::thread::sleep(after);
                self.bridge.kill();
                self.summary.kills.0 += 1;
                std::thread::sleep(LOOK_INTERVAL);
                self.bridge.run()?;
            }
            Blow::Node(index) => {
                std::thread::sleep(after);
                self.nodes[index].crash();
                self.summary.kills.1 += 1;
                std::thread::sleep(LOOK_INTERVAL);
                self.nodes[index].run()?;
            }
        }
        Ok(child.wait_with_output()?)
    }

    fn ask(&self, act: &Act) -> Result<std::process::Command> {
        match act {
            Act::Start { cluster, count } => {
                let need = format!("vcpus=1; memory_mb={}", self.memory_mib);
                let count = count.to_string();
                let line = self.guest.command_line("{vmdir}/serial.log")?;
                let words = ["cluster", "start", "--text", &need, "--count", &count, "--cluster", cluster];
                let line: Vec<&str> = line.iter().map(String::as_str).collect();
                self.bridge.command(&[&words[..], &["--holder", "test", "--"], &line].concat())
            }
            Act::Resize { cluster, count } => {
                self.bridge.command(&["cluster", "resize", cluster, &count.to_string()])
            }
            Act::Stop { cluster } => self.bridge.command(&["cluster", "stop", cluster]),
            Act::Run { plan, .. } => self.bridge.command(&["plan", "run", plan]),
        }
    }

    fn done(&mut self, act: &Act, again: bool) {
        *(if again { &mut self.summary.broken } else { &mut self.summary.done }) += 1;
        match act {
            Act::Start { cluster, count } => {
                self.summary.started += count;
                self.clusters.insert(cluster.clone(), *count);
            }
            Act::Resize { cluster, count } => {
                let before = self.clusters.insert(cluster.clone(), *count).unwrap_or(0);
                self.summary.started += count.saturating_sub(before);
            }
            Act::Stop { cluster } => drop(self.clusters.remove(cluster)),
            Act::Run { moves, .. } => self.summary.moved += moves,
        }
    }

    /// A start that was broken left nothing, or a cluster that can be stopped.
    fn undo(&mut self, cluster: &str) -> Result<()> {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            let output = self.bridge.command(&["cluster", "stop", cluster])?.output()?;
            let known = self.bridge.ask(&["cluster", "list"])?;
            let listed =
                known["clusters"].as_array().is_some_and(|all| all.iter().any(|one| one["id"] == cluster));
            if output.status.success() || !listed {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{cluster} cannot be stopped: {}", said(&output));
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Everything is where it is to be, as the nodes themselves tell. What the bridge looks at now and then it has seen in some seconds.
    fn is_right(&self) -> Result<()> {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        loop {
            match self.look() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(LOOK_INTERVAL),
            }
        }
    }

    fn look(&self) -> Result<()> {
        let mut at: BTreeMap<String, &str> = BTreeMap::new();
        let fleet = self.bridge.ask(&["fleet", "list"])?;
        for node in &self.nodes {
            let vms = node.vms()?;
            ensure!(
                fleet::qemus(node) == vms.len(),
                "{}: {} QEMUs, and {vms:?}",
                node.name(),
                fleet::qemus(node)
            );
            self.counted(node, &fleet, vms.len() as u64)?;
            for vm in vms {
                let known = node.vm(&vm)?;
                ensure!(known.status == "running", "{vm} on {} is {}", node.name(), known.status);
                let wrong = failures(&known.console());
                ensure!(wrong.is_empty(), "{vm}: {wrong:?}");
                if let Some(other) = at.insert(vm.clone(), node.name()) {
                    bail!("{vm} is on {other} and on {}", node.name());
                }
            }
        }
        let mut wanted = 0;
        for (cluster, count) in &self.clusters {
            wanted += count;
            let status = self.bridge.ask(&["cluster", "status", cluster])?;
            let members = status["members"].as_array().context("members")?;
            ensure!(
                members.len() as u64 == *count,
                "{cluster}: {} members, not {count}: {status}",
                members.len()
            );
            for member in members {
                let text = |key: &str| member[key].as_str().unwrap_or_default();
                let found = at.get(text("vm")).copied();
                ensure!(found == Some(text("node")), "{member} is at {found:?}");
            }
        }
        ensure!(at.len() as u64 == wanted, "VMs of no cluster: {at:?}, and of clusters {:?}", self.clusters);
        let leases = self.bridge.ask(&["lease", "list"])?;
        let leased = leases["leases"].as_array().map_or(0, Vec::len);
        ensure!(leased == self.clusters.len(), "{leased} leases for {:?}: {leases}", self.clusters);
        Ok(())
    }

    /// What of a node is free, as the bridge says, is what its VMs leave.
    fn counted(&self, node: &Node, fleet: &Value, vms: u64) -> Result<()> {
        ensure!(vms <= ROOM, "{} has {vms} VMs", node.name());
        let known =
            fleet["nodes"].as_array().and_then(|all| all.iter().find(|one| one["name"] == node.name()));
        let known = known.with_context(|| format!("{} is not listed", node.name()))?;
        let free = |key: &str| known[key].as_u64();
        let left = ROOM - vms;
        let memory = left * self.memory_mib;
        ensure!(
            free("cores_free") == Some(left) && free("memory_free_mib") == Some(memory),
            "{vms} VMs run: {known}"
        );
        ensure!(free("vms_without_lease").unwrap_or(0) == 0, "{known}");
        ensure!(known["state"] == "up", "{known}");
        Ok(())
    }
}

fn draw_blow(dice: &mut Dice) -> Blow {
    match dice.roll(10) {
        0 | 1 => Blow::Bridge,
        2 => Blow::Node(usize::try_from(dice.roll(u64::from(NODES))).unwrap_or(0)),
        _ => Blow::None,
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What is missing here for it.
///
/// # Errors
/// That.
pub fn ready(accel: Accel) -> Result<()> {
    places::root()?;
    payload::ready(accel)?;
    crate::networks::possible()?;
    ["vmoved", "vmove", "vbridged"].iter().try_for_each(|program| places::product(program).map(drop))
}
