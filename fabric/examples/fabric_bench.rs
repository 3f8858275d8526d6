//! Latency and bandwidth of the fabric between two processes of this machine.
//!
//! ```text
//! cargo run --release -p vmove-fabric --example fabric_bench -- [tcp|tls|local]... [--seconds S] [--only NAME]
//! ```
//!
//! The program starts itself as the peer. Figures are of CLOCK_MONOTONIC on the asking side, from the post to the
//! poll that yields the completion.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmove_fabric::local::LocalFabric;
use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::{
    Access, Class, CompletionKind, Completions, Endpoint, Fabric, MemoryArea, PeerAddress, ReadSegment,
    Region, RemoteRegion, ThreadOptions, WrId,
};

const MEMORY: u64 = 256 << 20;
const PAGE: u64 = 4096;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, kind, path] = arguments.as_slice() {
        if command == "serve" {
            return serve(kind, path);
        }
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
fn serve(kind: &str, path: &str) -> Outcome<()> {
    let (fabric, address): (Box<dyn Fabric>, String) = match kind {
        "local" => (Box::new(LocalFabric::bind(path.as_ref())?), path.to_owned()),
        _ => {
            let fabric = TcpFabric::bind(SocketAddr::from(([127, 0, 0, 1], 0)), TcpOptions::default())?;
            let address = fabric.local_addr().ok_or("not listening")?.to_string();
            (Box::new(fabric), address)
        }
    };
    let region = memory(&*fabric, Access { remote_read: true, remote_write: true }, 7)?;
    let zeros = memory(&*fabric, Access::REMOTE_READ, 0)?;
    println!("{address}");
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
        match fabric.accept(Duration::from_secs(3600)) {
            Ok(incoming) => {
                let options = match incoming.class {
                    Class::Urgent => ThreadOptions::urgent("urgent"),
                    _ => ThreadOptions::bulk("bulk"),
                };
                handles.push(incoming.endpoint.serve(options)?);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A peer process, and what is needed to reach its memory.
struct Peer {
    child: Child,
    fabric: Box<dyn Fabric>,
    address: PeerAddress,
    data: RemoteRegion,
    zeros: RemoteRegion,
    landing: Region,
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Peer {
    fn start(kind: &str) -> Outcome<Self> {
        let path = std::env::temp_dir().join(format!("fabric-bench-{}", std::process::id()));
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", kind])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let mut line = || lines.next().ok_or("the peer ended")?.map_err(Box::<dyn std::error::Error>::from);
        let address = line()?;
        let mut region = || -> Outcome<RemoteRegion> {
            let line = line()?;
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            let [addr, len, rkey] = numbers[..] else { return Err("a region has three numbers".into()) };
            Ok(RemoteRegion { addr, len, rkey })
        };
        let (data, zeros) = (region()?, region()?);
        let (fabric, address): (Box<dyn Fabric>, _) = match kind {
            "local" => (Box::new(LocalFabric::new()?), PeerAddress::Unix(address.into())),
            _ => (Box::new(TcpFabric::new(TcpOptions::default())?), PeerAddress::Tcp(address.parse()?)),
        };
        let landing = memory(&*fabric, Access::LOCAL, 1)?;
        Ok(Self { child, fabric, address, data, zeros, landing })
    }

    fn connect(&self, class: Class) -> Outcome<Box<dyn Endpoint>> {
        Ok(self.fabric.connect(&self.address, class, b"")?)
    }

    /// User and system time of the peer so far, in seconds.
    fn peer_cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
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
    if wanted("latency") {
        let found = latency(&peer, time, &AtomicBool::new(false))?;
        println!("  urgent 4 KiB read, idle              {found}");
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
    samples.sort_unstable();
    let at = |per_mille: usize| {
        let index = samples.len().saturating_sub(1) * per_mille / 1000;
        samples.get(index).map_or(0.0, |sample| sample.as_secs_f64() * 1e6)
    };
    Ok(format!(
        "p50 {:7.1} us  p99 {:7.1} us  p99.9 {:7.1} us  max {:7.1} us  n {}",
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
    let (own, others) = (own_cpu(), peer.peer_cpu());
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
    let seconds = begin.elapsed().as_secs_f64();
    let gigabytes = bytes as f64 / 1e9;
    Ok(format!(
        "{:6.2} GB/s  CPU per GB: reader {:.3} s, peer {:.3} s{}",
        gigabytes / seconds,
        (own_cpu() - own) / gigabytes,
        (peer.peer_cpu() - others) / gigabytes,
        if zeros > 0 {
            format!("  ({:.0} % zero)", zeros as f64 / bytes as f64 * 100.0)
        } else {
            String::new()
        }
    ))
}
