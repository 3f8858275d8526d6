//! Latency and bandwidth of the fabric between two processes of this machine.
//!
//! ```text
//! cargo run --release -p vmove-fabric --example fabric_bench -- [tcp|tls|local]... [--seconds S] [--only NAME]
//!     [--chunk BYTES] [--polite BYTES] [--buffer BYTES] [--urgent-buffer BYTES] [--spin US]
//! ```
//!
//! `others` is the processor time that neither of the two processes used, in processors: unless it is near 0, the machine
//! was not idle and the figures are too low.
//!
//! The program starts itself as the peer. Figures are of CLOCK_MONOTONIC on the asking side, from the post to the
//! poll that yields the completion.
#![allow(unsafe_code)]

mod tls;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{
    Access, Class, CompletionKind, Completions, Endpoint, Fabric, MemoryArea, PeerAddress, ReadSegment,
    Region, RemoteRegion, StayAwake, ThreadOptions, WrId,
};

const MEMORY: u64 = 256 << 20;
const PAGE: u64 = 4096;
/// Bytes per call of the plain sockets.
const PLAIN: usize = 512 << 10;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, kind, path, ..] = arguments.as_slice()
        && command == "serve"
    {
        return serve(kind, path.as_ref());
    }
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let seconds = value("--seconds").map_or(Ok(1.0), |text| text.parse::<f64>())?;
    let only = value("--only");
    let mut kinds: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .filter(|argument| ["tcp", "tls", "local"].contains(argument))
        .collect();
    if kinds.is_empty() {
        kinds = vec!["tcp", "local"];
    }
    for kind in kinds {
        bench(kind, Duration::from_secs_f64(seconds), only.as_deref())?;
    }
    Ok(())
}

/// Options as given on the command line, which the peer gets too.
fn options() -> TcpOptions {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str| -> Option<usize> {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse().ok()
    };
    let mut options = TcpOptions::default();
    options.bulk_chunk = number("--chunk").unwrap_or(options.bulk_chunk);
    options.polite_chunk = number("--polite").unwrap_or(options.polite_chunk);
    options.urgent_spin = number("--spin").map_or(options.urgent_spin, |us| Duration::from_micros(us as u64));
    options.bulk_buffer = number("--buffer").or(options.bulk_buffer);
    options.urgent_buffer = number("--urgent-buffer").or(options.urgent_buffer);
    options
}

/// Memory that stays for the life of the process.
fn memory(fabric: &dyn Fabric, access: Access, fill: u8) -> Outcome<Region> {
    let len = usize::try_from(MEMORY)?;
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
    let ptr = std::ptr::NonNull::new(at.cast::<u8>()).ok_or("mmap")?;
    // SAFETY: advice on a mapping of ours.
    unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
    // SAFETY: the mapping is ours, of this length, and nobody else uses it yet.
    unsafe { ptr.as_ptr().write_bytes(fill, len) };
    // SAFETY: never unmapped, never borrowed.
    Ok(fabric.register(unsafe { MemoryArea::new(ptr, MEMORY) }, access)?)
}

/// The peer: memory to read, and a responder for each connection.
fn serve(kind: &str, folder: &Path) -> Outcome<()> {
    let tcp = TcpFabric::bind(SocketAddr::from(([127, 0, 0, 1], 0)), options())?;
    let socket = folder.join("socket");
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let local = if kind == "local" { Some(LocalFabric::bind(&socket)?) } else { None };
    let fabric: &dyn Fabric = local.as_ref().map_or(&tcp as &dyn Fabric, |local| local);
    let address = match kind {
        "local" => socket.display().to_string(),
        "tls" => listener.local_addr()?.to_string(),
        _ => tcp.local_addr().ok_or("not listening")?.to_string(),
    };
    let region = memory(fabric, Access { remote_read: true, remote_write: true }, 7)?;
    let zeros = memory(fabric, Access::REMOTE_READ, 0)?;
    println!("{address}\n{}", plain_source(&region)?);
    for region in [&region, &zeros] {
        let RemoteRegion { addr, len, rkey } = region.remote();
        println!("{addr} {len} {rkey}");
    }
    std::io::stdout().flush()?;
    std::thread::spawn(|| {
        // The parent holds our standard input: its end is ours.
        let _ = std::io::stdin().lines().count();
        std::process::exit(0);
    });
    let mut handles = Vec::new();
    loop {
        let (class, endpoint) = if kind == "tls" {
            accept_tls(&tcp, &listener, &tls::Identity::load(folder)?)?
        } else {
            let incoming = fabric.accept(Duration::from_secs(3600))?;
            (incoming.class, incoming.endpoint)
        };
        let options = match class {
            Class::Urgent => ThreadOptions::urgent("urgent"),
            _ => ThreadOptions::bulk("bulk"),
        };
        handles.push(endpoint.serve(options)?);
    }
}

