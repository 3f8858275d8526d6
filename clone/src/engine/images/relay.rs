//! A host's sockets for images on the parent's node: what its children's QEMUs say there goes through the peer port.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::disk::Exported;
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use vmove_node::files::{read_json, write_atomically};
use vmove_node::peer::{BoxedStream, PeerTarget};
use vmove_node::peer::{Hello, LinkKind, SessionId, Token};
use vmove_qmp::confine::Confinement;

use super::{RECORD, ServedImages, join, remove};
use crate::engine::ForkEngine;
use crate::engine::error::ImageError;
use crate::engine::peers::Peers;
use vmove_node::blocking::run_blocking;
use vmove_types::problem::chain;

/// How soon the parent's node is dialled again, at first and later.
const DIAL_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often it is looked whether anybody still reads.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Images of another node, on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RelayRecord {
    session: SessionId,
    token: Token,
    /// Id of the fork, and its parent.
    fork: String,
    parent: String,
    /// The node that has the images.
    node: PeerTarget,
    /// How many there are.
    disks: usize,
}

/// Images of another node that somebody reads, or is about to. Sockets are listened on as long as this is not dropped.
#[derive(Debug)]
pub(super) struct Relay {
    record: RelayRecord,
    /// One for each socket; none as long as they cannot be listened on.
    tasks: Option<JoinSet<()>>,
    /// Children are being made.
    in_use: bool,
}

/// Says that children over images of another node are being made, until it is dropped.
#[derive(Debug)]
pub struct RelayInUse {
    images: Arc<ServedImages>,
    session: SessionId,
}

impl Drop for RelayInUse {
    fn drop(&mut self) {
        if let Some(relay) = self.images.lock().relays.get_mut(&self.session) {
            relay.in_use = false;
        }
    }
}

impl ServedImages {
    /// The sockets by which the images of a fork are reached, once [`Self::relay`] listens there.
    pub fn exported(&self, session: SessionId) -> Exported {
        Exported { folder: self.folder("in", session), patience: self.reconnect_s }
    }

    /// Whether anybody here reads images of this fork, or is about to. So it is as long as there is a record, even where that
    /// cannot be taken up: whoever asks ends the export for good otherwise.
    pub fn reads(&self, session: SessionId) -> bool {
        let known = self.lock().relays.contains_key(&session);
        known || self.folder("in", session).join(RECORD).try_exists().unwrap_or(true)
    }

    /// Folders of relays that are not known, since they could not be taken up.
    fn unknown(&self) -> Vec<PathBuf> {
        let folders = self.folders("in");
        // After the list: a relay is known before it has its folder.
        let known: Vec<PathBuf> =
            self.lock().relays.keys().map(|session| self.folder("in", *session)).collect();
        folders.into_iter().filter(|dir| !known.contains(dir)).collect()
    }
}

/// The node that has the images of a fork, and how it is greeted for one of them.
#[derive(Debug, Clone)]
struct Server {
    peers: Arc<Peers>,
    node: PeerTarget,
    hello: Hello,
}

impl Server {
    async fn accept(self, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((reader, _)) => {
                    let server = self.clone();
                    tokio::spawn(async move { server.carry(reader).await });
                }
                Err(error) => {
                    tracing::error!(%error, "could not accept a connection for a disk");
                    // Out of descriptors, most likely: trying again at once would only spin.
                    tokio::time::sleep(DIAL_PAUSES.0).await;
                }
            }
        }
    }

    /// Joins a QEMU to its image. As long as the node that has it is not reached, the QEMU waits.
    async fn carry(&self, reader: UnixStream) {
        let reached = tokio::select! {
            reached = self.reach() => reached,
            () = gone(&reader) => return,
        };
        join(reader, reached).await;
    }

    async fn reach(&self) -> BoxedStream {
        let (mut pause, most) = DIAL_PAUSES;
        let node = &self.node;
        loop {
            match self.peers.dialer.stream(node, &self.hello).await {
                Ok(stream) => return stream,
                // Once: it may take long.
                Err(error) if (most / 2..most).contains(&pause) => {
                    tracing::warn!(%node, why = %chain(&error), "an image is not reached: its readers wait");
                }
                Err(error) => tracing::debug!(%node, why = %chain(&error), "an image is not reached"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(most);
        }
    }
}

/// What a fork's images are listened for with.
#[derive(Debug)]
pub struct Images<'a> {
    /// Id of the fork.
    pub fork: &'a str,
    /// Its parent.
    pub parent: &'a str,
    /// The node that has them.
    pub node: PeerTarget,
    /// How many there are.
    pub disks: usize,
}

impl ServedImages {
    /// Listens for the children of a fork whose images are on another node.
    pub fn relay(
        self: &Arc<Self>,
        peers: &Arc<Peers>,
        hello: &Hello,
        images: Images<'_>,
    ) -> Result<RelayInUse, ImageError> {
        let record = RelayRecord {
            session: hello.session,
            token: hello.token,
            fork: images.fork.to_owned(),
            parent: images.parent.to_owned(),
            node: images.node,
            disks: images.disks,
        };
        let (session, dir) = (record.session, self.folder("in", record.session));
        // Before there is a folder: what nobody knows is looked after by others.
        let relay = Relay { record: record.clone(), tasks: None, in_use: true };
        self.lock().relays.insert(session, relay);
        if let Err(error) = note(&dir, &record).and_then(|()| self.listen(peers, &record)) {
            remove(&dir);
            self.lock().relays.remove(&session);
            return Err(error);
        }
        Ok(RelayInUse { images: self.clone(), session })
    }

