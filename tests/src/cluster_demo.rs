//! The life of a virtual cluster on two racks, by the commands that an operator types: `./run demo cluster`, and a test.
//!
//! Six nodes are daemons in network namespaces. Their inventories are those of a recorded `/sys` with eight GPUs and eight adapters, which are leased
//! but given to no guest, since they are not there. The guests are real, and verify their memory all the while.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vmove_guest::config::{Config, Rate};

use crate::bridge::Bridge;
use crate::daemon::Node;
use crate::fleet;
use crate::forks::Parent;
use crate::guest::{Guest, failures};
use crate::networks::Networks;
use crate::sandbox::Sandbox;

/// `/sys` and `/proc` of a machine with eight GPUs, each beside an adapter.
const RECORDED: &str = include_str!("../../sched-bridge/tests/fixtures/dgx.tree");
const NODES: u8 = 6;
const TOPOLOGY: &str =
    "SwitchName=rack1 Nodes=n[1-3]\nSwitchName=rack2 Nodes=n[4-6]\nSwitchName=spine Switches=rack[1-2]\n";
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// VMs with four GPUs, each below the PCIe root of an adapter of the VM.
fn cluster(name: &str, count: u32) -> String {
    let request = "vcpus=1; memory_mb=192; gpus=4; hcas=4; gpu_hca_affinity=root";
    format!("name: {name}\nvms:\n- {{name: worker, count: {count}, request: \"{request}\"}}\n")
}

/// Where the VMs of a cluster are at one moment.
type Moment = (String, BTreeMap<String, Vec<String>>);

/// Two racks with a bridge.
struct Racks<'a> {
    bridge: Bridge,
    nodes: Vec<Node>,
    moments: Vec<Moment>,
    begun: Instant,
    guest: Guest,
    /// By VMs of `train`: where their guests tell how they are. In copies it is the same place.
    beacons: BTreeMap<String, Parent>,
    pictures: Option<&'a Path>,
    // Last: it ends the namespaces.
    _networks: Networks,
}

/// Runs the scene in a sandbox, and prints what happens. `pictures`: a folder for drawings of the racks before and after.
///
/// # Errors
/// Something does not go as it should.
pub fn run(sandbox: &Sandbox, pictures: Option<&Path>) -> Result<()> {
    let mut racks = Racks::start(sandbox, pictures)?;
    racks.place_and_start(sandbox)?;
    racks.fork_one()?;
    racks.drain_and_compact(sandbox)?;
    racks.lose_a_node()?;
    racks.account()
}

impl<'a> Racks<'a> {
    fn start(sandbox: &Sandbox, pictures: Option<&'a Path>) -> Result<Self> {
        let begun = Instant::now();
        let networks = Networks::new(NODES)?;
        let shared = sandbox.folder("templates")?;
        let config = format!("[fork]\ntemplate-dir = {:?}\n", shared.display().to_string());
        let nodes = fleet::daemons(sandbox, &networks, |_| config.clone())?;
        let bridge = Bridge::start(sandbox, &nodes)?;
        let config = Config { working_set_mib: 16, rate: Rate::PagesPerSecond(300), ..Config::default() };
        let guest = Guest::new(192, config)?;
        let (moments, beacons) = Default::default();
        let racks = Self { bridge, nodes, moments, begun, guest, beacons, pictures, _networks: networks };
        let recorded = expand(&sandbox.folder("recorded")?)?;
        let root = recorded.display().to_string();
        for node in &racks.nodes {
            let inventory = racks.bridge.ask(&["inventory", "--root", &root, "--name", node.name()])?;
            let file = racks.bridge.write(node.name(), &inventory.to_string())?;
            racks.bridge.ask(&["fleet", "publish", &file])?;
        }
        racks.bridge.publish_topology(TOPOLOGY)?;
        racks.say("two racks of three nodes, each with 8 GPUs and 8 adapters (a recorded /sys)");
        Ok(racks)
    }

    fn say(&self, text: &str) {
        println!("[{:5.1} s] {text}", self.begun.elapsed().as_secs_f64());
    }

