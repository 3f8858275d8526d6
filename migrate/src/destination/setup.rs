//! How a session at the destination comes to be: asked for by a source, or taken up again after a restart.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use vmove_qmp::process::{QemuProcess, log_in};

use super::attempt::Attempt;
use super::guest::Block;
use super::launch::{self, LaunchOrder, Launched, chain};
use super::populate;
use super::room::{self, Room};
use super::session::{Arrival, End, Session};
use crate::clock::Mono;
use crate::journal::{DestinationRecord, Journal};
use crate::link::BoxedStream;
use crate::node::Node;
use crate::ownership::DestinationState;
use crate::progress::{GuestPlace, Phase};
use crate::proto::channel::Channel;
use crate::proto::hello::{Hello, SessionId};
use crate::proto::message::{Accepted, Prepare, ToDestination, ToSource};
use crate::publish::Publisher;
use crate::spec::Mode;
use crate::vm::VmRecord;

/// Attempts of up to 5 s each to reach the monitor of a QEMU that was found again: its main loop may wait for pages that come only when
/// the source has dialled.
const CONNECT_TRIES: u32 = 1000;
/// The source gives up when it has heard nothing for 15 s.
const ALIVE_EVERY: Duration = Duration::from_secs(2);
/// First message of a new session.
const FIRST: Duration = Duration::from_secs(10);

/// Serves a session from its first connection on.
pub(crate) async fn serve_new(
    node: Arc<Node>,
    hello: Hello,
    stream: BoxedStream,
    mut arrivals: mpsc::Receiver<Arrival>,
    announce: impl FnOnce(&Prepare) -> Result<Publisher, crate::check::Blocker>,
) {
    let mut channel: Channel<ToDestination> = Channel::new(stream);
    let prepare = match timeout(FIRST, channel.receive()).await {
        Ok(Ok(ToDestination::Prepare(prepare))) => *prepare,
        other => {
            return tracing::warn!(session = %hello.session, ?other, "expected Prepare as the first message");
        }
    };
    let looked = crate::check::destination::blockers(&node, &prepare);
    let mut blockers =
        if prepare.check_only { looked.await } else { while_alive(&mut channel, looked).await };
    if prepare.check_only {
        let agreed = crate::check::fabric::negotiate(&prepare.fabrics, &node.config.dialer.fabrics());
        let fabric = agreed.map_or_else(|why| why, |agreed| format!("{}: {}", agreed.kind, agreed.why));
        let _ = channel.send(&ToSource::Checked { blockers, fabric }).await;
        return;
    }
    if !blockers.is_empty() {
        let _ = channel.send(&ToSource::Refused(blockers)).await;
        return;
    }
    let publisher = match announce(&prepare) {
        Ok(publisher) => publisher,
        Err(blocker) => {
            blockers.push(blocker);
            let _ = channel.send(&ToSource::Refused(blockers)).await;
            return;
        }
    };
    match Session::open(node, hello.session, prepare, publisher) {
        Ok((mut session, accepted)) => {
            if channel.send(&ToSource::Accepted(Box::new(accepted))).await.is_ok() {
                session.start_launch();
                session.run(Some(channel), &mut arrivals).await;
            } else {
                session.undo().await;
            }
        }
        Err(why) => {
            let _ = channel.send(&ToSource::Refused(vec![crate::check::Blocker::new("no-room", why)])).await;
        }
    }
}

/// Looking for blockers may take long, since it asks a QEMU what it is, and the source must not take us for dead.
async fn while_alive<T>(channel: &mut Channel<ToDestination>, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    loop {
        match timeout(ALIVE_EVERY, &mut work).await {
            Ok(done) => return done,
            // A source that has gone is noticed by whoever reads from it next.
            Err(_) => drop(channel.send(&ToSource::Pong { token: 0, now: Mono::now() }).await),
        }
    }
}

