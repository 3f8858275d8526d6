//! What encryption of multicast datagrams costs: one sender and one receiver over the loopback interface, without and with a key, in
//! turn. Prints the throughput and the processor time of both, which is what counts: both do nothing else.
//!
//! `cargo run --release -p vmove-fabric --example multicast_cost`
#![allow(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmove_fabric::tcp::{TcpFabric, TcpOptions};
use vmove_fabric::udp::{UdpMulticast, UdpOptions};
use vmove_fabric::{
    Access, Fabric, Group, GroupAddress, LocalSlice, MemoryArea, Multicast, Outgoing, Region, Session, Sink,
};

const MEMORY: u64 = 64 << 20;
const PIECE: u32 = 1024;
const PASSES: usize = 8;
const ROUNDS: usize = 5;

/// Where each piece belongs.
struct Places<'a>(&'a Region);

impl Sink for Places<'_> {
    fn place(&mut self, immediate: u32, len: usize) -> Option<LocalSlice> {
        self.0.local(u64::from(immediate) * u64::from(PIECE), u32::try_from(len).ok()?)
    }

    fn landed(&mut self, _: u32) {}
}

struct Figures {
    mib_per_s: f64,
    cpu_ns_per_kib: f64,
    lost: f64,
}

fn processor_time() -> Duration {
    // User and system time in clock ticks: fields 14 and 15 of proc_pid_stat(5), the 12th and 13th after the name.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

fn measure(session: Session, port: u16) -> Result<Figures, Box<dyn std::error::Error>> {
    let address = SocketAddrV4::new(Ipv4Addr::new(239, 7, 43, 1), port);
    let group = Group { address: GroupAddress::Udp(address), session };
    let fabric = TcpFabric::new(TcpOptions::default())?;
    let mut options = UdpOptions::on(Ipv4Addr::LOCALHOST);
    options.mtu = Some(1500);
    let multicast = UdpMulticast::new(&fabric, options);
    let mut memory = [(); 2].map(|()| vec![1_u8; usize::try_from(MEMORY).unwrap_or(0)]);
    let [from, to] = memory.each_mut().map(|bytes| {
        let start = NonNull::from(bytes.as_mut_slice()).cast();
        // SAFETY: the regions are declared after the memory, so they are dropped before it, and nobody else touches it meanwhile.
        let area = unsafe { MemoryArea::new(start, MEMORY) };
        fabric.register(area, Access::LOCAL)
    });
    let (from, to) = (from?, to?);
    let mut receiver = multicast.join(&group)?;
    let mut sender = multicast.sender(&group)?;
    let pieces = u32::try_from(MEMORY / u64::from(PIECE))?;
    let all: Vec<Outgoing> = (0..pieces)
        .filter_map(|n| {
            let payload = from.local(u64::from(n) * u64::from(PIECE), PIECE)?;
            Some(Outgoing { immediate: n, payload })
        })
        .collect();
    let done = AtomicBool::new(false);
    let (begun, used) = (Instant::now(), processor_time());
    let sent = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if receiver.poll(&mut Places(&to)).unwrap_or(0) == 0 {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            receiver.counters().read().received
        });
        let mut sent = 0_u64;
        for _ in 0..PASSES {
            let mut at = 0;
            while at < all.len() {
                let taken = sender.send(&all[at..(at + 256).min(all.len())])?;
                (at, sent) = (at + taken, sent + taken as u64);
                if taken == 0 {
                    sender.wait(Duration::from_millis(10))?;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(50));
        done.store(true, Ordering::Relaxed);
        let received = receiving.join().map_err(|_| "the receiver panicked")?;
        Ok::<_, Box<dyn std::error::Error>>((sent, received))
    })?;
    #[allow(clippy::cast_precision_loss)]
    let (kib, taken) = ((sent.0 * u64::from(PIECE)) as f64 / 1024.0, sent.1 as f64 / sent.0 as f64);
    Ok(Figures {
        mib_per_s: kib / 1024.0 / begun.elapsed().as_secs_f64(),
        cpu_ns_per_kib: (processor_time() - used).as_secs_f64() * 1e9 / kib,
        lost: 1.0 - taken,
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("| round | datagrams | MiB/s | CPU ns per KiB, both ends | lost |\n|---|---|--:|--:|--:|");
    for round in 1..=ROUNDS {
        for (name, session) in [("checked", Session::draw()?), ("encrypted", Session::draw_sealed()?)] {
            let port = 21_000 + u16::try_from(round)?;
            let Figures { mib_per_s, cpu_ns_per_kib, lost } = measure(session, port)?;
            println!("| {round} | {name} | {mib_per_s:.0} | {cpu_ns_per_kib:.0} | {:.1} % |", lost * 100.0);
        }
    }
    Ok(())
}
