//! Daemons in network namespaces of their own, joined by a bridge, one of which has a guest that is to be forked to the others.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmove_guest::config::{Config, Rate};

use crate::daemon::{Node, NodeOptions};
use crate::disks;
use crate::forks::{PORT, Parent, template_files};
use crate::guest::{Accel, Guest, VIRTIO};
use crate::networks::{self, Networks};
use crate::payload::{self, KvmPages};
use crate::pki::Pki;
use crate::places::{self, Qemu};
use crate::process::Guarded;
use crate::sandbox::Sandbox;
use crate::scene::{self, NAME, memory_mib};

/// A guest that works little.
#[must_use]
pub fn light() -> Config {
    Config {
        working_set_mib: 16,
        cold_mib: 16,
        rate: Rate::PagesPerSecond(500),
        verify: 4_000,
        ..Config::default()
    }
}

/// Daemons n1, n2, ... of which n1 has a guest.
#[derive(Debug)]
pub struct Fleet {
    /// The daemons.
    pub nodes: Vec<Node>,
    /// The guest of n1.
    pub parent: Parent,
    /// What joins them.
    pub networks: Networks,
    /// Folder of the guest's disk.
    pub images: PathBuf,
    /// What node 2 has instead of that folder.
    pub unseen: Option<Unseen>,
    _pki: Option<Pki>,
    // Last: it ends whatever is left.
    _sandbox: Sandbox,
}

/// What differs from a plain fleet.
#[derive(Debug, Default)]
pub struct Setup {
    /// Of the guest.
    pub config: Option<Config>,
    /// TLS between nodes.
    pub tls: bool,
    /// Each node finds a QEMU of its own by this name; node 2 another version.
    pub odd_qemu: bool,
    /// The guest's disk.
    pub disk: Option<SetupDisk>,
    /// Node 2 does not see the folder of images.
    pub unseen: bool,
    /// The `PATH` of node 1.
    pub path: Option<String>,
    /// The guest has the port over which it forks itself.
    pub port: bool,
    /// The guest is the payload, and runs so.
    pub payload: Option<Accel>,
}

/// A disk: the format of its image, and how it is attached.
#[derive(Debug, Clone, Copy)]
pub struct SetupDisk {
    /// `raw` or `qcow2`.
    pub format: &'static str,
    /// QEMU's arguments.
    pub attach: fn(&Path) -> Vec<String>,
}

/// A mount namespace in which a folder is another one, empty at first.
#[derive(Debug)]
pub struct Unseen {
    holder: Guarded,
    folder: PathBuf,
}

impl Unseen {
    fn new(sandbox: &Sandbox, folder: &Path) -> anyhow::Result<Self> {
        let there = sandbox.path().join("mounted");
        let script = format!(
            "mount -t tmpfs unseen '{}' && touch '{}' && exec sleep infinity",
            folder.display(),
            there.display()
        );
        let holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .spawn()?;
        let mut unseen = Self { holder: holder.into(), folder: folder.to_owned() };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !there.exists() {
            anyhow::ensure!(unseen.holder.ended()?.is_none(), "no mount namespace can be made");
            anyhow::ensure!(Instant::now() < deadline, "nothing is mounted");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(unseen)
    }

    fn namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/mnt", self.holder.pid()).into()
    }

    /// Puts a file into it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn put(&self, name: &str, from: &Path) -> anyhow::Result<()> {
        let write = format!("cat >'{}'", self.folder.join(name).display());
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount={}", self.namespace().display())).args(["sh", "-c", &write]);
        let done = command.stdin(std::fs::File::open(from)?).status()?;
        anyhow::ensure!(done.success(), "{write} ended with {done}");
        Ok(())
    }
}

const ODD: &str = "qemu-system-of-this-node";

/// Fails when something is missing that every fleet needs: what a scene needs, and network namespaces.
///
/// # Errors
/// What is missing: tests are skipped then.
pub fn ready() -> anyhow::Result<()> {
    scene::ready()?;
    networks::possible()
}

