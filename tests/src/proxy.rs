//! A TCP proxy that fails on purpose: cuts, stalls, delays or slows a connection at a chosen byte.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

/// Direction of bytes through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the side that connects to the side that listens.
    Forth,
    /// From the side that listens to the side that connects.
    Back,
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// The connection is reset.
    Cut,
    /// The connection stays open, but passes no more bytes.
    Stall,
    /// Each piece is delayed by this time.
    Delay(Duration),
    /// Maximum number of bytes per second.
    Limit(u64),
}

/// A fault and the byte at which it happens.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Number of the connection, counted from 0 in the order of acceptance; `None`: every connection.
    pub connection: Option<u64>,
    /// The direction.
    pub direction: Direction,
    /// Number of bytes that pass before the fault, on each connection.
    pub after: u64,
    /// The fault.
    pub fault: Fault,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    stop: AtomicBool,
    refuse: AtomicBool,
    /// Protocol version that greetings and answers are made to name; 0: their own.
    version: AtomicU16,
    connections: AtomicU64,
    forth: AtomicU64,
    back: AtomicU64,
    rules: Mutex<Vec<Rule>>,
    /// Both ends of each connection, by its number.
    open: Mutex<Vec<(u64, TcpStream)>>,
}

/// Forwards connections to a target. Dropping the proxy cuts all connections.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and forwards to `target`.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            stop: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            version: AtomicU16::new(0),
            connections: AtomicU64::new(0),
            forth: AtomicU64::new(0),
            back: AtomicU64::new(0),
            rules: Mutex::default(),
            open: Mutex::default(),
        });
        let for_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("proxy".into()).spawn(move || accept(&listener, &for_thread))?;
        Ok(Self { shared, address })
    }

    /// Its listen address.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds a rule. It also applies to open connections: at once, if its byte has passed already.
    pub fn add(&self, rule: Rule) {
        lock(&self.shared.rules).push(rule);
    }

    /// As [`Proxy::add`], in place of all other rules.
    pub fn replace(&self, rules: Vec<Rule>) {
        *lock(&self.shared.rules) = rules;
    }

    /// Removes all rules. Stalled connections continue.
    pub fn heal(&self) {
        lock(&self.shared.rules).clear();
        self.shared.refuse.store(false, Ordering::SeqCst);
    }

    /// Resets all open connections; new ones are forwarded.
    pub fn cut_all(&self) {
        for (_, stream) in lock(&self.shared.open).drain(..) {
            reset(&stream);
        }
    }

    /// Closes new connections at once, until [`Proxy::heal`]. Together with [`Proxy::cut_all`], this simulates a lost peer.
    pub fn refuse(&self) {
        self.shared.refuse.store(true, Ordering::SeqCst);
    }

    /// From now on, new connections name this protocol version in greeting and answer, or their own again: each side takes the other
    /// for a daemon of that version. See "Greeting" in docs/protocol.md.
    pub fn name_version(&self, version: Option<u16>) {
        self.shared.version.store(version.unwrap_or(0), Ordering::SeqCst);
    }

    /// Connections accepted so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Number of bytes forwarded so far.
    #[must_use]
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.shared.counter(direction).load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.cut_all();
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    const fn counter(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::Forth => &self.forth,
            Direction::Back => &self.back,
        }
    }

    /// The fault at byte `at` of a connection, and the byte at which the next rule takes effect.
    fn fault(&self, connection: u64, direction: Direction, at: u64) -> (Option<Fault>, Option<u64>) {
        let rules = lock(&self.rules);
        let mine = || {
            rules.iter().filter(|rule| {
                rule.direction == direction && rule.connection.is_none_or(|number| number == connection)
            })
        };
        let now = mine().filter(|rule| rule.after <= at).max_by_key(|rule| rule.after).map(|rule| rule.fault);
        let next = mine().map(|rule| rule.after).filter(|after| *after > at).min();
        (now, next)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes with a reset instead of an orderly end: the peer of a machine that lost power sees the same after its timeout.
fn reset(stream: &TcpStream) {
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::Linger, &linger);
    let _ = stream.shutdown(Shutdown::Both);
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        let number = shared.connections.fetch_add(1, Ordering::SeqCst);
        if shared.refuse.load(Ordering::SeqCst) {
            reset(&client);
            continue;
        }
        if let Err(e) = forward(client, number, shared) {
            eprintln!("proxy: {e:#}");
        }
    }
}

