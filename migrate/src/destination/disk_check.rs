//! `--verify` of disks, this side's part: what the guest has here is read while it works on it, and compared with what the source says that it has
//! left.
//!
//! QEMU notes what the guest writes from before it runs here ([`note_writes`](crate::vmm::ComparesDisks::note_writes)). A chunk that differs counts
//! as damage unless it was written by then: that is looked at after the chunk was read, so whatever a write has changed in what was read is known to be
//! written.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use vmove_node::blocking::spawn_blocking;
use vmove_node::record::VmRecord;
use vmove_qmp::QmpError;
use vmove_qmp::disks::{writes_context, writes_of};
use vmove_qmp::nbd::{Nbd, NbdError};
use vmove_types::disk::DiskVerified;
use vmove_types::problem::chain;
use vmove_types::progress::ComparedDisks;
use vmove_types::time::Mono;

use super::images;
use super::session::Session;
use crate::disk_hash::{CHUNK, Chunks, chunks_of, socket};
use crate::node::Node;
use crate::proto::message::{DiskHashes, DiskRead, Prepare, ToDestination};
use crate::vmm::ArrivingMonitor;

/// Of a bitmap: the guest has written there.
const WRITTEN: u32 = 1;
/// Of more chunks that differ it is not noted which: 256 GiB of a disk.
const MOST_DIFFERING: usize = 1 << 22;
/// How much of a bitmap is asked for at once, in bytes of the disk.
const LOOK_AHEAD: u64 = 1 << 30;

/// Disks by their names, and what was found.
pub(super) type Verified = Vec<(String, DiskVerified)>;

/// Whether the guest's disks are those that it left.
#[derive(Debug)]
pub(super) struct DiskCheck {
    stand: Stand,
    /// One that begins waits until the one before has taken its exports away.
    turn: Arc<Mutex<()>>,
}

#[derive(Debug)]
enum Stand {
    NotYet,
    UnderWay { said: mpsc::Sender<Said>, comparing: JoinHandle<Option<Verified>> },
    Done(Verified),
}

/// What the source has told.
#[derive(Debug)]
enum Said {
    Hashes(DiskHashes),
    Read(DiskRead),
}

impl DiskCheck {
    /// Of a guest whose memory is on its way.
    pub(super) fn new(prepare: &Prepare) -> Self {
        let stand = if is_wanted(prepare) { Stand::NotYet } else { Stand::Done(Vec::new()) };
        Self { stand, turn: Arc::default() }
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self.stand, Stand::Done(_))
    }

    /// What was found, if it is done.
    pub(super) fn found(&self) -> Verified {
        match &self.stand {
            Stand::Done(found) => found.clone(),
            Stand::NotYet | Stand::UnderWay { .. } => Vec::new(),
        }
    }

    /// Begins, unless it has. True if the source is to be asked for its hashes.
    pub(super) fn begin(&mut self, session: &Session) -> bool {
        if !matches!(self.stand, Stand::NotYet) {
            return false;
        }
        let prepare = &session.journal.record().prepare;
        let Some(vm) = session.journal.record().vm.clone() else { return false };
        let comparison = Comparison {
            node: Arc::clone(&session.node),
            socket: socket(&vm),
            vm,
            images: images::paths(prepare),
            names: images::names(prepare),
            turn: Arc::clone(&self.turn),
        };
        let (said, heard) = mpsc::channel();
        self.stand = Stand::UnderWay { said, comparing: vmove_node::task::spawn(comparison.run(heard)) };
        let bytes_total = prepare.moved.iter().map(|disk| disk.size).sum();
        session.publisher.update(|p| p.compared_disks = Some(ComparedDisks { bytes_total, bytes_done: 0 }));
        true
    }

    /// Takes what the source tells of its disks; gives back other messages.
    pub(super) fn take(&mut self, message: ToDestination, session: &Session) -> Option<ToDestination> {
        let said = match message {
            ToDestination::DiskHashes(hashes) => {
                let bytes = hashes.hashes.count().saturating_mul(CHUNK);
                session.publisher.update(|p| p.compared_disks.iter_mut().for_each(|all| all.add(bytes)));
                Said::Hashes(hashes)
            }
            ToDestination::DiskRead(read) => Said::Read(read),
            other => return Some(other),
        };
        if let Stand::UnderWay { said: to, .. } = &self.stand {
            // One that has ended already has found why.
            let _ = to.send(said);
        }
        None
    }

    /// Waits until it has ended. Never ends if it is not under way. Cancel-safe.
    pub(super) async fn ended(&mut self) {
        let Stand::UnderWay { comparing, .. } = &mut self.stand else { return std::future::pending().await };
        match comparing.await {
            Ok(Some(found)) => self.stand = Stand::Done(found),
            Ok(None) => self.stand = Stand::NotYet,
            // It has panicked: nothing is known, and that is told.
            Err(error) => {
                let problem = Some(error.to_string());
                self.stand =
                    Stand::Done(vec![(String::new(), DiskVerified { problem, ..DiskVerified::default() })]);
            }
        }
    }

    /// The source is lost: it is begun anew with the next connection.
    pub(super) fn stop(&mut self) {
        if matches!(self.stand, Stand::UnderWay { .. }) {
            self.stand = Stand::NotYet;
        }
    }

    /// Nobody will compare: QEMU is to note no more what the guest writes.
    pub(super) fn give_up(&mut self, session: &Session) {
        if self.is_done() {
            return;
        }
        self.stand = Stand::Done(Vec::new());
        let Some(vm) = session.journal.record().vm.clone() else { return };
        let (node, turn) = (Arc::clone(&session.node), Arc::clone(&self.turn));
        drop(vmove_node::task::spawn(async move {
            let _turn = turn.lock().await;
            if let Ok(monitor) = node.config.vmm.reconnect(&vm).await {
                clean(&*monitor, &vm, false).await;
            }
        }));
    }
}

