//! Datagrams by RDMA from one host to many.
//!
//! ```text
//! verbs_multicast group ADDRESS                       draws a session for a group (an IPv4 multicast address) and prints both
//! verbs_multicast receive GROUP COUNT                 takes COUNT datagrams, or what comes until nothing has come for 3 s
//! verbs_multicast send GROUP COUNT MICROSECONDS       sends them, one in so many microseconds
//! ```
//!
//! A datagram carries a full MTU, each byte of which depends on its place and the datagram's number. The receiver compares
//! all of its memory afterwards, also what must not have been touched, and says how many datagrams are right, and what it
//! took. Exit status 1: something is wrong.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vmove_fabric::verbs::{VerbsFabric, VerbsMulticast, VerbsMulticastOptions, VerbsOptions};
use vmove_fabric::{
    Access, Fabric, Group, GroupAddress, LocalSlice, MemoryArea, Multicast, Outgoing, Region, Session, Sink,
};

/// How long a receiver waits for the first datagram, and for one more.
const FIRST_DATAGRAM_TIMEOUT: Duration = Duration::from_secs(20);
const NEXT_DATAGRAM_TIMEOUT: Duration = Duration::from_secs(3);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["group", address] => draw(address.parse()?),
        ["receive", group, count] => receive(&decode(group)?, count.parse()?),
        ["send", group, count, pace] => send(&decode(group)?, count.parse()?, pace.parse()?),
        _ => Err("expected: group ADDRESS | receive GROUP COUNT | send GROUP COUNT MICROSECONDS".into()),
    }
}

fn draw(address: Ipv4Addr) -> Outcome<()> {
    let group = Group { address: GroupAddress::Rdma(address), session: Session::draw()? };
    let bytes = postcard::to_stdvec(&group)?;
    println!("{}", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    Ok(())
}

fn decode(text: &str) -> Outcome<Group> {
    let digits = (0..text.len()).step_by(2).map(|at| text.get(at..at + 2).unwrap_or(""));
    let bytes: Vec<u8> = digits.map(|two| u8::from_str_radix(two, 16)).collect::<Result<_, _>>()?;
    Ok(postcard::from_bytes(&bytes)?)
}

/// Registered memory that lives as long as the process.
fn memory(fabric: &VerbsFabric, bytes: Vec<u8>) -> Outcome<Region> {
    let bytes = Box::leak(bytes.into_boxed_slice());
    let len = bytes.len() as u64;
    let start = NonNull::new(bytes.as_mut_ptr()).ok_or("no memory")?;
    // SAFETY: leaked, and never used by reference again.
    let area = unsafe { MemoryArea::new(start, len) };
    Ok(fabric.register(area, Access::LOCAL)?)
}

fn pattern(number: u32, len: usize) -> impl Iterator<Item = u8> {
    (0..len).map(move |at| (at.wrapping_mul(31) ^ (at >> 8) ^ number as usize).to_le_bytes()[0] | 1)
}

fn open(fabric: &VerbsFabric) -> VerbsMulticast {
    VerbsMulticast::new(fabric, VerbsMulticastOptions::default())
}

fn send(group: &Group, count: u32, pace: u64) -> Outcome<()> {
    let fabric = VerbsFabric::new(VerbsOptions::default())?;
    let multicast = open(&fabric);
    let len = multicast.max_payload();
    let region = memory(&fabric, (0..count).flat_map(|number| pattern(number, len)).collect())?;
    // Dropped before the region: until then the device may still read from it.
    let mut sender = multicast.sender(group)?;
    let (begin, mut retries) = (Instant::now(), 0);
    for number in 0..count {
        let payload = region.local(u64::from(number) * len as u64, u32::try_from(len)?).ok_or("outside")?;
        while sender.send(&[Outgoing { immediate: number, payload }])? == 0 {
            sender.wait(Duration::from_millis(100))?;
            retries += 1;
        }
        let due = Duration::from_micros(pace) * (number + 1);
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
    }
    let totals = sender.counters().read();
    let rate = totals.bytes_sent as f64 / begin.elapsed().as_secs_f64() / 1e6;
    println!(
        "sent {} datagrams of {len} bytes at {rate:.2} MB/s, waited {retries} times for room",
        totals.sent
    );
    Ok(())
}

/// Puts datagram n at n times the length, but for the second and every hundredth from there, which it does not want.
struct Places<'a> {
    region: &'a Region,
    len: usize,
    landed: HashSet<u32>,
}

fn is_wanted(number: u32) -> bool {
    number % 100 != 1
}

impl Sink for Places<'_> {
    fn place(&mut self, immediate: u32, len: usize) -> Option<LocalSlice> {
        let at = u64::from(immediate) * self.len as u64;
        (len == self.len && is_wanted(immediate)).then(|| self.region.local(at, u32::try_from(len).ok()?))?
    }

    fn landed(&mut self, immediate: u32) {
        self.landed.insert(immediate);
    }
}

fn receive(group: &Group, count: u32) -> Outcome<()> {
    let fabric = VerbsFabric::new(VerbsOptions::default())?;
    let multicast = open(&fabric);
    let mut receiver = multicast.join(group)?;
    let len = multicast.max_payload();
    let region = memory(&fabric, vec![0; len * count as usize])?;
    println!("joined, {} bytes of ring", receiver.ring_bytes());
    let mut places = Places { region: &region, len, landed: HashSet::new() };
    let mut last = Instant::now();
    while receiver.counters().read().received < u64::from(count) {
        if receiver.poll(&mut places)? > 0 {
            last = Instant::now();
            continue;
        }
        let timeout = if receiver.counters().read().received == 0 {
            FIRST_DATAGRAM_TIMEOUT
        } else {
            NEXT_DATAGRAM_TIMEOUT
        };
        if last.elapsed() > timeout {
            break;
        }
        wait(receiver.wait_fd())?;
    }
    let missing: Vec<u32> =
        (0..count).filter(|number| is_wanted(*number) && !places.landed.contains(number)).collect();
    if let (Some(first), Some(last)) = (missing.first(), missing.last()) {
        println!("missing: {} between {first} and {last}", missing.len());
    }
    let wrong = (0..count).filter(|number| !is_right(&places, *number)).count();
    let totals = receiver.counters().read();
    let lost = u64::from(count) - totals.received;
    let (landed, unwanted, refused) = (places.landed.len(), totals.unwanted, totals.refused);
    println!(
        "received {} lost {lost} landed {landed} unwanted {unwanted} refused {refused} wrong {wrong}",
        totals.received
    );
    if wrong == 0 && landed as u64 + unwanted == totals.received {
        Ok(())
    } else {
        Err("other bytes than were sent".into())
    }
}

/// Whether the memory of datagram `number` holds it, or nothing if it did not land.
fn is_right(places: &Places<'_>, number: u32) -> bool {
    let mut bytes = vec![0; places.len];
    let landed = places.landed.contains(&number);
    places.region.read_at(u64::from(number) * places.len as u64, &mut bytes)
        && if landed { pattern(number, places.len).eq(bytes) } else { bytes.iter().all(|byte| *byte == 0) }
}

fn wait(fd: std::os::fd::BorrowedFd<'_>) -> Outcome<()> {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    let most = rustix::event::Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    rustix::event::poll(&mut fds, Some(&most))?;
    Ok(())
}
