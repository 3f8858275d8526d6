//! One guest and two daemons: the steps that most tests of faults need.
//!
//! The guest starts at `a` and moves to `b`. Each request has a deadline, so that a migration that hangs fails its test and does not
//! delay all others.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vmove_guest::beacon::Beacon;
use vmove_guest::config::{Config, Rate};

use crate::beacon::{self, BeaconPage};
use crate::booted;
use crate::daemon::{Node, NodeOptions, Vm};
use crate::guest::{Accel, Guest, System, failures};
use crate::payload::{self, KvmPages};
use crate::places;
use crate::proxy::{Direction, Fault, Proxy, Rule};
use crate::sandbox::{Sandbox, qemu_in};

/// Name of the guest, unless the test gives it another.
pub const NAME: &str = "guest";
/// A link so slow that several seconds pass in the first round, or while pages are fetched that the guest does not touch.
pub const SLOW: &str = "256Mbit";
/// The same for the [payload], which has a quarter of the memory: takes the place of [`SLOW`] where that moves.
const SLOW_FOR_PAYLOAD: &str = "64Mbit";
/// The control connection. A migration's connections are numbered in the order in which they are opened: control, pages, device state.
pub const CONTROL: u64 = 0;
/// The connections for pages, one urgent and two bulk. They are opened at the same time, in any order.
pub const FOR_PAGES: [u64; 3] = [1, 2, 3];
/// The connection for device state.
pub const DEVICE_STATE: u64 = 4;
/// Timeout for steps that take some seconds on a busy machine.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(90);

/// See the [module](self).
#[derive(Debug)]
pub struct Scene {
    /// The node that has the guest at first.
    pub a: Node,
    /// The node to which the guest moves.
    pub b: Node,
    /// The proxy between the nodes, if the test asked for one.
    pub proxy: Option<Proxy>,
    name: String,
    config: Config,
    /// Position of the beacon: number of the RAM file, and offset in it.
    beacon: (usize, u64),
    is_payload: bool,
    // Dropped last: it ends all processes that are left.
    sandbox: Sandbox,
}

/// The result of a `vmove --json`.
#[derive(Debug)]
pub struct End {
    /// Exit code.
    pub code: i32,
    /// The object that it printed; null if it printed none.
    pub answer: Value,
    /// Its text for people, from stderr.
    pub said: String,
}

impl End {
    /// The error message; empty if there is none.
    #[must_use]
    pub fn error(&self) -> &str {
        self.answer["error"].as_str().unwrap_or_default()
    }
}

/// Whether [`Scene::new`] and [`Scene::behind_proxy`] have the payload under KVM instead of an emulated Linux: with
/// `VMOVE_TEST_GUEST=kvm`.
fn under_kvm() -> bool {
    std::env::var_os("VMOVE_TEST_GUEST").is_some_and(|guest| guest == "kvm")
}

/// The guest of [`Scene::new`] and [`Scene::behind_proxy`].
fn usual_guest(sandbox: &Sandbox) -> Result<Guest> {
    if under_kvm() {
        return payload::guest(sandbox.path(), Accel::Kvm, &payload::steady(), KvmPages::All);
    }
    Guest::new(memory_mib(&steady()), steady())
}

/// Checks that everything is here that each scene needs.
///
/// # Errors
/// What is missing.
pub fn ready() -> Result<()> {
    if under_kvm() {
        return payload::ready(Accel::Kvm);
    }
    places::root()?;
    places::guest_initrd()?;
    places::product("vmoved")?;
    places::product("vmove").map(|_| ())
}

/// A guest that writes all of its memory, but so slowly that a slow link suffices.
#[must_use]
pub fn steady() -> Config {
    Config {
        working_set_mib: 64,
        cold_mib: 64,
        rate: Rate::PagesPerSecond(5_000),
        verify: 30_000,
        ..Config::default()
    }
}

/// A guest with that task.
///
/// # Errors
/// [`Guest::new`].
pub fn steady_guest() -> Result<Guest> {
    let config = steady();
    Guest::new(memory_mib(&config), config)
}

