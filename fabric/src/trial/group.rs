//! Datagrams tried out: one side sends some to a group, at a pace, and the other says how many have come.
//!
//! The group is agreed on over the connection of the trial. What arrives stays in the receiver's ring until all was sent, so no
//! more is sent than fits.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Trial;
use crate::region::LocalSlice;
use crate::{
    CompletionKind, FabricError, Group, GroupAddress, Multicast, MulticastReceiver, MulticastSender,
    Outgoing, Session, Sink, WrId,
};

/// An address for use inside an organization (RFC 2365); the session keeps trials apart.
const GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 118, 109);
/// Maximum and minimum number of datagrams sent: a receiver's ring holds the maximum, and a percentage needs the minimum.
const MOST: u64 = 4000;
const LEAST: u64 = 200;
/// Part of the bandwidth of READs at which they are sent, so that the pace is not what loses them.
const PACE: f64 = 0.25;
/// Sleeping for less than this takes longer than was asked for.
const SHORTEST_SLEEP_INTERVAL: Duration = Duration::from_micros(200);
/// How long the last datagrams may take.
const LAST_DATAGRAMS_TIMEOUT: Duration = Duration::from_millis(300);

/// Asks the other side to join: this, then the group.
const JOIN: &[u8] = b"join";
/// Asks for the number of datagrams that have come; answered by this and the number.
const COUNT: &[u8] = b"count";
/// The other side has joined.
const JOINED: &[u8] = b"joined";

/// What became of the datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Datagrams {
    /// Datagrams that were sent.
    pub sent: u64,
    /// Of these, datagrams that have not come.
    pub lost: u64,
    /// Bytes per second at which they were sent.
    pub bytes_per_s: f64,
}

fn encode(group: &Group) -> Option<Vec<u8>> {
    let GroupAddress::Rdma(address) = group.address else { return None };
    let Session { tag, seed, .. } = group.session;
    Some([JOIN, &address.octets(), &tag.to_le_bytes(), &seed.to_le_bytes()].concat())
}

fn decode(message: &[u8]) -> Option<Group> {
    let (address, rest) = message.strip_prefix(JOIN)?.split_first_chunk::<4>()?;
    let (tag, seed) = rest.split_first_chunk::<8>()?;
    let seed = u64::from_le_bytes(seed.try_into().ok()?);
    let session = Session { tag: u64::from_le_bytes(*tag), seed, key: None };
    Some(Group { address: GroupAddress::Rdma(Ipv4Addr::from(*address)), session })
}

/// The side that receives.
#[derive(Debug)]
pub(super) struct Member<'a> {
    multicast: Option<&'a dyn Multicast>,
    receiver: Option<Box<dyn MulticastReceiver>>,
}

/// Wants nothing: what comes is counted all the same.
struct Nowhere;

impl Sink for Nowhere {
    fn place(&mut self, _immediate: u32, _len: usize) -> Option<LocalSlice> {
        None
    }

    fn landed(&mut self, _immediate: u32) {}
}

impl<'a> Member<'a> {
    pub(super) fn new(multicast: Option<&'a dyn Multicast>) -> Self {
        Self { multicast, receiver: None }
    }

    /// The answer to a message of the other side; `None` to one that is not about datagrams.
    pub(super) fn answer(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        if let Some(group) = decode(message) {
            return Some(match self.join(&group) {
                Ok(()) => JOINED.to_vec(),
                Err(why) => why.into_bytes(),
            });
        }
        if message != COUNT {
            return None;
        }
        Some(match self.count() {
            Ok(count) => [COUNT, &count.to_le_bytes()].concat(),
            Err(error) => error.to_string().into_bytes(),
        })
    }

    fn join(&mut self, group: &Group) -> Result<(), String> {
        let multicast = self.multicast.ok_or("this node has no multicast beside that fabric")?;
        self.receiver = Some(multicast.join(group).map_err(|error| with_cause(&error))?);
        Ok(())
    }

    fn count(&mut self) -> Result<u64, FabricError> {
        let Some(mut receiver) = self.receiver.take() else { return Ok(0) };
        std::thread::sleep(LAST_DATAGRAMS_TIMEOUT);
        while receiver.poll(&mut Nowhere)? > 0 {}
        Ok(receiver.counters().read().received)
    }
}

