//! Disks that follow their guest: once it is given up, its images here are only read, by the destination's QEMU.
//!
//! ```text
//! QEMU (destination) - vmoved ==== peer port ==== vmoved - qemu-nbd --read-only - image
//! ```
//!
//! A server is started only after the commit, and opens its image with QEMU's own locks: it cannot show what somebody writes. It needs no QEMU here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::task::JoinSet;
use vmove_node::image_server::{self, Image, PROGRAM, ServeError, Server};
use vmove_node::peer::{Hello, LinkError, PeerTarget, join_counted};
use vmove_node::record::VmRecord;
use vmove_qmp::CommandLine;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::disk::DiskReport;
use vmove_types::problem::chain;
use vmove_types::spec::MigrationSpec;
use vmove_types::time::Mono;

use super::disk_choice::Choice;
use crate::node::Node;
use crate::ownership::SourceState;
use crate::records::{ServedDisk, SourceRecord};

/// Until a connection that has ended is dialled again.
const DIAL_INTERVAL: Duration = Duration::from_millis(250);
/// The same after one that could not be made.
const LONG_DIAL_INTERVAL: Duration = Duration::from_secs(1);

/// Images that the destination reads.
#[derive(Debug)]
pub(super) struct ServedDisks {
    /// Ends with this.
    serving: JoinSet<()>,
    /// The VM's folder: sockets are in it.
    dir: PathBuf,
    disks: Vec<ServedDisk>,
    /// Bytes on the wire for each, both ways, since this daemon was started.
    sent: Vec<Arc<AtomicU64>>,
    since: Mono,
}

/// One of them.
struct Serving {
    node: Arc<Node>,
    program: PathBuf,
    image: Image,
    dir: PathBuf,
    socket: PathBuf,
    to: PeerTarget,
    hello: Hello,
    sent: Arc<AtomicU64>,
}

/// Why a connection is not made.
#[derive(Debug, thiserror::Error)]
enum WireError {
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("The server of the image does not answer on {socket}")]
    Socket { socket: PathBuf, source: std::io::Error },
}

