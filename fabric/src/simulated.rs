//! A back end without a network and without threads, for simulations: both ends are in one process, and whoever made the connection says
//! when a read may complete and when the connection is broken. Bytes are copied when a read completes.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::address::{Class, FabricKind, PeerAddress};
use crate::counters::CountersHandle;
use crate::endpoint::{Completion, CompletionKind, Completions, Endpoint, ReadSegment, WrId, WriteSegment};
use crate::error::{FabricError, PostError, RemoteStatus};
use crate::fabric::{Fabric, Incoming};
use crate::region::{Access, MemoryArea, Region, Registration, RemoteRegion, WeakRegion};
use crate::serve::ServeHandle;
use crate::thread::ThreadOptions;

/// Reads under way on one connection, at most.
const CAPACITY: usize = 8;

/// Nobody waits for a descriptor of this back end.
static NOTHING: LazyLock<Option<File>> = LazyLock::new(|| File::open("/dev/null").ok());

/// What becomes of a read that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// It completes.
    Arrives,
    /// Ask again later.
    NotYet,
    /// The connection is broken.
    Broken,
}

/// Who decides that, for one connection.
pub trait Way: Send + Sync + std::fmt::Debug {
    /// Asked for the oldest read.
    fn passage(&self) -> Passage;
}

/// Everything that is registered, with all fabrics of one simulation.
#[derive(Debug, Clone, Default)]
pub struct Memories(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    last_key: u64,
    regions: BTreeMap<u64, WeakRegion>,
}

impl Memories {
    /// How many regions are registered.
    #[must_use]
    pub fn registered(&self) -> usize {
        self.lock().regions.len()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, key: u64) -> Option<Region> {
        self.lock().regions.get(&key)?.upgrade()
    }
}

/// One node's.
#[derive(Debug, Clone, Default)]
pub struct SimulatedFabric(Memories);

impl SimulatedFabric {
    /// That shares its keys with others over the same memories.
    #[must_use]
    pub fn new(memories: &Memories) -> Self {
        Self(memories.clone())
    }
}

/// A hold on registered memory.
#[derive(Debug)]
struct Held {
    memories: Memories,
    key: u64,
}

impl Registration for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        self.memories.lock().regions.remove(&self.key);
    }
}

impl Fabric for SimulatedFabric {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn register(&self, area: MemoryArea, access: Access) -> Result<Region, FabricError> {
        let mut table = self.0.lock();
        table.last_key += 1;
        let key = table.last_key;
        let remote = RemoteRegion { addr: 0, len: area.len(), rkey: key };
        let held = Box::new(Held { memories: self.0.clone(), key });
        let region = Region::new(area, access, remote, key, false, held);
        table.regions.insert(key, region.downgrade());
        Ok(region)
    }

    fn connect(&self, _: &PeerAddress, _: Class, _: &[u8]) -> Result<Box<dyn Endpoint>, FabricError> {
        Err(FabricError::Unsupported { what: "to connect by address: make a pair of endpoints" })
    }

    fn accept(&self, _: Duration) -> Result<Incoming, FabricError> {
        Err(FabricError::Unsupported { what: "to listen: make a pair of endpoints" })
    }
}

/// Both ends of a connection.
#[must_use]
pub fn pair(memories: &Memories, class: Class, way: &Arc<dyn Way>) -> [Box<dyn Endpoint>; 2] {
    // Of each end the other knows whether it is still there.
    let ends = [Arc::new(()), Arc::new(())];
    let end = |mine: usize| {
        Box::new(SimulatedEndpoint {
            class,
            memories: memories.clone(),
            way: Arc::clone(way),
            open: Arc::clone(&ends[mine]),
            peer: Arc::downgrade(&ends[1 - mine]),
            reads: VecDeque::new(),
            counters: CountersHandle::default(),
        }) as Box<dyn Endpoint>
    };
    [end(0), end(1)]
}

#[derive(Debug)]
struct SimulatedEndpoint {
    class: Class,
    memories: Memories,
    way: Arc<dyn Way>,
    open: Arc<()>,
    peer: std::sync::Weak<()>,
    reads: VecDeque<Posted>,
    counters: CountersHandle,
}

/// A read under way.
#[derive(Debug)]
struct Posted {
    wr: WrId,
    segments: Vec<ReadSegment>,
    /// Only what is different is copied.
    changed: bool,
}

