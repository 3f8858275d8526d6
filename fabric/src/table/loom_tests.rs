//! The table in every order of a few threads, by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p vmove-fabric --release --lib loom`.
//!
//! This runs the code of this folder with loom's atomics and locks, one slot and two seats. Registered memory is a cell of
//! loom's, which fails the test when it is accessed and freed (or registered anew) without one happening before the other.
//!
//! What this shows and what it does not:
//! - Loom looks at every order of the threads' steps (with three threads: at those with at most three involuntary switches), and
//!   at every value that a load may give. So relaxed and acquire/release accesses are weak here even where this machine's are not.
//! - `SeqCst` *accesses* are not modelled (loom takes them as `AcqRel`), so the table has none. `SeqCst` *fences* are, and a
//!   little too strongly: loom lets the later of two fences happen after the earlier one, C++ and Rust only order them. So a
//!   race that is none only because two fences synchronize would not be found. The proof in `super` does not use that: what
//!   ends a section is known by its release and the wait's acquire.
//! - Loads that see stores which come later in program order of another thread's loads (load buffering) are not modelled.
//! - Mappings, other processes and system calls are not modelled. A process is a thread with a table of its own, and a message
//!   to it a release store that it acquires. `Arc` is the standard one, in which loom sees no steps.
//! - The peer here always ends its section. What happens with one that is stopped is a matter of time limits (`local::peer`).
//!
//! Rule (for the `unsafe` in this file): an area describes no memory, and nobody touches it.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::regions::Entry;
use super::{Need, Participant, PeerTable, PeerUser, RegionTable};
use crate::error::RemoteStatus;
use crate::region::{Access, MemoryArea, RemoteRegion};

const LEN: u32 = 4096;
const BOTH: Access = Access { remote_read: true, remote_write: true };

/// Pieces of memory. Each has an address, which only names it.
struct Memory([UnsafeCell<()>; 2]);

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self([UnsafeCell::new(()), UnsafeCell::new(())]))
    }

    fn address(index: usize) -> usize {
        (index + 1) << 20
    }

    fn area(index: usize) -> MemoryArea {
        let at = NonNull::new(std::ptr::without_provenance_mut(Self::address(index))).expect("not 0");
        // SAFETY: the rule: the table only passes the address on, and these tests take it as a name.
        unsafe { MemoryArea::new(at, LEN.into()) }
    }

    /// What a transfer does to the memory at this address.
    fn transfer(&self, address: usize) {
        let index = (0..self.0.len()).find(|&index| Self::address(index) == address);
        self.0[index.expect("an address of this memory")].with(|_| ());
    }

    /// What its owner does when it is no longer registered: it may be used otherwise, or unmapped.
    fn free(&self, index: usize) {
        self.0[index].with_mut(|_| ());
    }
}

fn register(table: &Arc<RegionTable>, index: usize) -> (Entry, RemoteRegion) {
    table.insert(Memory::area(index), BOTH).expect("a free slot")
}

/// A transfer that names memory of this process; where that is.
fn transfer(
    participant: &mut Participant,
    memory: &Memory,
    key: u64,
    need: Need,
) -> Result<usize, RemoteStatus> {
    let section = participant.enter();
    let granted = section.grant(key, 0, LEN, need)?;
    memory.transfer(granted.addr);
    Ok(granted.addr)
}

/// The other process of a connection.
struct Peer {
    its: PeerTable,
    seat: usize,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("seat", &self.seat).finish_non_exhaustive()
    }
}

impl PeerUser for Peer {
    fn wait_quiet(&self) {
        self.its.wait_quiet(self.seat, || false);
    }
}

/// One transfer of a process that looks into another's table, as `local` does it.
fn transfer_from(
    owner: &PeerTable,
    (seat, token): (usize, u64),
    key: u64,
    us: &mut Participant,
    memory: &Memory,
) {
    let _section = us.enter();
    if owner.token(seat) != token {
        return; // closed
    }
    if let Ok(at) = owner.resolve(key, 0, LEN, Need::Read) {
        memory.transfer(usize::try_from(at).expect("64 bits"));
    }
}