/// Whether disks are to be compared.
pub(super) fn is_wanted(prepare: &Prepare) -> bool {
    // Those that follow are not here when its memory is, and are only read from where they were.
    prepare.spec.verify && !prepare.spec.disks_after && !images::paths(prepare).is_empty()
}

/// Has QEMU note from here on what the guest writes to its disks: it does not run yet. If that does not work, a difference cannot be told from what
/// the guest has written; the migration goes on.
pub(super) async fn note_writes(monitor: &dyn ArrivingMonitor, vm: Option<&VmRecord>, images: &[PathBuf]) {
    let folder = vm.map(|vm| vm.vm_dir.clone()).unwrap_or_default();
    if let Err(error) = monitor.note_writes(&folder, images).await {
        tracing::warn!(
            error = chain(&error),
            "QEMU does not note what the guest writes: --verify may be unable to compare its disks"
        );
    }
}

/// What a comparison has made in QEMU goes.
async fn clean(monitor: &dyn ArrivingMonitor, vm: &VmRecord, keep_noting: bool) {
    if let Err(error) = monitor.end_comparison(&socket(vm), keep_noting).await {
        let error = chain(&error);
        tracing::warn!(
            error,
            "something of --verify is left in QEMU: the next migration with disks takes it away"
        );
    }
}

/// One that is under way.
struct Comparison {
    node: Arc<Node>,
    vm: VmRecord,
    socket: PathBuf,
    images: Vec<PathBuf>,
    names: Vec<String>,
    turn: Arc<Mutex<()>>,
}

/// What was found of a disk so far.
#[derive(Debug, Default)]
struct Found {
    /// The next chunk that the source is to tell of.
    next: u64,
    equal: u64,
    /// Chunks that differ.
    differing: BTreeSet<u64>,
    /// Of these, how many the guest has written.
    written: u64,
    source_read_bytes: u64,
    read_bytes: u64,
    problem: Option<String>,
    /// The source has said all.
    is_over: bool,
}

