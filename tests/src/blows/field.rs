//! Two daemons that reach each other only through proxies, the folders that can be filled, and one guest.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use vmove_guest::beacon::Beacon;

use crate::beacon::{BeaconPage, ram_files};
use crate::daemon::{Node, NodeOptions};
use crate::fleet::{light, qemu_pids};
use crate::forks::Parent;
use crate::guest::{Accel, Guest};
use crate::payload::{self, KvmPages};
use crate::places;
use crate::proxy::Proxy;
use crate::sandbox::Sandbox;
use crate::scene::{NAME, memory_mib};

/// Size of a state folder.
const STATE_BYTES: u64 = 16 << 20;

/// See the [module](self).
#[derive(Debug)]
pub struct Field {
    /// The nodes `a` and `b`.
    pub nodes: [Node; 2],
    /// The only way to the node of the same number.
    pub links: [Proxy; 2],
    /// Number of the node that has the guest, between steps.
    pub home: usize,
    /// The guest.
    pub guest: Parent,
    /// Mount points when both daemons had started.
    pub mounts: Vec<PathBuf>,
    /// Open descriptors of a daemon at rest, by its process id and whether it has the guest.
    pub descriptors: HashMap<(i32, bool), usize>,
    booted: PathBuf,
    kind: Kind,
    // Last: it ends whatever is left.
    sandbox: Sandbox,
}

/// Which guest moves to and fro. Each checks its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Linux, emulated.
    Linux,
    /// The [`payload`], under KVM.
    Kvm,
}

impl Field {
    /// Copies the logs of both daemons into this folder, which it makes.
    ///
    /// # Errors
    /// When it cannot.
    pub fn copy_logs(&self, folder: &Path) -> io::Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        for node in &self.nodes {
            std::fs::copy(node.folder().join("vmoved.log"), folder.join(format!("{}.log", node.name())))?;
        }
        Ok(folder.to_owned())
    }

    /// Starts the daemons, and the guest at `a`. Linux boots only if none is in the folder `booted` yet.
    ///
    /// # Errors
    /// What does not start.
    pub fn start(booted: &Path, kind: Kind) -> Result<Self> {
        let sandbox = Sandbox::new()?;
        let addresses = [vmove_skip::free_port(), vmove_skip::free_port()];
        let links = [Proxy::start(addresses[0])?, Proxy::start(addresses[1])?];
        let path =
            places::path_with(Some(booted)).into_string().map_err(|path| anyhow!("{path:?} is no text"))?;
        let start = |name: &str, number: usize, peer: &str| {
            sandbox.mount_small(&format!("{name}/state"), STATE_BYTES)?;
            let options = NodeOptions {
                listen: Some(addresses[number]),
                peers: vec![(peer.to_owned(), links[1 - number].address())],
                environment: vec![("PATH".to_owned(), path.clone())],
                ..NodeOptions::default()
            };
            Node::start(&sandbox, name, options)
        };
        let nodes = [start("a", 0, "b")?, start("b", 1, "a")?];
        let guest = start_guest(booted, kind, &sandbox, &nodes[0])?;
        let mounts = sandbox.mounts();
        let descriptors = HashMap::new();
        Ok(Self {
            nodes,
            links,
            home: 0,
            guest,
            mounts,
            descriptors,
            booted: booted.to_owned(),
            kind,
            sandbox,
        })
    }

    /// Starts a guest in place of the one that was lost.
    ///
    /// # Errors
    /// When it does not start.
    pub fn begin_anew(&mut self) -> Result<()> {
        self.guest = start_guest(&self.booted, self.kind, &self.sandbox, &self.nodes[self.home])?;
        Ok(())
    }

    /// The node that has the guest at the beginning of a step.
    #[must_use]
    pub const fn source(&self) -> &Node {
        &self.nodes[self.home]
    }

    /// The other node.
    #[must_use]
    pub const fn destination(&self) -> &Node {
        &self.nodes[1 - self.home]
    }

    /// What leads from the source to the destination.
    #[must_use]
    pub const fn link(&self) -> &Proxy {
        &self.links[1 - self.home]
    }

    /// The folder of everything.
    #[must_use]
    pub const fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Keeps logs and journals when this is dropped.
    pub const fn keep(&mut self) {
        self.sandbox.keep();
    }

    /// The QEMUs of both nodes.
    #[must_use]
    pub fn qemus(&self) -> [Vec<i32>; 2] {
        [0, 1].map(|number| qemu_pids(&self.nodes[number]).into_iter().collect())
    }

    /// What the guest's RAM files show at each node. A fork makes its memory private: then they show an earlier state.
    #[must_use]
    pub fn beacons(&self) -> [Option<Beacon>; 2] {
        [0, 1].map(|number| shown(&self.nodes[number].memory(), self.guest.offset()))
    }

    /// Begins to watch the guest at both nodes.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn watch(&self) -> Result<Watch> {
        let folders = [self.nodes[0].memory(), self.nodes[1].memory()];
        let (offset, end) = (self.guest.offset(), Arc::new(AtomicBool::new(false)));
        let ended = Arc::clone(&end);
        let thread = std::thread::Builder::new().name("watch".into());
        let thread = thread.spawn(move || look(&folders, offset, &ended))?;
        Ok(Watch { end, thread: Some(thread) })
    }
}

fn start_guest(booted: &Path, kind: Kind, sandbox: &Sandbox, node: &Node) -> Result<Parent> {
    let guest = match kind {
        Kind::Linux => Guest::new(memory_mib(&light()), light())?,
        Kind::Kvm => payload::guest(sandbox.path(), Accel::Kvm, &payload::busy(), KvmPages::None)?,
    };
    Parent::start_from(booted, node, NAME, guest).context("the guest does not start")
}

fn shown(memory: &Path, offset: u64) -> Option<Beacon> {
    let path = ram_files(memory).into_iter().next()?;
    BeaconPage::at(File::open(path).ok()?, offset).read()
}

/// What a [`Watch`] has seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// The furthest that the guest came, in periods of its work.
    pub beats: u64,
    /// It went on at both nodes at once.
    pub doubled: bool,
}

/// Looks at the guest's RAM files until it is asked for what it has seen.
#[derive(Debug)]
pub struct Watch {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<Seen>>,
}

impl Watch {
    /// Ends it.
    #[must_use]
    pub fn seen(mut self) -> Seen {
        self.end.store(true, Ordering::SeqCst);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
    }
}

/// So many looks in sequence must find progress at both nodes: rounds that copy the beacon again and again are shorter.
const LOOKS_FOR_DOUBLED: u32 = 20;
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

fn look(folders: &[PathBuf; 2], offset: u64, ended: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    let (mut before, mut both) = ([0; 2], 0);
    while !ended.load(Ordering::SeqCst) {
        let now = [0, 1].map(|n| shown(&folders[n], offset).map_or(0, |beacon| beacon.beats));
        seen.beats = seen.beats.max(now[0]).max(now[1]);
        both = if now[0] > before[0] && now[1] > before[1] { both + 1 } else { 0 };
        seen.doubled |= both >= LOOKS_FOR_DOUBLED;
        before = now;
        std::thread::sleep(LOOK_INTERVAL);
    }
    seen
}