/// Takes up a session that an earlier process of this daemon left in [`DestinationState::Loaded`] or `Owner`.
pub(crate) async fn adopt(
    node: Arc<Node>,
    journal: Journal<DestinationRecord>,
    publisher: Publisher,
    mut arrivals: mpsc::Receiver<Arrival>,
) {
    let record = journal.record();
    let ended = record.vm.as_ref().is_some_and(|vm| {
        match vmove_memory::Process::reopen(vm.pid.unsigned_abs(), vm.pid_start) {
            Ok(process) => !process.has_memory(),
            Err(error) => matches!(error, vmove_memory::MemoryError::ProcessGone { .. }),
        }
    });
    if record.state == DestinationState::Loaded && ended {
        // It never ran the guest: a source that has committed takes it back when it hears of this.
        discard(&node, journal).await;
        return publisher.fail("QEMU has ended while there was no daemon", GuestPlace::Source, false);
    }
    match Session::reopen(node, journal, publisher) {
        Ok(mut session) => session.run(None, &mut arrivals).await,
        Err((publisher, why)) => publisher.fail(why, GuestPlace::PausedAtDestination, false),
    }
}

/// Removes what an earlier process left of a session that never owned the guest.
pub(crate) async fn discard(node: &Node, mut journal: Journal<DestinationRecord>) {
    let record = journal.record().clone();
    // Where the journal could not be written when this session ended, one that came later may have brought the guest.
    let later = record.vm.as_ref().and_then(|vm| node.vms.other_than(vm, &record.id.to_string()));
    if let Some(later) = later {
        tracing::warn!(vm = later.name, session = %record.id, "a VM of this name came later: it stays as it is");
    } else if let Some(vm) = &record.vm {
        super::handover::end_left_qemu(vm).await;
        let files: Vec<_> = vm.ram.iter().map(|f| f.path.clone()).collect();
        room::remove_files(&files);
        let _ = std::fs::remove_dir_all(&vm.vm_dir);
        if let Err(error) = node.vms.remove(&vm.name) {
            tracing::warn!(vm = vm.name, %error, "could not remove the record of a VM that never arrived");
        }
    }
    room::remove_files(&tables_of(node, &record));
    if let Err(error) = journal.update(|r| r.state = DestinationState::Gone) {
        tracing::warn!(%error, "could not write the journal");
    }
}

fn tables_of(node: &Node, record: &DestinationRecord) -> Vec<std::path::PathBuf> {
    (0..record.prepare.blocks.len())
        .map(|index| super::guest::GuestMemory::table_path(&node.page_map_dir(), record.id, index))
        .collect()
}

/// After a kill between a session's last line in the journal and its last act.
pub(crate) fn tidy(node: &Node, record: &DestinationRecord) {
    room::remove_files(&tables_of(node, record));
    let id = record.id.to_string();
    if let Ok(mut vm) = node.vms.get(&record.prepare.vm) {
        if vm.session.as_ref() == Some(&id) {
            vm.session = None;
            if let Err(error) = node.vms.put(vm) {
                tracing::warn!(session = id, %error, "could not update the VM's record");
            }
        }
    }
}