/// As a daemon would: its own port, TLS, a first word, and then the socket goes to the fabric.
fn accept_tls(
    fabric: &TcpFabric,
    listener: &TcpListener,
    identity: &tls::Identity,
) -> Outcome<(Class, Box<dyn Endpoint>)> {
    let (stream, _) = listener.accept()?;
    let mut tls = identity.accept(&stream)?;
    let mut class = [0];
    while tls.reader().read(&mut class).is_err() {
        tls.complete_io(&mut &stream)?;
    }
    let class = Class::from_wire(class[0]).ok_or("unknown class")?;
    Ok((class, fabric.adopt_tls(stream, tls, class)?))
}

/// Sends the memory in pieces to whoever connects, for ever: what a socket can do without a fabric.
fn plain_source(region: &Region) -> Outcome<SocketAddr> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let address = listener.local_addr()?;
    let region = region.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = ThreadOptions::bulk("plain").apply();
            let mut places = Places(3);
            let mut at = 0;
            while at < PLAIN {
                let Ok(place) = usize::try_from(places.next(PLAIN as u64)) else { break };
                let start = region.area().ptr().as_ptr().wrapping_add(place);
                while at < PLAIN {
                    // SAFETY: inside the region; the kernel only reads it.
                    let sent = unsafe {
                        libc::send(
                            stream.as_raw_fd(),
                            start.wrapping_add(at).cast(),
                            PLAIN - at,
                            libc::MSG_NOSIGNAL,
                        )
                    };
                    let Ok(sent) = usize::try_from(sent) else { break };
                    at += sent;
                }
                at = if at == PLAIN { 0 } else { PLAIN + 1 };
            }
        }
    });
    Ok(address)
}

/// Receives what `plain_source` sends.
fn plain(peer: &Peer, time: Duration) -> Outcome<String> {
    let stream = TcpStream::connect(peer.plain)?;
    let mut places = Places(7);
    let mut bytes = 0;
    let usage = Usage::begin(peer);
    let begin = Instant::now();
    while begin.elapsed() < time {
        let place = usize::try_from(places.next(PLAIN as u64))?;
        let start = peer.landing.area().ptr().as_ptr().wrapping_add(place);
        let mut at = 0;
        while at < PLAIN {
            // SAFETY: inside the region, which nobody borrows.
            let got = unsafe { libc::recv(stream.as_raw_fd(), start.wrapping_add(at).cast(), PLAIN - at, 0) };
            at += usize::try_from(got)?.max(1);
        }
        bytes += PLAIN as u64;
    }
    Ok(speed(&usage, peer, bytes, 0))
}

/// A peer process, and what is needed to reach its memory.
struct Peer {
    child: Child,
    tcp: TcpFabric,
    local: Option<LocalFabric>,
    identity: Option<tls::Identity>,
    address: PeerAddress,
    plain: SocketAddr,
    data: RemoteRegion,
    zeros: RemoteRegion,
    landing: Region,
    _folder: tempfile::TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(kind: &str) -> Outcome<Self> {
        let folder = tempfile::tempdir()?;
        let identity = if kind == "tls" { Some(tls::Identity::create(folder.path())?) } else { None };
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", kind])
            .arg(folder.path())
            .args(std::env::args().skip(1))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let mut line = || lines.next().ok_or("the peer ended")?.map_err(Box::<dyn std::error::Error>::from);
        let address = line()?;
        let plain = line()?.parse()?;
        let mut region = || -> Outcome<RemoteRegion> {
            let line = line()?;
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            let [addr, len, rkey] = numbers[..] else { return Err("a region has three numbers".into()) };
            Ok(RemoteRegion { addr, len, rkey })
        };
        let (data, zeros) = (region()?, region()?);
        let tcp = TcpFabric::new(options())?;
        let (local, address) = match kind {
            "local" => (Some(LocalFabric::new()?), PeerAddress::Unix(address.into())),
            _ => (None, PeerAddress::Tcp(address.parse()?)),
        };
        let fabric: &dyn Fabric = local.as_ref().map_or(&tcp as &dyn Fabric, |local| local);
        let landing = memory(fabric, Access::LOCAL, 1)?;
        Ok(Self { child, tcp, local, identity, address, plain, data, zeros, landing, _folder: folder })
    }

