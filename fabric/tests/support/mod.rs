//! What the tests of every back end need: memory, connected pairs, and a loop that drives both ends.
#![allow(unsafe_code, dead_code)]

use std::fs::File;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
#[cfg(feature = "verbs")]
use vmove_fabric::verbs::{VerbsFabric, VerbsOptions};
use vmove_fabric::{
    Access, Class, Completion, CompletionKind, Completions, Endpoint, Fabric, FabricError, LocalSlice,
    MemoryArea, ReadSegment, Region, RemoteSlice, RemoteStatus, WrId, WriteSegment,
};
use vmove_guard::Guard;

pub mod tls;

/// Longest that anything here may take.
pub const TIMEOUT: Duration = Duration::from_secs(if cfg!(feature = "verbs") { 120 } else { 20 });

/// A mapping of whole pages. Freed on drop: keep it longer than its regions.
#[derive(Debug)]
pub struct Memory {
    ptr: NonNull<u8>,
    len: usize,
    file: Option<(Guard, File)>,
}

// SAFETY: an owned mapping, accessed by raw copies only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(len: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self { ptr: NonNull::new(at.cast()).unwrap(), len, file: None }
    }

    /// As [`filled`](Self::filled), of a file that can be [shortened](Self::shorten).
    pub fn of_file(len: usize, seed: u8) -> Self {
        let mut memory = Self::new(len);
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(len as u64).unwrap();
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let at = memory.ptr.as_ptr();
        // SAFETY: takes the place of a mapping of our own, which nobody knows yet.
        let mapped = unsafe { libc::mmap(at.cast(), len, prot, flags, file.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        // SAFETY: the whole mapping; the guard is dropped before it is unmapped, and there are no references to it.
        let guard = unsafe { Guard::new(at, len, 4096) }.unwrap();
        memory.file = Some((guard, file));
        memory.write(0, &patterned(0, len, seed));
        memory
    }

    /// Cuts off the end of the file.
    pub fn shorten(&self, len: usize) {
        let (_, file) = self.file.as_ref().unwrap();
        file.set_len(len as u64).unwrap();
    }

    /// Every byte depends on its place and on `seed`; none is 0.
    pub fn filled(len: usize, seed: u8) -> Self {
        let memory = Self::new(len);
        let bytes: Vec<u8> = (0..len).map(|at| pattern(at, seed)).collect();
        memory.write(0, &bytes);
        memory
    }

    pub fn area(&self) -> MemoryArea {
        // SAFETY: the tests drop regions before their memory, and access it by copies only.
        unsafe { MemoryArea::new(self.ptr, self.len as u64) }
    }

    pub fn register(&self, fabric: &dyn Fabric, access: Access) -> Region {
        fabric.register(self.area(), access).unwrap()
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: `at` is inside the mapping.
        let from = unsafe { self.ptr.as_ptr().add(at) };
        // SAFETY: the range is inside the mapping, and the target is a fresh buffer.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: `at` is inside the mapping.
        let to = unsafe { self.ptr.as_ptr().add(at) };
        // SAFETY: the range is inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Takes the pages away and leaves a hole where nothing can be accessed.
    pub fn revoke(&self, at: usize, len: usize) {
        // SAFETY: `at` is inside the mapping.
        let from = unsafe { self.ptr.as_ptr().add(at) };
        // SAFETY: the range is inside the mapping, and no reference to it exists.
        let result = unsafe { libc::mprotect(from.cast(), len, libc::PROT_NONE) };
        assert_eq!(result, 0);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.file = None;
        // SAFETY: an owned mapping that nobody uses any more.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

pub fn pattern(at: usize, seed: u8) -> u8 {
    let mixed = (at ^ (at >> 8) ^ (at >> 16)).wrapping_mul(167).wrapping_add(usize::from(seed));
    u8::try_from(mixed % 255).unwrap() + 1
}

pub fn patterned(at: usize, len: usize, seed: u8) -> Vec<u8> {
    (at..at + len).map(|at| pattern(at, seed)).collect()
}

/// One end of a connection and its fabric.
#[derive(Debug)]
pub struct Side {
    pub fabric: Arc<dyn Fabric>,
    pub endpoint: Box<dyn Endpoint>,
    pub found: Completions,
}

impl Side {
    pub fn new(fabric: Arc<dyn Fabric>, endpoint: Box<dyn Endpoint>) -> Self {
        Self { fabric, endpoint, found: Completions::default() }
    }

    /// One poll; what it found.
    pub fn poll(&mut self) -> Result<Vec<Completion>, FabricError> {
        self.endpoint.poll(&mut self.found)?;
        Ok(self.found.drain().collect())
    }

    /// Polls until `count` completions were found.
    pub fn complete(&mut self, count: usize) -> Vec<Completion> {
        self.complete_within(count, TIMEOUT)
    }

    /// As [`complete`](Self::complete), with another time-out.
    pub fn complete_within(&mut self, count: usize, timeout: Duration) -> Vec<Completion> {
        let mut all = Vec::new();
        let begin = Instant::now();
        while all.len() < count {
            assert!(begin.elapsed() < timeout, "{} of {count} completions", all.len());
            let found = self.poll().unwrap();
            if found.is_empty() {
                self.endpoint.wait(Some(Duration::from_millis(100))).unwrap();
            }
            all.extend(found);
        }
        assert_eq!(all.len(), count);
        all
    }

    /// Polls until something was found.
    pub fn complete_some(&mut self) -> Vec<Completion> {
        let begin = Instant::now();
        loop {
            assert!(begin.elapsed() < TIMEOUT, "nothing came");
            let found = self.poll().unwrap();
            if !found.is_empty() {
                return found;
            }
            self.endpoint.wait(Some(Duration::from_millis(100))).unwrap();
        }
    }

    /// Polls until the connection fails; what completed before.
    pub fn fail(&mut self) -> (Vec<Completion>, FabricError) {
        let mut all = Vec::new();
        let begin = Instant::now();
        loop {
            assert!(begin.elapsed() < TIMEOUT, "the connection did not fail");
            match self.poll() {
                Ok(found) if found.is_empty() => self.endpoint.wait(Some(Duration::from_millis(50))).unwrap(),
                Ok(found) => all.extend(found),
                Err(error) => return (all, error),
            }
        }
    }
}

/// Two connected sides of different fabrics.
#[derive(Debug)]
pub struct Pair {
    pub asking: Side,
    pub asked: Side,
}

impl Pair {
    /// Polls both sides until each has found as many completions as wanted.
    pub fn drive(&mut self, asking: usize, asked: usize) -> (Vec<Completion>, Vec<Completion>) {
        let (mut left, mut right) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        while left.len() < asking || right.len() < asked {
            assert!(
                begin.elapsed() < TIMEOUT,
                "{} of {asking} and {} of {asked} completions",
                left.len(),
                right.len()
            );
            left.extend(self.asking.poll().unwrap());
            match self.asked.poll() {
                Ok(found) => right.extend(found),
                // A queue pair ends with the request that is refused.
                Err(_) if left.len() == asking && right.len() == asked => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!((left.len(), right.len()), (asking, asked));
        (left, right)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    Tls,
    Local,
    Verbs,
}

impl Kind {
    /// Whether a program of the peer answers requests.
    pub fn answers_by_program(self) -> bool {
        matches!(self, Self::Tcp | Self::Tls)
    }

    /// What comes of a request that a peer refuses for this reason. RDMA devices do not say why.
    pub fn refusal(self, reason: RemoteStatus) -> RemoteStatus {
        if self == Self::Verbs { RemoteStatus::Refused } else { reason }
    }

    /// How often to repeat what is to be tried `times` times: emulated devices are slow.
    pub fn times(self, times: u64) -> u64 {
        if self == Self::Verbs { times.div_ceil(8) } else { times }
    }
}

/// Whether a test cannot be run because this host has no RDMA device; says so.
#[cfg(feature = "verbs")]
pub fn skip_without_rdma() -> bool {
    match VerbsFabric::new(VerbsOptions::default()) {
        Err(error @ FabricError::NoDevice { .. }) => {
            vmove_skip::skip!("{error}; './run lab test' runs it on an emulated one");
            true
        }
        _ => false,
    }
}

/// A connected pair within this process.
pub fn pair(kind: Kind, class: Class) -> Pair {
    let (left, right) = fabrics(kind);
    pair_of(kind, class, left, right)
}

/// A connection between two given fabrics.
pub fn pair_of(kind: Kind, class: Class, left: Side2, right: Side2) -> Pair {
    match kind {
        #[cfg(feature = "verbs")]
        Kind::Verbs => {
            let (here, there) = sockets();
            let (Side2::Verbs(left), Side2::Verbs(right)) = (left, right) else { unreachable!() };
            let (here, there) = std::thread::scope(|scope| {
                let there = scope.spawn(|| right.adopt(there, class).unwrap());
                (left.adopt(here, class).unwrap(), there.join().unwrap())
            });
            Pair { asking: Side::new(left, here), asked: Side::new(right, there) }
        }
        #[cfg(not(feature = "verbs"))]
        Kind::Verbs => panic!("built without verbs"),
        Kind::Tcp | Kind::Tls => {
            let (here, there) = sockets();
            tcp_pair(kind, class, (left, here), (right, there))
        }
        Kind::Local => {
            let (here, there) = UnixStream::pair().unwrap();
            let (Side2::Local(left), Side2::Local(right)) = (left, right) else { unreachable!() };
            let (here, there) = std::thread::scope(|scope| {
                let there = scope.spawn(|| right.adopt(there, class).unwrap());
                (left.adopt(here, class).unwrap(), there.join().unwrap())
            });
            Pair { asking: Side::new(left, here), asked: Side::new(right, there) }
        }
    }
}

/// A fabric of a known type.
#[derive(Debug, Clone)]
pub enum Side2 {
    Tcp(Arc<TcpFabric>),
    Local(Arc<LocalFabric>),
    #[cfg(feature = "verbs")]
    Verbs(Arc<VerbsFabric>),
}

impl Side2 {
    pub fn fabric(&self) -> Arc<dyn Fabric> {
        match self {
            Self::Tcp(fabric) => Arc::<TcpFabric>::clone(fabric),
            Self::Local(fabric) => Arc::<LocalFabric>::clone(fabric),
            #[cfg(feature = "verbs")]
            Self::Verbs(fabric) => Arc::<VerbsFabric>::clone(fabric),
        }
    }
}

pub fn fabrics(kind: Kind) -> (Side2, Side2) {
    let make = || match kind {
        Kind::Tcp | Kind::Tls => Side2::Tcp(Arc::new(TcpFabric::new(TcpOptions::default()).unwrap())),
        Kind::Local => Side2::Local(Arc::new(LocalFabric::new().unwrap())),
        #[cfg(feature = "verbs")]
        Kind::Verbs => Side2::Verbs(Arc::new(VerbsFabric::new(VerbsOptions::default()).unwrap())),
        #[cfg(not(feature = "verbs"))]
        Kind::Verbs => panic!("built without verbs"),
    };
    (make(), make())
}

/// A pair over two given sockets, which need not be each other's ends.
pub fn tcp_pair(kind: Kind, class: Class, left: (Side2, TcpStream), right: (Side2, TcpStream)) -> Pair {
    let ((Side2::Tcp(left), here), (Side2::Tcp(right), there)) = (left, right) else {
        panic!("not a tcp pair")
    };
    let (here, there) = match kind {
        Kind::Tls => std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                let tls = tls::accept(&there);
                right.adopt_tls(there, tls, class).unwrap()
            });
            let tls = tls::connect(&here);
            (left.adopt_tls(here, tls, class).unwrap(), there.join().unwrap())
        }),
        _ => (left.adopt(here, class).unwrap(), right.adopt(there, class).unwrap()),
    };
    Pair { asking: Side::new(left, here), asked: Side::new(right, there) }
}

/// Two ends of a loopback connection.
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here, listener.accept().unwrap().0)
}

pub fn local(region: &Region, offset: usize, len: usize) -> LocalSlice {
    region.local(offset as u64, u32::try_from(len).unwrap()).unwrap()
}

pub fn remote(region: &Region, offset: usize) -> RemoteSlice {
    region.remote().at(offset as u64).unwrap()
}

pub fn read_segment(from: &Region, from_at: usize, to: &Region, to_at: usize, len: usize) -> ReadSegment {
    ReadSegment { remote: remote(from, from_at), local: local(to, to_at, len) }
}

pub fn write_segment(from: &Region, from_at: usize, to: &Region, to_at: usize, len: usize) -> WriteSegment {
    WriteSegment { local: local(from, from_at, len), remote: remote(to, to_at) }
}

/// Sleeps until it is so.
pub fn wait_until(what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < TIMEOUT, "not so: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The wr, if it is a READ that succeeded in full.
pub fn whole_read(completion: &Completion) -> WrId {
    assert_eq!(completion.kind, CompletionKind::Read { zero_mask: 0 });
    completion.status.unwrap();
    completion.wr
}