impl Session {
    fn open(
        node: Arc<Node>,
        id: SessionId,
        prepare: Prepare,
        publisher: Publisher,
    ) -> Result<(Self, Accepted), String> {
        let agreed = crate::check::fabric::negotiate(&prepare.fabrics, &node.config.dialer.fabrics())?;
        let kind = agreed.kind;
        let room = room::make(&node, id, &prepare)?;
        let accepted = Accepted {
            destination: node.config.node.clone(),
            boot_id: crate::clock::boot_id(),
            fabric: kind,
            fabric_reason: agreed.why,
            fabric_address: agreed.address,
            bulk_connections: node.config.bulk_connections,
            may_fall_back: agreed.may_fall_back,
        };
        let vm = VmRecord {
            name: prepare.vm.clone(),
            pid: 0,
            pid_start: 0,
            qmp_socket: room.layout.qmp_socket.clone(),
            vm_dir: room.layout.vm_dir.clone(),
            backing: prepare.backing.clone(),
            command_line: prepare.command_line.clone(),
            environment: prepare.environment.clone(),
            ram: room.ram.clone(),
            overlays: Vec::new(),
            adopted: false,
            session: Some(id.to_string()),
        };
        let record = DestinationRecord {
            id,
            prepare,
            state: DestinationState::Filling,
            vm: Some(vm),
            fault_fd: None,
            mode: None,
            final_applied: false,
            fabric: kind,
            released: false,
            complete: None,
        };
        let path = node.session_dir(id).join("destination.jsonl");
        let journal =
            std::fs::create_dir_all(node.session_dir(id)).and_then(|()| Journal::create(&path, record));
        match journal {
            Ok(journal) => Ok((Self::with(node, id, journal, room, publisher), accepted)),
            Err(error) => {
                room.remove();
                Err(format!("Could not write {}: {error}", path.display()))
            }
        }
    }

