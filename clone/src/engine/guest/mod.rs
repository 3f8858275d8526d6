//! Forks that guests ask for, over the virtio-serial port `org.vmove.fork`.
//!
//! A guest writes one line of JSON and reads one line of JSON; `{"fork": N}` is answered in the parent and in each child.
//! Between its request and the answer a guest writes nothing: what it had written would be in the children's queues, too.
//! QEMU listens on `{vmdir}/fork.sock`, and this daemon connects. To a child it connects before the child runs: so its guest
//! sees no change of the port, and reads on where its parent waited.
//!
//! | Module | Owns |
//! |---|---|
//! | `line` | what a guest may say |
//! | `answer` | what it is answered |
//! | `family`, `tickets` | the children of one request, and what they left |
//! | `store` | what of that outlives the daemon |
//! | `admission`, `limit` | what guests may take of this host |
//! | `gather` | ends of children on other hosts, fetched |
//! | `hosted` | children here of guests on other hosts |

mod admission;
mod answer;
mod family;
mod gather;
mod hosted;
mod limit;
mod line;
mod store;
mod tickets;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::CloneError;
use crate::record::Lineage;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::Instant;
use vmove_node::disk::KernelDisk;
use vmove_node::record::VmRecord;
use vmove_qmp::CommandLine;

use self::family::Family;
use self::line::Request;
#[cfg(feature = "fuzzing")]
pub use self::line::any_lines;
use self::store::{Store, Waits};
use super::ForkEngine;
use super::children::Loaded;

/// The name of the port.
pub const PORT: &str = "org.vmove.fork";
/// Where QEMU listens, as its command line must have it.
const SOCKET: &str = "{vmdir}/fork.sock";
/// How soon a VM's port is found.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// So often, in looks for ports, children are ended again that live although they have ended.
const END_AGAIN_ROUNDS: u64 = 20;
/// A guest whose daemon was ended asks the next one again. That has answered it already, and passes over what was asked twice within this time.
const ASKED_AGAIN: Duration = Duration::from_secs(2);
/// Of an answer, so much is written before the time for it begins anew.
const PART: usize = 16 << 10;
/// QEMU's main loop takes a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A guest that does not read for so long is let go of, and found again.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What is known of guests that fork themselves.
#[derive(Debug)]
pub struct Guests {
    state: Mutex<State>,
    /// Of two guests that ask at the same time, the second counts what the first was given.
    admission: tokio::sync::Mutex<()>,
    /// One file is written after the other: the last one has the last word.
    writing: tokio::sync::Mutex<()>,
    store: Store,
}

#[derive(Debug, Default)]
struct State {
    /// By ticket, which is the fork's id.
    families: HashMap<String, Family>,
    /// Children that are connected and do not run yet: the port, and what they are to be told.
    waiting: HashMap<String, (UnixStream, Value)>,
    /// VMs whose ports have a task, or that have no port; with their process.
    known: HashSet<(String, i32)>,
    /// Children that are being ended.
    ending: HashSet<String>,
    /// Tickets and the hosts that a task asks about them.
    followed: HashSet<(String, String)>,
}

impl Guests {
    /// `journals`: the folder of what outlives the daemon of forks.
    pub(super) fn new(journals: &Path) -> Self {
        Self {
            state: Mutex::default(),
            admission: tokio::sync::Mutex::default(),
            writing: tokio::sync::Mutex::default(),
            store: Store::new(journals, Arc::new(KernelDisk)),
        }
    }

    /// Whether a guest asked for this fork.
    pub(super) fn asked_for(&self, fork: &str) -> bool {
        self.lock().families.contains_key(fork)
    }

    /// Where the children of this fork come from, if a guest asked for it.
    pub(super) fn lineage(&self, fork: &str) -> Option<Lineage> {
        self.lock().families.get(fork).map(|family| family.record.lineage.clone())
    }