    fn connect(&self, class: Class) -> Outcome<Box<dyn Endpoint>> {
        let (Some(identity), PeerAddress::Tcp(address)) = (&self.identity, &self.address) else {
            return Ok(self.fabric().connect(&self.address, class, b"")?);
        };
        let stream = TcpStream::connect(address)?;
        let mut tls = identity.connect(&stream)?;
        tls.writer().write_all(&[class as u8])?;
        tls.complete_io(&mut &stream)?;
        Ok(self.tcp.adopt_tls(stream, tls, class)?)
    }

    fn fabric(&self) -> &dyn Fabric {
        self.local.as_ref().map_or(&self.tcp as &dyn Fabric, |local| local)
    }

    /// User and system time of the peer so far, in seconds.
    fn peer_cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

/// Time that all processors spent working, in seconds.
fn all_cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|text| text.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    ticks
        .iter()
        .take(8)
        .enumerate()
        .filter(|(index, _)| *index != 3 && *index != 4)
        .map(|(_, ticks)| ticks)
        .sum::<f64>()
        / 100.0
}

/// What is needed to tell who used how much processor time.
struct Usage {
    begin: Instant,
    own: f64,
    peer: f64,
    all: f64,
}

impl Usage {
    fn begin(peer: &Peer) -> Self {
        Self { begin: Instant::now(), own: own_cpu(), peer: peer.peer_cpu(), all: all_cpu() }
    }

    /// Own, the peer's, and that of others as a number of processors.
    fn end(&self, peer: &Peer) -> (f64, f64, f64) {
        let (own, other) = (own_cpu() - self.own, peer.peer_cpu() - self.peer);
        let others = (all_cpu() - self.all - own - other) / self.begin.elapsed().as_secs_f64();
        (own, other, others.max(0.0))
    }
}