/// Every order, however many switches it takes: with two threads of a few steps that is a matter of a second.
fn in_every_order(model: impl Fn() + Send + Sync + 'static) {
    let mut every = loom::model::Builder::new();
    every.preemption_bound = None;
    every.check(model);
}

/// Every order with at most three involuntary switches: all orders of three threads would take minutes.
fn in_most_orders(model: impl Fn() + Send + Sync + 'static) {
    let mut most = loom::model::Builder::new();
    most.preemption_bound = Some(3);
    most.check(model);
}

/// Two transfers, one after the other, while the memory is deregistered and freed.
#[test]
fn loom_no_transfer_after_deregistration() {
    in_every_order(|| {
        let table = RegionTable::private().expect("a table");
        let memory = Memory::new();
        let (entry, remote) = register(&table, 0);
        let mut user = table.join().expect("a seat");
        let seen = Arc::clone(&memory);
        let user = thread::spawn(move || {
            let first = transfer(&mut user, &seen, remote.rkey, Need::Read);
            let second = transfer(&mut user, &seen, remote.rkey, Need::Write);
            assert!(first.is_ok() || second.is_err(), "a key that is gone does not come back");
        });
        drop(entry);
        memory.free(0);
        let mut late = table.join().expect("a seat");
        assert_eq!(transfer(&mut late, &memory, remote.rkey, Need::Read), Err(RemoteStatus::BadKey));
        user.join().expect("the user");
    });
}

/// The slot of a region is used again while somebody still has the old key, and hears of the new one as soon as can be.
#[test]
fn loom_a_key_names_its_own_memory_only() {
    in_every_order(|| {
        let table = RegionTable::private().expect("a table");
        let memory = Memory::new();
        let (entry, old) = register(&table, 0);
        let mut user = table.join().expect("a seat");
        let told = Arc::new(AtomicU64::new(0));
        let (seen, hears) = (Arc::clone(&memory), Arc::clone(&told));
        let user = thread::spawn(move || {
            let found = transfer(&mut user, &seen, old.rkey, Need::Read);
            assert!(
                matches!(found, Err(RemoteStatus::BadKey)) || found == Ok(Memory::address(0)),
                "{found:?}"
            );
            // Relaxed, as a guess would be: the table itself must not show a key before what belongs to it.
            let new = hears.load(Ordering::Relaxed);
            let found = transfer(&mut user, &seen, new, Need::Read);
            assert!(
                matches!(found, Err(RemoteStatus::BadKey)) || found == Ok(Memory::address(1)),
                "{found:?}"
            );
        });
        drop(entry);
        memory.free(0);
        let (again, new) = register(&table, 1);
        told.store(new.rkey, Ordering::Relaxed);
        user.join().expect("the user");
        drop(again);
        memory.free(1);
    });
}

/// Somebody looks for a free slot while another thread deregisters and a third one still reads what its slot says.
#[test]
fn loom_a_slot_is_not_reused_while_it_is_read() {
    in_most_orders(|| {
        let table = RegionTable::private().expect("a table");
        let memory = Memory::new();
        let (entry, old) = register(&table, 0);
        let mut user = table.join().expect("a seat");
        let seen = Arc::clone(&memory);
        let user = thread::spawn(move || {
            let found = transfer(&mut user, &seen, old.rkey, Need::Read);
            assert!(
                matches!(found, Err(RemoteStatus::BadKey)) || found == Ok(Memory::address(0)),
                "{found:?}"
            );
        });
        let same = Arc::clone(&table);
        let other = thread::spawn(move || same.insert(Memory::area(1), BOTH).ok());
        drop(entry);
        memory.free(0);
        user.join().expect("the user");
        drop(other.join().expect("the other"));
    });
}

