//! The network of guests: a bridge and a tap on each node, and a client elsewhere, which speaks with a guest while that moves.
//!
//! It is apart from the network of the daemons. The bridges are connected by one that learns addresses as switches do.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmove_guest::SERVICE_PORT;

use crate::networks::{Networks, ip};

/// The guest's address, wherever it is.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
/// Hardware address of its network card.
pub const MAC: &str = "52:54:00:9a:00:02";
/// The tap of the guest, on each node.
pub const TAP: &str = "guest0";
/// A guest that has not answered for so long is lost.
const LOST: Duration = Duration::from_secs(60);

/// QEMU's arguments for the guest's network card.
#[must_use]
pub fn card() -> [String; 4] {
    [
        "-netdev".to_owned(),
        format!("tap,id=net0,ifname={TAP},script=no,downscript=no"),
        "-device".to_owned(),
        format!("virtio-net-pci,netdev=net0,mac={MAC},romfile="),
    ]
}

/// Kernel modules for that card, behind those of [virtio](crate::guest::VIRTIO).
pub const MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];

/// Makes the network for the guests of all nodes. It ends with the nodes' namespaces. QEMU opens its tap as root.
///
/// # Errors
/// Without root, or without iproute2.
pub fn make(networks: &Networks) -> Result<()> {
    let hub = networks.name(0);
    ip(&format!("-n {hub} link add lan type bridge mcast_snooping 0"))?;
    ip(&format!("-n {hub} address add 10.9.0.1/24 dev lan"))?;
    ip(&format!("-n {hub} link set lan up"))?;
    for number in networks.numbers() {
        let node = networks.name(number);
        ip(&format!("-n {node} link add lan type bridge mcast_snooping 0"))?;
        ip(&format!("-n {hub} link add lan{number} type veth peer name up0 netns {node}"))?;
        ip(&format!("-n {hub} link set lan{number} master lan up"))?;
        ip(&format!("-n {node} link set up0 master lan up"))?;
        ip(&format!("-n {node} link set lan up"))?;
        ip(&format!("-n {node} tuntap add dev {TAP} mode tap vnet_hdr"))?;
        ip(&format!("-n {node} link set {TAP} master lan up"))?;
    }
    Ok(())
}

/// What a client has seen.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When each answer came.
    pub at: Vec<Instant>,
}

impl Seen {
    /// The longest time without an answer between two moments.
    #[must_use]
    pub fn longest_gap(&self, from: Instant, to: Instant) -> Duration {
        let before = self.at.iter().rev().find(|at| **at <= from).copied();
        let within = self.at.iter().filter(|at| **at > from && **at <= to).copied();
        let moments: Vec<Instant> = before.into_iter().chain(within).collect();
        moments.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(to - from)
    }
}

/// A client with one TCP connection to the guest: it asks, waits for the answer, and asks again.
#[derive(Debug)]
pub struct Client {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Seen>>,
}

impl Client {
    /// Connects from the network's own namespace, which is no node's.
    ///
    /// # Errors
    /// When the guest does not answer within a minute.
    pub fn connect(networks: &Networks) -> Result<Self> {
        let stream = networks.within(0, || {
            let begun = Instant::now();
            loop {
                match TcpStream::connect_timeout(
                    &SocketAddr::from((GUEST, SERVICE_PORT)),
                    Duration::from_secs(1),
                ) {
                    Ok(stream) => return Ok(stream),
                    Err(error) if begun.elapsed() > LOST => {
                        return Err(error).context("the guest does not answer");
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(50)),
                }
            }
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LOST))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || ask(stream, &stopped));
        Ok(Self { stop, thread })
    }

    /// Ends the connection; what it has seen.
    ///
    /// # Errors
    /// The connection broke, or an answer was missing, doubled or wrong.
    pub fn end(self) -> Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(seen) => seen,
            Err(_) => bail!("the thread of the client failed"),
        }
    }
}

fn ask(mut stream: TcpStream, stop: &AtomicBool) -> Result<Seen> {
    let (mut at, mut said) = (Vec::new(), [0; 16]);
    for count in 1_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let word = count.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        stream.write_all(&word).with_context(|| format!("question {count}"))?;
        stream.read_exact(&mut said).with_context(|| format!("answer {count}"))?;
        ensure!(said[..8] == word && said[8..] == count.to_le_bytes(), "answer {count} is {said:?}");
        at.push(Instant::now());
    }
    Ok(Seen { at })
}
