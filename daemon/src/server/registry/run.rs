//! `vmove run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmove_memory::{ByteLen, MemoryDir, MemoryError};
use vmove_migrate::node;
use vmove_migrate::vm::{RamFileRecord, VmRecord};
use vmove_qmp::cmdline::CommandLineError;
use vmove_qmp::process::ProcessError;
use vmove_qmp::{CommandLine, QemuProcess, RamFileSpec, RunLayout};

use super::starting::{self, Note};
use super::{Registry, off_worker};
use crate::api::problem::{Code, Problem, chain};
use crate::api::types::{RunRequest, VmDetail};

/// Huge pages are zeroed while QEMU starts: 1 s per 5 GiB, with room.
const MONITOR_OPENS: Duration = Duration::from_secs(60);

/// A VM on its way: what was made for it so far.
struct Attempt {
    layout: RunLayout,
    note: Note,
    process: Option<QemuProcess>,
}

impl Attempt {
    /// Everything that was made goes away again.
    async fn undo(self) {
        if let Some(process) = self.process {
            if let Err(error) = process.kill().await {
                tracing::error!(vm = %self.note.name, %error, "could not end a QEMU that failed to start");
            }
        }
        let work = move || starting::undo(&self.layout.vm_dir, &self.note);
        if let Err(problem) = off_worker(work).await {
            tracing::error!(%problem, "could not clean up after a VM that failed to start");
        }
    }
}

impl Registry {
    /// Starts a VM that can be moved. On an error nothing is left behind. Must not be cancelled in the middle.
    pub async fn run(self: &Arc<Self>, request: RunRequest) -> Result<VmDetail, Problem> {
        let reserved = self.reserve(&request.name)?;
        let backing = node::backing_named(&request.memory).ok_or_else(|| {
            Problem::new(
                Code::BadOption,
                format!("Expected memory thp, hugetlb-2m or hugetlb-1g, found {:?}", request.memory),
            )
        })?;
        let layout = node::layout(&self.run_dir, &self.memory_dir, &request.name, backing);
        let words = request.command_line.iter().map(OsString::from).collect();
        let mut line = CommandLine::parse(words).map_err(|e| command_line_problem(&e))?;
        let ram = line.rewrite_movable(&layout).map_err(|e| command_line_problem(&e))?;
        let made: Vec<RamFileSpec> =
            ram.iter().filter(|r| r.path.starts_with(&layout.memory_dir)).cloned().collect();

        let note = Note { name: request.name.clone(), ram: made.iter().map(|r| r.path.clone()).collect() };
        let mut attempt = Attempt { layout, note, process: None };
        let argv = with_environment(&request, line.to_argv());
        let record = match self.start(&mut attempt, made, argv, &request, ram).await {
            Ok(record) => record,
            Err(problem) => {
                attempt.undo().await;
                return Err(problem);
            }
        };
        let vm_dir = record.vm_dir.clone();
        off_worker(move || starting::done(&vm_dir)).await?;
        tracing::info!(vm = %record.name, pid = record.pid, memory = %record.backing, "VM started");
        drop(reserved);
        self.show(&record.name).await
    }

    async fn start(
        self: &Arc<Self>,
        attempt: &mut Attempt,
        made: Vec<RamFileSpec>,
        argv: Vec<OsString>,
        request: &RunRequest,
        ram: Vec<RamFileSpec>,
    ) -> Result<VmRecord, Problem> {
        prepare(attempt, made).await?;
        let (vm_dir, log) =
            (attempt.layout.vm_dir.clone(), vmove_qmp::process::log_in(&attempt.layout.vm_dir));
        let process = off_worker(move || QemuProcess::spawn(&argv, &vm_dir, &log)).await?;
        let process = process.map_err(|e| process_problem(&e))?;
        attempt.process = Some(process.clone());
        let client = process
            .wait_qmp(&attempt.layout.qmp_socket, MONITOR_OPENS)
            .await
            .map_err(|e| process_problem(&e))?;
        let started = vmove_memory::Process::open(process.pid()).map_err(|e| memory_problem(&e))?;
        let record = VmRecord {
            name: request.name.clone(),
            pid: i32::try_from(process.pid()).unwrap_or_default(),
            pid_start: started.start_time(),
            qmp_socket: attempt.layout.qmp_socket.clone(),
            vm_dir: attempt.layout.vm_dir.clone(),
            backing: request.memory.clone(),
            command_line: request.command_line.clone(),
            environment: request.environment.clone().into_iter().collect(),
            ram: ram.into_iter().map(|r| ram_record(r, &attempt.layout)).collect(),
            overlays: Vec::new(),
            adopted: false,
            session: None,
        };
        self.monitors.insert(&record.qmp_socket, client).await;
        if let Err(problem) = self.enter(record.clone()).await {
            self.monitors.forget(&record.qmp_socket).await;
            return Err(problem);
        }
        Ok(record)
    }
}

/// Folder, note, RAM files.
async fn prepare(attempt: &Attempt, made: Vec<RamFileSpec>) -> Result<(), Problem> {
    let (layout, note) = (attempt.layout.clone(), attempt.note.clone());
    let work = move || {
        starting::begin(&layout.vm_dir, &note).map_err(|e| {
            Problem::new(Code::Internal, format!("Could not make {}: {e}", layout.vm_dir.display()))
        })?;
        let memory = MemoryDir::prepare(&layout.memory_dir, node::memory_backing(layout.backing))
            .map_err(|e| memory_problem(&e))?;
        let wanted: u64 = made.iter().map(|r| r.size).sum();
        let free = memory.free().map_err(|e| memory_problem(&e))?;
        if free < ByteLen(wanted) {
            return Err(no_memory(&layout, wanted, free.0));
        }
        for spec in &made {
            // Of an earlier VM of this name, which has ended.
            starting::remove(&spec.path);
            let name = spec.path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            memory.create_ram_file(name, ByteLen(spec.size)).map_err(|e| memory_problem(&e))?;
        }
        Ok(())
    };
    off_worker(work).await?
}

fn no_memory(layout: &RunLayout, wanted: u64, free: u64) -> Problem {
    use crate::units::format_bytes;
    let next = match layout.backing {
        vmove_qmp::RamBacking::Thp => "give the guest less (-m), or end other guests",
        _ => "reserve more huge pages (sysctl vm.nr_hugepages), or use --memory thp",
    };
    let text = format!(
        "Expected {} for guest memory, found {} free; {next}",
        format_bytes(wanted),
        format_bytes(free)
    );
    Problem::new(Code::NoMemory, text)
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

pub fn command_line_problem(error: &CommandLineError) -> Problem {
    let code = match error {
        CommandLineError::NotMovable(_) => Code::NotMovable,
        CommandLineError::Proc { .. } => Code::Internal,
        _ => Code::BadCommandLine,
    };
    Problem::new(code, chain(error))
}

fn process_problem(error: &ProcessError) -> Problem {
    let code = match error {
        ProcessError::NoProgram => Code::BadCommandLine,
        ProcessError::Log { .. } => Code::Internal,
        _ => Code::QemuFailed,
    };
    Problem::new(code, chain(error))
}

pub fn memory_problem(error: &MemoryError) -> Problem {
    Problem::from_error(Code::NoMemory, error)
}