fn own_cpu() -> f64 {
    // SAFETY: all-zero is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a local that outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn bench(kind: &str, time: Duration, only: Option<&str>) -> Outcome<()> {
    let peer = Peer::start(kind)?;
    let wanted = |name: &str| only.is_none_or(|only| name.contains(only));
    println!("{kind}:");
    if wanted("plain") && kind == "tcp" {
        println!("  plain socket, 512 KiB calls          {}", plain(&peer, time)?);
    }
    if wanted("latency") {
        let found = latency(&peer, time, &AtomicBool::new(false))?;
        println!("  urgent 4 KiB read, idle              {found}");
        let awake = StayAwake::new();
        let found = latency(&peer, time, &AtomicBool::new(false))?;
        let what =
            if awake.is_ok() { "the same, processors awake" } else { "the same (no /dev/cpu_dma_latency)" };
        println!("  {what:<36} {found}");
    }
    for (name, segment, count, depth) in [
        ("bulk 128 KiB x 1, depth 8", 128 << 10, 1, 8),
        ("bulk 512 KiB x 1, depth 4", 512 << 10, 1, 4),
        ("bulk 512 KiB x 1, depth 8", 512 << 10, 1, 8),
        ("bulk 2 MiB x 1, depth 4", 2 << 20, 1, 4),
        ("bulk 2 MiB x 1, depth 8", 2 << 20, 1, 8),
        ("bulk scattered 4 KiB x 64, depth 4", PAGE, 64, 4),
        ("bulk scattered 4 KiB x 64, depth 8", PAGE, 64, 8),
    ] {
        if wanted(name) {
            let found = bulk(&peer, &peer.data, segment, count, depth, time, &AtomicBool::new(false))?;
            println!("  {name:<36} {found}");
        }
    }
    if wanted("zeros") {
        let found = bulk(&peer, &peer.zeros, PAGE, 64, 8, time, &AtomicBool::new(false))?;
        println!("  zeros 4 KiB x 64, depth 8            {found}");
    }
    for (name, segment, count) in
        [("mixed with 512 KiB x 1", 512 << 10, 1), ("mixed with 4 KiB x 64", PAGE, 64)]
    {
        if !wanted(name) {
            continue;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (urgent, bulk) = std::thread::scope(|scope| {
            let background = scope.spawn(|| {
                let _ = ThreadOptions::bulk("bulk-reader").apply();
                bulk(&peer, &peer.data, segment, count, 8, Duration::MAX, &stop)
                    .map_err(|error| error.to_string())
            });
            let urgent = scope.spawn(|| {
                let _ = ThreadOptions::urgent("urgent-reader").apply();
                std::thread::sleep(Duration::from_millis(200));
                let found = latency(&peer, time, &stop).map_err(|error| error.to_string());
                stop.store(true, Ordering::Relaxed);
                found
            });
            (urgent.join(), background.join())
        });
        println!("  {name:<36} {}", urgent.map_err(|_| "the urgent thread panicked")??);
        println!("  {:<36} {}", "  and the bulk beside it", bulk.map_err(|_| "the bulk thread panicked")??);
    }
    Ok(())
}

/// A cheap sequence of places, all over the memory.
struct Places(u64);

impl Places {
    fn next(&mut self, unit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % (MEMORY / unit) * unit
    }
}

fn latency(peer: &Peer, time: Duration, stop: &AtomicBool) -> Outcome<String> {
    let mut endpoint = peer.connect(Class::Urgent)?;
    let mut found = Completions::default();
    let mut places = Places(1);
    let mut samples = Vec::with_capacity(1 << 20);
    let usage = Usage::begin(peer);
    let begin = Instant::now();
    while begin.elapsed() < time && !stop.load(Ordering::Relaxed) {
        let offset = places.next(PAGE);
        let segment = ReadSegment {
            remote: peer.data.at(offset).ok_or("outside")?,
            local: peer.landing.local(offset, 4096).ok_or("outside")?,
        };
        let posted = Instant::now();
        endpoint.post_read(WrId(1), &[segment])?;
        endpoint.flush()?;
        while endpoint.poll(&mut found)? == 0 {
            endpoint.wait(None)?;
        }
        samples.push(posted.elapsed());
    }
    let (_, _, others) = usage.end(peer);
    samples.sort_unstable();
    let at = |per_mille: usize| {
        let index = samples.len().saturating_sub(1) * per_mille / 1000;
        samples.get(index).map_or(0.0, |sample| sample.as_secs_f64() * 1e6)
    };
    Ok(format!(
        "p50 {:7.1} us  p99 {:7.1} us  p99.9 {:7.1} us  max {:7.1} us  n {}  others {others:.2}",
        at(500),
        at(990),
        at(999),
        at(1000),
        samples.len()
    ))
}

fn bulk(
    peer: &Peer,
    from: &RemoteRegion,
    segment: u64,
    count: usize,
    depth: usize,
    time: Duration,
    stop: &AtomicBool,
) -> Outcome<String> {
    let mut endpoint = peer.connect(Class::Bulk)?;
    let mut found = Completions::default();
    let mut places = Places(7);
    let mut segments = Vec::with_capacity(count);
    let (mut posted, mut bytes, mut zeros) = (0, 0_u64, 0_u64);
    let usage = Usage::begin(peer);
    let begin = Instant::now();
    while begin.elapsed() < time && !stop.load(Ordering::Relaxed) {
        while posted < depth {
            segments.clear();
            for _ in 0..count {
                let offset = places.next(segment);
                segments.push(ReadSegment {
                    remote: from.at(offset).ok_or("outside")?,
                    local: peer.landing.local(offset, u32::try_from(segment)?).ok_or("outside")?,
                });
            }
            endpoint.post_read(WrId(posted as u64), &segments)?;
            posted += 1;
        }
        if endpoint.poll(&mut found)? == 0 {
            endpoint.wait(None)?;
        }
        for completion in &found {
            completion.status?;
            if let CompletionKind::Read { zero_mask } = completion.kind {
                zeros += u64::from(zero_mask.count_ones()) * segment;
            }
            posted -= 1;
            bytes += segment * count as u64;
        }
    }
    Ok(speed(&usage, peer, bytes, zeros))
}

fn speed(usage: &Usage, peer: &Peer, bytes: u64, zeros: u64) -> String {
    let seconds = usage.begin.elapsed().as_secs_f64();
    let gigabytes = bytes as f64 / 1e9;
    let (own, other, others) = usage.end(peer);
    let zeros = if zeros > 0 {
        format!("  ({:.0} % zero)", zeros as f64 / bytes as f64 * 100.0)
    } else {
        String::new()
    };
    format!(
        "{:6.2} GB/s  CPU per GB: reader {:.3} s, peer {:.3} s  others {others:.2}{zeros}",
        gigabytes / seconds,
        own / gigabytes,
        other / gigabytes,
    )
}