/// Starts one; `fork` is the `[fork]` table of each node, by number.
///
/// # Panics
/// If anything does not start: that is no reason to skip a test.
pub fn fleet_with(count: u8, setup: &Setup, fork: impl Fn(u8) -> String) -> Fleet {
    start(count, setup, fork).unwrap_or_else(|error| panic!("the fleet does not start: {error:#}"))
}

/// As [`fleet_with`].
///
/// # Errors
/// What does not start.
pub fn start(count: u8, setup: &Setup, fork: impl Fn(u8) -> String) -> anyhow::Result<Fleet> {
    let config = setup.config.clone().unwrap_or_else(light);
    let networks = Networks::new(count)?;
    let sandbox = Sandbox::new()?;
    let addresses: Vec<_> = (1..=count).map(|n| networks.address(n).ip()).collect();
    let pki = setup.tls.then(|| Pki::new(&addresses)).transpose()?;
    let vmoved = places::product("vmoved")?;
    let peers: Vec<_> = (1..=count).map(|n| (format!("n{n}"), networks.address(n))).collect();
    let images = sandbox.folder("images")?;
    let unseen = setup.unseen.then(|| Unseen::new(&sandbox, &images)).transpose()?;
    let start = |number: u8| {
        let mounts = unseen.as_ref().filter(|_| number == 2).map(Unseen::namespace);
        let path = setup.path.iter().filter(|_| number == 1).map(|path| ("PATH".to_owned(), path.clone()));
        let odd = setup.odd_qemu.then(|| path_of(&sandbox, number)).transpose()?;
        let options = NodeOptions {
            program: Some(networks.wrapper(sandbox.path(), number, &vmoved, mounts.as_deref())?),
            listen: Some(networks.address(number)),
            peers: peers.clone(),
            config: format!("[fork]\n{}", fork(number)),
            extra: pki.as_ref().map(Pki::flags).unwrap_or_default(),
            environment: odd.into_iter().chain(path).collect(),
            ..NodeOptions::default()
        };
        Node::start(&sandbox, &format!("n{number}"), options)
    };
    let nodes: Vec<Node> = (1..=count).map(start).collect::<anyhow::Result<_>>()?;
    let mut guest = match setup.payload {
        Some(accel) => payload::guest(sandbox.path(), accel, &config, KvmPages::All)?,
        None => Guest::new(memory_mib(&config), config)?,
    };
    if setup.odd_qemu {
        guest.qemu = ODD.into();
    }
    if let Some(disk) = setup.disk {
        let image = images.join("disk");
        disks::create(&image, disk.format)?;
        guest.modules = VIRTIO.into_iter().chain(["virtio_blk"]).collect();
        guest.extra = (disk.attach)(&image);
        guest.disk = Some(image);
    }
    if setup.port {
        guest.modules = VIRTIO.into_iter().chain(["virtio_console"]).collect();
        guest.extra = PORT.map(str::to_owned).to_vec();
    }
    let parent = Parent::start(&nodes[0], NAME, "thp", guest)?;
    Ok(Fleet { nodes, parent, networks, images, unseen, _pki: pki, _sandbox: sandbox })
}

/// A plain one.
///
/// # Panics
/// As [`fleet_with`].
pub fn fleet(count: u8, fork: impl Fn(u8) -> String) -> Fleet {
    fleet_with(count, &Setup::default(), fork)
}

/// A `PATH` on which node `number` finds its QEMU.
fn path_of(sandbox: &Sandbox, number: u8) -> anyhow::Result<(String, String)> {
    let qemu = if number == 2 { Qemu::V7_2.path()? } else { Qemu::V10_0.path()? };
    let folder = sandbox.folder(&format!("bin-{number}"))?;
    let program = folder.join(ODD);
    std::fs::write(&program, format!("#!/bin/sh\nexec '{}' \"$@\"\n", qemu.display()))?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH").unwrap_or_default();
    Ok(("PATH".to_owned(), format!("{}:{path}", folder.display())))
}

/// An empty `[fork]` table.
#[must_use]
pub fn plain(_: u8) -> String {
    String::new()
}