pub(super) fn with_cause(error: &FabricError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// The side that sends. `rate`: bytes per second of READs.
pub(super) fn send(
    trial: &mut Trial<'_>,
    multicast: &dyn Multicast,
    rate: f64,
) -> Result<Datagrams, FabricError> {
    let group = Group { address: GroupAddress::Rdma(GROUP), session: Session::draw()? };
    let mut sender = multicast.sender(&group)?;
    let join =
        encode(&group).ok_or(FabricError::Unsupported { what: "a trial of multicast to such a group" })?;
    let said = ask(trial, &join)?;
    if said != JOINED {
        return Err(FabricError::protocol(format!("the other side: {}", String::from_utf8_lossy(&said))));
    }
    let (sent, bytes_per_s) = all(trial, &mut *sender, rate * PACE)?;
    // Returns when the device has sent them.
    drop(sender);
    let said = ask(trial, COUNT)?;
    let count = said.strip_prefix(COUNT).and_then(|rest| rest.try_into().ok()).map(u64::from_le_bytes);
    let Some(came) = count else {
        return Err(FabricError::protocol(format!("the other side: {}", String::from_utf8_lossy(&said))));
    };
    Ok(Datagrams { sent, lost: sent.saturating_sub(came), bytes_per_s })
}

/// Sends a second's worth, never more at a time than is due. How many, and at how many bytes per second.
fn all(trial: &Trial<'_>, sender: &mut dyn MulticastSender, rate: f64) -> Result<(u64, f64), FabricError> {
    let len = u32::try_from(sender.max_payload()).unwrap_or(u32::MAX);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped
    let count = (rate / f64::from(len)).clamp(LEAST as f64, MOST as f64) as u64;
    let gap = Duration::from_secs_f64(f64::from(len) / rate.max(1.0));
    let payload = trial.buffer.region.local(0, len);
    let payload = payload.ok_or_else(|| FabricError::protocol("a datagram beyond the trial's memory"))?;
    let begun = Instant::now();
    let mut due = begun;
    for number in 0..count {
        let outgoing = Outgoing { immediate: u32::try_from(number).unwrap_or(u32::MAX), payload };
        while sender.send(&[outgoing])? == 0 {
            sender.wait(Duration::from_millis(100))?;
        }
        // What was missed is not made up for: that would be a burst.
        due = (due + gap).max(Instant::now().checked_sub(SHORTEST_SLEEP_INTERVAL).unwrap_or(due));
        let ahead = due.saturating_duration_since(Instant::now());
        if ahead >= SHORTEST_SLEEP_INTERVAL {
            std::thread::sleep(ahead);
        }
    }
    let seconds = begun.elapsed().as_secs_f64().max(1e-6);
    Ok((count, count as f64 * f64::from(len) / seconds))
}

/// Says something to the other side; what it answers.
fn ask(trial: &mut Trial<'_>, message: &[u8]) -> Result<Vec<u8>, FabricError> {
    let posted = trial.endpoint.post_send(WrId(0), message);
    posted.map_err(|error| FabricError::protocol(error.to_string()))?;
    trial.endpoint.flush()?;
    trial.next(|kind| match kind {
        CompletionKind::Received(bytes) => Some(bytes.to_vec()),
        _ => None,
    })
}

/// Decodes bytes as a message about datagrams, for `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn any_message(bytes: &[u8]) {
    if let Some(group) = decode(bytes) {
        assert_eq!(encode(&group).as_deref(), Some(bytes));
    }
    drop(Member::new(None).answer(bytes));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_what_was_sent() {
        let group = Group { address: GroupAddress::Rdma(GROUP), session: Session::draw().unwrap() };
        let message = encode(&group).unwrap();
        assert_eq!(decode(&message), Some(group));
        for cut in 0..message.len() {
            assert_eq!(decode(&message[..cut]), None);
        }
        assert_eq!(decode(&[&message[..], b"x"].concat()), None);
    }

    #[test]
    fn a_side_without_multicast_says_so() {
        let group = Group { address: GroupAddress::Rdma(GROUP), session: Session::draw().unwrap() };
        let mut member = Member::new(None);
        let said = member.answer(&encode(&group).unwrap()).unwrap();
        assert!(String::from_utf8(said).unwrap().contains("no multicast"));
        assert_eq!(member.answer(COUNT).unwrap(), [COUNT, &0_u64.to_le_bytes()].concat());
        assert_eq!(member.answer(b"something else"), None);
    }
}
