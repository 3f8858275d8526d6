//! Freezing a guest: it goes on within milliseconds, and its RAM file never changes again.
//!
//! ```text
//!                 guest runs                    guest stands still                      guest runs
//! journal  Begun ------------- Stopping -------------------------------- Frozen ---------------------- (Complete)
//!          template named,     STOP, device state saved,  RAM mapped     RESUME, its writes stay
//!          new RAM files made  drained                    private        in its own memory
//! ```
//!
//! The guest's RAM becomes a private mapping of its file: the kernel keeps what the guest writes from then on apart. The file
//! gets a second name, that of the template; the first name, and QEMU's own descriptor, go to a new and empty file. So
//! nothing that QEMU does to "its" RAM file (punching holes, when a balloon is plugged in later) reaches the template.
//!
//! Memory that cannot be mapped again is write-protected and copied instead: see [`copy`].
//!
//! Killed at any instruction, this leaves a guest that [`undo`] lets run on with the memory that it had: as long as it has not
//! run since it stopped, private and shared mappings of the file show the same bytes.

mod copy;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use vmove_types::Backing;

use tokio::io::AsyncReadExt;
use vmove_memory::{
    ByteLen, Injector, Kept, MemoryDir, Process, QemuMapping, RamFile, Replacement, Sharing, descriptors_of,
    is_shared_whole, replace_in_qemu, unmap_strays,
};
use vmove_node::guest_devices::fit::Owned;
use vmove_node::journal::Journal;
use vmove_node::layout;
use vmove_types::time::{Mono, ms};

use vmove_node::record::VmRecord;
use vmove_node::registry::process_of;
use vmove_node::starter::Starter;
use vmove_qmp::Client;
use vmove_qmp::confine::Confinement;
use vmove_qmp::inspect::VmFacts;
use vmove_qmp::switchover::{GuestState, Hold, Outbound, Source, SourceOptions, StateReceiver};

use crate::CloneError;
use crate::check::{GuestRam, Way, hints_of};
use crate::disk::{self, Disk};
use crate::error::blocking;
use crate::files::remove_file;
use crate::record::{ForkPhase, ForkRecord, FrozenFile};
use crate::room;
use crate::template::{Manifest, Template, TemplateRam, folders, remove_dir};
use vmove_types::fork_report::FreezeReport;

/// For what takes milliseconds, on a machine that is busy.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a QEMU may take to end after its monitor was closed.
const GONE_TIMEOUT: Duration = Duration::from_secs(2);
/// Open files given to QEMU are this many milliseconds old at most when it must have taken them.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);

/// What is to be frozen.
#[derive(Debug)]
pub struct Freeze<'a> {
    /// Id of the fork, and of its template.
    pub id: &'a str,
    /// The guest.
    pub vm: &'a VmRecord,
    /// Its monitor.
    pub client: &'a Client,
    /// What it is made of.
    pub facts: &'a VmFacts,
    /// Its memory.
    pub ram: Arc<GuestRam>,
    /// Most bytes that a copy of its memory may take, where it is copied.
    pub copy_limit: Option<u64>,
    /// The daemon's folder for guest memory.
    pub memory: &'a Path,
    /// Where to write the journal.
    pub journal: &'a Path,
    /// Name under which the template is to be kept.
    pub name: Option<String>,
    /// Names of the children that are to come.
    pub children: Vec<String>,
    /// Devices of its node that it owns: none of them is plugged in.
    pub devices: &'a [Owned],
    /// Its disks that are written.
    pub disks: &'a [Disk],
    /// How QEMUs are started here, and where their memory is taken from.
    pub starter: &'a Starter,
    /// Folder for overlays; `None` for that of each image.
    pub overlay_dir: Option<&'a Path>,
}

/// A guest that was frozen and runs again (or is paused, as it was).
#[derive(Debug)]
pub struct Frozen {
    /// What was frozen.
    pub template: Template,
    /// Its device state.
    pub state: Arc<[u8]>,
    /// When it was stopped, if it ran.
    pub stopped: Option<Mono>,
    /// From STOP to RESUME.
    pub pause: Duration,
    /// How its memory was frozen.
    pub freeze: FreezeReport,
    /// The journal, in phase [`ForkPhase::Frozen`].
    pub journal: Journal<ForkRecord>,
}

