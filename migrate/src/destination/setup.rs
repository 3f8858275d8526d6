//! How a session at the destination comes to be: asked for by a source, or taken up again after a restart.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::after_wires::AfterWires;
use super::disk_check::DiskCheck;
use super::disk_wires::DiskWires;
use super::error::{DestinationError, OpenError};
use super::filling::nothing_is_known;
use super::images::{self, Ground};
use super::loaded::{Loaded, Reached};
use super::monitor::Connecting;
use super::owner::{Guest, Owner};
use super::page_connections::PageConnections;
use super::phases;
use super::session::{Arrival, Control, Session};
use super::verify::SourceHashes;
use super::vm_files::{self, VmFiles};
use crate::check;
use crate::devices::arrival;
use crate::frames::Deliveries;
use crate::history::homeward;
use crate::node::Node;
use crate::owed;
use crate::ownership::{DestinationEvent, DestinationState, SourceState};
use crate::pending::WireSet;
use crate::proto::message::{Accepted, Prepare, ToDestination, ToSource};
use crate::publish::Publisher;
use crate::records::DestinationRecord;
use crate::vmm::QemuHandle;
use vmove_node::admission::Coming;
use vmove_node::devices::DevicesError;
use vmove_node::disk::remove_files;
use vmove_node::journal::Journal;
use vmove_node::peer::{BoxedStream, Caller, Channel, Hello, SessionId};
use vmove_node::record::VmRecord;
use vmove_node::reservations::Reservation;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::problem::chain;
use vmove_types::progress::{GuestPlace, Outcome, Phase};
use vmove_types::time::Mono;

/// The source gives up when it has heard nothing for 15 s.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// For a name that somebody holds for a moment.
const NAME_HELD_FOR: Duration = Duration::from_secs(3);
/// Between looks whether it is free.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// First message of a new session.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves a session from its first connection on.
pub(crate) async fn serve_new(
    node: Arc<Node>,
    (hello, caller): (Hello, Caller),
    stream: BoxedStream,
    arrivals: mpsc::Receiver<Arrival>,
    announce: impl FnOnce(&Prepare) -> Result<Publisher, Blocker>,
) {
    let mut channel: Channel<ToDestination> = Channel::new(stream);
    let prepare = match timeout(FIRST_MESSAGE_TIMEOUT, channel.receive()).await {
        Ok(Ok(ToDestination::Prepare(mut prepare))) => {
            // What cannot be read is refused with everything else that stands in the way.
            let _ = check::moved_disks::settle(&node, &mut prepare);
            *prepare
        }
        Ok(Ok(other)) => {
            return tracing::warn!(found = other.name(), "expected Prepare as the first message");
        }
        Ok(Err(error)) => {
            return tracing::warn!(error = chain(&error), "expected Prepare as the first message");
        }
        Err(_) => return tracing::warn!("expected Prepare as the first message, and none came"),
    };
    let looked = check::destination::room(&node, hello.session, &prepare, &caller);
    let looked = if prepare.check_only { looked.await } else { while_alive(&mut channel, looked).await };
    if prepare.check_only {
        let agreed = vmove_node::peer::negotiate(&prepare.fabrics, &node.config.dialer.fabrics());
        let fabric =
            agreed.map_or_else(|why| why.to_string(), |agreed| format!("{}: {}", agreed.kind, agreed.why));
        let blockers = looked.err().unwrap_or_default();
        let warnings = check::network::warnings(&prepare.taps, &node.config.node, &prepare.source);
        let _ = channel.send(&ToSource::Checked { blockers, fabric, warnings }).await;
        return;
    }
    if looked.is_ok() {
        until_free(&node, &prepare.vm).await;
    }
    let admitted =
        looked.and_then(|room| announce(&prepare).map(|publisher| (room, publisher)).map_err(|b| vec![b]));
    let (room, publisher) = match admitted {
        Ok(admitted) => admitted,
        Err(blockers) => {
            let _ = channel.send(&ToSource::Refused(blockers)).await;
            return;
        }
    };
    publisher.coming(|coming| coming.begin(prepare.held_bytes()));
    let requested = prepare.spec.mode.fixed().map(|mode| mode.to_string());
    publisher.update(|p| p.mode = requested);
    let home = caller.address.zip(prepare.home_port);
    let home = home.map(|(address, port)| SocketAddr::new(address, port).to_string());
    let opening = open(node, (hello.session, home), prepare, (room, publisher), arrivals);
    // Devices are bound, which may take long.
    match while_alive(&mut channel, opening).await {
        Ok((mut session, accepted)) => {
            if let Err(error) = channel.send(&ToSource::Accepted(Box::new(accepted))).await {
                return session.remove(None, chain(&error).into()).await;
            }
            phases::run(&mut session, Control::new(channel)).await;
        }
        Err(refused) => {
            let (publisher, error) = *refused;
            let code = match error {
                OpenError::Devices(_) => BlockerCode::Device,
                OpenError::NotAdmitted(_) => BlockerCode::Grant,
                _ => BlockerCode::NoRoom,
            };
            let blocker = Blocker::new(code, chain(&error));
            // Its VM is not on its way here: it may be tried again.
            publisher.finish(Outcome::Refused { blockers: vec![blocker.clone()] });
            let _ = channel.send(&ToSource::Refused(vec![blocker])).await;
        }
    }
}

