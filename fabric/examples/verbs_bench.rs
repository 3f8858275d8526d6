//! Latency and bandwidth of READs by RDMA between two hosts, through the fabric.
//!
//! ```text
//! verbs_bench serve ADDRESS:PORT
//! verbs_bench latency ADDRESS:PORT BYTES COUNT
//! verbs_bench bandwidth ADDRESS:PORT BYTES COUNT DEPTH
//! verbs_bench write ADDRESS:PORT BYTES COUNT DEPTH
//! ```
//!
//! The server ends after one client. 'write' is the same as 'bandwidth' with WRITEs into the server's memory, and a message to
//! the server after each MiB, which must be told what it has got. Latency is of CLOCK_MONOTONIC from the post to the poll that yields the completion,
//! one READ at a time on an urgent connection; bandwidth is of COUNT READs of BYTES each with DEPTH under way on a bulk
//! connection, in MiB/s, from the first post to the last completion. Both sides say how much processor time their process took
//! from the connection's begin to its end, and their whole host with its kernel (in ticks of 10 ms).
#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vmove_fabric::verbs::{VerbsFabric, VerbsOptions};
use vmove_fabric::{
    Access, Class, CompletionKind, Completions, Endpoint, Fabric, MemoryArea, PeerAddress, PostError,
    ReadSegment, Region, RemoteRegion, WrId, WriteSegment,
};

/// What is read from, and into: larger than any READ asked for here.
const MEMORY: usize = 32 << 20;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", address] => serve(address.parse()?),
        ["latency", address, bytes, count] => latency(address.parse()?, bytes.parse()?, count.parse()?),
        ["bandwidth", address, bytes, count, depth] => {
            bandwidth(Way::Read, address.parse()?, bytes.parse()?, count.parse()?, depth.parse()?)
        }
        ["write", address, bytes, count, depth] => {
            bandwidth(Way::Write, address.parse()?, bytes.parse()?, count.parse()?, depth.parse()?)
        }
        _ => {
            let forms =
                "serve ADDRESS | latency ADDRESS BYTES COUNT | bandwidth|write ADDRESS BYTES COUNT DEPTH";
            Err(format!("expected: {forms}").into())
        }
    }
}

/// Which side moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write,
}

/// Bytes after which the server is told of WRITEs.
const TOLD: u64 = 1 << 20;

/// Processor time in ticks of 10 ms: of this process, and of this host with its kernel.
#[derive(Debug, Clone, Copy)]
struct Used {
    process: u64,
    host: u64,
}

impl Used {
    fn now() -> Outcome<Self> {
        let sum = |text: &str, places: &[usize]| -> u64 {
            let words: Vec<&str> = text.split_whitespace().collect();
            places.iter().filter_map(|at| words.get(*at)?.parse::<u64>().ok()).sum()
        };
        let own = std::fs::read_to_string("/proc/self/stat")?;
        // After the name, which may hold anything: state is the first word, user and system time the 12th and 13th.
        let own = own.rsplit_once(')').ok_or("no process times")?.1;
        let all = std::fs::read_to_string("/proc/stat")?;
        // cpu user nice system idle iowait irq softirq
        Ok(Self {
            process: sum(own, &[11, 12]),
            host: sum(all.lines().next().unwrap_or(""), &[1, 2, 3, 6, 7]),
        })
    }

    fn say(self, side: &str) -> Outcome<()> {
        let now = Self::now()?;
        let (process, host) = ((now.process - self.process) * 10, (now.host - self.host) * 10);
        println!("{side}: process {process} ms, host {host} ms");
        Ok(())
    }
}

/// Memory that lives as long as the process.
fn memory(fabric: &VerbsFabric, access: Access) -> Outcome<Region> {
    let bytes = Box::leak(vec![7_u8; MEMORY].into_boxed_slice());
    let start = NonNull::new(bytes.as_mut_ptr()).ok_or("no memory")?;
    // SAFETY: leaked, and never used by reference again.
    let area = unsafe { MemoryArea::new(start, MEMORY as u64) };
    Ok(fabric.register(area, access)?)
}

fn serve(address: SocketAddr) -> Outcome<()> {
    let fabric = VerbsFabric::bind(address, VerbsOptions::default())?;
    let region = memory(&fabric, Access { remote_read: true, remote_write: true })?;
    let mut endpoint = fabric.accept(Duration::from_secs(60))?.endpoint;
    let used = Used::now()?;
    let remote = region.remote();
    let mut message = Vec::new();
    for number in [remote.addr, remote.len, remote.rkey] {
        message.extend(number.to_le_bytes());
    }
    endpoint.post_send(WrId(0), &message)?;
    // Nothing to do but to stay, and to hear what was written: the device does the rest.
    let mut found = Completions::default();
    while endpoint.poll(&mut found).is_ok() {
        drop(found.drain());
        endpoint.wait(Some(Duration::from_secs(60)))?;
    }
    used.say("server")
}