/// Memory size for a guest with this task, in MiB.
#[must_use]
pub fn memory_mib(config: &Config) -> u32 {
    config.working_set_mib + config.cold_mib + 192
}

impl Scene {
    /// Starts two daemons, and a guest with [`steady`] work on the first; with `VMOVE_TEST_GUEST=kvm` the payload under KVM.
    ///
    /// # Errors
    /// When one does not start.
    pub fn new() -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let guest = usual_guest(&sandbox)?;
        Self::in_sandbox(sandbox, "thp", &guest)
    }

    /// As [`Scene::new`], with `guest` as `name` and its `memory`.
    ///
    /// # Errors
    /// When one does not start.
    pub fn with(name: &str, memory: &str, guest: &Guest) -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let (a, b) = Node::pair(&sandbox, &NodeOptions::default())?;
        Self::begin(sandbox, (a, b, None), name, memory, guest)
    }

    /// As [`Scene::new`], in a sandbox that was made before.
    ///
    /// # Errors
    /// When one does not start.
    pub fn in_sandbox(sandbox: Sandbox, memory: &str, guest: &Guest) -> Result<Self> {
        Self::with_options(sandbox, &NodeOptions::default(), memory, guest)
    }

    /// As [`Scene::in_sandbox`], with these options of the nodes.
    ///
    /// # Errors
    /// When one does not start.
    pub fn with_options(
        sandbox: Sandbox,
        options: &NodeOptions,
        memory: &str,
        guest: &Guest,
    ) -> Result<Self> {
        let (a, b) = Node::pair(&sandbox, options)?;
        Self::begin(sandbox, (a, b, None), NAME, memory, guest)
    }

    /// As [`Scene::new`], with a proxy: `a` reaches `b` only through it.
    ///
    /// # Errors
    /// When one does not start.
    pub fn behind_proxy() -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let guest = usual_guest(&sandbox)?;
        Self::behind_proxy_in(sandbox, &guest)
    }

    /// As [`Scene::behind_proxy`], with `guest` in a sandbox that was made before.
    ///
    /// # Errors
    /// When one does not start.
    pub fn behind_proxy_in(sandbox: Sandbox, guest: &Guest) -> Result<Self> {
        let b = Node::start(&sandbox, "b", NodeOptions::default())?;
        let proxy = Proxy::start(b.listen())?;
        let peers = vec![("b".to_owned(), proxy.address())];
        let a = Node::start(&sandbox, "a", NodeOptions { peers, ..NodeOptions::default() })?;
        Self::begin(sandbox, (a, b, Some(proxy)), NAME, "thp", guest)
    }

    /// As [`Scene::new`], with a node `b` that was started before, and this `memory`.
    ///
    /// # Errors
    /// When the other daemon or the guest does not start.
    pub fn to(sandbox: Sandbox, b: Node, memory: &str, guest: &Guest) -> Result<Self> {
        let peers = vec![("b".to_owned(), b.listen())];
        let a = Node::start(&sandbox, "a", NodeOptions { peers, ..NodeOptions::default() })?;
        Self::begin(sandbox, (a, b, None), NAME, memory, guest)
    }

    fn begin(
        sandbox: Sandbox,
        (a, b, proxy): (Node, Node, Option<Proxy>),
        name: &str,
        memory: &str,
        guest: &Guest,
    ) -> Result<Self> {
        let vm = booted::run(&a, name, memory, guest)?;
        let files = vm.ram_files();
        let (path, page) = beacon::find(&files)?;
        let number = files.iter().position(|file| *file == path).context("a beacon in none of the files")?;
        let beacon = (number, page.offset());
        let is_payload = guest.system != System::Linux;
        let (name, config) = (name.to_owned(), guest.config.clone());
        let scene = Self { a, b, proxy, name, config, beacon, is_payload, sandbox };
        scene.alive_at(&scene.a)?;
        Ok(scene)
    }

    /// The sandbox of both nodes.
    #[must_use]
    pub const fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// The proxy of [`Scene::behind_proxy`].
    ///
    /// # Errors
    /// When there is none.
    pub fn proxy(&self) -> Result<&Proxy> {
        self.proxy.as_ref().context("this scene has no proxy")
    }

    /// Begins to move the guest from `a` to `b`. Returns the id of the migration.
    ///
    /// # Errors
    /// When the daemon does not accept the request.
    pub fn start(&self, options: &[&str]) -> Result<String> {
        let options = self.for_this_guest(options);
        let taken =
            self.a.ask(&[&["migrate", &self.name, "--to", "b", "--detach"], &options[..]].concat())?;
        Ok(taken["id"].as_str().context("an id")?.to_owned())
    }

    /// Moves the guest from `a` to `to` and waits until the migration succeeds or fails.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn migrate_to(&self, to: &str, options: &[&str]) -> Result<End> {
        let options = self.for_this_guest(options);
        vmove(&self.a, &[&["migrate", &self.name, "--to", to], &options[..]].concat())
    }

    /// Sends the guest from `a` to `b` for a visit. Returns what was said once `b` knows it.
    ///
    /// # Errors
    /// When it does not go.
    pub fn visit(&self, options: &[&str]) -> Result<Value> {
        let End { code, answer, said } =
            vmove(&self.a, &[&["visit", &self.name, "--to", "b"], options].concat())?;
        ensure!(code == 0, "visit {options:?}: {answer} {said}; node a: {}", self.a.log());
        // Its record is written after it runs: a slow disk lengthens no pause.
        let deadline = Instant::now() + STEP_TIMEOUT;
        while !self.b.runs(&self.name) {
            ensure!(Instant::now() < deadline, "node b does not know it: {}", self.b.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(answer)
    }

    fn for_this_guest<'a>(&self, options: &[&'a str]) -> Vec<&'a str> {
        let link = if self.is_payload { SLOW_FOR_PAYLOAD } else { SLOW };
        options.iter().map(|option| if *option == SLOW { link } else { *option }).collect()
    }

    /// Waits until node `a` reports the end of migration `id`.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn end(&self, id: &str) -> Result<End> {
        let followed = vmove(&self.a, &["status", id, "--follow"]);
        followed.with_context(|| format!("the log of {}: {}", self.b.name(), self.b.log()))
    }

    /// Begins a migration and stalls its device state in the proxy: the guest has stopped, and only the source owns it.
    /// [`Scene::unstick`] lets the device state pass.
    ///
    /// # Errors
    /// When the migration does not reach that point.
    pub fn start_and_stick_in_the_switchover(&self) -> Result<String> {
        let proxy = self.proxy()?;
        proxy.add(device_state(proxy.connections(), Fault::Stall));
        let id = self.start(&["--mode", "hybrid"])?;
        self.reach(&id, "hand-over")?;
        // Time for everything else on its way to arrive.
        std::thread::sleep(Duration::from_millis(500));
        Ok(id)
    }

    /// Lets the stalled device state pass. Other rules of the proxy stay. `first` is the number of the migration's first
    /// connection.
    ///
    /// # Errors
    /// When there is no proxy.
    pub fn unstick(&self, first: u64) -> Result<()> {
        // Of two rules for the same byte, the later one applies.
        self.proxy()?.add(device_state(first, Fault::Delay(Duration::ZERO)));
        Ok(())
    }

    /// Waits until node `a` reports that migration `id` is in `phase`.
    ///
    /// # Errors
    /// When the migration is over, or does not reach the phase in time.
    pub fn reach(&self, id: &str, phase: &str) -> Result<Value> {
        self.reach_one_of(id, &[phase])
    }

    /// As [`Scene::reach`], but for any of several phases, since a short one may be over before it is seen.
    ///
    /// # Errors
    /// As [`Scene::reach`].
    pub fn reach_one_of(&self, id: &str, phases: &[&str]) -> Result<Value> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            // By HTTP, not by the command: a phase may be over before the command has started.
            let (code, status) = self.a.rest("GET", &format!("/v1/migrations/{id}"), &Value::Null)?;
            if code != 200 || status["outcome"]["state"] != "running" {
                bail!("expected phase {phases:?} of a migration at work, found {status}");
            }
            if status["phase"].as_str().is_some_and(|phase| phases.contains(&phase)) {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let (a, b) = (self.a.log(), self.b.log());
                bail!("expected phase {phases:?} within {STEP_TIMEOUT:?}, found {status}\na: {a}\nb: {b}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the guest runs at the destination. The phase `fetch` may be too short for [`Scene::reach`].
    ///
    /// # Errors
    /// When the migration fails or takes longer than [`STEP_TIMEOUT`].
    pub fn handed_over(&self, id: &str) -> Result<()> {
        let deadline = Instant::now() + STEP_TIMEOUT;
        loop {
            let (code, status) = self.a.rest("GET", &format!("/v1/migrations/{id}"), &Value::Null)?;
            let (phase, outcome) = (&status["phase"], &status["outcome"]["state"]);
            if code == 200
                && (outcome == "done"
                    || outcome == "running"
                        && ["fetch", "disks-after", "finish"].iter().any(|one| phase == one))
            {
                return Ok(());
            }
            if code != 200 || outcome != "running" || Instant::now() > deadline {
                bail!(
                    "expected a guest that runs at the destination within {STEP_TIMEOUT:?}, found {status}"
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Bytes allocated by the guest's RAM file at `node`.
    ///
    /// # Errors
    /// When there is no RAM file.
    pub fn ram_bytes_at(&self, node: &Node) -> Result<u64> {
        let files = beacon::ram_files(&node.memory());
        let file = files.first().with_context(|| format!("a RAM file at {}", node.name()))?;
        Ok(std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(file)?) * 512)
    }

    /// The guest's beacon at `node`.
    ///
    /// # Errors
    /// When the guest is not there.
    pub fn beacon_at(&self, node: &Node) -> Result<Beacon> {
        let vm = node.vm(&self.name)?;
        self.page(&vm)?.read().with_context(|| format!("no beacon of the guest at node {}", node.name()))
    }

    /// The page of the beacon at `node`.
    ///
    /// # Errors
    /// When the guest is not there.
    pub fn beacon_page_at(&self, node: &Node) -> Result<BeaconPage> {
        self.page(&node.vm(&self.name)?)
    }

    fn page(&self, vm: &Vm) -> Result<BeaconPage> {
        let (number, offset) = self.beacon;
        let path = vm.ram.get(number).context("the VM has fewer RAM files")?.path.as_path();
        let file = File::open(path).with_context(|| format!("could not open {}", path.display()))?;
        Ok(BeaconPage::at(file, offset))
    }

    /// Waits until the guest works at `node`: its virtual CPUs run, and it has found no error.
    ///
    /// # Errors
    /// When it does not work in time, or has found an error.
    pub fn alive_at(&self, node: &Node) -> Result<()> {
        self.works_at(node, 0)
    }

    /// As [`Scene::alive_at`], but waits until the guest has checked each of its pages once more.
    ///
    /// # Errors
    /// As [`Scene::alive_at`].
    pub fn sound_at(&self, node: &Node) -> Result<()> {
        self.works_at(node, u64::from(self.config.working_pages()) + u64::from(self.config.cold_pages()))
    }

    fn works_at(&self, node: &Node, pages: u64) -> Result<()> {
        let vm = node.vm(&self.name)?;
        if vm.status != "running" {
            bail!("expected a running guest at node {}, found {}", node.name(), vm.status);
        }
        let page = self.page(&vm)?;
        let deadline = Instant::now() + STEP_TIMEOUT;
        let mut first: Option<Beacon> = None;
        loop {
            if let Some(now) = page.read() {
                if now.errors != 0 {
                    bail!("the guest at node {} found wrong memory: {}", node.name(), now.verdict());
                }
                let before = first.get_or_insert_with(|| now.clone());
                let worked = self.config.rate == Rate::PagesPerSecond(0) || now.work > before.work + 500;
                if worked && now.beats > before.beats + 50 && now.verified > before.verified + pages {
                    break;
                }
            }
            if Instant::now() > deadline {
                let now = page.read();
                bail!(
                    "the guest at node {} stands still: {first:?}, later {now:?}; QEMU {:?}, console:\n{}\ndaemon:\n{}",
                    node.name(),
                    qemu_in(node.folder()),
                    vm.console(),
                    node.log()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        match failures(&vm.console()).as_slice() {
            [] => Ok(()),
            told => bail!("the guest at node {} told of {told:?}", node.name()),
        }
    }

    /// As [`gone_from`].
    ///
    /// # Errors
    /// When something is left.
    pub fn gone_from(&self, node: &Node) -> Result<()> {
        gone_from(node)
    }

    /// Checks the state after a migration that failed: the guest works at `a`, `b` has nothing of it, and no migration is
    /// running.
    ///
    /// # Errors
    /// When one of these is not so.
    pub fn unharmed(&self) -> Result<()> {
        self.alive_at(&self.a)?;
        self.gone_from(&self.b)?;
        let status = self.a.ask(&["status"])?;
        match status["migrations"].as_array() {
            Some(list) if list.is_empty() => Ok(()),
            _ => bail!("a migration is still at work: {status}"),
        }
    }

    /// Moves the guest to `b` without injected faults, and lets it check all its memory there.
    ///
    /// # Errors
    /// When the migration fails, or the guest finds an error.
    pub fn moves_now(&self) -> Result<()> {
        let end = self.migrate_to("b", &["--mode", "hybrid"])?;
        if end.code != 0 {
            bail!("the next migration ended with {}: {} {}", end.code, end.answer, end.said);
        }
        self.arrived()
    }

    /// Checks the state after a migration that succeeded: the guest works at `b`, its memory is correct, and `a` has nothing of it.
    ///
    /// # Errors
    /// When one of these is not so.
    pub fn arrived(&self) -> Result<()> {
        self.sound_at(&self.b)?;
        self.gone_from(&self.a)?;
        // The source learns of the end before the destination has cleaned up.
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let maps = page_maps(self.b.folder());
            if maps.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("page maps of a finished migration are left: {maps:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Waits until `node` has nothing of any guest: no QEMU, no memory, no page map, no record.
///
/// # Errors
/// When something is left.
pub fn gone_from(node: &Node) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let qemu = qemu_in(node.folder());
        let ram = beacon::ram_files(&node.memory());
        let maps = page_maps(node.folder());
        let vms = node.vms()?;
        if qemu.is_none() && ram.is_empty() && maps.is_empty() && vms.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!(
                "left at node {}: QEMU {qemu:?}, memory {ram:?}, page maps {maps:?}, VMs {vms:?}\n{}",
                node.name(),
                node.log()
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A rule for the device state of the migration whose connections begin at `first`.
#[must_use]
pub const fn device_state(first: u64, fault: Fault) -> Rule {
    Rule { connection: Some(first + DEVICE_STATE), direction: Direction::Forth, after: 8 << 10, fault }
}

/// Runs `vmove --json` on `node` and waits for its end.
///
/// # Errors
/// When it does not end in time.
pub fn vmove(node: &Node, arguments: &[&str]) -> Result<End> {
    let mut child = node.vmove_in_background(&[&["--json"], arguments].concat())?;
    let out = child.stdout.take().context("its output")?;
    // Who follows is told more than fits into a pipe.
    let printed = std::thread::spawn(move || std::io::read_to_string(out));
    let deadline = Instant::now() + STEP_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            bail!(
                "vmove {} did not end within {STEP_TIMEOUT:?}; node {}: {}",
                arguments.join(" "),
                node.name(),
                node.log()
            );
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let mut said = String::new();
    let printed = printed.join().map_err(|_| anyhow::anyhow!("its output was not read"))??;
    child.stderr.take().context("its messages")?.read_to_string(&mut said)?;
    let last = serde_json::Deserializer::from_str(&printed).into_iter::<Value>().last();
    let answer = last.transpose()?.unwrap_or(Value::Null);
    Ok(End { code: status.code().unwrap_or(-1), answer, said })
}

/// Page maps below `folder`.
#[must_use]
pub fn page_maps(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries.flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                _ if path.extension().is_some_and(|e| e == "pages") => found.push(path),
                _ => {}
            }
        }
    }
    found
}
