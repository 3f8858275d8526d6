//! Phase Asking: the guest is looked at, and the destination is asked for room. Nothing is changed yet.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use vmove_memory::RamFile;
use vmove_qmp::inspect::VmFacts;

use super::aborted::Undo;
use super::control::Control;
use super::conversation::{Heard, Serving};
use super::disk_choice::{self, Choice, Moving};
use super::disk_copies::GIVE_UP_TIMEOUT;
use super::error::{SourceError, Stop};
use super::link_rate::LinkRate;
use super::memory::{SourceMemory, parts_with_data};
use super::page_service::{PageService, Terms, show_fabric};
use super::served_disks;
use super::session::Session;
use super::warm::Warm;
use crate::devices::way;
use crate::disk_hash;
use crate::node::Node;
use crate::proto::message::{Accepted, BlockInfo, OwnedDevice, Prepare, ToDestination, ToSource};
use crate::records::{FileId, LeftImage, ServedDisk};
use crate::taps::{Tap, TapsError};
use crate::vmm::LeavingMonitor;
use vmove_node::blocking::spawn_blocking;
use vmove_node::peer::Token;
use vmove_node::record::{RamFileRecord, VmRecord};
use vmove_types::check::Blocker;
use vmove_types::goal::Goals;
use vmove_types::spec::{MigrationSpec, Mode};

/// The destination looks for blockers, which starts a QEMU twice to ask what it is.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The guest's QEMU, as it was found.
#[derive(Debug)]
pub(super) struct Guest {
    pub monitor: Arc<dyn LeavingMonitor>,
    /// A disk bypasses the page cache: the guest is stopped and drained for each scan.
    pub direct_io: bool,
    facts: VmFacts,
    disks: Choice,
    taps: Result<Vec<Tap>, TapsError>,
    /// Modes that nothing here is in the way of.
    pub modes: Vec<Mode>,
}

/// A destination that was dialled.
#[derive(Debug)]
pub(super) struct Asking {
    guest: Guest,
    blocks: Vec<BlockInfo>,
    devices: Vec<OwnedDevice>,
    control: Control,
}

/// A destination that has room.
#[derive(Debug)]
pub(super) struct Room {
    accepted: Accepted,
    memory: Arc<SourceMemory>,
}

/// Describes a VM to a destination.
pub(super) fn prepare_message(
    node: &Node,
    vm: &VmRecord,
    spec: &MigrationSpec,
    (facts, disks): (&VmFacts, &Choice),
    (blocks, devices): (Vec<BlockInfo>, Vec<OwnedDevice>),
    token: Token,
    check_only: bool,
) -> Prepare {
    Prepare {
        vm: vm.name.clone(),
        source: node.config.node.clone(),
        boot_id: vmove_node::clock::boot_id(),
        token,
        spec: spec.clone(),
        check_only,
        command_line: vm.command_line.clone(),
        environment: vm.environment.clone(),
        backing: vm.backing,
        blocks,
        qemu_version: facts.version.clone(),
        machine: facts.machine.clone(),
        was_running: facts.status == "running",
        disks: disks.shared(facts),
        moved: disks.told(),
        fabrics: node.config.dialer.fabrics(),
        devices,
        taps: crate::check::network::places(facts, vm.pid.unsigned_abs()),
        in_group: false,
        libvirt: vm.libvirt.clone(),
        home: None,
        home_port: node.config.port,
    }
}