    /// Numbers of children of tickets that this VM has not joined: a VM of such a name would be taken for the ticket's child.
    pub(super) fn numbers_in_tickets(&self, parent: &str) -> Vec<u32> {
        let state = self.lock();
        state.families.values().filter(|family| family.is_of(parent)).flat_map(Family::numbers).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ForkEngine {
    /// Connects to the ports of all VMs that have one. Never returns.
    pub async fn serve_guests(self: Arc<Self>) {
        for round in 0_u64.. {
            if round % END_AGAIN_ROUNDS == 0 {
                self.end_those_that_have_said_so();
            }
            let records = self.registry.records();
            {
                let mut state = self.guests.lock();
                state.known.retain(|(name, pid)| records.iter().any(|r| r.name == *name && r.pid == *pid));
            }
            self.close_orphaned(&records).await;
            self.expire_hosted().await;
            for record in records {
                let who = (record.name.clone(), record.pid);
                if self.guests.lock().known.contains(&who) {
                    continue;
                }
                // A migration has its own say over who is running.
                if self.registry.not_in_session(&record.name).is_err() || self.is_to_be_met(&record) {
                    continue;
                }
                if self.guests.lock().known.insert(who) && has_port(&record) {
                    tokio::spawn(self.clone().serve(record));
                }
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Ends children whose end is noted and that still live: the daemon was killed meanwhile, or a migration held them.
    fn end_those_that_have_said_so(self: &Arc<Self>) {
        let ended: Vec<(String, String)> = {
            let state = self.guests.lock();
            let all = state.families.iter();
            all.flat_map(|(ticket, family)| family.ended_here().map(|vm| (ticket.clone(), vm.to_owned())))
                .collect()
        };
        for (ticket, vm) in ended {
            let record = self.registry.vms().get(&vm).ok();
            // Not a later VM of that name.
            if record.and_then(|record| self.members.get(&record)).is_some_and(|member| member.fork == ticket)
            {
                let engine = Arc::clone(self);
                tokio::spawn(async move { engine.end_child(&vm).await });
            }
        }
    }

    /// Closes the tickets of guests that have gone: nobody is left to ask for these. What a child has forked itself ends with it.
    async fn close_orphaned(self: &Arc<Self>, records: &[VmRecord]) {
        let orphaned: Vec<(String, bool)> = {
            let state = self.guests.lock();
            let gone = |family: &Family| {
                let record = &family.record;
                let is_open = record.home.is_none() && !record.closed && family.under_way.is_none();
                is_open && records.iter().all(|r| r.name != record.parent)
            };
            let gone = state.families.iter().filter(|(_, family)| gone(family));
            gone.map(|(ticket, family)| (ticket.clone(), family.record.lineage.depth > 1)).collect()
        };
        for (ticket, end) in orphaned {
            self.close_ticket(&ticket, end).await;
        }
    }

    /// A child whose fork has not got as far as [`ForkEngine::meet`]: its port is not ours yet.
    fn is_to_be_met(&self, record: &VmRecord) -> bool {
        let Some(member) = self.members.get(record).filter(|member| member.parent.is_some()) else {
            return false;
        };
        self.guests.lock().families.get(&member.fork).is_some_and(|family| family.is_to_be_met(&record.name))
    }

    async fn serve(self: Arc<Self>, record: VmRecord) {
        if let Ok(mut port) = connect(&record).await
            && let Ok(answered) = self.answer_owed(&record, &mut port).await
        {
            self.listen(&record.name, port, answered).await;
        }
        // Found again, if it is still there.
        tokio::time::sleep(LOOK_INTERVAL).await;
        self.guests.lock().known.remove(&(record.name.clone(), record.pid));
    }

    /// Answers what a guest asked an earlier life of the daemon. Gives what it may ask again. An error if it does not listen.
    async fn answer_owed(
        self: &Arc<Self>,
        record: &VmRecord,
        port: &mut UnixStream,
    ) -> std::io::Result<Option<Request>> {
        let Some(waits) = self.guests.store.owed(record) else { return Ok(None) };
        let asked = match &waits {
            Waits::Join(ticket) => Some(Request::Join(ticket.clone())),
            Waits::Kill(ticket) => Some(Request::Kill(ticket.clone())),
            Waits::Line(line) => line["joined"].as_str().map(|ticket| Request::Join(ticket.to_owned())),
            Waits::Fork(_) => None,
        };
        let answer = self.answer_again(&record.name, waits).await;
        if !write(port, &answer).await {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.guests.store.told(&record.name);
        Ok(asked)
    }

    /// Answers a guest until its port is closed. `answered`: what it was just told, as it may not have known when it asked again.
    async fn listen(self: &Arc<Self>, vm: &str, port: UnixStream, answered: Option<Request>) {
        let (from, mut to) = port.into_split();
        let mut lines = line::Lines::new(from);
        let begun = Instant::now();
        while let Some(line) = lines.next().await {
            if begun.elapsed() < ASKED_AGAIN && answered.as_ref().is_some_and(|asked| line.asks(asked)) {
                continue;
            }
            let Some(answer) = self.answer(vm, line).await else { break };
            if !write(&mut to, &answer).await {
                tracing::warn!(vm = %vm, "the guest does not read from its port {PORT}");
                break;
            }
            self.guests.store.told(vm);
        }
    }

    /// For a fork that a guest asked for: gives each child its place and connects to its port, before any of them runs. Children
    /// whose port cannot be reached would never learn who they are: they end.
    pub(super) async fn meet(
        self: &Arc<Self>,
        fork: &str,
        mut loaded: Vec<(Loaded, bool)>,
    ) -> (Vec<(Loaded, bool)>, Vec<(u32, String, CloneError)>) {
        if !self.guests.lock().families.contains_key(fork) {
            return (loaded, Vec::new());
        }
        loaded.sort_by_key(|(child, _)| child.child.plan.index);
        let (mut met, mut lost, mut ports) = (Vec::new(), Vec::new(), Vec::new());
        for (child, was_prepared) in loaded {
            let record = child.child.record();
            match connect(&record).await {
                Ok(port) => {
                    ports.push((record, port));
                    met.push((child, was_prepared));
                }
                Err(error) => {
                    let why = CloneError::Task(format!("its port {PORT} cannot be reached ({error})"));
                    lost.push((child.child.plan.index, record.name.clone(), why));
                    if let Err(error) = self.registry.stop(&record.name, true).await {
                        tracing::error!(child = %record.name, %error, "could not end a child without a port");
                    }
                }
            }
        }
        self.number_met(fork, &ports).await;
        let mut state = self.guests.lock();
        for (record, port) in ports {
            let Some(family) = state.families.get_mut(fork) else { continue };
            let Some(index) = family.index_of(&record.name) else { continue };
            let size = family.record.size;
            let told = json!({ "role": "child", "index": index, "size": size, "ticket": fork });
            family.meet(&record.name);
            self.owe(&record.name, Waits::Line(told.clone()));
            state.known.insert((record.name.clone(), record.pid));
            state.waiting.insert(record.name.clone(), (port, told));
        }
        (met, lost)
    }

    /// Children of a fork that stays on this node get their numbers now, when it is known who is there.
    async fn number_met(&self, fork: &str, ports: &[(VmRecord, UnixStream)]) {
        let is_numbered = |family: &Family| !family.record.children.is_empty();
        if !self.guests.lock().families.get(fork).is_some_and(is_numbered) {
            let names: Vec<String> = ports.iter().map(|(record, _)| record.name.clone()).collect();
            self.number_children(fork, &names, &[]).await;
        }
    }

    /// A child runs, or never will: if its guest waits for an answer, it gets it.
    pub(super) fn greet(self: &Arc<Self>, vm: &str, runs: bool) {
        let Some((mut port, told)) = self.guests.lock().waiting.remove(vm) else { return };
        if !runs {
            return self.guests.store.told(vm);
        }
        let (engine, vm) = (self.clone(), vm.to_owned());
        tokio::spawn(async move {
            if write(&mut port, &told).await {
                engine.guests.store.told(&vm);
                engine.listen(&vm, port, None).await;
            }
            if let Ok(record) = engine.registry.vms().get(&vm) {
                tokio::time::sleep(LOOK_INTERVAL).await;
                engine.guests.lock().known.remove(&(vm, record.pid));
            }
        });
    }
}

/// Writes one line, to a guest that goes on reading.
async fn write(port: &mut (impl AsyncWriteExt + Unpin), answer: &Value) -> bool {
    let line = format!("{answer}\n");
    for part in line.as_bytes().chunks(PART) {
        if !matches!(tokio::time::timeout(WRITE_TIMEOUT, port.write_all(part)).await, Ok(Ok(()))) {
            return false;
        }
    }
    true
}

async fn connect(record: &VmRecord) -> std::io::Result<UnixStream> {
    let path = record.vm_dir.join("fork.sock");
    tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(&path))
        .await
        .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
}

/// Whether a VM has the port, on the socket that is expected.
fn has_port(record: &VmRecord) -> bool {
    let line = CommandLine::parse(record.command_line.iter().map(Into::into).collect());
    match line.and_then(|line| line.port_socket(PORT)) {
        Ok(Some(socket)) if socket == SOCKET => true,
        Ok(Some(socket)) => {
            tracing::warn!(vm = %record.name, "port {PORT} is on {socket:?}, expected {SOCKET}: the guest is not heard");
            false
        }
        _ => false,
    }
}
