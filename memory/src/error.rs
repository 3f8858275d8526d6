//! The crate's error type.

use std::io;
use std::path::PathBuf;

use crate::{ByteLen, FileOffset, Hva, PageIndex};

/// Why an operation on a guest's memory failed. Each message says what was expected, what was found, and, where
/// there is one, the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The process ended, or its pid belongs to another process by now.
    #[error("Process {pid} does not exist any more (it exited, or its pid was given to another process)")]
    ProcessGone {
        /// The pid that was used.
        pid: u32,
    },
    /// A file under `/proc` could not be read or understood.
    #[error("Could not read {path}")]
    Proc {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A system call of ours failed.
    #[error("{what} failed")]
    System {
        /// The call and its object.
        what: &'static str,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A file or directory could not be used.
    #[error("{what} failed for {path}")]
    Path {
        /// The operation.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// The RAM file is on a file system whose faults cannot be served.
    #[error(
        "{path} is on a file system of type {fs_type:#x}; guest RAM must be a file on tmpfs (huge=advise) or hugetlbfs"
    )]
    UnsupportedFilesystem {
        /// The RAM file.
        path: PathBuf,
        /// `f_type` of fstatfs.
        fs_type: u64,
    },
    /// A RAM file is shorter than it was.
    #[error(
        "Expected {expected} bytes in the RAM file {path}, found {found}: somebody has shortened it, and that part of the guest's \
         memory is lost"
    )]
    Shortened {
        /// The RAM file.
        path: PathBuf,
        /// Its length when it was opened.
        expected: ByteLen,
        /// Its length now.
        found: ByteLen,
    },
    /// A page of a RAM file could not be had when it was touched.
    #[error(
        "A page of the RAM file {path} could not be had: somebody has shortened the file, or memory or huge pages have run out"
    )]
    Broken {
        /// The RAM file.
        path: PathBuf,
    },
    /// An offset or page lies outside the file.
    #[error("Bytes {offset}+{len} are outside a RAM file of {file_len} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: FileOffset,
        /// Bytes asked for.
        len: ByteLen,
        /// Length of the file.
        file_len: ByteLen,
    },
    /// A RAM file is not mapped by the process.
    #[error("Process {pid} does not map {path}; expected the RAM file of one of its memory backends")]
    NotMapped {
        /// The process.
        pid: u32,
        /// The RAM file.
        path: PathBuf,
    },
    /// No thread of the process could be stopped.
    #[error(
        "None of {threads} threads of process {pid} stopped within {waited_ms} ms; all may be waiting for a disk or for pages that nobody serves"
    )]
    NoThreadStops {
        /// The process.
        pid: u32,
        /// How many threads were tried.
        threads: usize,
        /// How long it took, in milliseconds.
        waited_ms: u64,
    },
    /// Another tracer holds the process.
    #[error("Process {pid} is being traced by process {tracer} (a debugger or strace?); end that first")]
    AlreadyTraced {
        /// The process.
        pid: u32,
        /// Its tracer.
        tracer: u32,
    },
    /// A ptrace request failed.
    #[error("ptrace {request} failed for thread {tid}")]
    Ptrace {
        /// The request.
        request: &'static str,
        /// The thread.
        tid: u32,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A thread did not reach the next stop of an injected call in time.
    #[error("Thread {tid} did not finish the injected system call {nr} within {waited_ms} ms")]
    InjectionTimeout {
        /// The thread.
        tid: u32,
        /// Number of the system call.
        nr: i64,
        /// How long it took, in milliseconds.
        waited_ms: u64,
    },
    /// A thread stopped for a reason that cannot be handled.
    #[error("Thread {tid} stopped unexpectedly during an injected system call (wait status {status:#x})")]
    UnexpectedStop {
        /// The thread.
        tid: u32,
        /// Wait status.
        status: i32,
    },
    /// A system call run inside the process failed there.
    #[error("{what} failed inside process {pid}")]
    Remote {
        /// The call.
        what: &'static str,
        /// The process.
        pid: u32,
        /// The kernel's error there.
        #[source]
        source: io::Error,
    },
    /// No `syscall` instruction was found.
    #[error("Process {pid} has no readable executable mapping with a syscall instruction")]
    NoSyscallInstruction {
        /// The process.
        pid: u32,
    },
    /// The process is not a 64-bit x86 one.
    #[error("Thread {tid} runs 32-bit code (cs {cs:#x}); only 64-bit x86 processes can be attached to")]
    NotX86_64 {
        /// The thread.
        tid: u32,
        /// Its code segment selector.
        cs: u64,
    },
    /// The descriptor is not a userfaultfd.
    #[error("Descriptor {fd} of process {pid} is {found}, not a userfaultfd")]
    NotUserfaultfd {
        /// The process.
        pid: u32,
        /// The descriptor number there.
        fd: i32,
        /// What it is.
        found: String,
    },
    /// The kernel lacks a feature.
    #[error("This kernel lacks {feature}; {consequence}")]
    Unsupported {
        /// What is missing.
        feature: &'static str,
        /// What cannot be done without it.
        consequence: &'static str,
    },
    /// A userfaultfd request failed.
    #[error("userfaultfd {request} failed at {hva}+{len}")]
    Uffd {
        /// The request.
        request: &'static str,
        /// First address.
        hva: Hva,
        /// Bytes.
        len: ByteLen,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// An event the kernel should not have sent.
    #[error("Unexpected userfaultfd event: {0}")]
    UnexpectedEvent(String),
    /// The range is already registered with another userfaultfd.
    #[error(
        "Memory at {hva}+{len} is already registered with another userfaultfd; unregister that one first (a page \
         service and a dirty tracker cannot share a range)"
    )]
    RangeBusy {
        /// First address.
        hva: Hva,
        /// Bytes.
        len: ByteLen,
    },
    /// After a discard the process still had page-table entries.
    #[error(
        "Process still maps {pages} pages after {rounds} discards, the first at {first}; something may be touching its memory"
    )]
    StillMapped {
        /// How many.
        pages: u64,
        /// The first one.
        first: Hva,
        /// How often it was tried.
        rounds: u32,
    },
    /// A page table file is on a file system whose write-back would stall the fault thread.
    #[error(
        "{path} is not on tmpfs: write-back to a disk could stall the fault thread; put page tables under /dev/shm or /run"
    )]
    TableNotInMemory {
        /// The file.
        path: PathBuf,
    },
    /// A page table file is damaged or of another version.
    #[error("{path} is not a page table of this version: {found}")]
    TableFormat {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
    },
    /// The page number is not in the table.
    #[error("Page {page} is not in a table of {pages} pages")]
    NoSuchPage {
        /// The page.
        page: PageIndex,
        /// Size of the table.
        pages: u64,
    },
    /// The directory holds something else than was asked for.
    #[error("{path} is {found}, but {wanted} was asked for; choose another directory or unmount it")]
    WrongMount {
        /// The directory.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// There is not enough memory for a RAM file.
    #[error("{needed} bytes of {kind} are needed, {available} are free{hint}")]
    NotEnoughMemory {
        /// Kind of memory.
        kind: &'static str,
        /// Bytes wanted.
        needed: u64,
        /// Bytes free.
        available: u64,
        /// What to do.
        hint: &'static str,
    },
}

impl MemoryError {
    pub(crate) fn system(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System { what, source: source.into() }
    }

    pub(crate) fn path(what: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Path { what, path: path.into(), source: source.into() }
    }

    /// True if the process no longer exists, so that nothing more can be done for it.
    #[must_use]
    pub fn is_process_gone(&self) -> bool {
        match self {
            Self::ProcessGone { .. } => true,
            Self::Remote { source, .. } | Self::Uffd { source, .. } => {
                source.raw_os_error() == Some(libc::ESRCH)
            }
            _ => false,
        }
    }
}

/// Shorthand of this crate.
pub type Result<T, E = MemoryError> = std::result::Result<T, E>;
