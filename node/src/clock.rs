//! What another host's CLOCK_MONOTONIC says at a moment of ours.

use serde::{Deserialize, Serialize};
use vmove_types::time::Mono;

/// How far the peer's CLOCK_MONOTONIC is ahead of ours, estimated as NTP does (RFC 5905, section 8): the sample with the
/// shortest round trip, error at most half of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ClockOffset {
    /// Peer minus us, in nanoseconds.
    pub nanos: i64,
    /// Largest possible error, in nanoseconds.
    pub error: u64,
}

impl ClockOffset {
    /// The offset between two processes of one running kernel: none.
    pub const SAME_HOST: Self = Self { nanos: 0, error: 0 };
    /// Nothing is known of the peer's clock.
    pub const UNKNOWN: Self = Self { nanos: 0, error: u64::MAX };

    /// What one ping tells: `peer` is what the peer's clock said between `sent` and `got` of ours.
    #[must_use]
    pub fn from_sample(sent: Mono, peer: Mono, got: Mono) -> Self {
        let half = got.0.saturating_sub(sent.0) / 2;
        let nanos = i128::from(peer.0) - i128::from(sent.0) - i128::from(half);
        Self { nanos: i64::try_from(nanos).unwrap_or(i64::MAX), error: half }
    }

    /// A moment of the peer's clock, on ours.
    #[must_use]
    pub fn to_ours(self, peer: Mono) -> Mono {
        Mono(peer.0.saturating_add_signed(self.nanos.saturating_neg()))
    }
}

/// The peer's clock, learnt by pings among other messages; nobody waits for their answers.
#[derive(Debug)]
pub struct PeerClock {
    asked: Option<(u32, Mono)>,
    tokens: u32,
    answers: u32,
    /// By the ping with the shortest round trip.
    offset: ClockOffset,
}

impl Default for PeerClock {
    fn default() -> Self {
        Self { asked: None, tokens: 0, answers: 0, offset: ClockOffset::UNKNOWN }
    }
}

/// After so many samples one of them was likely not delayed.
const SAMPLES: u32 = 8;

impl PeerClock {
    /// Sets the offset to zero: the peer runs on this host, so both read the same clock.
    pub const fn set_same_host(&mut self) {
        self.offset = ClockOffset::SAME_HOST;
    }

    /// Number of a ping that is sent now. Never 0.
    pub fn ask(&mut self) -> u32 {
        self.tokens = self.tokens.wrapping_add(1).max(1);
        self.asked = Some((self.tokens, Mono::now()));
        self.tokens
    }

    /// The answer to a ping has come, with what the peer's clock said then. Whether another ping would be of use at once.
    pub fn answered(&mut self, token: u32, peer: Mono) -> bool {
        let Some((_, sent)) = self.asked.take_if(|asked| asked.0 == token) else { return false };
        let offset = ClockOffset::from_sample(sent, peer, Mono::now());
        if offset.error < self.offset.error {
            self.offset = offset;
        }
        self.answers = self.answers.saturating_add(1);
        self.offset != ClockOffset::SAME_HOST && self.answers < SAMPLES
    }

    /// As well as it is known by now.
    pub const fn offset(&self) -> ClockOffset {
        self.offset
    }
}

/// An id of the running kernel: equal on two daemons only if they share its clock.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|s| s.trim().to_owned())
        .unwrap_or_default()
}

/// Whether `boot_id`, as a peer told it, is of the kernel that runs here. A host that could not read its own is no other's.
#[must_use]
pub fn is_of_this_kernel(boot_id: &str) -> bool {
    !boot_id.is_empty() && boot_id == self::boot_id()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_ping_tells_the_offset_and_its_error() {
        let offset = ClockOffset::from_sample(Mono(3000), Mono(8050), Mono(3100));
        assert_eq!(offset, ClockOffset { nanos: 5000, error: 50 });
        assert_eq!(offset.to_ours(Mono(8050)), Mono(3050));
    }

    #[test]
    fn the_shortest_round_trip_wins() {
        let mut clock = PeerClock::default();
        for wait in [100, 0, 100] {
            let token = clock.ask();
            std::thread::sleep(Duration::from_millis(wait));
            clock.answered(token, Mono(Mono::now().0 + 5_000_000_000));
        }
        let offset = clock.offset();
        assert!(offset.error < 50_000_000, "{offset:?}");
        assert!(offset.nanos.abs_diff(5_000_000_000) <= offset.error, "{offset:?}");
    }

    #[test]
    fn a_peer_is_asked_until_its_clock_is_known() {
        let mut clock = PeerClock::default();
        assert_eq!(clock.offset().error, u64::MAX);
        let mut rounds = 0;
        while {
            let token = clock.ask();
            assert!(!clock.answered(token + 1, Mono(0)), "an answer to something else");
            clock.answered(token, Mono(Mono::now().0 + 1_000_000_000))
        } {
            rounds += 1;
        }
        assert_eq!(rounds, SAMPLES - 1);
        let offset = clock.offset();
        assert!(offset.nanos.abs_diff(1_000_000_000) <= offset.error, "{offset:?}");
        clock.set_same_host();
        assert_eq!(clock.offset(), ClockOffset::SAME_HOST);
    }

    #[test]
    fn the_clock_goes_on() {
        let a = Mono::now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(Mono::now().since(a) >= Duration::from_millis(2));
    }
}