/// A guest that could not be frozen.
#[derive(Debug)]
pub struct Failed {
    /// Why.
    pub why: CloneError,
    /// What was begun, and how far it is undone.
    pub journal: Option<Box<Journal<ForkRecord>>>,
}

impl From<CloneError> for Failed {
    fn from(why: CloneError) -> Self {
        Self { why, journal: None }
    }
}

/// Freezes a guest with shared memory. `on_private` is called while it stands still, before its memory becomes private, if it
/// does: it writes down that it is, and where. `on_kept` hears how far the copy has come, where memory is copied instead.
///
/// # Errors
/// [`Failed`]; the guest then runs on, unless the error says otherwise. [`is_private`](crate::check::is_private) tells
/// with which memory.
pub async fn freeze(
    order: Freeze<'_>,
    on_private: impl FnOnce(&[QemuMapping]) -> Result<(), CloneError> + Send + 'static,
    on_kept: impl Fn(Kept) + Send,
) -> Result<Frozen, Failed> {
    let ram = Arc::clone(&order.ram);
    let manifest = manifest(&order);
    let mut journal = begin(&order, &ram)?;
    let made = make(&mut journal, &ram, (order.memory, order.starter), manifest).await;
    let (dir, manifest) = match made {
        Ok(made) => made,
        Err(error) => return Err(give_up(journal, order.client, error).await),
    };
    let done = match ram.way {
        Way::Remapped => remap(&order, &ram, &mut journal, on_private).await.map(|stopped| {
            (stopped, FreezeReport { way: Way::Remapped.word().to_owned(), ..FreezeReport::default() })
        }),
        Way::WriteProtected => copy::freeze_by_copy(&order, &ram, &mut journal, on_kept).await,
    };
    match done {
        Ok((Stopped { state, at, pause }, freeze)) => {
            let given = state.clone();
            match blocking(move || Template::complete(&dir, manifest, &given)).await {
                Ok(template) => Ok(Frozen { template, state, stopped: at, pause, freeze, journal }),
                Err(error) => Err(give_up(journal, order.client, error).await),
            }
        }
        Err(error) => Err(give_up(journal, order.client, error).await),
    }
}

/// Brings the guest back after an error, and says what became of it.
async fn give_up(mut journal: Journal<ForkRecord>, client: &Client, error: CloneError) -> Failed {
    let vm = journal.record().vm.clone();
    let undone = match process_of(&vm) {
        Some(_) => undo(&mut journal, client).await.err(),
        None => None,
    };
    // A QEMU that is killed closes its monitor before it is gone.
    let until = tokio::time::Instant::now() + GONE_TIMEOUT;
    let has_time = || tokio::time::Instant::now() < until;
    while undone.is_some() && client.is_closed() && process_of(&vm).is_some() && has_time() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let log = vmove_qmp::process::log_in(&vm.vm_dir);
    let why = match undone {
        _ if process_of(&vm).is_none() => {
            CloneError::ParentEnded { vm: vm.name, log, error: Box::new(error) }
        }
        None => error,
        Some(why) => CloneError::ParentNotBack { vm: vm.name, error: Box::new(error), why: Box::new(why) },
    };
    Failed { why, journal: Some(Box::new(journal)) }
}

fn manifest(order: &Freeze<'_>) -> Manifest {
    let created = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |age| age.as_secs());
    Manifest {
        version: crate::template::VERSION,
        id: order.id.to_owned(),
        name: order.name.clone(),
        vm: order.vm.name.clone(),
        created,
        qemu: format!("{} {}", order.facts.version, order.facts.package).trim().to_owned(),
        machine: order.facts.machine.clone(),
        backing: order.vm.backing,
        command_line: order.vm.command_line.clone(),
        environment: order.vm.environment.clone(),
        disks: order.disks.to_vec(),
        devices: order.devices.to_vec(),
        ram: Vec::new(),
        state_bytes: 0,
        state_checksum: 0,
    }
}

fn begin(order: &Freeze<'_>, ram: &GuestRam) -> Result<Journal<ForkRecord>, CloneError> {
    let record = ForkRecord {
        id: order.id.to_owned(),
        vm: order.vm.clone(),
        phase: ForkPhase::Begun,
        way: ram.way,
        was_running: order.facts.status == "running",
        files: Vec::new(),
        mappings: ram.mappings.clone(),
        template: PathBuf::new(),
        keep: order.name.is_some(),
        children: order.children.clone(),
        disks: disk::steps(order.disks, &order.vm.name, order.id, order.overlay_dir),
    };
    Journal::create(order.journal, record).map_err(CloneError::io("write", order.journal))
}