    fn reopen(
        node: Arc<Node>,
        journal: Journal<DestinationRecord>,
        publisher: Publisher,
    ) -> Result<Self, (Publisher, String)> {
        let record = journal.record().clone();
        let rebuild = || -> Result<(Room, VmRecord, i32), String> {
            let vm = record.vm.clone().ok_or("the journal names no VM")?;
            if !record.final_applied {
                return Err(
                    "the page maps were never completed: they cannot say which pages are old".to_owned()
                );
            }
            let fault_fd = record.fault_fd.ok_or("the journal names no fault descriptor")?;
            Ok((room::find(&node, record.id, &record.prepare, &vm.ram)?, vm, fault_fd))
        };
        let (room, vm, fault_fd) = match rebuild() {
            Ok(all) => all,
            Err(why) => return Err((publisher, why)),
        };
        let pid = vm.pid.unsigned_abs();
        let retaken = launch::retake_faults(pid, vm.pid_start, fault_fd, &room.memory);
        let process = QemuProcess::adopt(pid, &log_in(&vm.vm_dir)).map_err(|e| chain(&e));
        let (attached, process) = match (retaken, process) {
            (Ok(a), Ok(p)) => (a, p),
            (Err(why), _) | (_, Err(why)) => return Err((publisher, why)),
        };
        let (monitors, socket) = (Arc::clone(&node.config.monitors), vm.qmp_socket.clone());
        room.memory.attach(attached);
        room.memory.begin_serving();
        let mut session = Self::with(node, record.id, journal, room, publisher);
        session.process = Some(process);
        session.connecting = Some(tokio::spawn(async move {
            let mut last = Ok(());
            for _ in 0..CONNECT_TRIES {
                match monitors.client(&socket).await {
                    Ok(client) => return Ok(client),
                    Err(error) => last = Err(chain(&error)),
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            Err(last.err().unwrap_or_default())
        }));
        session.loaded = true;
        session.told_loaded = true;
        if record.state.may_run() {
            session.publisher.enter(Phase::Fetch);
        } else {
            session.publisher.enter(Phase::HandOver);
        }
        Ok(session)
    }

    fn with(
        node: Arc<Node>,
        id: SessionId,
        journal: Journal<DestinationRecord>,
        room: Room,
        publisher: Publisher,
    ) -> Self {
        let (events, fill_events) = mpsc::unbounded_channel();
        let attempt = Attempt::new(node.config.bulk_connections, events);
        Self {
            node,
            id,
            journal,
            room,
            publisher,
            attempt,
            renewing: false,
            fill_events,
            launching: None,
            populating: None,
            populated: None,
            started: None,
            process: None,
            client: None,
            destination: None,
            connecting: None,
            owes_resume: false,
            state_sender: None,
            state_stream: None,
            relay: None,
            loading: None,
            touched: Vec::new(),
            round: None,
            loaded: false,
            told_loaded: false,
            whole_first: false,
            state_bytes: 0,
            source_hashes: Vec::new(),
            all_hashes: false,
            told_complete: false,
        }
    }

    fn start_launch(&mut self) {
        self.publisher.enter(Phase::Prepare);
        let prepare = &self.journal.record().prepare;
        let locked = self.room.locked;
        if prepare.spec.mode.fixed() == Some(Mode::Postcopy) || locked || self.must_be_given() {
            match populate::start(&self.room.memory, &prepare.blocks, locked) {
                Ok((populating, task)) => (self.populating, self.populated) = (Some(populating), Some(task)),
                // Then pages get their memory when they are touched.
                Err(why) => tracing::warn!(session = %self.id, why, "memory is not populated ahead"),
            }
        }
        if !locked || self.populated.is_none() {
            self.launch();
        }
    }

    fn launch(&mut self) {
        let (started, receiver) = oneshot::channel();
        let order = LaunchOrder {
            command: self.room.command.clone(),
            vm_dir: self.room.layout.vm_dir.clone(),
            qmp_socket: self.room.layout.qmp_socket.clone(),
            memory: Arc::clone(&self.room.memory),
            locked: self.room.locked,
            started,
        };
        self.started = Some(receiver);
        self.launching = Some(tokio::spawn(launch::launch(order)));
    }

    pub(super) async fn populated(
        &mut self,
        populated: Result<(), String>,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        populated.map_err(|why| End::Failed(format!("No memory for the guest at the destination: {why}")))?;
        if self.room.locked {
            self.launch();
            return Ok(());
        }
        self.start_attempt()?;
        self.tell_prepared(channel).await
    }

    fn must_be_given(&self) -> bool {
        self.room.memory.blocks.iter().any(Block::must_be_given)
    }

    /// Pages are being given, or locked, and nothing may be read before that is done. What the source says meanwhile waits.
    pub(super) fn is_being_given(&self) -> bool {
        let locking = self.room.locked && (self.populated.is_some() || self.launching.is_some());
        locking || self.populated.is_some() && self.must_be_given()
    }

    /// The source may stop the guest: QEMU waits for its state, and there is memory.
    async fn tell_prepared(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        if self.destination.is_some() && self.populated.is_none() {
            channel.send(&ToSource::Prepared).await?;
        }
        Ok(())
    }

    pub(super) fn process_started(&mut self, process: QemuProcess) -> Result<(), End> {
        let pid = i32::try_from(process.pid()).unwrap_or(0);
        let start = vmove_memory::Process::open(process.pid()).map_or(0, |p| p.start_time());
        self.process = Some(process);
        let written = self.journal.update(|r| {
            if let Some(vm) = &mut r.vm {
                vm.pid = pid;
                vm.pid_start = start;
            }
        });
        written.map_err(|e| End::Failed(format!("Could not write the journal: {e}")))
    }

    pub(super) async fn launched(
        &mut self,
        launched: Result<Launched, String>,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        let launched =
            launched.map_err(|why| End::Failed(format!("QEMU did not start at the destination: {why}")))?;
        let pid = i32::try_from(launched.process.pid()).unwrap_or(0);
        let (start, fd) = (launched.pid_start, launched.fault_fd);
        let written = self.journal.update(|r| {
            r.fault_fd = Some(fd);
            if let Some(vm) = &mut r.vm {
                (vm.pid, vm.pid_start) = (pid, start);
            }
        });
        written.map_err(|e| End::Failed(format!("Could not write the journal: {e}")))?;
        self.node.config.monitors.insert(&self.room.layout.qmp_socket, launched.client.clone()).await;
        self.process = Some(launched.process);
        self.client = Some(launched.client);
        self.destination = Some(Arc::new(launched.destination));
        self.state_sender = Some(launched.state);
        self.touched = launched.touched;
        self.room.memory.attach(launched.attached);
        self.start_attempt()?;
        self.start_relay();
        self.tell_prepared(channel).await
    }
}