/// Why disks cannot follow a guest from here.
pub(super) fn blockers(node: &Node, vm: &VmRecord, spec: &MigrationSpec, disks: &Choice) -> Vec<Blocker> {
    if !spec.disks_after {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut refuse = |why: String| found.push(Blocker::new(BlockerCode::DiskNotMovable, why));
    if vm.libvirt.is_some() {
        refuse(format!(
            "{:?} is libvirt's, which decides how its disks move: leave out --disks-after",
            vm.name
        ));
    }
    if vm.adopted {
        // Its folder is closed to the user as whom images are served, who may have no rights to them either.
        refuse(format!(
            "{:?} was adopted, and {} may not be able to serve its images: leave out --disks-after",
            vm.name, node.config.node
        ));
    }
    if !vm.devices.is_empty() {
        refuse(format!(
            "{:?} owns devices of {}, and its disks cannot follow it then: leave out --disks-after",
            vm.name, node.config.node
        ));
    }
    if disks.told().is_empty() && disks.blockers.is_empty() {
        refuse(format!(
            "{:?} has no disk that it can write, so none can follow it: leave out --disks-after",
            vm.name
        ));
    }
    if program(vm).is_none() {
        refuse(format!(
            "{} would have to serve the images, and {PROGRAM} is not installed there: install it (package qemu-utils of Debian and Ubuntu, qemu-img of Fedora and RHEL), or leave out --disks-after",
            node.config.node
        ));
    }
    let line = CommandLine::parse(vm.command_line.iter().map(Into::into).collect());
    if let Ok(Some(option)) = line.and_then(|line| line.gives_up_root()) {
        refuse(format!(
            "a QEMU whose disks follow connects anew to sockets of vmoved, which it cannot once it has given up root by {option}: start the guest without that, or leave out --disks-after"
        ));
    }
    found
}

fn program(vm: &VmRecord) -> Option<PathBuf> {
    image_server::find(vm.command_line.first().map_or("", String::as_str))
}

impl ServedDisks {
    /// Serves the images of a guest that is given up. Nothing if none of its disks follows. `hello`: of the connection of each disk. `anew`: an earlier
    /// process of this daemon may have done so.
    pub(super) fn begin(
        node: &Arc<Node>,
        record: &SourceRecord,
        hello: impl Fn(u8) -> Hello,
        anew: bool,
    ) -> Option<Self> {
        if record.after.is_empty() || record.state != SourceState::Committed {
            return None;
        }
        let dir = record.vm.vm_dir.clone();
        let mut all = Vec::new();
        for (number, disk) in record.after.iter().enumerate() {
            let index = u8::try_from(number).unwrap_or(u8::MAX);
            all.push(Serving {
                node: Arc::clone(node),
                // It was there when the migration began.
                program: program(&record.vm).unwrap_or_else(|| PROGRAM.into()),
                image: Image { file: disk.path.clone(), format: disk.told.format.clone() },
                dir: dir.clone(),
                socket: dir.join(format!("vmove-served{number}.sock")),
                to: record.to.clone(),
                hello: hello(index),
                sent: Arc::default(),
            });
        }
        let sent = all.iter().map(|serving| Arc::clone(&serving.sent)).collect();
        let mut serving = JoinSet::new();
        let left = dir.clone();
        serving.spawn(async move {
            if anew {
                // Their connections ended with the daemon that had started them.
                image_server::end_in(&left).await;
            }
            let mut each = JoinSet::new();
            for one in all {
                each.spawn(one.run());
            }
            while each.join_next().await.is_some() {}
        });
        Some(Self { serving, dir, disks: record.after.clone(), sent, since: Mono::now() })
    }

    /// Ends the servers: from here on nobody reads the images.
    pub(super) async fn end(mut self) {
        self.serving.shutdown().await;
        image_server::end_in(&self.dir).await;
        for number in 0..self.disks.len() {
            let _ = std::fs::remove_file(self.dir.join(format!("vmove-served{number}.sock")));
        }
    }

    /// What became of the disks.
    pub(super) fn reports(&self) -> Vec<DiskReport> {
        let report = |(disk, sent): (&ServedDisk, &Arc<AtomicU64>)| {
            let from = disk.path.to_string_lossy().into_owned();
            DiskReport {
                name: disk.told.name.clone(),
                to: disk.told.to.clone().unwrap_or_else(|| from.clone()),
                from,
                format: "qcow2".to_owned(),
                size_bytes: disk.told.size,
                allocated_bytes: disk.told.allocated,
                sent_bytes: sent.load(Ordering::Relaxed),
                copy_ms: Mono::now().ms_since(self.since),
                after: true,
                ..DiskReport::default()
            }
        };
        self.disks.iter().zip(&self.sent).map(report).collect()
    }
}

impl Serving {
    /// Has a connection at the destination that QEMU there may take, again and again.
    async fn run(self) {
        let (mut server, mut failed) = (None, None);
        loop {
            match self.wire(&mut server).await {
                Ok(()) => failed = None,
                Err(error) => {
                    let why = chain(&error);
                    if failed.as_ref() != Some(&why) {
                        tracing::warn!(image = %self.image.file.display(), why, "an image does not reach the destination: trying again");
                    }
                    failed = Some(why);
                }
            }
            tokio::time::sleep(if failed.is_some() { LONG_DIAL_INTERVAL } else { DIAL_INTERVAL }).await;
        }
    }

    /// Makes a connection, and carries it until it ends.
    async fn wire(&self, server: &mut Option<Server>) -> Result<(), WireError> {
        if !server.is_some_and(image_server::lives) {
            *server = Some(self.start().await?);
        }
        let wire = self.node.config.dialer.stream(&self.to, &self.hello).await?;
        let failed = |source| WireError::Socket { socket: self.socket.clone(), source };
        let image = UnixStream::connect(&self.socket).await.map_err(failed)?;
        join_counted(image, wire, &self.sent).await;
        Ok(())
    }

    async fn start(&self) -> Result<Server, ServeError> {
        let rights = &self.node.config.confinement;
        let at: (&Path, &Path) = (&self.dir, &self.socket);
        image_server::start(&self.program, &self.image, at, rights).await
    }
}