pub(crate) fn note(
    journal: &mut Journal<ForkRecord>,
    change: impl FnOnce(&mut ForkRecord),
) -> Result<(), CloneError> {
    let path = journal.path().to_owned();
    journal.update(change).map_err(CloneError::io("write", &path))
}

/// Names the template's files and makes those that take their place, or those that memory is copied to.
async fn make(
    journal: &mut Journal<ForkRecord>,
    ram: &Arc<GuestRam>,
    (memory, starter): (&Path, &Starter),
    mut manifest: Manifest,
) -> Result<(PathBuf, Manifest), CloneError> {
    let backing = manifest.backing;
    let (dir, ram_dir) = folders(memory, &manifest.id, backing)?;
    let mut files = Vec::new();
    for (number, (file, known)) in ram.files.iter().zip(&journal.record().vm.ram).enumerate() {
        let template = ram_dir.join(format!("ram-{number}"));
        manifest.ram.push(TemplateRam {
            id: known.id.clone(),
            size: known.size,
            file: template.clone(),
            checksum: None,
        });
        let path = known.path.clone();
        let home = if ram.way == Way::Remapped { with_suffix(&path, "home") } else { PathBuf::new() };
        files.push(FrozenFile { path, home, template, identity: file.identity() });
    }
    let (noted, folder) = (files.clone(), dir.clone());
    note(journal, |r| {
        r.files = noted;
        r.template = folder;
    })?;
    let (way, starter, vm) = (ram.way, starter.clone(), journal.record().vm.name.clone());
    blocking(move || {
        for file in &files {
            let size = std::fs::metadata(&file.path).map_err(CloneError::io("look at", &file.path))?.len();
            if way == Way::WriteProtected {
                make_empty(&file.template, size, backing)?;
                continue;
            }
            remove_file(&file.home)?;
            std::fs::hard_link(&file.path, &file.template).map_err(CloneError::io("link", &file.path))?;
            let home = make_empty(&file.home, size, backing)?;
            // The parent's memory stays on its NUMA nodes, and children write on theirs.
            starter.bind_memory(&vm, &home);
            starter.unbind_memory(&vm, &file.template);
        }
        Ok((dir, manifest))
    })
    .await
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{suffix}"));
    name.into()
}

/// A RAM file that is all hole, beside the one whose place it is to take: on the same file system, whoever chose that.
fn make_empty(path: &Path, size: u64, backing: Backing) -> Result<RamFile, CloneError> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let dir = MemoryDir::prepare(folder, backing)?;
    Ok(dir.create_ram_file(name, ByteLen(size))?)
}

/// Stops the guest, saves its device state, makes its memory private, and lets it go on.
async fn remap(
    order: &Freeze<'_>,
    ram: &Arc<GuestRam>,
    journal: &mut Journal<ForkRecord>,
    on_private: impl FnOnce(&[QemuMapping]) -> Result<(), CloneError> + Send + 'static,
) -> Result<Stopped, CloneError> {
    let plan = plan(order.client, ram, journal.record().files.clone()).await?;
    let (held, entries) = (Arc::clone(ram), plan.entries);
    let backing = order.vm.backing;
    let dir = layout::memory_dir(order.memory, backing);
    let work = move || {
        // First: private memory that nobody knows of could not be found again.
        on_private(&held.mappings)?;
        let needed = plan.replacements.iter().map(|one| one.at.len.0).sum();
        replace_in_qemu(&held.process, &plan.replacements, &plan.descriptors)
            .map_err(|error| room::huge_pages(error, needed, &dir, backing))?;
        for file in &plan.files {
            std::fs::rename(&file.home, &file.path).map_err(CloneError::io("rename", &file.home))?;
        }
        Ok(())
    };
    let stopped = stop_and_go(order, journal, work, ForkPhase::Frozen).await?;
    for entry in entries {
        // QEMU closes it at the latest with our connection.
        if let Err(error) = order.client.remove_fd(entry).await {
            tracing::debug!(%error, "a descriptor stays open in QEMU");
        }
    }
    Ok(stopped)
}

/// What was saved while the guest stood still.
pub(crate) struct Stopped {
    pub(crate) state: Arc<[u8]>,
    /// When it was stopped, if it ran.
    pub(crate) at: Option<Mono>,
    /// From STOP to RESUME.
    pub(crate) pause: Duration,
}

