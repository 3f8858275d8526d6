//! Places for connections of which nobody knows yet what they are for.
//!
//! Every connection gets a place at once, so that a peer that greets is heard however many strangers are silent. Who has to
//! give way is decided here: the oldest of an address that has too many, or, when all places are taken, the oldest of
//! the address that holds most, but one that is older than a second before any that is younger. Addresses of known peers come last. A
//! connection that has greeted leaves its place.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use tokio_util::sync::CancellationToken;

/// A peer greets within milliseconds. Younger connections do not count against their address: a node that begins many migrations at
/// once, or nodes behind one address, open many at a time.
const YOUNG: Duration = Duration::from_secs(1);
/// How long an address counts as that of a peer after the peer has shown a certificate or a session's secret.
const KNOWN_FOR: Duration = Duration::from_secs(3600);
/// Addresses of peers that are remembered.
const KNOWN: usize = 1024;
/// Between two lines of the log about connections that gave way.
const QUIET: Duration = Duration::from_secs(10);

/// How many connections may be there.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Of all addresses.
    pub all: usize,
    /// Of one address, beside those younger than a second.
    pub of_one_address: usize,
}

/// The places of one kind of connections.
#[derive(Debug)]
pub struct Places {
    /// For the log and the metric: what these connections have not done, or are.
    what: &'static str,
    limits: Limits,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    /// By number: the oldest first.
    by_age: BTreeMap<u64, Holder>,
    known: HashMap<Source, Instant>,
    last_said: Option<Instant>,
}

#[derive(Debug)]
struct Holder {
    source: Source,
    since: Instant,
    must_leave: CancellationToken,
}

/// Whose connections are counted together: an IPv4 address, or the network of 64 bits of an IPv6 address, all of which one host may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Source(IpAddr);

impl Source {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(v6) if !v6.is_loopback() => {
                Self(IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)))
            }
            other => Self(other),
        }
    }
}

/// The place of one connection, free again when dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
    must_leave: CancellationToken,
}

impl Place {
    /// Cancelled when the connection has to give way to another one.
    pub fn must_leave(&self) -> CancellationToken {
        self.must_leave.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().by_age.remove(&self.number);
    }
}

impl Places {
    pub fn new(what: &'static str, limits: Limits) -> Arc<Self> {
        Arc::new(Self { what, limits, taken: Mutex::default() })
    }

    /// A place for a connection from `address`. If there are too many connections, another one has to leave.
    pub fn take(self: &Arc<Self>, address: IpAddr) -> Place {
        self.take_at(address, Instant::now())
    }

    /// Somebody at `address` has shown a certificate or a session's secret.
    pub fn know(&self, address: IpAddr) {
        self.know_at(address, Instant::now());
    }

    fn take_at(self: &Arc<Self>, address: IpAddr, now: Instant) -> Place {
        let source = Source::of(address);
        let must_leave = CancellationToken::new();
        let mut taken = self.lock();
        if let Some(number) = taken.who_gives_way(source, self.limits, now)
            && let Some(holder) = taken.by_age.remove(&number)
        {
            holder.must_leave.cancel();
            self.say(&mut taken, holder.source, now);
        }
        let number = taken.next;
        taken.next += 1;
        taken.by_age.insert(number, Holder { source, since: now, must_leave: must_leave.clone() });
        drop(taken);
        Place { places: Arc::clone(self), number, must_leave }
    }

    fn know_at(&self, address: IpAddr, now: Instant) {
        let mut taken = self.lock();
        taken.known.insert(Source::of(address), now);
        if taken.known.len() > KNOWN {
            let oldest = taken.known.iter().min_by_key(|(_, heard)| **heard).map(|(source, _)| *source);
            oldest.and_then(|source| taken.known.remove(&source));
        }
    }