impl Fleet {
    /// A node by its name.
    ///
    /// # Panics
    /// Without one.
    #[must_use]
    pub fn node(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name() == name).expect("a node of the fleet")
    }

    /// Every child of an answer is on the node that it names, runs there, and finds its memory right.
    ///
    /// # Panics
    /// Otherwise.
    pub fn sound(&self, answer: &Value) {
        self.parent.all_sound(&self.family(answer)).unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// The children of an answer, each with its node, and their parent.
    ///
    /// # Panics
    /// When a child has an error.
    pub fn family<'a>(&'a self, answer: &'a Value) -> Vec<(&'a Node, &'a str)> {
        let child = |child: &'a Value| {
            assert!(child["error"].is_null(), "{child}");
            let (node, name) = (child["node"].as_str(), child["name"].as_str());
            (self.node(node.expect("a node")), name.expect("a name"))
        };
        let children = answer["children"].as_array().expect("children").iter().map(child);
        children.chain([(&self.nodes[0], NAME)]).collect()
    }

    /// What a fork leaves behind: no template, no record, on no node. A host tidies up after it has answered.
    ///
    /// # Panics
    /// Otherwise.
    pub fn clean(&self) {
        for node in &self.nodes {
            let end = Instant::now() + Duration::from_secs(10);
            while Instant::now() < end && !(template_files(node).is_empty() && records(node).is_empty()) {
                std::thread::sleep(Duration::from_millis(50));
            }
            assert_eq!(template_files(node), Vec::<std::path::PathBuf>::new(), "{}", node.name());
            assert_eq!(records(node), Vec::<String>::new(), "{}", node.name());
        }
    }
}

/// Journals and records of forks at a node.
fn records(node: &Node) -> Vec<String> {
    let forks = node.folder().join("state/forks");
    let files = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let paths = entries.map(|e| e.path()).filter(|p| p.is_file());
        paths.map(|p| p.display().to_string()).collect()
    };
    [files(&forks), files(&forks.join("hosted"))].concat()
}

/// What an answer says of a host.
///
/// # Panics
/// If that is nothing.
#[must_use]
pub fn host<'a>(answer: &'a Value, node: &str) -> &'a Value {
    host_in(answer, node).unwrap_or_else(|| panic!("{node} in {answer}"))
}

/// What an answer, or a progress, says of a host, if anything yet.
#[must_use]
pub fn host_in<'a>(answer: &'a Value, node: &str) -> Option<&'a Value> {
    answer["hosts"].as_array()?.iter().find(|host| host["node"] == node)
}

/// Waits for a minute at most.
///
/// # Panics
/// When it is not so then.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Daemons `n1`, `n2` and so on, one in each of these network namespaces. `config`: what else is in the configuration of each, by its number.
///
/// # Errors
/// One does not start.
pub fn daemons(
    sandbox: &Sandbox,
    networks: &Networks,
    config: impl Fn(u8) -> String,
) -> anyhow::Result<Vec<Node>> {
    let vmoved = places::product("vmoved")?;
    let start = |number| {
        let options = NodeOptions {
            program: Some(networks.wrapper(sandbox.path(), number, &vmoved, None)?),
            listen: Some(networks.address(number)),
            config: config(number),
            ..NodeOptions::default()
        };
        Node::start(sandbox, &format!("n{number}"), options)
    };
    networks.numbers().map(start).collect()
}

/// Kills the daemon of a node and its QEMUs, as if the host had lost its power.
///
/// # Panics
/// A QEMU cannot be killed.
pub fn lose(node: &mut Node) {
    node.crash();
    for pid in qemu_pids(node) {
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is killed");
    }
}

/// QEMUs that work in a folder of this node.
///
/// # Panics
/// Without `/proc`.
#[must_use]
pub fn qemus(node: &Node) -> usize {
    qemu_pids(node).len()
}

/// Their process ids.
///
/// # Panics
/// Without `/proc`.
#[must_use]
pub fn qemu_pids(node: &Node) -> BTreeSet<i32> {
    let run = node.folder().join("run");
    let entries = std::fs::read_dir("/proc").expect("it is there").flatten();
    entries
        .filter(|e| std::fs::read_link(e.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&run)))
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .collect()
}