/// Stops the guest, saves its device state, does `work`, and lets it go on in phase `then`.
pub(crate) async fn stop_and_go(
    order: &Freeze<'_>,
    journal: &mut Journal<ForkRecord>,
    work: impl FnOnce() -> Result<(), CloneError> + Send + 'static,
    then: ForkPhase,
) -> Result<Stopped, CloneError> {
    let client = order.client;
    let disks = journal.record().disks.clone();
    let confinement = Confinement::of_process(order.vm.pid.unsigned_abs()).unwrap_or_default();
    disk::prepare(client, &disks, &confinement).await?;
    let hold = match client.version().major {
        // Disks are switched when the guest is drained, and before QEMU lets go of them.
        _ if !disks.is_empty() => Hold::UntilTold,
        // QEMU 10 says when the guest is drained without being made to wait.
        10.. => Hold::Never,
        _ => Hold::AtOnce,
    };
    let source = Source::prepare(client, &SourceOptions::default().hold(hold)).await?;
    let (mut stream, theirs) = StateReceiver::pair()?;
    note(journal, |r| r.phase = ForkPhase::Stopping)?;
    let reading = tokio::spawn(async move {
        let mut state = Vec::with_capacity(1 << 20);
        stream.read_to_end(&mut state).await.map(|_| state)
    });
    let saved = async {
        source.start(Outbound::Fd(theirs)).await?;
        let stopped = source.stopped(STEP_TIMEOUT).await?;
        if !disks.is_empty() {
            source.held(STEP_TIMEOUT).await?;
            disk::snapshot(client, &disks).await?;
            source.continue_().await?;
        }
        source.completed(STEP_TIMEOUT).await?;
        Ok::<_, CloneError>(stopped)
    };
    let stopped = saved.await?;
    let saved = Mono::now();
    blocking(work).await?;
    note(journal, |r| r.phase = then)?;
    let worked = Mono::now();
    let state = source.resume_after_completed(STEP_TIMEOUT).await?;
    let pause = match state {
        GuestState::Running { resumed: Some(at) } if stopped.was_running => {
            Mono(at.0).since(Mono(stopped.at.0))
        }
        GuestState::Running { .. } if stopped.was_running => Mono::now().since(Mono(stopped.at.0)),
        _ => Duration::ZERO,
    };
    tracing::debug!(
        saved_ms = ms(saved.since(Mono(stopped.at.0))),
        memory_ms = ms(worked.since(saved)),
        pause_ms = ms(pause),
        "the guest stood still"
    );
    let bytes = reading.await.map_err(|e| CloneError::Task(e.to_string()))?;
    let bytes = bytes.map_err(|e| CloneError::Task(format!("the device state could not be read: {e}")))?;
    let at = stopped.was_running.then_some(Mono(stopped.at.0));
    Ok(Stopped { state: bytes.into(), at, pause })
}

/// What is to happen inside QEMU, all of it found out while the guest runs.
struct Plan {
    replacements: Vec<Replacement>,
    descriptors: Vec<(i32, i32)>,
    files: Vec<FrozenFile>,
    entries: Vec<vmove_qmp::client::FdSetEntry>,
}

async fn plan(client: &Client, ram: &Arc<GuestRam>, files: Vec<FrozenFile>) -> Result<Plan, CloneError> {
    let (mut own, mut descriptors, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    let held = Arc::clone(ram);
    blocking(move || Ok(Injector::prepare(&held.process)?)).await?;
    for file in &files {
        let held = descriptors_of(&ram.process, file.identity)?;
        let first = held.first().copied().ok_or_else(|| {
            CloneError::Task(format!("QEMU holds no descriptor of {}", file.path.display()))
        })?;
        own.push(first);
        let home = RamFile::open(&file.home)?;
        let entry = client.add_fd(None, home.fd(), DESCRIPTOR_TIMEOUT).await?;
        descriptors.extend(held.into_iter().map(|old| (entry.fd, old)));
        entries.push(entry);
    }
    let replacements = ram
        .mappings
        .iter()
        .zip(&ram.hints)
        .map(|(at, hints)| Replacement {
            at: *at,
            fd_in_qemu: own[at.file_index],
            sharing: Sharing::Private,
            hints: hints.clone(),
        })
        .collect();
    Ok(Plan { replacements, descriptors, files, entries })
}

/// How a fork was undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undone {
    /// The guest's memory is its RAM file again, or still.
    Shared,
    /// The guest's memory is private: it had got that far.
    Private,
}