    /// Says a command and runs it.
    fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let shown = arguments.split(|word| *word == "--").next().unwrap_or_default().join(" ");
        let more = if arguments.contains(&"--") { " -- QEMU …" } else { "" };
        self.say(&format!("vmove {shown}{more}"));
        self.bridge.ask(arguments)
    }

    fn place_and_start(&mut self, sandbox: &Sandbox) -> Result<()> {
        let file = sandbox.path().join("train.yaml");
        std::fs::write(&file, cluster("train", 4))?;
        let file = file.display().to_string();
        let placed = self.bridge.ask(&["place", &file, "--what-if", "--explain"])?;
        let score = &placed["placement"]["score"];
        self.say("vmove place train.yaml --what-if --explain");
        println!(
            "            4 VMs with 4 GPUs and 4 adapters each, every GPU below the PCIe root of an adapter: {} hop at most, {} in all",
            score["max_hops"], score["sum_hops"]
        );
        self.start_cluster(&file, "alice")?;
        self.note("started", "train")?;
        self.draw("before.svg")
    }

    fn start_cluster(&self, file: &str, holder: &str) -> Result<()> {
        let line = self.guest.command_line("{vmdir}/serial.log")?;
        let line: Vec<&str> =
            line.iter().map(|word| if word == "192" { "{memory_mib}" } else { word }).collect();
        let name = Path::new(file).file_name().unwrap_or_default().to_string_lossy();
        self.say(&format!("vmove cluster start {name} --holder {holder} -- QEMU …"));
        self.bridge.ask(&[&["cluster", "start", file, "--holder", holder, "--"][..], &line].concat())?;
        Ok(())
    }

    /// A fork of the whole cluster, which a scheduler might try something with.
    fn fork_one(&mut self) -> Result<()> {
        let forked = self.ask(&["cluster", "fork", "train", "what-if"])?;
        let members = forked["members"].as_array().context("members")?;
        let still = members.iter().filter_map(|one| one["stood_still_ms"].as_f64()).fold(0.0, f64::max);
        println!("            all frozen at one moment; none stood still for more than {still:.0} ms");
        self.note("a copy, forked", "what-if")?;
        self.ask(&["cluster", "stop", "what-if"]).map(drop)
    }

    fn drain_and_compact(&mut self, sandbox: &Sandbox) -> Result<()> {
        let file = sandbox.path().join("web.yaml");
        std::fs::write(&file, cluster("web", 2))?;
        self.start_cluster(&file.display().to_string(), "bob")?;
        let node = self.of("train", 0)?;
        self.plan(&["plan", "evacuate", &node])?;
        self.note(&format!("{node} evacuated"), "train")?;
        self.ask(&["cluster", "stop", "web"])?;
        self.ask(&["fleet", "resume", &node])?;
        self.plan(&["plan", "compact", "train"])?;
        self.note("compacted", "train")?;
        self.ask(&["cluster", "resize", "train", "5"])?;
        self.note("grown to 5", "train")
    }

    fn plan(&self, words: &[&str]) -> Result<()> {
        let plan = self.ask(words)?;
        let id = plan["id"].as_str().context("an id")?.to_owned();
        let (before, after) = (&plan["hops"]["before"], &plan["hops"]["after"]);
        let steps = plan["steps"].as_array().map_or(0, Vec::len);
        println!("            {steps} migrations; hops of all pairs: {before} before, {after} after");
        let done = self.ask(&["plan", "run", &id])?;
        ensure!(done["state"]["is"] == "done", "the plan has not come to its end: {done}");
        for step in done["steps"].as_array().into_iter().flatten() {
            let (vm, from, to) = (&step["vm"], &step["from"], &step["to"]["node"]);
            let down = step["state"]["downtime_us"].as_f64().unwrap_or_default() / 1000.0;
            println!(
                "            {} from {} to {}: down for {down:.1} ms",
                text(vm)?,
                text(from)?,
                text(to)?
            );
        }
        Ok(())
    }

    fn lose_a_node(&mut self) -> Result<()> {
        let kept = self.ask(&["cluster", "checkpoint", "train", "noon"])?;
        let members = kept["members"].as_array().context("members")?;
        let still = members.iter().filter_map(|one| one["stood_still_ms"].as_f64()).fold(0.0, f64::max);
        println!("            all kept at one moment; none stood still for more than {still:.0} ms");
        let lost = self.of("train", 0)?;
        let at = self.nodes.iter().position(|node| node.name() == lost).context("the node")?;
        self.say(&format!("{lost} is lost, with its guests"));
        fleet::lose(&mut self.nodes[at]);
        // The others cannot go on without those.
        for (vm, node) in self.members("train")? {
            if node != lost {
                self.node(&node)?.ask(&["stop", &vm])?;
            }
        }
        self.ask(&["cluster", "restore", "noon", "--lost", &lost])?;
        self.note(&format!("restored without {lost}"), "train")?;
        self.draw("after.svg")
    }

    fn account(&self) -> Result<()> {
        self.picture();
        self.ask(&["cluster", "stop", "train"])?;
        let output = self.bridge.command(&["account"])?.output()?;
        self.say("vmove account");
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let record: Value = serde_json::from_str(line)?;
            let seconds = |key: &str| record["usage"][key].as_f64().unwrap_or_default() / 1000.0;
            println!(
                "            {} of {}: {:.0} GPU-seconds, {:.0} adapter-seconds, {:.0} core-seconds",
                text(&record["cluster"])?,
                text(&record["holder"])?,
                seconds("gpu_ms"),
                seconds("adapter_ms"),
                seconds("core_ms")
            );
        }
        self.say("done");
        Ok(())
    }

    fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).context("a node")
    }

    /// VMs of a cluster with their nodes.
    fn members(&self, cluster: &str) -> Result<Vec<(String, String)>> {
        let status = self.bridge.ask(&["cluster", "status", cluster])?;
        let members = status["members"].as_array().context("members")?;
        members.iter().map(|one| Ok((text(&one["vm"])?.to_owned(), text(&one["node"])?.to_owned()))).collect()
    }

    /// The node of a VM, by its place in the cluster.
    fn of(&self, cluster: &str, place: usize) -> Result<String> {
        let members = self.members(cluster)?;
        Ok(members.get(place).context("a VM")?.1.clone())
    }

    /// Looks that each VM works where the bridge says, and has found no wrong memory; remembers where they are.
    fn note(&mut self, what: &str, cluster: &str) -> Result<()> {
        let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, node) in self.members(cluster)? {
            self.works(&name, &node)?;
            let number = name.rsplit('-').next().unwrap_or_default().to_owned();
            places.entry(node).or_default().push(number);
        }
        self.moments.push((what.to_owned(), places));
        Ok(())
    }

    /// Waits until a guest has verified pages once more.
    fn works(&mut self, name: &str, node: &str) -> Result<()> {
        let number = name.rsplit('-').next().unwrap_or_default().to_owned();
        let (deadline, mut first) = (Instant::now() + STEP_TIMEOUT, None);
        loop {
            let vm = self.node(node)?.vm(name)?;
            let told = failures(&vm.console());
            ensure!(told.is_empty(), "{name} has found wrong memory: {told:?}");
            // Where it was forked, its memory is private: the file has nothing.
            if let Ok(parent) = Parent::at_work(name, self.guest.clone(), &vm) {
                self.beacons.insert(number.clone(), parent);
            }
            let page = self.beacons.get(&number).and_then(|parent| parent.page(&vm).ok());
            if let Some(now) = page.and_then(|page| page.read()) {
                ensure!(now.errors == 0, "{name}: {}", now.verdict());
                let first = *first.get_or_insert(now.verified);
                if now.verified > first + 100 {
                    return Ok(());
                }
            }
            ensure!(Instant::now() < deadline, "{name} is {} on {node}, and not at work", vm.status);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn draw(&self, name: &str) -> Result<()> {
        let Some(folder) = self.pictures else { return Ok(()) };
        let file = folder.join(name).display().to_string();
        let drawn = self.bridge.command(&["topology", "--svg", &file])?.output()?;
        if !drawn.status.success() {
            bail!("{}", String::from_utf8_lossy(&drawn.stderr));
        }
        self.say(&format!("vmove topology --svg {file}"));
        Ok(())
    }

    /// Each moment in a line: numbers of VMs below their nodes.
    fn picture(&self) {
        let cell = |text: &str| format!("{text:^9}");
        let row = |head: &str, of: &dyn Fn(&str) -> String| {
            let rack = |numbers: std::ops::RangeInclusive<u8>| -> String {
                numbers.map(|number| cell(&of(&format!("n{number}")))).collect()
            };
            println!("  {head:<22}|{}|{}|", rack(1..=3), rack(4..=6));
        };
        println!("\n  {:<22}|{:^27}|{:^27}|", "VMs of the cluster", "rack1", "rack2");
        row("", &str::to_owned);
        for (what, places) in &self.moments {
            row(what, &|node| places.get(node).map_or_else(|| "·".to_owned(), |vms| vms.join(" ")));
        }
        println!();
    }
}

fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("expected a text, found {value}"))
}

/// Makes the files and links of the recording.
fn expand(folder: &Path) -> Result<PathBuf> {
    for line in RECORDED.lines().filter(|line| !line.starts_with('#')) {
        let (head, rest) = line.split_once('\t').context("a tab")?;
        let (kind, path) = head.split_once(' ').context("a kind")?;
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        match kind {
            "F" => std::fs::write(path, rest.replace("\\n", "\n"))?,
            "L" => symlink(rest, path)?,
            other => bail!("{other} in the recording"),
        }
    }
    Ok(folder.to_owned())
}