/// A connection, and the memory at its other end and at this.
struct Client {
    endpoint: Box<dyn Endpoint>,
    from: RemoteRegion,
    to: Region,
    found: Completions,
}

impl Client {
    fn connect(address: SocketAddr, class: Class) -> Outcome<Self> {
        let fabric = VerbsFabric::new(VerbsOptions::default())?;
        let to = memory(&fabric, Access::LOCAL)?;
        let mut endpoint = fabric.connect(&PeerAddress::Tcp(address), class, b"")?;
        let mut found = Completions::default();
        while endpoint.poll(&mut found)? == 0 {
            endpoint.wait(None)?;
        }
        let first = found.drain().next().ok_or("nothing")?;
        let CompletionKind::Received(message) = first.kind else { return Err("no message".into()) };
        let number = |at: usize| -> Outcome<u64> {
            Ok(u64::from_le_bytes(message.get(at..at + 8).ok_or("a short message")?.try_into()?))
        };
        let from = RemoteRegion { addr: number(0)?, len: number(8)?, rkey: number(16)? };
        Ok(Self { endpoint, from, to, found })
    }

    fn post(&mut self, offset: u64, bytes: u32) -> Outcome<()> {
        let segment = ReadSegment {
            remote: self.from.at(offset).ok_or("outside")?,
            local: self.to.local(offset, bytes).ok_or("outside")?,
        };
        let posted = self.endpoint.post_read(WrId(offset), &[segment]);
        self.posted(posted)
    }

    fn post_write(&mut self, offset: u64, bytes: u32) -> Outcome<()> {
        let segment = WriteSegment {
            local: self.to.local(offset, bytes).ok_or("outside")?,
            remote: self.from.at(offset).ok_or("outside")?,
        };
        let posted = self.endpoint.post_write(WrId(offset), &[segment]);
        self.posted(posted)
    }

    /// The connection may have failed after the last completions were taken: the next poll says why.
    fn posted(&mut self, posted: Result<(), PostError>) -> Outcome<()> {
        while posted == Err(PostError::Dead) {
            self.endpoint.poll(&mut self.found)?;
        }
        Ok(posted?)
    }

    /// Waits until some READ or WRITE completes; how many did.
    fn complete(&mut self) -> Outcome<usize> {
        loop {
            while self.endpoint.poll(&mut self.found)? == 0 {
                self.endpoint.wait(None)?;
            }
            let mut moved = 0;
            for completion in &self.found {
                completion.status?;
                let moves = matches!(completion.kind, CompletionKind::Read { .. } | CompletionKind::Write);
                moved += usize::from(moves);
            }
            if moved > 0 {
                return Ok(moved);
            }
        }
    }
}

fn latency(address: SocketAddr, bytes: u32, count: usize) -> Outcome<()> {
    let mut client = Client::connect(address, Class::Urgent)?;
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        client.post(0, bytes)?;
        client.endpoint.flush()?;
        client.complete()?;
        samples.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    samples.sort_unstable_by(f64::total_cmp);
    let at = |percent: usize| samples.get(samples.len() * percent / 100).copied().unwrap_or(0.0);
    let average = samples.iter().sum::<f64>() / count as f64;
    println!("typical {:.2} us, average {average:.2} us, 99 % {:.2} us", at(50), at(99));
    Ok(())
}

fn bandwidth(way: Way, address: SocketAddr, bytes: u32, count: usize, depth: usize) -> Outcome<()> {
    let mut client = Client::connect(address, Class::Bulk)?;
    let used = Used::now()?;
    let places = MEMORY as u64 / u64::from(bytes);
    let (mut posted, mut done, mut untold) = (0, 0, 0);
    let begin = Instant::now();
    while done < count {
        while posted < count && posted - done < depth {
            let offset = posted as u64 % places * u64::from(bytes);
            posted += 1;
            if way == Way::Read {
                client.post(offset, bytes)?;
                continue;
            }
            client.post_write(offset, bytes)?;
            untold += u64::from(bytes);
            if untold >= TOLD || posted == count {
                client.endpoint.post_send(WrId(0), &untold.to_le_bytes())?;
                untold = 0;
            }
        }
        done += client.complete()?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!("average {:.2} MiB/s", f64::from(bytes) * count as f64 / f64::from(1 << 20) / seconds);
    used.say("client")
}