impl Posted {
    fn completion(&self, same_mask: u64) -> CompletionKind {
        let zero_mask = 0;
        if self.changed {
            CompletionKind::ReadChanged { zero_mask, same_mask }
        } else {
            CompletionKind::Read { zero_mask }
        }
    }
}

impl SimulatedEndpoint {
    fn post(&mut self, wr: WrId, segments: &[ReadSegment], changed: bool) -> Result<(), PostError> {
        if self.reads.len() >= CAPACITY {
            return Err(PostError::Full { capacity: CAPACITY });
        }
        self.reads.push_back(Posted { wr, segments: segments.to_vec(), changed });
        Ok(())
    }

    /// Copies the bytes. Returns which segments were the same already, if those are asked for.
    fn carry(&self, posted: &Posted) -> Result<u64, RemoteStatus> {
        let mut same_mask = 0;
        for (index, segment) in posted.segments.iter().enumerate() {
            let theirs = self.memories.find(segment.remote.rkey).filter(|region| region.access().remote_read);
            let theirs = theirs.ok_or(RemoteStatus::BadKey)?;
            let ours = self.memories.find(segment.local.key).ok_or(RemoteStatus::LocalGone)?;
            let mut bytes = vec![0; segment.local.len as usize];
            if !theirs.read_at(segment.remote.addr, &mut bytes) {
                return Err(RemoteStatus::BadKey);
            }
            let at = (segment.local.addr - ours.area().ptr().addr().get()) as u64;
            let mut here = vec![0; bytes.len()];
            if posted.changed && ours.read_at(at, &mut here) && here == bytes {
                same_mask |= 1 << index;
                continue;
            }
            if !ours.write_at(at, &bytes) {
                return Err(RemoteStatus::LocalGone);
            }
            self.counters.totals().read_bytes.add(bytes.len() as u64);
            self.counters.totals().bytes_received.add(bytes.len() as u64);
        }
        Ok(same_mask)
    }

    fn broken(&self) -> FabricError {
        FabricError::PeerClosed { outstanding: self.reads.len() }
    }
}

impl Endpoint for SimulatedEndpoint {
    fn kind(&self) -> FabricKind {
        FabricKind::Tcp
    }

    fn class(&self) -> Class {
        self.class
    }

    fn post_read(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        self.post(wr, segments, false)
    }

    fn post_read_changed(&mut self, wr: WrId, segments: &[ReadSegment]) -> Result<(), PostError> {
        self.post(wr, segments, true)
    }

    fn post_write(&mut self, _: WrId, _: &[WriteSegment]) -> Result<(), PostError> {
        Err(PostError::Dead)
    }

    fn post_send(&mut self, _: WrId, _: &[u8]) -> Result<(), PostError> {
        Err(PostError::Dead)
    }

    fn flush(&mut self) -> Result<(), FabricError> {
        Ok(())
    }

    fn poll(&mut self, out: &mut Completions) -> Result<usize, FabricError> {
        out.clear();
        while !self.reads.is_empty() && !out.is_full() {
            match self.way.passage() {
                Passage::NotYet => break,
                Passage::Broken => {
                    // Some of it has come, whose end nobody has heard of.
                    if let Some(mut cut) = self.reads.pop_front() {
                        cut.segments.truncate(cut.segments.len().div_ceil(2));
                        let _ = self.carry(&cut);
                    }
                    return Err(self.broken());
                }
                Passage::Arrives => {}
            }
            let Some(posted) = self.reads.pop_front() else { break };
            let carried = self.carry(&posted);
            let (kind, status) = (posted.completion(carried.unwrap_or(0)), carried.map(drop));
            out.push(Completion { wr: posted.wr, kind, status });
        }
        let gone = self.peer.strong_count() == 0 || self.way.passage() == Passage::Broken;
        if out.is_empty() && gone {
            return Err(self.broken());
        }
        Ok(out.len())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        NOTHING.as_ref().expect("/dev/null is there").as_fd()
    }

    fn wants_write(&self) -> bool {
        false
    }

    fn wait(&mut self, _: Option<Duration>) -> Result<(), FabricError> {
        Ok(())
    }

    fn outstanding(&self) -> usize {
        self.reads.len()
    }

    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn counters_handle(&self) -> CountersHandle {
        self.counters.clone()
    }

    fn serve(self: Box<Self>, _: ThreadOptions) -> Result<ServeHandle, FabricError> {
        Ok(ServeHandle::holding(self.counters.clone(), self.open))
    }
}