    /// Listens on the sockets of a relay that is known.
    fn listen(&self, peers: &Arc<Peers>, record: &RelayRecord) -> Result<(), ImageError> {
        let dir = self.folder("in", record.session);
        super::let_pass(&self.confinement, &dir).map_err(ImageError::io("opened for QEMU", &dir))?;
        let mut tasks = JoinSet::new();
        for number in 0..record.disks {
            let listener = bind(&Exported::socket(&dir, number), &self.confinement)?;
            let index = u8::try_from(number).map_err(|_| ImageError::TooMany)?;
            let hello = Hello { index, ..peers.hello(LinkKind::ForkDisk, record.session, record.token) };
            let server = Server { peers: peers.clone(), node: record.node.clone(), hello };
            tasks.spawn(server.accept(listener));
        }
        if let Some(relay) = self.lock().relays.get_mut(&record.session) {
            relay.tasks = Some(tasks);
        }
        Ok(())
    }

    /// Takes up the sockets of an earlier life, whose children have connected anew or are about to.
    pub(super) fn recover_relays(&self, peers: &Arc<Peers>) {
        for record in self.left::<RelayRecord>("in") {
            self.take_up(peers, &record);
        }
    }

    fn take_up(&self, peers: &Arc<Peers>, record: &RelayRecord) {
        let relay = Relay { record: record.clone(), tasks: None, in_use: false };
        self.lock().relays.insert(record.session, relay);
        if let Err(error) = self.listen(peers, record) {
            tracing::error!(fork = %record.fork, why = %chain(&error), "disks of children are not reached: they wait, trying on");
        }
    }

    fn listen_again(&self, peers: &Arc<Peers>, record: &RelayRecord) {
        let fork = &record.fork;
        match self.listen(peers, record) {
            Ok(()) => tracing::info!(%fork, "disks of children are reached again"),
            Err(error) => {
                tracing::debug!(%fork, why = %chain(&error), "disks of children are not reached yet");
            }
        }
    }
}

/// Before there is a socket: a next life finds it.
fn note(dir: &Path, record: &RelayRecord) -> Result<(), ImageError> {
    std::fs::create_dir_all(dir.parent().unwrap_or(dir)).map_err(ImageError::io("made", dir))?;
    vmove_node::files::make_private_dir(dir).map_err(ImageError::io("made", dir))?;
    let path = dir.join(RECORD);
    write_atomically(&path, record).map_err(ImageError::io("written", &path))
}

/// Waits until a reader that waits for its server, which speaks first, has closed the connection. That it seems readable means nothing.
async fn gone(reader: &UnixStream) {
    while reader.readable().await.is_ok() {
        match reader.try_read(&mut [0]) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// A socket to which QEMUs may connect.
fn bind(socket: &Path, confinement: &Confinement) -> Result<UnixListener, ImageError> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).map_err(ImageError::io("listened on", socket))?;
    confinement.give(socket).map_err(ImageError::io("given to QEMU", socket))?;
    Ok(listener)
}

impl ForkEngine {
    /// Gives up sockets that nobody reads from any more, and tries again what could not be taken up. Never returns.
    pub(super) async fn tidy_relays(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            self.take_up_late().await;
            let idle: Vec<(RelayRecord, bool)> = {
                let state = self.images.lock();
                let idle = state.relays.values().filter(|relay| !relay.in_use);
                idle.map(|relay| (relay.record.clone(), relay.tasks.is_some())).collect()
            };
            for (record, listens) in idle {
                let (engine, dir) = (self.clone(), self.images.folder("in", record.session));
                let looked = run_blocking(move || engine.needs(&dir)).await;
                if looked.is_ok_and(|needed| !needed) {
                    self.give_up_relay(record.session);
                } else if !listens {
                    self.images.listen_again(&self.peers, &record);
                }
            }
        }
    }

    /// Takes up what could not be read when this daemon started. What nobody needs goes away.
    async fn take_up_late(self: &Arc<Self>) {
        let engine = self.clone();
        let work = move || {
            let unknown = engine.images.unknown();
            let (needed, idle): (Vec<_>, Vec<_>) = unknown.into_iter().partition(|dir| engine.needs(dir));
            for dir in &idle {
                remove(dir);
            }
            needed.iter().filter_map(|dir| read_json(&dir.join(RECORD)).ok()).collect::<Vec<RelayRecord>>()
        };
        for record in run_blocking(work).await.unwrap_or_default() {
            self.images.take_up(&self.peers, &record);
        }
    }

    fn give_up_relay(&self, session: SessionId) {
        let gone = self.images.lock().relays.remove(&session);
        if let Some(relay) = gone {
            let record = &relay.record;
            tracing::info!(fork = %record.fork, parent = %record.parent, node = %record.node, "nobody reads its images any more");
        }
        remove(&self.images.folder("in", session));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_that_cannot_be_taken_up_is_read_nevertheless() {
        let dir = tempfile::tempdir().unwrap();
        let disks = ServedImages::new(dir.path(), Duration::from_secs(1), Confinement::default());
        let session = SessionId::random();
        assert!(!disks.reads(session));
        let folder = disks.folder("in", session);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join(RECORD), "cut sh").unwrap();
        assert!(disks.reads(session));
        assert!(!disks.reads(SessionId::random()));
        assert!(disks.left::<RelayRecord>("in").is_empty());
        assert_eq!(disks.unknown(), std::slice::from_ref(&folder));
        remove(&folder);
        assert!(!disks.reads(session));
    }
}
