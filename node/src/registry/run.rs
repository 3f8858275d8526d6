//! `vmove run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::layout;
use crate::record::{RamFileRecord, VmRecord};
use crate::reservations::Reservations;
use crate::starter::Starter;
use vmove_memory::{ByteLen, MemoryDir};
use vmove_qmp::{CommandLine, QemuProcess, RamFileSpec, RunLayout, access};
use vmove_types::Backing;
use vmove_types::device::VmDevice;

use super::starting::{self, Note};
use super::{GIVE_BACK, Registry, RegistryError, elsewhere};
use crate::blocking::run_blocking;
use vmove_types::vm::{RunRequest, VmDetail};

/// Huge pages are zeroed while QEMU starts: 1 s per 5 GiB, with room.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);

/// A VM on its way: what was made for it so far.
struct Attempt {
    layout: RunLayout,
    note: Note,
    process: Option<QemuProcess>,
}

impl Attempt {
    /// Everything that was made goes away again.
    async fn undo(self) {
        if let Some(process) = self.process
            && let Err(error) = process.kill().await
        {
            tracing::error!(vm = %self.note.name, %error, "could not end a QEMU that failed to start");
        }
        let work = move || starting::undo(&self.layout.vm_dir, &self.note);
        if let Err(error) = run_blocking(work).await {
            tracing::error!(%error, "could not clean up after a VM that failed to start");
        }
    }
}

/// What a VM is started with.
struct Start<'a> {
    request: &'a RunRequest,
    /// The command line that is kept: ports, but no devices of the host.
    kept: Vec<String>,
    devices: Vec<VmDevice>,
    argv: Vec<OsString>,
    made: Vec<RamFileSpec>,
    ram: Vec<RamFileSpec>,
}

