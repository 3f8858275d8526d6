//! The parent's node serves frozen images, read-only, to the hosts that do not see them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::disk::{Disk, Exported};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use vmove_node::files::write_atomically;
use vmove_node::image_server::{self, Image, end_in, lives, start};
use vmove_node::peer::{BoxedStream, PeerTarget};
use vmove_node::peer::{Hello, SessionId, Status, Token};
use vmove_qmp::confine::Confinement;

use super::{RECORD, ServedImages, join, remove};
use crate::engine::ForkEngine;
use crate::engine::error::ImageError;
use crate::engine::message::{ToHost, ToParent};
use vmove_types::problem::chain;

/// How often hosts are asked whether they still read, and servers looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(3);

/// What is served to whom, on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExportRecord {
    pub session: SessionId,
    token: Token,
    /// Id of the fork, and its parent.
    fork: String,
    parent: String,
    program: PathBuf,
    pub images: Vec<Image>,
    /// The rights of the servers: those of the parent's QEMU, which reads the images, too.
    #[serde(default)]
    confinement: Confinement,
    /// Hosts that may still read.
    hosts: Vec<PeerTarget>,
    /// Process ids of the servers, with their start times (written with the boot), in the order of the images.
    #[serde(with = "vmove_node::boot::processes")]
    servers: Vec<(u32, u64)>,
}

/// Images under way to other hosts.
#[derive(Debug)]
pub(super) struct Export {
    pub record: ExportRecord,
    /// The fork has ended: its hosts know whether they read. Until then they are not asked.
    settled: bool,
}

/// What an export begins with.
#[derive(Debug)]
pub struct Wanted<'a> {
    pub session: SessionId,
    pub token: Token,
    pub fork: &'a str,
    pub parent: &'a str,
    pub program: PathBuf,
    pub disks: &'a [Disk],
    pub confinement: Confinement,
    pub hosts: Vec<PeerTarget>,
}

/// The server of images that belongs to a QEMU: beside it, or on the `PATH`. Or what to install.
pub fn find_server(qemu: &str, node: &str) -> Result<PathBuf, ImageError> {
    image_server::find(qemu)
        .ok_or_else(|| ImageError::NoServer { node: node.to_owned(), program: image_server::PROGRAM })
}

impl ServedImages {
    /// Begins to serve the images of a fork.
    pub async fn export(&self, wanted: Wanted<'_>) -> Result<(), ImageError> {
        let Wanted { session, token, fork, parent, program, disks, confinement, hosts } = wanted;
        let image = |disk: &Disk| Image { file: disk.file.clone(), format: disk.format.clone() };
        let (fork, parent, images) = (fork.to_owned(), parent.to_owned(), disks.iter().map(image).collect());
        let mut record = ExportRecord {
            session,
            token,
            fork,
            parent,
            program,
            images,
            confinement,
            hosts,
            servers: Vec::new(),
        };
        let dir = self.folder("out", session);
        let opened = || {
            let passed = super::let_pass(&record.confinement, &dir);
            passed
                .and_then(|()| record.confinement.open_folder(&dir))
                .map_err(ImageError::io("given to QEMU", &dir))
        };
        let written = prepare(&dir).and_then(|()| record.write(&dir)).and_then(|()| opened());
        if let Err(error) = written {
            remove(&dir);
            return Err(error);
        }
        if let Err(error) = record.serve(&dir).await {
            end(&dir).await;
            return Err(error);
        }
        tracing::info!(fork = %record.fork, parent = %record.parent, images = record.images.len(), "images are served to other hosts");
        self.lock().exports.insert(session, Export { record, settled: false });
        Ok(())
    }

    /// The fork has ended at all hosts.
    pub fn settle(&self, session: SessionId) {
        if let Some(export) = self.lock().exports.get_mut(&session) {
            export.settled = true;
        }
    }

    /// The same for whatever is served for a fork, by its id: who followed its hosts may have broken off.
    pub fn settle_fork(&self, fork: &str) {
        for export in self.lock().exports.values_mut().filter(|export| export.record.fork == fork) {
            export.settled = true;
        }
    }

    /// Takes up what an earlier life served.
    pub(super) fn find_exports(&self) {
        for record in self.left::<ExportRecord>("out") {
            self.lock().exports.insert(record.session, Export { record, settled: true });
        }
    }

    /// Starts servers again that have ended meanwhile, all at the same time.
    async fn start_servers_again(self: &Arc<Self>) {
        let records: Vec<ExportRecord> = self.lock().exports.values().map(|e| e.record.clone()).collect();
        let mut starting = JoinSet::new();
        for record in records {
            let images = Arc::clone(self);
            starting.spawn(async move { images.start_again(record).await });
        }
        while starting.join_next().await.is_some() {}
    }

    async fn start_again(&self, mut record: ExportRecord) {
        if record.all_served() {
            return;
        }
        let dir = self.folder("out", record.session);
        // One that was started and not yet written down would be in the way of another.
        end_in(&dir).await;
        record.servers.clear();
        record.serve_again(&dir).await;
        if let Some(export) = self.lock().exports.get_mut(&record.session) {
            export.record = record;
        }
    }