impl Guest {
    /// Looks at the guest, and for what stands in the way here.
    pub(super) async fn look(session: &mut Session) -> Result<Self, Stop> {
        let vmm = Arc::clone(&session.node.config.vmm);
        let monitor = vmm.monitor(session.vm()).await.map_err(SourceError::Monitor)?;
        let pid = session.vm().pid.unsigned_abs();
        let facts = monitor.facts(pid).await.map_err(SourceError::Monitor)?;
        let vm = session.vm().clone();
        let mut blockers = crate::check::source::blockers(&facts, &vm.devices);
        let ways = way::look(&vm, &*monitor, &facts, &session.spec().devices).await;
        blockers.extend(ways.map_err(SourceError::Devices)?.blockers);
        let private = crate::check::source::private_ram(&*vmm, session.vm());
        blockers.extend(private.map_err(SourceError::memory("look at the guest's memory"))?);
        let disks = look_at_disks(session, &*monitor).await?;
        disks.mend(&facts, &mut blockers);
        blockers.extend(disks.blockers.iter().cloned());
        blockers.extend(served_disks::blockers(&session.node, session.vm(), session.spec(), &disks));
        let mode = session.spec().mode.fixed();
        let modes = left_of(&blockers);
        // `auto` takes what is left; a named mode must be possible.
        let bad: Vec<_> =
            blockers.into_iter().filter(|b| mode.map_or(b.modes.is_empty(), |m| b.rules_out(m))).collect();
        if !bad.is_empty() {
            return Err(Stop::Refused(bad));
        }
        let direct_io = facts.has_direct_io();
        let how = if direct_io {
            "guest stopped and drained for each scan"
        } else {
            "no disk bypasses the page cache"
        };
        how.clone_into(&mut session.report.direct_io);
        let was_running = facts.status == "running";
        session.write(|r| r.was_running = was_running)?;
        // Of a guest of libvirt's no frames are passed on.
        let taps = if vm.libvirt.is_some() { Ok(Vec::new()) } else { Tap::of(&facts.netdevs, pid) };
        Ok(Self { monitor, direct_io, facts, disks, taps, modes })
    }

    /// Whether the guest runs.
    pub(super) fn runs(&self) -> bool {
        self.facts.status == "running"
    }

    /// Dials the destination, when everything is known that it is to be told: it does not wait long for the first message, and the kernel may take
    /// long to say which huge pages there are, while it moves them elsewhere to make larger ones.
    pub(super) async fn dial(self, session: &Session) -> Result<Asking, Stop> {
        let vm = session.vm().clone();
        // Registered with the fabric once that is agreed on; what is asked here is the layout.
        let blocks = spawn_blocking(move || layout(&vm)).await.map_err(SourceError::from)??;
        let devices = way::owned_devices(&session.node, session.vm()).await;
        let control = Control::dial(session, Token::default()).await?;
        Ok(Asking { guest: self, blocks, devices, control })
    }
}

impl Asking {
    /// Asks the destination for room.
    pub(super) async fn ask(&mut self, session: &mut Session) -> Result<Room, Stop> {
        let record = session.journal.record();
        let mut prepare = prepare_message(
            &session.node,
            &record.vm,
            &record.spec,
            (&self.guest.facts, &self.guest.disks),
            (std::mem::take(&mut self.blocks), std::mem::take(&mut self.devices)),
            record.token,
            false,
        );
        prepare.in_group = session.member.is_some();
        prepare.home = record.home;
        // Goals are this side's, and it may have chosen the mode by them.
        // But for the share of its processors, which it keeps itself.
        let host_cpu_percent = prepare.spec.goals.host_cpu_percent;
        prepare.spec.goals = Goals { host_cpu_percent, ..Goals::default() };
        if session.steering.is_some() {
            prepare.spec.mode = session.mode.into();
        }
        self.control.send(&ToDestination::Prepare(Box::new(prepare))).await?;
        let answer = timeout(ANSWER_TIMEOUT, session.next(&mut self.control, Serving::Nothing)).await;
        let no_answer =
            || SourceError::NoAnswer { to: session.to().clone(), seconds: ANSWER_TIMEOUT.as_secs() };
        let accepted = match answer.map_err(|_| no_answer())?? {
            Heard::Message(ToSource::Accepted(accepted)) => *accepted,
            Heard::Message(other) => return Err(session.unexpected(&other)),
            // Never: nothing is served.
            Heard::PagesRenewed => return Err(no_answer().into()),
        };
        let (vm, vmm) = (session.vm().clone(), Arc::clone(&session.node.config.vmm));
        let (home, dir) = (session.journal.record().home, session.node.page_map_dir());
        let open = move || match home {
            Some(home) => SourceMemory::open_of_visit(&*vmm, &vm, &dir, home.visit),
            None => SourceMemory::open(&*vmm, &vm),
        };
        let memory = spawn_blocking(open).await.map_err(SourceError::from)?;
        let memory = memory.map_err(SourceError::memory("open the guest's memory"))?;
        note(session, &accepted, &memory)?;
        note_disks(session, &self.guest.disks)?;
        Ok(Room { accepted, memory: Arc::new(memory.counted_in(&session.cpu)) })
    }