/// Looking for blockers may take long, since it asks a QEMU what it is, and the source must not take us for dead.
async fn while_alive<T>(channel: &mut Channel<ToDestination>, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    loop {
        match timeout(KEEPALIVE_INTERVAL, &mut work).await {
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
    arrivals: mpsc::Receiver<Arrival>,
) {
    if never_ran_and_ended(&node, journal.record()) {
        discard(&node, journal).await;
        return publisher.fail("QEMU has ended while there was no daemon", GuestPlace::Source, false);
    }
    match found_again(&node, journal.record()) {
        Ok((files, process)) => {
            let (state, id, prepare) =
                (journal.record().state, journal.record().id, &journal.record().prepare);
            let wanted = check::destination::wanted(prepare, node.config.reservations.overcommits());
            let room = node.config.reservations.promised(&check::destination::holder(id, prepare), wanted);
            // Its QEMU is there.
            room.mapped();
            let mut session = session(node, journal, (room, publisher), files, arrivals);
            if let Err(error) = settle_let_go(&mut session) {
                return session.publisher.fail(chain(&error), GuestPlace::PausedAtDestination, false);
            }
            let connecting = Connecting::to_monitor_of(&session);
            // Hashes went with the process that took them, and so did the length of the device state.
            let (state_bytes, hashes) = (0, SourceHashes::default());
            // Until the source dials, this is what is waited for.
            session.publisher.reconnecting(chain(&DestinationError::StartedAnew));
            if state.may_run() {
                session.publisher.enter(Phase::Fetch);
                // One that is on its way home is let run by the session that takes it there, here or at home.
                let guest = if goes_home(&session) { Guest::Settled } else { Guest::Unknown(connecting) };
                let disk_check = DiskCheck::new(&session.journal.record().prepare);
                let owner = Owner::new(process, guest, state_bytes, hashes, disk_check);
                phases::run_from_owner(&mut session, owner, None).await;
            } else {
                session.publisher.enter(Phase::HandOver);
                let loaded = Loaded { process, monitor: Reached::NotYet(connecting), state_bytes, hashes };
                phases::run_from_loaded(&mut session, loaded, None).await;
            }
        }
        Err(error) => {
            // It may have ended since it was looked for.
            if never_ran_and_ended(&node, journal.record()) {
                discard(&node, journal).await;
                return publisher.fail(chain(&error), GuestPlace::Source, false);
            }
            publisher.fail(chain(&error), GuestPlace::PausedAtDestination, false);
        }
    }
}

/// Whether the guest of a visit is being taken home, and may have been stopped for that.
fn goes_home(session: &Session) -> bool {
    let (node, id) = (&session.node, session.journal.record().id);
    homeward(node.disk(), &node.config.sessions_dir, id).is_some_and(|r| r.state != SourceState::Warm)
}

/// Whether QEMU has ended without having run the guest: a source that has committed takes it back when it hears of that.
fn never_ran_and_ended(node: &Node, record: &DestinationRecord) -> bool {
    let ended = || record.vm.as_ref().is_some_and(|vm| node.config.vmm.has_ended(vm));
    let of_libvirt = record.vm.as_ref().is_some_and(|vm| vm.libvirt.is_some());
    let never_ran = record.state == DestinationState::Loaded
        || record.state == DestinationState::Owner && of_libvirt && !record.ran;
    never_ran && ended()
}

/// A daemon that was killed after libvirt was let go on, and before it had the final set, knows of no page that it is current.
fn settle_let_go(session: &mut Session) -> Result<(), DestinationError> {
    if !session.journal.record().final_applied {
        nothing_is_known(session)?;
        session.files.memory.begin_serving();
    }
    if session.state() == DestinationState::Filling {
        session.advance(DestinationEvent::StateLoaded)?;
    }
    Ok(())
}

/// Ends the QEMU of libvirt's in which a guest never ran, and that waits for a page of it: nobody answers its faults, and libvirt may wait for it. Also of
/// a session that ended before this daemon was started anew.
pub(crate) fn end_if_stuck(node: &Node, record: &DestinationRecord) {
    let vm = record.vm.as_ref().filter(|vm| vm.libvirt.is_some() && !node.config.vmm.has_ended(vm));
    if let Some(Ok(qemu)) = vm.map(|vm| node.config.vmm.adopt(vm)) {
        qemu.end_if_stuck();
    }
}

/// Removes what an earlier process left of a session that never owned the guest.
pub(crate) async fn discard(node: &Node, mut journal: Journal<DestinationRecord>) {
    let mut record = journal.record().clone();
    if record.vm.as_ref().is_some_and(|vm| vm.libvirt.is_some()) {
        // QEMU and its memory are libvirt's. It stays in the journal: the next life of this daemon may have to end it.
        end_if_stuck(node, &record);
        let left = !remove_files(node.disk(), tables_of(node, &record));
        record.state = DestinationState::Gone;
        record.note_removal(left);
        if journal.update_owing(|r| *r = record).is_err() {
            drop(owed::write_later(journal));
        }
        return;
    }
    // Where something could not be written or removed when this session ended, one that came later may have brought the guest.
    let later = record.vm.as_ref().and_then(|vm| node.vms.other_than(vm, &record.id.to_string()));
    let mut others_left = false;
    if let Some(later) = later {
        tracing::warn!(vm = later.name, "a VM of this name came later: it stays as it is");
        if let Some(vm) = &record.vm {
            others_left |= !arrival::give_back(&*node.config.devices, vm, Some(&later)).await;
        }
        record.leave_to(&later);
        let ours = record.vm.iter().flat_map(|vm| &vm.ram);
        vm_files::remove_ram(node.disk(), ours);
    } else if let Some(vm) = &record.vm {
        let ended = end_left_qemu(node, vm).await;
        others_left |= !ended;
        if ended {
            others_left |= !images::remove(record.id, &record.prepare, &record.images);
        }
        others_left |= !arrival::give_back(&*node.config.devices, vm, None).await;
        let folder = record.folder_is_ours.then_some(&vm.vm_dir);
        vm_files::remove_of(node.disk(), &vm.ram, &vm.qmp_socket, folder);
        if let Err(error) = node.vms.remove(&vm.name) {
            others_left = true;
            tracing::warn!(
                vm = vm.name,
                error = chain(&error),
                "could not remove the record of a VM that never arrived"
            );
        }
    }
    others_left |= !remove_files(node.disk(), tables_of(node, &record));
    record.state = DestinationState::Gone;
    record.note_removal(others_left);
    if journal.update_owing(|r| *r = record).is_err() {
        drop(owed::write_later(journal));
    }
}

fn tables_of(node: &Node, record: &DestinationRecord) -> Vec<std::path::PathBuf> {
    (0..record.prepare.blocks.len())
        .map(|index| super::guest_memory::GuestMemory::table_path(&node.page_map_dir(), record.id, index))
        .collect()
}

/// After a kill between a session's last line in the journal and its last act.
pub(crate) fn tidy(node: &Node, record: &DestinationRecord) {
    remove_files(node.disk(), tables_of(node, record));
    let id = record.id.to_string();
    if let Ok(mut vm) = node.vms.get(&record.prepare.vm)
        && vm.session.as_ref() == Some(&id)
    {
        vm.session = None;
        if let Err(error) = node.vms.put_owing(vm) {
            tracing::warn!(error = chain(&error), "could not update the VM's record");
        }
    }
}

/// After a kill before the record of a VM that came here could be written: the journal has it.
pub(crate) fn enter_again(node: &Node, record: &DestinationRecord) {
    let Some(vm) = record.vm.as_ref().filter(|vm| vm.libvirt.is_none()) else { return };
    let alive = node.config.vmm.is_there(vm) && !node.config.vmm.has_ended(vm);
    if !alive || node.vms.has(&vm.name) || node.vms.list().iter().any(|other| other.pid == vm.pid) {
        return;
    }
    tracing::warn!(vm = vm.name, pid = vm.pid, "this VM came here, and has no record: entering it again");
    if let Err(error) = node.vms.put_owing(vm.clone()) {
        tracing::warn!(vm = vm.name, error = chain(&error), "could not record a VM that came here");
    }
}

async fn open(
    node: Arc<Node>,
    (id, home): (SessionId, Option<String>),
    prepare: Prepare,
    (reserved, publisher): (Reservation, Publisher),
    arrivals: mpsc::Receiver<Arrival>,
) -> Result<(Session, Accepted), Box<(Publisher, OpenError)>> {
    match room(&node, (id, publisher.began_at(), home), prepare).await {
        Ok((files, journal, accepted)) => {
            Ok((session(node, journal, (reserved, publisher), files, arrivals), accepted))
        }
        Err(error) => Err(Box::new((publisher, error))),
    }
}

/// Writes down for what room is needed, and makes it: a process of the daemon that is killed meanwhile leaves nothing that the next one does
/// not find. Nothing is left if that fails.
async fn room(
    node: &Node,
    (id, began_at, home_address): (SessionId, Option<String>, Option<String>),
    mut prepare: Prepare,
) -> Result<(VmFiles, Journal<DestinationRecord>, Accepted), OpenError> {
    let asked = check::destination::asked_of(&prepare);
    // Not in every line of the journal: for a guest of 1 TiB it is longer than all else, and lines are written while the guest stands still.
    let held = prepare
        .blocks
        .iter_mut()
        .map(|b| std::mem::replace(&mut b.data, WireSet::Runs(Vec::new())))
        .collect();
    let agreed = vmove_node::peer::negotiate(&prepare.fabrics, &node.config.dialer.fabrics())?;
    let kind = agreed.kind;
    let plan = vm_files::plan(node, &prepare)?;
    let accepted = Accepted {
        destination: node.config.node.clone(),
        boot_id: vmove_node::clock::boot_id(),
        fabric: kind,
        fabric_reason: agreed.why,
        fabric_address: agreed.address,
        bulk_connections: node.config.bulk_connections,
        may_fall_back: agreed.may_fall_back,
    };
    let vm = match plan.waits.clone() {
        Some(waits) => VmRecord { session: Some(id.to_string()), ram: plan.ram.clone(), ..waits },
        None => VmRecord {
            name: prepare.vm.clone(),
            pid: 0,
            pid_start: 0,
            qmp_socket: plan.layout.qmp_socket.clone(),
            vm_dir: plan.layout.vm_dir.clone(),
            backing: prepare.backing,
            command_line: prepare.command_line.clone(),
            environment: prepare.environment.clone(),
            ram: plan.ram.clone(),
            overlays: Vec::new(),
            devices: arrival::chosen(&prepare),
            adopted: false,
            libvirt: None,
            session: Some(id.to_string()),
        },
    };
    let record = DestinationRecord {
        called_off: None,
        whole_report: None,
        id,
        began_at,
        prepare,
        state: DestinationState::Filling,
        vm: Some(vm),
        fault_fd: None,
        mode: None,
        final_applied: false,
        let_go: false,
        ran: false,
        fabric: kind,
        released: false,
        abandoned: false,
        complete: None,
        to_remove: false,
        folder_is_ours: plan.folder_is_ours,
        missing: Vec::new(),
        images: Vec::new(),
        stays: false,
        home_address,
    };
    let (dir, disk) = (node.session_dir(id), node.disk());
    let path = dir.join("destination.jsonl");
    let journal = disk.create_dir_all(&dir).and_then(|()| Journal::create_on(disk, &path, record));
    let mut journal = journal.map_err(|source| OpenError::Journal { path: path.clone(), source })?;
    let record = journal.record();
    // A device that it was granted is given to no other VM.
    let taken = match node.config.admission.admit(&asked, Coming::ByMigration) {
        Ok(()) => take_devices(node, record.vm.as_ref()).await.map_err(OpenError::Devices),
        Err(why) => Err(OpenError::NotAdmitted(why)),
    };
    let made = taken.and_then(|()| Ok(vm_files::make(node, id, &record.prepare, plan, held)?));
    let made = made.and_then(|files| match make_images(node, &mut journal, &path) {
        Ok(()) => Ok(files),
        Err(error) => {
            files.remove(node.disk());
            Err(error)
        }
    });
    match made {
        Ok(files) => Ok((files, journal, accepted)),
        Err(error) => {
            if let Some(vm) = &journal.record().vm {
                arrival::give_back(&*node.config.devices, vm, None).await;
            }
            // Nothing has begun. If it stays, the next process of the daemon finds nothing to remove.
            let _ = disk.remove_dir_all(&dir);
            Err(error)
        }
    }
}

/// Makes the images of the disks that move. Nothing is left if that fails.
fn make_images(node: &Node, journal: &mut Journal<DestinationRecord>, path: &Path) -> Result<(), OpenError> {
    let record = journal.record();
    if record.prepare.moved.is_empty() {
        return Ok(());
    }
    let (id, prepare) = (record.id, record.prepare.clone());
    let vm_dir = node.layout(&prepare.vm, prepare.backing).vm_dir;
    let made = images::make(id, &prepare, &Ground::of(node, &vm_dir))?;
    let noted = journal.update(|r| r.images.clone_from(&made));
    let noted = noted.map_err(|source| OpenError::Journal { path: path.to_owned(), source });
    let settled = noted.and_then(|()| Ok(images::settle(id, &made)?));
    if settled.is_err() {
        images::remove(id, &prepare, &made);
    }
    settled
}

async fn take_devices(node: &Node, vm: Option<&VmRecord>) -> Result<(), DevicesError> {
    match vm {
        Some(vm) => arrival::take(&*node.config.devices, vm).await,
        None => Ok(()),
    }
}

/// What an earlier process of this daemon has left: the VM's files and its QEMU, whose faults are taken again.
fn found_again(node: &Node, record: &DestinationRecord) -> Result<(VmFiles, Arc<dyn QemuHandle>), OpenError> {
    let vm = record.vm.as_ref().ok_or(OpenError::NotInJournal("VM"))?;
    if !record.final_applied && !record.let_go {
        return Err(OpenError::PageMapsIncomplete);
    }
    let fault_fd = record.fault_fd.ok_or(OpenError::NotInJournal("fault descriptor"))?;
    let files = vm_files::find(node, record, &vm.ram)?;
    let attached = node.config.vmm.retake_faults(vm, fault_fd, &files.memory.files())?;
    let process = node.config.vmm.adopt(vm)?;
    if let Some(attached) = attached {
        files.memory.attach(attached);
    }
    if record.final_applied {
        files.memory.begin_serving();
    }
    Ok((files, process))
}

fn session(
    node: Arc<Node>,
    journal: Journal<DestinationRecord>,
    (room, publisher): (Reservation, Publisher),
    files: VmFiles,
    arrivals: mpsc::Receiver<Arrival>,
) -> Session {
    room.in_files(files.ram.iter().map(|file| file.path.clone()).collect());
    let pages = PageConnections::new(node.config.bulk_connections, node.config.vmm.page_workers());
    let (deliveries, disks) = (Deliveries::default(), DiskWires::default());
    let record = journal.record();
    let after = AfterWires::of(
        &record.prepare,
        &files.layout.vm_dir,
        &node.config.confinement,
        record.state.may_run(),
    );
    Session { node, journal, publisher, files, room, pages, arrivals, deliveries, disks, after }
}

/// Ends the QEMU that an earlier process of this daemon had started for a session that is no more, also when that process was
/// killed before it had written down which one it is. False if it does not end.
async fn end_left_qemu(node: &Node, vm: &VmRecord) -> bool {
    match node.config.vmm.end_started_in(&vm.vm_dir).await {
        Ok(ended) if ended.iter().any(|pid| *pid != vm.pid.unsigned_abs()) => {
            tracing::warn!(vm = vm.name, ?ended, "ended a QEMU that has no record");
        }
        Ok(_) => {}
        Err(error) => {
            tracing::error!(vm = vm.name, error = chain(&error), "a QEMU does not end");
            return false;
        }
    }
    true
}

/// Waits a while for a name that somebody holds for a moment, such as whoever gives back the devices of a VM that has ended.
async fn until_free(node: &Node, vm: &str) {
    let until = Instant::now() + NAME_HELD_FOR;
    while node.vms.is_name_held(vm) && Instant::now() < until {
        sleep(LOOK_AGAIN).await;
    }
}