    fn say(&self, taken: &mut Taken, source: Source, now: Instant) {
        counter!("vmove_peer_connections_total", "result" => "crowded_out").increment(1);
        if taken.last_said.is_some_and(|last| now.duration_since(last) < QUIET) {
            return;
        }
        taken.last_said = Some(now);
        let held = taken.by_age.values().filter(|holder| holder.source == source).count() + 1;
        tracing::warn!(
            address = %source.0,
            held,
            "the peer port has too many connections {}; the oldest of this address was closed. Let a firewall say who reaches the port",
            self.what
        );
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// The number of the connection that has to leave before one more from `source` is taken.
    fn who_gives_way(&self, source: Source, limits: Limits, now: Instant) -> Option<u64> {
        let grown = |holder: &Holder| now.duration_since(holder.since) >= YOUNG;
        let mut own = self.by_age.iter().filter(|(_, holder)| holder.source == source && grown(holder));
        let oldest_own = own.next().map(|(number, _)| *number);
        // The first is taken out already.
        if own.count() + 1 >= limits.of_one_address && oldest_own.is_some() {
            return oldest_own;
        }
        if self.by_age.len() < limits.all {
            return None;
        }
        let mut held: HashMap<Source, usize> = HashMap::new();
        for holder in self.by_age.values() {
            *held.entry(holder.source).or_default() += 1;
        }
        let known =
            |source: &Source| self.known.get(source).is_some_and(|at| now.duration_since(*at) < KNOWN_FOR);
        // Strangers before peers, then who had time to greet, then who holds most. Of equals `min_by_key` takes the first: the oldest.
        let rank = |holder: &Holder| {
            (known(&holder.source), !grown(holder), std::cmp::Reverse(held.get(&holder.source).copied()))
        };
        self.by_age.iter().min_by_key(|(_, holder)| rank(holder)).map(|(number, _)| *number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { all: 8, of_one_address: 4 };

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn left(places: &[Place]) -> Vec<usize> {
        (0..places.len()).filter(|i| places[*i].must_leave().is_cancelled()).collect()
    }

    #[test]
    fn an_address_at_its_limit_loses_its_oldest() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        let other = places.take_at(address(9), start);
        let mut held: Vec<Place> = (0..4).map(|_| places.take_at(address(1), start)).collect();
        held.push(places.take_at(address(1), start + YOUNG));
        assert_eq!(left(&held), [0]);
        held.push(places.take_at(address(1), start + YOUNG));
        assert_eq!(left(&held), [0], "three are old: the limit is not reached");
        drop(held.remove(1));
        assert!(!other.must_leave().is_cancelled());
    }

    #[test]
    fn many_at_once_from_one_address_stay_while_there_are_places() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        let held: Vec<Place> = (0..8).map(|_| places.take_at(address(1), start)).collect();
        assert_eq!(left(&held), [0; 0]);
        let _one_more = places.take_at(address(1), start);
        assert_eq!(left(&held), [0]);
    }

    #[test]
    fn when_all_are_taken_the_address_with_most_gives_way() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        let few: Vec<Place> = (0..3).map(|_| places.take_at(address(1), start)).collect();
        let most: Vec<Place> = (0..5).map(|_| places.take_at(address(2), start)).collect();
        let newest = places.take_at(address(3), start);
        assert_eq!((left(&few).len(), left(&most)), (0, vec![0]));
        assert!(!newest.must_leave().is_cancelled());
    }

    #[test]
    fn who_had_time_to_greet_gives_way_before_who_had_none() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        let silent: Vec<Place> = (1..=4).map(|n| places.take_at(address(n), start)).collect();
        // A node that opens all its connections at once.
        let node: Vec<Place> = (0..8).map(|_| places.take_at(address(9), start + YOUNG)).collect();
        assert_eq!((left(&silent).len(), left(&node).len()), (4, 0));
    }

    #[test]
    fn connections_from_peers_give_way_last_and_only_for_an_hour() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        places.know_at(address(1), start);
        let peer: Vec<Place> = (0..3).map(|_| places.take_at(address(1), start)).collect();
        // Many addresses with one connection each.
        let mut strangers: Vec<Place> = (10..15).map(|n| places.take_at(address(n), start)).collect();
        strangers.extend((20..40).map(|n| places.take_at(address(n), start)));
        assert_eq!((left(&peer).len(), left(&strangers).len()), (0, 20));
        let later = places.take_at(address(50), start + KNOWN_FOR);
        assert_eq!(left(&peer), [0]);
        drop(later);
    }

    #[test]
    fn a_place_that_was_left_is_free() {
        let places = Places::new("", LIMITS);
        let start = Instant::now();
        let held: Vec<Place> = (0..8).map(|n| places.take_at(address(n), start)).collect();
        drop(held);
        let held: Vec<Place> = (0..8).map(|n| places.take_at(address(n), start)).collect();
        assert_eq!(left(&held), [0; 0]);
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_and_ipv4_in_ipv6_as_ipv4() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_eq!(of("::1"), Source(IpAddr::V6(Ipv6Addr::LOCALHOST)));
    }
}