/// A connection is closed, its seat given to another, while memory is deregistered.
#[test]
fn loom_a_seat_changes_hands() {
    in_most_orders(|| {
        let table = RegionTable::private().expect("a table");
        let memory = Memory::new();
        let (entry, remote) = register(&table, 0);
        let users: Vec<_> = (0..2)
            .map(|_| (Arc::clone(&table), Arc::clone(&memory)))
            .map(|(table, memory)| {
                thread::spawn(move || {
                    let mut user = table.join().expect("a seat");
                    let _ = transfer(&mut user, &memory, remote.rkey, Need::Read);
                })
            })
            .collect();
        drop(entry);
        memory.free(0);
        for user in users {
            user.join().expect("a user");
        }
    });
}

/// Another process transfers twice, under its own table's numbers, while the owner deregisters and frees.
#[test]
fn loom_a_peer_is_waited_for() {
    in_every_order(|| {
        let (ours, theirs) =
            (RegionTable::private().expect("a table"), RegionTable::private().expect("a table"));
        let memory = Memory::new();
        let (entry, remote) = register(&ours, 0);
        let connection = ours.join().expect("a seat");
        let (token, _) = connection.open().expect("a number");
        let mut them = theirs.join().expect("a seat");
        let watch = ours.expect_peer();
        watch.meet(Arc::new(Peer { its: theirs.seen_by_a_peer(), seat: them.seat() }));
        let (table, seen, seat) = (ours.seen_by_a_peer(), Arc::clone(&memory), connection.seat());
        let peer = thread::spawn(move || {
            for _ in 0..2 {
                transfer_from(&table, (seat, token), remote.rkey, &mut them, &seen);
            }
        });
        drop(entry);
        memory.free(0);
        peer.join().expect("the peer");
    });
}

/// A connection ends, and its peer is no longer watched; then the memory goes away, though the peer has not heard of it.
#[test]
fn loom_no_transfer_through_a_closed_connection() {
    in_every_order(|| {
        let (ours, theirs) =
            (RegionTable::private().expect("a table"), RegionTable::private().expect("a table"));
        let memory = Memory::new();
        let (entry, remote) = register(&ours, 0);
        let connection = ours.join().expect("a seat");
        let (token, _) = connection.open().expect("a number");
        let mut them = theirs.join().expect("a seat");
        let peer = Peer { its: theirs.seen_by_a_peer(), seat: them.seat() };
        let (table, seen, seat) = (ours.seen_by_a_peer(), Arc::clone(&memory), connection.seat());
        let peers = thread::spawn(move || {
            for _ in 0..2 {
                transfer_from(&table, (seat, token), remote.rkey, &mut them, &seen);
            }
        });
        // As the drop of a local endpoint.
        connection.close();
        peer.wait_quiet();
        drop(connection);
        drop(entry);
        memory.free(0);
        peers.join().expect("the peer");
    });
}

/// A peer uses memory as soon as it has our hello, before we have its own and know who it is; meanwhile the memory is
/// deregistered.
#[test]
fn loom_a_peer_is_waited_for_before_it_is_known() {
    in_most_orders(|| {
        let (ours, theirs) =
            (RegionTable::private().expect("a table"), RegionTable::private().expect("a table"));
        let memory = Memory::new();
        let (entry, remote) = register(&ours, 0);
        let mut them = theirs.join().expect("a seat");
        let peer = Peer { its: theirs.seen_by_a_peer(), seat: them.seat() };
        let hello = Arc::new(AtomicU64::new(0));
        let (table, seen, hears) = (ours.seen_by_a_peer(), Arc::clone(&memory), Arc::clone(&hello));
        let peers = thread::spawn(move || {
            // Seat 0 is the first that is given out.
            let token = hears.load(Ordering::Acquire);
            if token != 0 {
                transfer_from(&table, (0, token), remote.rkey, &mut them, &seen);
            }
        });
        let table = Arc::clone(&ours);
        let opens = thread::spawn(move || {
            let connection = table.join().expect("a seat");
            let (token, _) = connection.open().expect("a number");
            let watch = table.expect_peer();
            hello.store(token, Ordering::Release);
            // Its answer.
            watch.meet(Arc::new(peer));
            (connection, watch)
        });
        drop(entry);
        memory.free(0);
        peers.join().expect("the peer");
        drop(opens.join().expect("the opening"));
    });
}