impl Comparison {
    /// Nothing if the source was lost.
    async fn run(self, heard: mpsc::Receiver<Said>) -> Option<Verified> {
        let turn = Arc::clone(&self.turn);
        let _turn = turn.lock().await;
        let begun = Mono::now();
        let found = match self.export().await {
            Ok(monitor) => {
                let found = self.compare(&*monitor, heard).await;
                clean(&*monitor, &self.vm, found.is_none()).await;
                found?
            }
            Err(error) => {
                let problem = format!("QEMU at the destination does not let it be read: {}", chain(&error));
                if let Ok(monitor) = self.node.config.vmm.reconnect(&self.vm).await {
                    clean(&*monitor, &self.vm, false).await;
                }
                self.unknown(&problem)
            }
        };
        let took_ms = Mono::now().ms_since(begun);
        let told = self.names.into_iter().zip(found.into_iter().map(|one| one.told(took_ms)));
        let told: Verified = told.collect();
        for (name, disk) in &told {
            tell(name, disk);
        }
        Some(told)
    }

    /// Nothing is known of any disk.
    fn unknown(&self, problem: &str) -> Vec<Found> {
        let one = |_| Found { problem: Some(problem.to_owned()), ..Found::default() };
        self.names.iter().map(one).collect()
    }

    async fn export(&self) -> Result<Arc<dyn ArrivingMonitor>, QmpError> {
        let monitor = self.node.config.vmm.reconnect(&self.vm).await?;
        monitor.end_comparison(&self.socket, true).await?;
        monitor.export_present(&self.socket, &self.vm.vm_dir, &self.images).await?;
        Ok(monitor)
    }

    async fn compare(
        &self,
        monitor: &dyn ArrivingMonitor,
        heard: mpsc::Receiver<Said>,
    ) -> Option<Vec<Found>> {
        let (socket, disks) = (self.socket.clone(), self.names.len());
        let compare = move || compare_all(disks, |disk| Chunks::open(&socket, disk), &heard);
        let mut found = match spawn_blocking(compare).await {
            Ok(found) => found?,
            Err(error) => return Some(self.unknown(&error.to_string())),
        };
        if found.iter().all(|disk| disk.differing.is_empty()) {
            return Some(found);
        }
        let exported = monitor.export_writes(&self.vm.vm_dir, &self.images).await;
        if let Err(error) = exported {
            for disk in found.iter_mut().filter(|disk| !disk.differing.is_empty()) {
                disk.cannot_tell(&chain(&error));
            }
            return Some(found);
        }
        let socket = self.socket.clone();
        let look = move || {
            for (number, disk) in found.iter_mut().enumerate() {
                let written = Nbd::open(&socket, &writes_of(number), &writes_context())
                    .and_then(|mut bitmap| disk.leave_out_written(&mut bitmap));
                if let Err(error) = written {
                    disk.cannot_tell(&chain(&error));
                }
            }
            found
        };
        Some(spawn_blocking(look).await.unwrap_or_else(|error| self.unknown(&error.to_string())))
    }
}

fn tell(name: &str, disk: &DiskVerified) {
    let (differing, first, problem) = (disk.differing_chunks, disk.first_difference, disk.problem.as_deref());
    match disk.is_right() {
        Some(true) => tracing::info!(disk = name, "the disk is the one that the guest left"),
        Some(false) => tracing::error!(disk = name, differing, first, "the disk differs from the source's"),
        None => tracing::warn!(disk = name, problem, "the disk could not be compared"),
    }
}

/// Compares what the source tells, until it has told all. Nothing if it was lost.
fn compare_all(
    disks: usize,
    open: impl Fn(usize) -> Result<Chunks, NbdError>,
    heard: &mpsc::Receiver<Said>,
) -> Option<Vec<Found>> {
    let mut found: Vec<Found> = (0..disks).map(|_| Found::default()).collect();
    let mut opened: Option<(usize, Chunks)> = None;
    while found.iter().any(|disk| !disk.is_over) {
        let said = heard.recv().ok()?;
        let number = usize::from(match &said {
            Said::Hashes(hashes) => hashes.disk,
            Said::Read(read) => read.disk,
        });
        let Some(disk) = found.get_mut(number) else {
            // It says nothing sound of the others either.
            let problem = format!("expected hashes of disks 0 to {}, found some of disk {number}", disks - 1);
            found.iter_mut().for_each(|disk| disk.problem = Some(problem.clone()));
            return Some(found);
        };
        if disk.problem.is_none()
            && opened.as_ref().is_none_or(|(open, _)| *open != number)
            && let Err(error) = open(number).map(|chunks| opened = Some((number, chunks)))
        {
            disk.problem = Some(chain(&Incomparable::Here(error)));
        }
        let here = opened.as_mut().filter(|(open, _)| *open == number).map(|(_, chunks)| chunks);
        match said {
            Said::Hashes(hashes) if disk.problem.is_none() => {
                if let Some(here) = here
                    && let Err(why) = disk.compare(&hashes, here)
                {
                    disk.problem = Some(chain(&why));
                }
            }
            Said::Hashes(_) => {}
            Said::Read(read) => disk.end(read, here.map(|here| &*here)),
        }
    }
    Some(found)
}

