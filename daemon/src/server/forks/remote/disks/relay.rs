//! A host's sockets for images on the parent's node: what its children's QEMUs say there goes through the peer port.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use vmove_clone::disk::Exported;
use vmove_migrate::link::{BoxedStream, Dialer, PeerTarget};
use vmove_migrate::proto::hello::{Hello, LinkKind, SessionId, Token};
use vmove_migrate::vm::write_atomically;

use super::{Disks, RECORD, join, remove};
use crate::api::problem::chain;
use crate::server::forks::Forks;
use crate::server::forks::remote::Remote;
use crate::server::registry::off_worker;

/// How soon the parent's node is dialled again, at first and later.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often it is looked whether anybody still reads.
const LOOK: Duration = Duration::from_secs(2);

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
    at_work: bool,
}

/// Says that children over images of another node are being made, until it is dropped.
#[derive(Debug)]
pub struct AtWork {
    remote: Arc<Remote>,
    session: SessionId,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if let Some(relay) = self.remote.disks.lock().relays.get_mut(&self.session) {
            relay.at_work = false;
        }
    }
}

impl Disks {
    /// The sockets by which the images of a fork are reached, once [`Remote::relay`] listens there.
    pub fn exported(&self, session: SessionId) -> Exported {
        Exported { folder: self.folder("in", session), patience: self.patience }
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

impl Remote {
    /// Listens for the children of a fork whose images are on `node`.
    pub fn relay(
        self: &Arc<Self>,
        hello: &Hello,
        fork: &str,
        parent: &str,
        node: PeerTarget,
        disks: usize,
    ) -> Result<AtWork, String> {
        let record = RelayRecord {
            session: hello.session,
            token: hello.token,
            fork: fork.to_owned(),
            parent: parent.to_owned(),
            node,
            disks,
        };
        let (session, dir) = (record.session, self.disks.folder("in", record.session));
        // Before there is a folder: what nobody knows is looked after by others.
        let relay = Relay { record: record.clone(), tasks: None, at_work: true };
        self.disks.lock().relays.insert(session, relay);
        if let Err(why) = note(&dir, &record).and_then(|()| self.listen(&record)) {
            remove(&dir);
            self.disks.lock().relays.remove(&session);
            return Err(why);
        }
        Ok(AtWork { remote: self.clone(), session })
    }

    /// Listens on the sockets of a relay that is known.
    fn listen(self: &Arc<Self>, record: &RelayRecord) -> Result<(), String> {
        let dir = self.disks.folder("in", record.session);
        let mut tasks = JoinSet::new();
        for number in 0..record.disks {
            let listener = bind(&Exported::socket(&dir, number))?;
            let index = u8::try_from(number).map_err(|_| "more than 256 disks".to_owned())?;
            let hello = Hello { index, ..self.hello(LinkKind::ForkDisk, record.session, record.token) };
            let (remote, node) = (self.clone(), record.node.clone());
            tasks.spawn(async move { remote.accept(listener, node, hello).await });
        }
        if let Some(relay) = self.disks.lock().relays.get_mut(&record.session) {
            relay.tasks = Some(tasks);
        }
        Ok(())
    }

    async fn accept(self: Arc<Self>, listener: UnixListener, node: PeerTarget, hello: Hello) {
        loop {
            match listener.accept().await {
                Ok((reader, _)) => {
                    let (remote, node, hello) = (self.clone(), node.clone(), hello.clone());
                    tokio::spawn(async move { remote.carry(reader, &node, &hello).await });
                }
                Err(error) => {
                    tracing::error!(%error, "could not accept a connection for a disk");
                    // Out of descriptors, most likely: trying again at once would only spin.
                    tokio::time::sleep(AGAIN.0).await;
                }
            }
        }
    }

    /// Joins a QEMU to its image. As long as the node that has it is not reached, the QEMU waits.
    async fn carry(&self, reader: UnixStream, node: &PeerTarget, hello: &Hello) {
        let reached = tokio::select! {
            reached = self.reach(node, hello) => reached,
            () = gone(&reader) => return,
        };
        join(reader, reached).await;
    }

    async fn reach(&self, node: &PeerTarget, hello: &Hello) -> BoxedStream {
        let (mut pause, most) = AGAIN;
        loop {
            match self.dialer.stream(node, hello).await {
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

    /// Takes up the sockets of an earlier life, whose children have connected anew or are about to.
    pub(super) fn recover_relays(self: &Arc<Self>) {
        for record in self.disks.left::<RelayRecord>("in") {
            self.take_up(&record);
        }
    }

    fn take_up(self: &Arc<Self>, record: &RelayRecord) {
        let relay = Relay { record: record.clone(), tasks: None, at_work: false };
        self.disks.lock().relays.insert(record.session, relay);
        if let Err(why) = self.listen(record) {
            tracing::error!(fork = %record.fork, %why, "disks of children are not reached: they wait, trying on");
        }
    }

    fn listen_again(self: &Arc<Self>, record: &RelayRecord) {
        let fork = &record.fork;
        match self.listen(record) {
            Ok(()) => tracing::info!(%fork, "disks of children are reached again"),
            Err(why) => tracing::debug!(%fork, %why, "disks of children are not reached yet"),
        }
    }
}

/// Before there is a socket: a next life finds it.
fn note(dir: &Path, record: &RelayRecord) -> Result<(), String> {
    let failed = |e: &dyn std::fmt::Display| format!("{} cannot be made: {e}", dir.display());
    std::fs::create_dir_all(dir.parent().unwrap_or(dir)).map_err(|e| failed(&e))?;
    crate::server::lock::make_private_dir(dir).map_err(|e| failed(&chain(&e)))?;
    write_atomically(&dir.join(RECORD), record).map_err(|e| failed(&e))
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

fn bind(socket: &Path) -> Result<UnixListener, String> {
    let _ = std::fs::remove_file(socket);
    UnixListener::bind(socket).map_err(|e| format!("{} cannot be listened on: {e}", socket.display()))
}

impl Forks {
    /// Gives up sockets that nobody reads from any more, and tries again what could not be taken up. Never returns.
    pub(super) async fn tidy_relays(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            self.take_up_late().await;
            let idle: Vec<(RelayRecord, bool)> = {
                let state = self.remote.disks.lock();
                let idle = state.relays.values().filter(|relay| !relay.at_work);
                idle.map(|relay| (relay.record.clone(), relay.tasks.is_some())).collect()
            };
            for (record, listens) in idle {
                let (forks, dir) = (self.clone(), self.remote.disks.folder("in", record.session));
                let looked = off_worker(move || forks.needs(&dir)).await;
                if looked.is_ok_and(|needed| !needed) {
                    self.give_up_relay(record.session);
                } else if !listens {
                    self.remote.listen_again(&record);
                }
            }
        }
    }

    /// Takes up what could not be read when this daemon started. What nobody needs goes away.
    async fn take_up_late(self: &Arc<Self>) {
        let forks = self.clone();
        let work = move || {
            let unknown = forks.remote.disks.unknown();
            let (needed, idle): (Vec<_>, Vec<_>) = unknown.into_iter().partition(|dir| forks.needs(dir));
            for dir in &idle {
                remove(dir);
            }
            let texts = needed.iter().filter_map(|dir| std::fs::read(dir.join(RECORD)).ok());
            texts.filter_map(|text| serde_json::from_slice(&text).ok()).collect::<Vec<RelayRecord>>()
        };
        for record in off_worker(work).await.unwrap_or_default() {
            self.remote.take_up(&record);
        }
    }

    fn give_up_relay(&self, session: SessionId) {
        let gone = self.remote.disks.lock().relays.remove(&session);
        if let Some(relay) = gone {
            let record = &relay.record;
            tracing::info!(fork = %record.fork, parent = %record.parent, node = %record.node, "nobody reads its images any more");
        }
        remove(&self.remote.disks.folder("in", session));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_that_cannot_be_taken_up_is_read_nevertheless() {
        let dir = tempfile::tempdir().unwrap();
        let disks = Disks { dir: dir.path().to_owned(), patience: 1, state: Default::default() };
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