/// Brings the guest of an unfinished fork back, after an error or in a new life of the daemon: its memory is whole, one way or
/// the other, and it runs if it did. The template is removed, unless the guest's memory is private and it is to be kept.
///
/// # Errors
/// [`CloneError`] if the guest cannot be brought back.
pub async fn undo(journal: &mut Journal<ForkRecord>, client: &Client) -> Result<Undone, CloneError> {
    let record = journal.record().clone();
    let how = settle_memory(&record, client).await?;
    if record.phase != ForkPhase::Begun {
        let source = Source::attach(client, record.was_running).await?;
        source.cancel(STEP_TIMEOUT).await?;
    }
    disk::undo(client, &record.disks).await?;
    if record.phase != ForkPhase::Complete {
        // The guest is back, and whoever finds the older line finds it so.
        if let Err(error) = journal.update_owing(|r| r.phase = ForkPhase::Complete) {
            tracing::warn!(path = %journal.path().display(), %error, "cannot write down that a fork was undone");
        }
    }
    Ok(how)
}

/// Removes what an unfinished fork had made on this host.
///
/// # Errors
/// [`CloneError::Io`].
pub fn tidy(record: &ForkRecord) -> Result<(), CloneError> {
    for file in &record.files {
        remove_file(&file.home)?;
        remove_file(&file.template)?;
        if let Some(folder) = file.template.parent() {
            remove_dir(folder)?;
        }
    }
    if record.template.as_os_str().is_empty() { Ok(()) } else { remove_dir(&record.template) }
}

/// Finishes, or finds not begun, what happens inside QEMU while the guest stands still.
async fn settle_memory(record: &ForkRecord, client: &Client) -> Result<Undone, CloneError> {
    if record.way == Way::WriteProtected {
        // Protection ended with whoever held it.
        return Ok(Undone::Shared);
    }
    let process = Process::reopen(record.vm.pid.unsigned_abs(), record.vm.pid_start)?;
    let frozen: Vec<RamFile> = record
        .files
        .iter()
        .filter_map(|file| RamFile::open(&file.template).ok().filter(|f| f.identity() == file.identity))
        .collect();
    if frozen.len() < record.files.len() || frozen.is_empty() {
        // Not even the names were made.
        return Ok(Undone::Shared);
    }
    let identities: Vec<(u64, u64)> = record.files.iter().map(|file| file.identity).collect();
    unmap_strays(&process, &identities, &record.mappings)?;
    let shared = is_shared_whole(&process, &frozen.iter().collect::<Vec<_>>())?;
    let held: Vec<Vec<i32>> =
        record.files.iter().map(|f| descriptors_of(&process, f.identity)).collect::<Result<_, _>>()?;
    if shared && held.iter().all(|fds| !fds.is_empty()) {
        return Ok(Undone::Shared);
    }
    // Forward: what was done already is done again, which changes nothing since the guest has not run.
    let hints = hints_of(&process, &record.mappings)?;
    let mut descriptors = Vec::new();
    for (file, held) in record.files.iter().zip(&held) {
        if held.is_empty() {
            continue;
        }
        let home = RamFile::open(&file.home)?;
        let entry = client.add_fd(None, home.fd(), DESCRIPTOR_TIMEOUT).await?;
        descriptors.extend(held.iter().map(|old| (entry.fd, *old)));
    }
    let all_held = held.iter().all(|fds| !fds.is_empty());
    let replacements: Vec<Replacement> = record
        .mappings
        .iter()
        .zip(&hints)
        // Descriptors go last: with one of them gone, every mapping is private.
        .filter(|_| all_held)
        .map(|(at, hints)| Replacement {
            at: *at,
            fd_in_qemu: held[at.file_index][0],
            sharing: Sharing::Private,
            hints: hints.clone(),
        })
        .collect();
    let files = record.files.clone();
    blocking(move || {
        replace_in_qemu(&process, &replacements, &descriptors)?;
        for file in files.iter().filter(|file| file.home.exists()) {
            std::fs::rename(&file.home, &file.path).map_err(CloneError::io("rename", &file.home))?;
        }
        Ok(Undone::Private)
    })
    .await
}