    /// The destination has room: pages can cross.
    pub(super) fn accepted(self, room: Room) -> Warm {
        let pages = PageService::new(Terms::from(&room.accepted), room.memory);
        let Guest { monitor, direct_io, disks, taps, .. } = self.guest;
        Warm {
            moving: disks.moved,
            taps,
            monitor,
            direct_io,
            begins_copies: false,
            control: self.control,
            pages,
            link_rate: LinkRate::default(),
            compare_next: false,
            prepared: false,
        }
    }
}

/// The modes that these do not rule out.
pub(super) fn left_of(blockers: &[Blocker]) -> Vec<Mode> {
    let open = |mode: &Mode| !blockers.iter().any(|blocker| blocker.rules_out(*mode));
    [Mode::Precopy, Mode::Postcopy, Mode::Hybrid].into_iter().filter(open).collect()
}

/// Which disks move. What an earlier migration has left in QEMU of their copies is taken away before: a block job would be in the way.
async fn look_at_disks(session: &Session, monitor: &dyn LeavingMonitor) -> Result<Choice, Stop> {
    if !session.spec().disks.is_empty() {
        monitor.give_up_copies(GIVE_UP_TIMEOUT).await.map_err(SourceError::Monitor)?;
        let left = monitor.end_comparison(&disk_hash::socket(session.vm()), false).await;
        left.map_err(SourceError::Monitor)?;
    }
    let disks = monitor.disks().await.map_err(SourceError::Monitor)?;
    Ok(disk_choice::choose(session.vm(), session.spec(), disks).map_err(SourceError::from)?)
}

/// Which images are left here in the end.
fn note_disks(session: &mut Session, disks: &Choice) -> Result<(), SourceError> {
    if disks.moved.is_empty() {
        return Ok(());
    }
    let left = |disk: &Moving| {
        let path = disk.path.clone();
        let file =
            FileId::at(&path).map_err(|source| SourceError::DiskImage { path: path.clone(), source })?;
        Ok(LeftImage { name: disk.told.name.clone(), path, file })
    };
    let left = disks.moved.iter().map(left).collect::<Result<Vec<_>, SourceError>>()?;
    let after = session.spec().disks_after;
    let served = |disk: &Moving| ServedDisk { told: disk.told.clone(), path: disk.path.clone() };
    session.write(|r| {
        r.disks = left;
        r.after = disks.moved.iter().filter(|_| after).map(served).collect();
    })
}

/// What is known from here on is in the report and in the journal.
fn note(session: &mut Session, accepted: &Accepted, memory: &SourceMemory) -> Result<(), SourceError> {
    let backing = session.vm().backing.name();
    let report = &mut session.report;
    report.destination.clone_from(&accepted.destination);
    report.fabric = accepted.fabric.to_string();
    report.fabric_reason.clone_from(&accepted.fabric_reason);
    backing.clone_into(&mut report.memory);
    report.pages_total = memory.total_pages();
    report.page_size = memory.page_bytes();
    show_fabric(session);
    session.publisher.coming(|coming| coming.begin(memory.content_bytes()));
    session.write(|r| {
        r.fabric = Some(accepted.fabric);
        r.fabric_address.clone_from(&accepted.fabric_address);
        r.bulk_connections = accepted.bulk_connections;
        r.may_fall_back = accepted.may_fall_back;
    })?;
    if vmove_node::clock::is_of_this_kernel(&accepted.boot_id) {
        session.clock.set_same_host();
    }
    Ok(())
}

impl Undo for Asking {
    async fn bring_guest_back(&mut self, _: &Session) -> Result<(), SourceError> {
        Ok(())
    }

    fn control(&mut self) -> Option<&mut Control> {
        Some(&mut self.control)
    }
}

fn layout(vm: &VmRecord) -> Result<Vec<BlockInfo>, SourceError> {
    let info = |ram: &RamFileRecord| -> vmove_memory::Result<BlockInfo> {
        let data = parts_with_data(&RamFile::open(&ram.path)?)?;
        Ok(BlockInfo { id: ram.id.clone(), size: ram.size, page_size: vm.backing.page_bytes(), data })
    };
    let infos: vmove_memory::Result<_> = vm.ram.iter().map(info).collect();
    infos.map_err(SourceError::memory("look at the guest's memory"))
}
