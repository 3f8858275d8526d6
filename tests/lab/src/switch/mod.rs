//! An Ethernet switch in user space, for QEMU's `-netdev stream` over Unix sockets.
//!
//! On the socket a frame is its length (4 bytes, big endian) and its bytes. Each host has a socket of its own, so its
//! port is known from the start; what is not for one host goes to all. Without rules nothing is lost: a receiver that
//! does not keep up holds its senders back.

mod outbox;
pub mod rules;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use outbox::Outbox;
use rules::{Dice, HOLD, Rule};

/// Longest frame: a large packet of the virtual network card, before segmentation.
const MAX_FRAME: usize = 128 << 10;
/// Length of the two addresses and the type.
const HEADER: usize = 14;

/// A switch. Its threads end with the process.
#[derive(Debug)]
pub struct Switch {
    ports: Vec<Arc<Outbox>>,
    ways: Vec<Vec<Way>>,
    /// Which port a station was last heard at.
    stations: Mutex<HashMap<[u8; 6], usize>>,
}

/// One direction between two ports.
#[derive(Debug, Default)]
struct Way {
    rule: Mutex<Rule>,
    /// When the last frame that the rate lets pass is through.
    busy_until: Mutex<Option<Instant>>,
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    reordered: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Switch {
    /// A switch whose port `n` (from 0) is the socket at `paths[n]`.
    ///
    /// # Errors
    /// A path cannot be bound.
    pub fn start(paths: &[PathBuf]) -> Result<Arc<Self>> {
        let count = paths.len();
        let switch = Arc::new(Self {
            ports: (0..count).map(|_| Arc::new(Outbox::default())).collect(),
            ways: (0..count).map(|_| (0..count).map(|_| Way::default()).collect()).collect(),
            stations: Mutex::default(),
        });
        for (port, path) in paths.iter().enumerate() {
            let listener =
                UnixListener::bind(path).with_context(|| format!("could not bind {}", path.display()))?;
            let switch = Arc::clone(&switch);
            std::thread::Builder::new().name(format!("port {port}")).spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    if let Err(error) = switch.serve(port, &stream) {
                        eprintln!("switch: port {port}: {error:#}");
                    }
                }
            })?;
        }
        Ok(switch)
    }

    /// Changes what happens to frames from one port to another; `None`: any port.
    pub fn set(&self, from: Option<usize>, to: Option<usize>, rule: Rule) {
        for (source, ways) in self.ways.iter().enumerate() {
            for (target, way) in ways.iter().enumerate() {
                if from.is_none_or(|from| from == source) && to.is_none_or(|to| to == target) {
                    *lock(&way.rule) = rule;
                    *lock(&way.busy_until) = None;
                }
            }
        }
    }

    /// Totals of each direction that carried something, as a table.
    #[must_use]
    pub fn stats(&self) -> String {
        let mut text = String::from("from to     frames        bytes  dropped  reordered  rule\n");
        for (source, ways) in self.ways.iter().enumerate() {
            for (target, way) in ways.iter().enumerate() {
                let [frames, bytes, dropped, reordered] =
                    [&way.frames, &way.bytes, &way.dropped, &way.reordered]
                        .map(|total| total.load(Ordering::Relaxed));
                if frames + dropped > 0 {
                    let (from, to, rule) = (source + 1, target + 1, *lock(&way.rule));
                    let _ = writeln!(
                        text,
                        "h{from}   h{to} {frames:>10} {bytes:>12} {dropped:>8} {reordered:>10}  {rule}"
                    );
                }
            }
        }
        text
    }

    /// Takes frames from a host until it hangs up.
    fn serve(&self, port: usize, stream: &UnixStream) -> Result<()> {
        let outbox = Arc::clone(&self.ports[port]);
        let out = stream.try_clone()?;
        outbox.open();
        let writer = std::thread::Builder::new()
            .name(format!("to port {port}"))
            .spawn(move || outbox.write_to(out))?;
        let result = self.receive(port, stream);
        self.ports[port].close();
        let _ = writer.join();
        result
    }

    fn receive(&self, port: usize, stream: &UnixStream) -> Result<()> {
        let mut input = BufReader::with_capacity(256 << 10, stream);
        let mut dice = Dice::new(port as u64 + 1);
        loop {
            let mut length = [0; 4];
            if input.read_exact(&mut length).is_err() {
                return Ok(());
            }
            let length = usize::try_from(u32::from_be_bytes(length))?;
            anyhow::ensure!(
                (HEADER..=MAX_FRAME).contains(&length),
                "a frame of {length} bytes; expected {HEADER} to {MAX_FRAME}"
            );
            let mut frame = vec![0; length];
            input.read_exact(&mut frame).context("a frame that breaks off")?;
            self.forward(port, &frame.into(), &mut dice);
        }
    }

    fn forward(&self, port: usize, frame: &Arc<[u8]>, dice: &mut Dice) {
        let address = |at: usize| -> [u8; 6] { frame[at..at + 6].try_into().unwrap_or_default() };
        let (target, source) = (address(0), address(6));
        let known = {
            let mut stations = lock(&self.stations);
            stations.insert(source, port);
            // The lowest bit of the first byte marks addresses of groups.
            if target[0] & 1 == 0 { stations.get(&target).copied() } else { None }
        };
        for to in (0..self.ports.len()).filter(|&to| to != port && known.is_none_or(|known| known == to)) {
            if let Some(due) = self.ways[port][to].admit(frame, dice) {
                self.ports[to].push(due, Arc::clone(frame));
            }
        }
    }
}

impl Way {
    /// When a frame of this length is to leave; `None`: never.
    fn admit(&self, frame: &[u8], dice: &mut Dice) -> Option<Instant> {
        let rule = *lock(&self.rule);
        let length = frame.len();
        let to_group = frame.first().is_some_and(|first| first & 1 == 1);
        let lost = dice.roll(rule.drop) || (to_group && dice.roll(rule.drop_multicast));
        if rule.cut || (rule.cut_rdma && is_rdma(frame)) || lost {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.frames.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(length as u64, Ordering::Relaxed);
        let now = Instant::now();
        let mut due = now + Duration::from_micros(rule.delay_us);
        // One bit at one megabit per second takes one microsecond.
        let takes = (length as u64 * 8000).checked_div(rule.rate_mbit).map(Duration::from_nanos);
        if let Some(takes) = takes {
            let mut busy_until = lock(&self.busy_until);
            let begin = busy_until.map_or(now, |time| time.max(now));
            let end = begin + takes;
            *busy_until = Some(end);
            due += end - now;
        }
        if dice.roll(rule.reorder) {
            self.reordered.fetch_add(1, Ordering::Relaxed);
            due += HOLD;
        }
        Some(due)
    }
}

/// RoCE v2: IPv4, UDP, port 4791.
fn is_rdma(frame: &[u8]) -> bool {
    let header = frame.get(14).map_or(0, |first| usize::from(first & 15) * 4);
    frame.get(12..14) == Some(&[8, 0])
        && frame.get(23) == Some(&17)
        && frame.get(14 + header + 2..14 + header + 4) == Some(&4791_u16.to_be_bytes())
}

#[cfg(test)]
mod tests;