/// Why a disk cannot be compared any further.
#[derive(Debug, thiserror::Error)]
enum Incomparable {
    #[error("expected hashes from chunk {next} of {all} on, found {count} from chunk {first} on")]
    OutOfOrder { next: u64, all: u64, count: u64, first: u64 },
    #[error("at the destination")]
    Here(#[source] NbdError),
    #[error("more than {MOST_DIFFERING} chunks differ")]
    TooManyDiffer,
}

impl Found {
    fn compare(&mut self, said: &DiskHashes, here: &mut Chunks) -> Result<(), Incomparable> {
        let (all, count) = (chunks_of(here.size()), said.hashes.count());
        if said.first != self.next || count == 0 || count > all.saturating_sub(said.first) {
            return Err(Incomparable::OutOfOrder { next: self.next, all, count, first: said.first });
        }
        let end = said.first + count;
        while self.next < end {
            let ours = here.next(self.next, end - self.next).map_err(Incomparable::Here)?;
            for place in 0..ours.count() {
                let chunk = self.next + place;
                if ours.at(place) == said.hashes.at(chunk - said.first) {
                    self.equal += 1;
                } else if self.differing.len() < MOST_DIFFERING {
                    self.differing.insert(chunk);
                } else {
                    return Err(Incomparable::TooManyDiffer);
                }
            }
            self.next += ours.count();
        }
        self.read_bytes = here.read_bytes;
        Ok(())
    }

    /// The source has told all of a disk.
    fn end(&mut self, read: DiskRead, here: Option<&Chunks>) {
        self.is_over = true;
        self.source_read_bytes = read.read_bytes;
        let all = here.map_or(self.next, |here| chunks_of(here.size()));
        let short = self.next < all;
        let short = short.then(|| format!("the source has told of {} of {all} chunks", self.next));
        self.problem = self.problem.take().or(read.problem).or(short);
    }

    /// Of what differs, takes out what the guest has written.
    fn leave_out_written(&mut self, bitmap: &mut Nbd) -> Result<(), NbdError> {
        let differed = self.differing.len();
        let mut at = 0;
        while at < bitmap.size() && self.differing.range(at / CHUNK..).next().is_some() {
            let len = (bitmap.size() - at).min(LOOK_AHEAD);
            for extent in bitmap.status(at, u32::try_from(len).unwrap_or(u32::MAX))? {
                let end = at + extent.len;
                if extent.flags & WRITTEN != 0 {
                    let written: Vec<u64> =
                        self.differing.range(at / CHUNK..chunks_of(end)).copied().collect();
                    written.iter().for_each(|chunk| {
                        self.differing.remove(chunk);
                    });
                }
                at = end;
            }
        }
        self.written = (differed - self.differing.len()) as u64;
        Ok(())
    }

    /// Chunks differ, and nobody knows whether the guest has written to them.
    fn cannot_tell(&mut self, why: &str) {
        let differing = std::mem::take(&mut self.differing).len();
        // Why it could not be read says more.
        self.problem.get_or_insert_with(|| {
            format!("{differing} chunks differ, and it is not known whether the guest has written to them since: {why}")
        });
    }

    fn told(self, took_ms: f64) -> DiskVerified {
        DiskVerified {
            chunk_bytes: CHUNK,
            equal_chunks: self.equal,
            written_chunks: self.written,
            differing_chunks: self.differing.len() as u64,
            first_difference: self.differing.first().map(|chunk| chunk * CHUNK),
            source_read_bytes: self.source_read_bytes,
            destination_read_bytes: self.read_bytes,
            took_ms,
            problem: self.problem,
        }
    }
}