fn forward(client: TcpStream, number: u64, shared: &Arc<Shared>) -> Result<()> {
    let server = TcpStream::connect(shared.target)?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        // A stalled or slowed thread reads its rules again.
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        lock(&shared.open).push((number, stream.try_clone()?));
    }
    let ways =
        [(Direction::Forth, client.try_clone()?, server.try_clone()?), (Direction::Back, server, client)];
    let ways_left = Arc::new(AtomicU64::new(2));
    for (direction, from, to) in ways {
        let (shared, ways_left) = (Arc::clone(shared), Arc::clone(&ways_left));
        std::thread::Builder::new().name(format!("proxy-{number}")).spawn(move || {
            copy(from, to, number, direction, &shared);
            if ways_left.fetch_sub(1, Ordering::SeqCst) == 1 {
                lock(&shared.open).retain(|(of, _)| *of != number);
            }
        })?;
    }
    Ok(())
}

/// Where a greeting and its answer name the protocol version.
const VERSION_AT: u64 = 8;

/// Changes the version in bytes that begin at `at` of a connection, as far as they contain it.
fn put_version(bytes: &mut [u8], at: u64, version: u16) {
    for (place, byte) in (VERSION_AT..).zip(version.to_le_bytes()) {
        let offset = place.checked_sub(at).and_then(|offset| usize::try_from(offset).ok());
        if let Some(found) = offset.and_then(|offset| bytes.get_mut(offset)) {
            *found = byte;
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, number: u64, direction: Direction, shared: &Shared) {
    let mut buffer = vec![0; 256 << 10];
    let mut passed = 0;
    let version = Some(shared.version.load(Ordering::SeqCst)).filter(|version| *version != 0);
    loop {
        let (fault, next) = shared.fault(number, direction, passed);
        let mut room = next.map_or(buffer.len(), |next| usize::try_from(next - passed).unwrap_or(usize::MAX));
        match fault {
            Some(Fault::Cut) => {
                reset(&from);
                reset(&to);
                return;
            }
            Some(Fault::Stall) => {
                std::thread::sleep(Duration::from_millis(5));
                if shared.stop.load(Ordering::SeqCst) || !is_open(&to) {
                    return;
                }
                continue;
            }
            // The bytes of 10 ms at a time.
            Some(Fault::Limit(rate)) => {
                room = room.min(usize::try_from(rate / 100).unwrap_or(usize::MAX).max(1));
            }
            _ => {}
        }
        let began = Instant::now();
        let wanted = room.min(buffer.len());
        let read = match from.read(&mut buffer[..wanted]) {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(read) => read,
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                continue;
            }
            Err(_) => {
                reset(&to);
                return;
            }
        };
        if let Some(Fault::Delay(delay)) = fault {
            std::thread::sleep(delay);
        }
        // A rule that was made while these bytes were waited for applies to them.
        while shared.fault(number, direction, passed).0 == Some(Fault::Stall) {
            std::thread::sleep(Duration::from_millis(5));
            if shared.stop.load(Ordering::SeqCst) || !is_open(&to) {
                return;
            }
        }
        if let Some(version) = version {
            put_version(&mut buffer[..read], passed, version);
        }
        passed += read as u64;
        // Counted before they are forwarded, so that a byte that was received is always counted.
        shared.counter(direction).fetch_add(read as u64, Ordering::SeqCst);
        if to.write_all(&buffer[..read]).is_err() {
            reset(&from);
            return;
        }
        if let Some(Fault::Limit(rate)) = fault {
            let due = Duration::from_nanos(read as u64 * 1_000_000_000 / rate.max(1));
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
    }
}

fn is_open(stream: &TcpStream) -> bool {
    !matches!(stream.take_error(), Ok(Some(_)) | Err(_)) && stream.peer_addr().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets, and a connection to it through a proxy.
    fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let proxy = Proxy::start(listener.local_addr().expect("an address")).expect("a proxy");
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                std::thread::spawn(move || {
                    let mut back = stream.try_clone().expect("clones");
                    let _ = std::io::copy(&mut stream, &mut back);
                });
            }
        });
        let stream = TcpStream::connect(proxy.address()).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("sets a time-out");
        (proxy, stream)
    }

    fn there_and_back(stream: &mut TcpStream, bytes: usize) -> std::io::Result<()> {
        stream.write_all(&vec![7; bytes])?;
        stream.read_exact(&mut vec![0; bytes])
    }

    #[test]
    fn without_rules_bytes_pass() {
        let (proxy, mut stream) = echo();
        there_and_back(&mut stream, 1 << 20).expect("an echo");
        assert_eq!((proxy.bytes(Direction::Forth), proxy.bytes(Direction::Back)), (1 << 20, 1 << 20));
        assert_eq!(proxy.connections(), 1);
    }

    #[test]
    fn a_cut_lets_exactly_the_chosen_bytes_pass() {
        let (proxy, mut stream) = echo();
        // Set before the connection is opened: an open connection may already wait under the earlier rules.
        proxy.add(Rule { connection: Some(1), direction: Direction::Forth, after: 1000, fault: Fault::Cut });
        let mut second = TcpStream::connect(proxy.address()).expect("connects");
        second.write_all(&[7; 5000]).expect("the kernel takes them");
        let mut back = Vec::new();
        let _ = second.read_to_end(&mut back);
        assert_eq!(proxy.bytes(Direction::Forth), 1000);
        // The rule does not apply to the first connection.
        there_and_back(&mut stream, 5000).expect("an echo");
    }

    #[test]
    fn a_stalled_connection_goes_on_when_healed() {
        let (proxy, mut stream) = echo();
        proxy.add(Rule { connection: None, direction: Direction::Back, after: 10, fault: Fault::Stall });
        there_and_back(&mut stream, 10).expect("an echo");
        stream.set_read_timeout(Some(Duration::from_millis(100))).expect("sets a time-out");
        there_and_back(&mut stream, 10).expect_err("nothing comes back");
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("sets a time-out");
        proxy.heal();
        stream.read_exact(&mut [0; 10]).expect("the echo that was held back");
    }

    #[test]
    fn a_limit_slows_down() {
        let (proxy, mut stream) = echo();
        proxy.add(Rule {
            connection: None,
            direction: Direction::Forth,
            after: 0,
            fault: Fault::Limit(1 << 20),
        });
        let began = Instant::now();
        there_and_back(&mut stream, 300 << 10).expect("an echo");
        let took = began.elapsed();
        assert!(took > Duration::from_millis(200) && took < Duration::from_secs(4), "{took:?}");
    }

    #[test]
    fn a_version_is_named_wherever_the_pieces_end() {
        let (proxy, mut stream) = echo();
        there_and_back(&mut stream, 20).expect("an echo");
        proxy.name_version(Some(0x0201));
        let mut stream = TcpStream::connect(proxy.address()).expect("connects");
        let mut back = [0; 12];
        for (sent, received) in [(9, 9), (3, 12)] {
            stream.write_all(&vec![7; sent]).expect("it takes them");
            stream.read_exact(&mut back[received - sent..received]).expect("an echo");
        }
        assert_eq!(back, [7, 7, 7, 7, 7, 7, 7, 7, 1, 2, 7, 7]);
    }

    #[test]
    fn a_refusing_proxy_closes_at_once() {
        let (proxy, mut stream) = echo();
        there_and_back(&mut stream, 10).expect("an echo");
        proxy.refuse();
        proxy.cut_all();
        there_and_back(&mut stream, 10).expect_err("it was cut");
        let mut second = TcpStream::connect(proxy.address()).expect("connects");
        there_and_back(&mut second, 10).expect_err("it is refused");
        proxy.heal();
        there_and_back(&mut TcpStream::connect(proxy.address()).expect("connects"), 10).expect("an echo");
    }
}
