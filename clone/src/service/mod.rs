//! The page service of a host whose template is still on its way: its children run, and wait for what they touch before it is there.
//!
//! A child's RAM is a private mapping of the template's files, registered with a userfaultfd for missing and minor faults: of a file
//! that is being filled nothing is seen that was not mapped by an answer. One thread answers the faults of all children of the host:
//!
//! | The chunk is | Answer |
//! |---|---|
//! | whole, its checksum compared | mapped, with those behind it that are whole, up to 2 MiB |
//! | zero | pages of zeros, up to 2 MiB; the file stays a hole |
//! | missing | asked for, once however many wait; mapped when it is there |
//!
//! The descriptors stay open inside the QEMUs: if the daemon dies, a child that faults waits, and is ended by the daemon's next life.
//! It never reads what is not there.

mod faults;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::event::epoll;
use vmove_memory::{
    FaultContext, Keep, Process, QemuMapping, UffdFeatures, close_in_qemu, create_uffd, discard_in_qemu,
};
use vmove_node::latency::Latencies;
use vmove_types::report::FaultStats;

use self::faults::FaultThread;
use crate::CloneError;
use crate::chunks::Chunks;

/// Asks for the chunk at an offset (bytes) of a region; false: not now, ask again. Must neither wait nor allocate.
pub type Ask = Box<dyn Fn(u16, u64) -> bool + Send>;

/// Whether this kernel lets children run before all of their memory is there.
///
/// # Errors
/// [`CloneError::Memory`] names what is missing.
pub fn check() -> Result<(), CloneError> {
    Ok(UffdFeatures::Faults.check()?)
}

/// Serves the children of one host. Dropping it before [`Self::release`] ends them, since nobody serves them any more.
#[derive(Debug)]
pub struct PageService {
    shared: Arc<Shared>,
    thread: Mutex<Option<FaultThread>>,
    released: AtomicBool,
}

/// What the service and its thread share.
#[derive(Debug)]
struct Shared {
    chunks: Arc<Chunks>,
    children: Box<[OnceLock<Served>]>,
    taken: AtomicUsize,
    /// Tells which child has events, by its number; [`ARRIVALS`] for arrivals.
    epoll: OwnedFd,
    stopping: AtomicBool,
    latencies: Latencies,
}

/// The number of what is no child.
const ARRIVALS: u64 = u64::MAX;

/// A child whose faults are answered.
#[derive(Debug)]
struct Served {
    process: Arc<Process>,
    context: FaultContext,
    mappings: Vec<QemuMapping>,
    /// Why it is not served any more: it was killed.
    failed: OnceLock<String>,
}

impl PageService {
    /// For at most `children` children of the template that `chunks` is of. `ask` is called by the thread that answers.
    ///
    /// # Errors
    /// [`CloneError::Task`] without a thread or descriptors to spare.
    pub fn start(chunks: Arc<Chunks>, children: usize, ask: Ask) -> Result<Arc<Self>, CloneError> {
        let failed = |what: &str, why: &dyn std::fmt::Display| CloneError::Task(format!("{what}: {why}"));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed("no epoll", &e))?;
        let data = epoll::EventData::new_u64(ARRIVALS);
        epoll::add(&epoll, chunks.arrivals(), data, epoll::EventFlags::IN)
            .map_err(|e| failed("epoll", &e))?;
        let shared = Arc::new(Shared {
            chunks,
            children: (0..children).map(|_| OnceLock::new()).collect(),
            taken: AtomicUsize::new(0),
            epoll,
            stopping: AtomicBool::new(false),
            latencies: Latencies::default(),
        });
        let thread = faults::start(&shared, ask).map_err(|e| failed("the thread that answers faults", &e))?;
        let thread = Mutex::new(Some(thread));
        Ok(Arc::new(Self { shared, thread, released: AtomicBool::new(false) }))
    }

    /// Takes the faults of a child that has the template mapped and which does not run. Blocks.
    ///
    /// # Errors
    /// [`CloneError::Memory`].
    pub fn take(&self, process: &Arc<Process>, mappings: &[QemuMapping]) -> Result<(), CloneError> {
        let remote = create_uffd(process, UffdFeatures::Faults, Keep::InQemu)?;
        let context = FaultContext::new(remote);
        context.register(mappings)?;
        // What QEMU touched before would be seen for ever.
        discard_in_qemu(process, mappings, Some(&context))?;
        let number = self.shared.taken.fetch_add(1, Ordering::Relaxed);
        let full = || CloneError::Task("more children than were planned".to_owned());
        let place = self.shared.children.get(number).ok_or_else(full)?;
        let served = place.get_or_init(|| Served {
            process: Arc::clone(process),
            context,
            mappings: mappings.to_vec(),
            failed: OnceLock::new(),
        });
        let data = epoll::EventData::new_u64(number as u64);
        epoll::add(&self.shared.epoll, served.context.as_fd(), data, epoll::EventFlags::IN)
            .map_err(|e| CloneError::Task(format!("epoll: {e}")))
    }

    /// All of the template is there and verified: children see their files as they are, at full speed. Blocks.
    ///
    /// # Errors
    /// [`CloneError::Memory`] if a child cannot be let go; all others are.
    pub fn release(&self) -> Result<(), CloneError> {
        let mut result = Ok(());
        for served in self.served() {
            result = result.and(served.context.unregister(&served.mappings));
        }
        self.released.store(true, Ordering::Relaxed);
        // Only now: until here one that discards memory waits for its event to be read.
        self.stop();
        for served in self.served().filter(|served| served.process.alive()) {
            // What was registered is not any more, so that it may as well stay.
            let closed = served.context.to_remote().and_then(|remote| close_in_qemu(&served.process, remote));
            if let Err(error) = closed {
                tracing::warn!(pid = served.process.pid(), %error, "a descriptor for faults stays open in QEMU");
            }
        }
        Ok(result?)
    }

    /// The template will not become whole: ends the children, whatever they wait for.
    pub fn end(&self) {
        for served in self.served() {
            if let Err(error) = served.process.kill() {
                tracing::error!(pid = served.process.pid(), %error, "a child that cannot go on could not be ended");
            }
        }
        self.stop();
    }

    /// Children that were killed since they could not be served, and why.
    #[must_use]
    pub fn failed(&self) -> Vec<(u32, String)> {
        self.served().filter_map(|s| Some((s.process.pid(), s.failed.get()?.clone()))).collect()
    }

    /// Faults so far. Latencies are those of faults on chunks that were missing.
    #[must_use]
    pub fn faults(&self) -> FaultStats {
        self.shared.latencies.stats()
    }

    fn served(&self) -> impl Iterator<Item = &Served> {
        self.shared.children.iter().filter_map(OnceLock::get)
    }

    fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.chunks.ring();
        drop(self.thread.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Drop for PageService {
    fn drop(&mut self) {
        if *self.released.get_mut() { self.stop() } else { self.end() }
    }
}