impl Registry {
    /// Starts a VM that can be moved. On an error nothing is left behind. Must not be cancelled in the middle.
    pub async fn run(self: &Arc<Self>, request: RunRequest) -> Result<VmDetail, RegistryError> {
        let reserved = self.reserve(&request.name)?;
        let backing = request.memory.parse::<Backing>()?;
        let layout =
            layout::of_vm(&self.run_dir, self.memory_dir(), &request.name, backing, &self.confinement);
        let words = request.command_line.iter().map(OsString::from).collect();
        let mut line = CommandLine::parse(words)?;
        let devices = seat(&mut line, &request)?;
        let kept = if devices.is_empty() { request.command_line.clone() } else { texts(&line)? };
        let notes = elsewhere::not_taken(&kept, &request.name).await?;
        let ram = line.rewrite_movable(&layout)?;
        line.plug(&devices);
        let made: Vec<RamFileSpec> =
            ram.iter().filter(|r| r.path.starts_with(&layout.memory_dir)).cloned().collect();

        let note = Note { name: request.name.clone(), ram: made.iter().map(|r| r.path.clone()).collect() };
        let mut attempt = Attempt { layout, note, process: None };
        let start = Start { request: &request, kept, devices, argv: line.to_argv(), made, ram };
        let started = match self.make_ready(&start, &attempt.layout).await {
            Ok(()) => match self.start(&mut attempt, start).await {
                Ok(record) => Ok(record),
                Err(error) => {
                    attempt.undo().await;
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        let record = match started {
            Ok(record) => record,
            Err(error) => {
                self.take_back(&request.name).await;
                return Err(error);
            }
        };
        let vm_dir = record.vm_dir.clone();
        run_blocking(move || starting::done(&vm_dir)).await?;
        tracing::info!(vm = %record.name, pid = record.pid, memory = %record.backing, "VM started");
        drop(reserved);
        Ok(VmDetail { notes, ..self.show(&record.name).await? })
    }

    /// Takes the devices, and looks whether QEMU may open all that it needs: it may open the devices only then.
    async fn make_ready(&self, start: &Start<'_>, layout: &RunLayout) -> Result<(), RegistryError> {
        for device in &start.devices {
            self.devices.take(&start.request.name, &device.request).await?;
        }
        may_open(&start.argv, layout).await
    }

    /// Gives the devices of a VM back that does not come to be, or is no more.
    pub(super) async fn take_back(&self, vm: &str) {
        if let Err(error) = self.devices.give_all_back(vm, GIVE_BACK).await {
            tracing::error!(vm, %error, "a device of a VM that is no more is not back yet: trying again");
        }
    }

    async fn start(
        self: &Arc<Self>,
        attempt: &mut Attempt,
        start: Start<'_>,
    ) -> Result<VmRecord, RegistryError> {
        let Start { request, kept, devices, argv, made, ram } = start;
        let argv = with_environment(request, argv);
        prepare(attempt, made, self.reservations.clone(), self.starter.clone()).await?;
        let (vm_dir, starter) = (attempt.layout.vm_dir.clone(), self.starter.clone());
        let (name, rights) = (request.name.clone(), self.confinement.clone());
        let process = run_blocking(move || starter.start(&name, &argv, &vm_dir, &rights)).await?;
        let process = process?;
        attempt.process = Some(process.clone());
        let client = process.wait_qmp(&attempt.layout.qmp_socket, MONITOR_TIMEOUT).await?;
        let started = vmove_memory::Process::open(process.pid())?;
        let record = VmRecord {
            name: request.name.clone(),
            pid: i32::try_from(process.pid()).unwrap_or_default(),
            pid_start: started.start_time(),
            qmp_socket: attempt.layout.qmp_socket.clone(),
            vm_dir: attempt.layout.vm_dir.clone(),
            backing: attempt.layout.backing,
            command_line: kept,
            environment: request.environment.clone().into_iter().collect(),
            ram: ram.into_iter().map(|r| ram_record(r, &attempt.layout)).collect(),
            overlays: Vec::new(),
            devices,
            adopted: false,
            libvirt: None,
            session: None,
        };
        self.monitors.insert(&record.qmp_socket, client).await;
        if let Err(error) = self.enter(record.clone()).await {
            self.monitors.forget(&record.qmp_socket).await;
            return Err(error);
        }
        Ok(record)
    }
}

/// Devices of the host that the VM gets: those of its command line, which lacks them afterwards, and those of the request.
fn seat(line: &mut CommandLine, request: &RunRequest) -> Result<Vec<VmDevice>, RegistryError> {
    let own = line.take_host_devices()?;
    Ok(line.seat(own, &request.devices)?)
}

/// The words of a command line, as they are kept.
pub(super) fn texts(line: &CommandLine) -> Result<Vec<String>, RegistryError> {
    let words = line.to_argv().into_iter().map(OsString::into_string);
    words.collect::<Result<_, _>>().map_err(RegistryError::NotUtf8)
}

/// Refuses what QEMU could not open as its user.
async fn may_open(argv: &[OsString], layout: &RunLayout) -> Result<(), RegistryError> {
    let (argv, of) = (argv.to_vec(), layout.clone());
    let denied = run_blocking(move || access::denied(&argv, &of, &access::More::default()))
        .await?
        .map_err(RegistryError::NotAsked)?;
    let messages: Vec<String> = denied.into_iter().map(|denied| denied.message).collect();
    if messages.is_empty() { Ok(()) } else { Err(RegistryError::Denied(messages)) }
}

/// Folder, note, RAM files.
async fn prepare(
    attempt: &Attempt,
    made: Vec<RamFileSpec>,
    reservations: Arc<Reservations>,
    starter: Starter,
) -> Result<(), RegistryError> {
    let (layout, note) = (attempt.layout.clone(), attempt.note.clone());
    let work = move || {
        starting::begin(&layout, &note)
            .map_err(|source| RegistryError::Folder { path: layout.vm_dir.clone(), source })?;
        let memory = MemoryDir::prepare(&layout.memory_dir, layout.backing)?;
        let wanted: u64 = made.iter().map(|r| r.size).sum();
        let room = reservations.room(layout.backing)?;
        if room.left() < wanted && !reservations.overcommits() {
            return Err(RegistryError::NoMemory { backing: layout.backing, wanted: ByteLen(wanted), room });
        }
        for spec in &made {
            // Of an earlier VM of this name, which has ended.
            starting::remove(&spec.path);
            let name = spec.path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let file = memory.create_promised_ram_file(name, ByteLen(spec.size))?;
            starter.bind_memory(&note.name, &file);
            let given = layout.confinement.give(&spec.path);
            given.map_err(|source| RegistryError::Folder { path: spec.path.clone(), source })?;
        }
        Ok(())
    };
    run_blocking(work).await?
}

/// `env` replaces itself by QEMU, so the process id stays.
fn with_environment(request: &RunRequest, argv: Vec<OsString>) -> Vec<OsString> {
    if request.environment.is_empty() {
        return argv;
    }
    let pairs = request.environment.iter().map(|(key, value)| OsString::from(format!("{key}={value}")));
    std::iter::once(OsString::from("env")).chain(pairs).chain(argv).collect()
}

fn ram_record(spec: RamFileSpec, layout: &RunLayout) -> RamFileRecord {
    let path: PathBuf = layout.vm_dir.join(spec.path);
    RamFileRecord { id: spec.id, path, size: spec.size }
}
