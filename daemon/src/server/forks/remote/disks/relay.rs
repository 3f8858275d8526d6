//! A host's sockets for images on the parent's node: what its children's QEMUs say there goes through the peer port.

use std::path::Path;
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

/// Sockets that are listened on, as long as this is not dropped.
#[derive(Debug)]
pub(super) struct Relay {
    record: RelayRecord,
    /// One task for each socket.
    _tasks: JoinSet<()>,
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

    /// Whether anybody here reads images of this fork, or is about to.
    pub fn reads(&self, session: SessionId) -> bool {
        self.lock().relays.contains_key(&session)
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
        let dir = self.disks.folder("in", record.session);
        let failed = |e: &dyn std::fmt::Display| format!("{} cannot be made: {e}", dir.display());
        std::fs::create_dir_all(dir.parent().unwrap_or(&dir)).map_err(|e| failed(&e))?;
        crate::server::lock::make_private_dir(&dir).map_err(|e| failed(&chain(&e)))?;
        // Before there is a socket: a next life finds it.
        let listening = write_atomically(&dir.join(RECORD), &record)
            .map_err(|e| failed(&e))
            .and_then(|()| self.listen(record, true));
        if let Err(why) = listening {
            remove(&dir);
            return Err(why);
        }
        Ok(AtWork { remote: self.clone(), session: hello.session })
    }

    fn listen(self: &Arc<Self>, record: RelayRecord, at_work: bool) -> Result<(), String> {
        let dir = self.disks.folder("in", record.session);
        let mut tasks = JoinSet::new();
        for number in 0..record.disks {
            let listener = bind(&Exported::socket(&dir, number))?;
            let index = u8::try_from(number).map_err(|_| "more than 256 disks".to_owned())?;
            let hello = Hello { index, ..self.hello(LinkKind::ForkDisk, record.session, record.token) };
            let (remote, node) = (self.clone(), record.node.clone());
            tasks.spawn(async move { remote.accept(listener, node, hello).await });
        }
        let session = record.session;
        self.disks.lock().relays.insert(session, Relay { record, _tasks: tasks, at_work });
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
            let fork = record.fork.clone();
            if let Err(why) = self.listen(record, false) {
                tracing::error!(%fork, %why, "disks of children are not reached: they wait, and get errors then");
            }
        }
    }
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
    /// Gives up sockets that nobody reads from any more. Never returns.
    pub(super) async fn tidy_relays(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let idle: Vec<SessionId> = {
                let state = self.remote.disks.lock();
                state.relays.iter().filter(|(_, relay)| !relay.at_work).map(|(session, _)| *session).collect()
            };
            for session in idle {
                let (forks, dir) = (self.clone(), self.remote.disks.folder("in", session));
                let looked = off_worker(move || forks.needs(&dir)).await;
                if looked.is_ok_and(|needed| !needed) {
                    self.give_up_relay(session);
                }
            }
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