    /// Whether a connection for a disk is one of a fork whose images are served here.
    pub fn wants(&self, hello: &Hello) -> Result<(), (Status, String)> {
        let state = self.lock();
        let known = state.exports.get(&hello.session).filter(|export| export.record.token == hello.token);
        match known {
            Some(export) if usize::from(hello.index) < export.record.images.len() => Ok(()),
            _ => Err((Status::UnknownSession, format!("no images are served for {}", hello.session))),
        }
    }

    /// Joins a connection that [`wants`](Self::wants) let in to its server.
    pub async fn serve(&self, hello: Hello, stream: BoxedStream) {
        let socket = Exported::socket(&self.folder("out", hello.session), usize::from(hello.index));
        match UnixStream::connect(&socket).await {
            Ok(server) => join(stream, server).await,
            Err(error) => {
                tracing::warn!(node = %hello.node, socket = %socket.display(), %error, "an image is not served");
            }
        }
    }
}

fn prepare(dir: &Path) -> Result<(), ImageError> {
    remove(dir);
    std::fs::create_dir_all(dir.parent().unwrap_or(dir)).map_err(ImageError::io("made", dir))?;
    vmove_node::files::make_private_dir(dir).map_err(ImageError::io("made", dir))
}

/// Ends the servers of an export, and removes what is left of it.
async fn end(dir: &Path) {
    end_in(dir).await;
    remove(dir);
}

impl ExportRecord {
    fn write(&self, dir: &Path) -> Result<(), ImageError> {
        let path = dir.join(RECORD);
        write_atomically(&path, self).map_err(ImageError::io("written", &path))
    }

    /// Whether each image has a server that lives.
    fn all_served(&self) -> bool {
        self.servers.len() == self.images.len() && self.servers.iter().all(|server| lives(*server))
    }

    /// As [`serve`](Self::serve), for servers that have ended. If it fails, it is tried again at the next look.
    async fn serve_again(&mut self, dir: &Path) {
        if let Err(error) = self.serve(dir).await {
            tracing::error!(fork = %self.fork, why = %chain(&error), "images cannot be served again: trying on");
        }
    }

    /// Starts a server for each image that has none.
    async fn serve(&mut self, dir: &Path) -> Result<(), ImageError> {
        for (number, image) in self.images.iter().enumerate() {
            if self.servers.get(number).is_some_and(|server| lives(*server)) {
                continue;
            }
            let socket = Exported::socket(dir, number);
            let server = start(&self.program, image, (dir, &socket), &self.confinement).await?;
            if number < self.servers.len() {
                self.servers[number] = server;
            } else {
                self.servers.push(server);
            }
        }
        self.write(dir)
    }
}

impl ForkEngine {
    /// Looks after what is served here: servers that have ended are started again, and end when no host reads. Never returns.
    pub(super) async fn serve_exports(self: Arc<Self>) {
        self.images.start_servers_again().await;
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let exports: Vec<(ExportRecord, bool)> = {
                let state = self.images.lock();
                state.exports.values().map(|e| (e.record.clone(), e.settled)).collect()
            };
            let mut looks = JoinSet::new();
            for (record, settled) in exports {
                let engine = self.clone();
                looks.spawn(async move { engine.look_at(record, settled).await });
            }
            while looks.join_next().await.is_some() {}
        }
    }

    /// Those of its hosts that may still read.
    async fn readers(&self, record: &ExportRecord) -> Vec<PeerTarget> {
        let mut reading = Vec::new();
        for host in &record.hosts {
            match self.peers.ask(host, ToHost::Reads(record.session)).await {
                Ok(ToParent::Reads(false)) => {}
                Ok(_) => reading.push(host.clone()),
                Err(error) => {
                    tracing::debug!(node = %host, why = %error.message(), "a node is not asked whether it reads images");
                    reading.push(host.clone());
                }
            }
        }
        reading
    }

    async fn look_at(&self, mut record: ExportRecord, settled: bool) {
        let before = record.clone();
        if settled {
            record.hosts = self.readers(&before).await;
        }
        let (images, dir) = (&self.images, self.images.folder("out", record.session));
        if record.hosts.is_empty() {
            images.lock().exports.remove(&record.session);
            end(&dir).await;
            return tracing::info!(fork = %record.fork, parent = %record.parent, "no host reads its images any more");
        }
        if !record.all_served() {
            tracing::warn!(fork = %record.fork, "a server of images has ended: starting it again");
            record.serve_again(&dir).await;
        } else if record.hosts != before.hosts
            && let Err(error) = record.write(&dir)
        {
            tracing::warn!(fork = %record.fork, why = %chain(&error), "which hosts read images is not written down");
        }
        if let Some(export) = images.lock().exports.get_mut(&record.session) {
            export.record = record;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_served_for_a_fork_is_settled_by_its_id() {
        let dir = tempfile::tempdir().unwrap();
        let images = ServedImages::new(dir.path(), Duration::from_secs(1), Confinement::default());
        let export = |fork: &str| Export {
            record: ExportRecord {
                session: SessionId::random(),
                token: Token::random(),
                fork: fork.to_owned(),
                parent: "web".to_owned(),
                program: image_server::PROGRAM.into(),
                images: Vec::new(),
                confinement: Confinement::default(),
                hosts: Vec::new(),
                servers: Vec::new(),
            },
            settled: false,
        };
        for fork in ["one", "other"] {
            let export = export(fork);
            images.lock().exports.insert(export.record.session, export);
        }
        images.settle_fork("one");
        assert!(images.lock().exports.values().all(|export| export.settled == (export.record.fork == "one")));
    }
}
