//! The course of a migration, run through beforehand: by the same decisions that its rounds take.

use std::time::Duration;

use super::writes::Writes;
use crate::plan::{self, Next, Standing};
use vmove_types::spec::Mode;

/// What a round takes beside the bytes: a message each way, a scan, and threads that wake up.
const ROUND_MS: f64 = 3.0;
/// For as long a guest is watched before pre-copy decides whether to begin with rounds.
const SAMPLE: Duration = Duration::from_millis(100);
/// Of what a guest writes it finds so much missing at the destination; bulk reads were there before for the rest.
const FAULTED_SHARE: f64 = 0.5;
/// A guest that waits for each page, some 100 us, gets no more than that in a second. Unit: bytes.
const MOST_FAULTED: f64 = 4e7;

/// What a migration takes beside the memory that crosses, as earlier ones to the node have shown. Unit: milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beside {
    /// From the request to the first page.
    pub setup_ms: f64,
    /// From the request until the destination's QEMU waits for the guest.
    pub ready_ms: f64,
    /// The pause, without pages.
    pub pause_ms: f64,
    /// The same in all but a tenth of migrations: no longer than this. Not less than the pause.
    pub pause_up_to_ms: f64,
    /// From the guest's running there to the end, without pages.
    pub after_ms: f64,
}

/// What the processors of the two hosts can move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hosts {
    /// All of them, of the host that can move less. Unit: bytes of page payload per second.
    pub bytes_per_s: f64,
    /// That is known of an earlier migration.
    pub is_known: bool,
    /// Of that so much may be used. Unit: percent.
    pub share: Option<f64>,
}

/// What is known before a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Bytes that are to cross: pages that hold something else than zeros.
    pub content_bytes: f64,
    /// What the guest writes.
    pub writes: Writes,
    /// What the link carries. Unit: bytes of page payload per second.
    pub link_bytes_per_s: f64,
    /// The same for pages that the destination has memory for already, since they crossed before or were given that memory ahead: a page that comes for the
    /// first time waits until the kernel has cleared one.
    pub again_bytes_per_s: f64,
    /// What the processors can move.
    pub hosts: Hosts,
    /// The link's rate is a limit, which does not hold back pages that the guest waits for.
    pub limited: bool,
    /// What is left must cross in this time for pre-copy to stop the guest. Unit: milliseconds.
    pub pages_in_pause_ms: f64,
    /// Everything else.
    pub beside: Beside,
    /// When all is to be done, after the request. Unit: milliseconds.
    pub within_ms: Option<f64>,
}

/// How a migration would go.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Course {
    /// What is used of all processors. Unit: percent.
    pub host_cpu_percent: Option<f64>,
    /// The guest's pause. Unit: milliseconds.
    pub pause_ms: f64,
    /// The pause is no longer than this in nine of ten migrations. Unit: milliseconds.
    pub pause_up_to_ms: f64,
    /// The whole. Unit: milliseconds.
    pub time_ms: f64,
    /// Page payload that crosses. Unit: bytes.
    pub sent_bytes: f64,
    /// Rounds.
    pub rounds: u32,
}

impl Hosts {
    /// So much may be moved. Unit: bytes per second.
    fn limit(&self) -> Option<f64> {
        self.share.map(|share| self.bytes_per_s * share / 100.0)
    }

    /// Of all processors so much is used to move so many bytes. Unit: percent. `None`: nobody knows.
    pub(super) fn used(&self, bytes: f64, ms: f64) -> Option<f64> {
        let used = (bytes / self.bytes_per_s.max(1.0) / (ms.max(1.0) / 1e3) * 100.0).min(100.0);
        match self.share {
            Some(share) => Some(used.min(share)),
            None => self.is_known.then_some(used),
        }
    }
}

/// A course that is being run.
struct Run {
    mode: Mode,
    outlook: Outlook,
    at_ms: f64,
    sent: f64,
    left: f64,
    rounds: u32,
}

/// Pre-copy does not converge. Why, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Diverges(pub String);

/// How a migration in this mode would go.
///
/// # Errors
/// [`Diverges`].
pub fn course(mode: Mode, outlook: &Outlook) -> Result<Course, Diverges> {
    let at_ms = outlook.beside.setup_ms;
    let mut run =
        Run { mode, outlook: *outlook, at_ms, sent: 0.0, left: outlook.content_bytes.max(0.0), rounds: 0 };
    if mode != Mode::Postcopy && !run.stops_at_once() {
        run.rounds()?;
        let late = run.outlook.beside.ready_ms - run.at_ms;
        if late > 0.0 {
            // The guest goes on writing until the destination's QEMU is ready.
            run.at_ms += late;
            run.left = run.left.max(outlook.writes.after_ms(late));
            let pays = plan::could_shrink(outlook.writes.bytes_per_s, run.link());
            // A round of nothing takes no time that is worth counting.
            if run.left >= 1.0 && (mode == Mode::Precopy || pays) {
                run.rounds()?;
            }
        }
    }
    Ok(run.end())
}

impl Run {
    /// Of the first round, or of what comes after it, as far as the processors may move it.
    fn link(&self) -> f64 {
        self.outlook
            .hosts
            .limit()
            .map_or_else(|| self.unlimited(), |limit| self.unlimited().min(limit.max(1.0)))
    }

    /// The same for what the guest waits for.
    fn unlimited(&self) -> f64 {
        let Outlook { link_bytes_per_s, again_bytes_per_s, .. } = self.outlook;
        let rate = if self.rounds == 0 && self.mode != Mode::Postcopy {
            link_bytes_per_s
        } else {
            again_bytes_per_s
        };
        rate.max(1.0)
    }

    fn ms(&self, bytes: f64) -> f64 {
        bytes / self.link() * 1e3
    }

    fn standing(&self, last: f64) -> Standing {
        Standing {
            rounds: self.rounds,
            last_bytes: whole(last),
            left_bytes: whole(self.left),
            link_bytes_per_s: self.link(),
        }
    }

    /// Pre-copy whose guest may pause for all of its memory, and would gain nothing by rounds.
    fn stops_at_once(&self) -> bool {
        let dirty = whole(self.outlook.writes.after_ms(SAMPLE.as_secs_f64() * 1e3));
        let standing = self.standing(0.0);
        self.mode == Mode::Precopy
            && plan::stop_at_once(self.outlook.pages_in_pause_ms, standing, dirty, SAMPLE).is_some()
    }

    fn rounds(&mut self) -> Result<(), Diverges> {
        loop {
            let bytes = self.left;
            let took = self.ms(bytes) + ROUND_MS;
            self.at_ms += took;
            self.sent += bytes;
            self.rounds += 1;
            self.left = self.outlook.writes.after_ms(took);
            match plan::next(self.mode, self.outlook.pages_in_pause_ms, self.standing(bytes)) {
                Next::Round if self.is_out_of_time(bytes) => return Ok(()),
                Next::Round => {}
                Next::Stop(_) => return Ok(()),
                Next::GiveUp(why) => return Err(Diverges(why)),
            }
        }
    }

    /// A goal ends the rounds of a migration, see [`plan::hurry`].
    fn is_out_of_time(&self, last: f64) -> bool {
        let Outlook { within_ms, pages_in_pause_ms, beside, .. } = self.outlook;
        let Some(within) = within_ms else { return false };
        let left_ms = within - self.at_ms - beside.pause_ms - beside.after_ms;
        plan::hurry(self.mode, false, (left_ms, pages_in_pause_ms), self.standing(last)).is_some()
    }

    /// How long what is left takes to follow the guest.
    fn fetched_in_ms(&self) -> f64 {
        let Outlook { writes, limited, hosts, .. } = self.outlook;
        if !limited && hosts.limit().is_none_or(|limit| limit >= self.unlimited()) {
            return self.ms(self.left);
        }
        let faulted = |ms: f64| (FAULTED_SHARE * writes.after_ms(ms)).min(MOST_FAULTED * ms / 1e3);
        // Faults are not held back by the share, but cross the link as everything else.
        let by_link = if limited { 0.0 } else { self.left / self.unlimited() * 1e3 };
        let (mut least, mut most) = (by_link, self.ms(self.left).max(by_link));
        while most - least > 1.0 {
            let middle = f64::midpoint(least, most);
            if self.link() * middle / 1e3 + faulted(middle) < self.left {
                least = middle;
            } else {
                most = middle;
            }
        }
        most
    }

    fn end(self) -> Course {
        let Beside { ready_ms, pause_ms, pause_up_to_ms, after_ms, .. } = self.outlook.beside;
        let left_ms = self.left / self.unlimited() * 1e3;
        let (in_pause, after) =
            if self.mode == Mode::Precopy { (left_ms, 0.0) } else { (0.0, self.fetched_in_ms()) };
        let pause_ms = pause_ms + in_pause;
        let time_ms = self.at_ms.max(ready_ms) + pause_ms + after + after_ms;
        let Outlook { hosts, beside, .. } = self.outlook;
        Course {
            host_cpu_percent: hosts.used(self.sent + after / 1e3 * self.link(), time_ms - beside.setup_ms),
            pause_ms,
            pause_up_to_ms: pause_up_to_ms + in_pause,
            time_ms,
            sent_bytes: self.sent + self.left,
            rounds: self.rounds,
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of memory, not negative")]
pub(super) fn whole(bytes: f64) -> u64 {
    bytes as u64
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) const BESIDE: Beside =
        Beside { setup_ms: 50.0, ready_ms: 400.0, pause_ms: 10.0, pause_up_to_ms: 10.0, after_ms: 100.0 };

    pub(crate) fn outlook(content: f64, rate: f64, reach: f64, link: f64) -> Outlook {
        Outlook {
            content_bytes: content,
            writes: Writes { bytes_per_s: rate, reach },
            link_bytes_per_s: link,
            again_bytes_per_s: link,
            hosts: Hosts { bytes_per_s: 4e9, is_known: true, share: None },
            limited: false,
            pages_in_pause_ms: 50.0,
            beside: BESIDE,
            within_ms: None,
        }
    }

    #[test]
    fn an_idle_guest_takes_as_long_as_its_memory_does() {
        for mode in [Mode::Precopy, Mode::Hybrid] {
            let idle = course(mode, &outlook(2e9, 0.0, 0.0, 1e9)).unwrap();
            assert_eq!(idle.rounds, 1, "{mode}");
            assert!((idle.pause_ms - 10.0).abs() < 1e-9 && (idle.sent_bytes - 2e9).abs() < 1.0, "{idle:?}");
            assert!((idle.time_ms - (50.0 + 2000.0 + ROUND_MS + 10.0 + 100.0)).abs() < 1e-6, "{idle:?}");
        }
    }

    #[test]
    fn a_busy_guest_does_not_converge_by_precopy_and_pauses_shortly_otherwise() {
        let busy = outlook(2e9, 2e9, 2e9, 1e9);
        assert!(course(Mode::Precopy, &busy).unwrap_err().0.contains("does not converge"));
        let hybrid = course(Mode::Hybrid, &busy).unwrap();
        let post = course(Mode::Postcopy, &busy).unwrap();
        assert!((hybrid.pause_ms - 10.0).abs() < 1e-9 && (post.pause_ms - 10.0).abs() < 1e-9);
        assert!(post.sent_bytes < hybrid.sent_bytes && post.rounds == 0);
    }

    #[test]
    fn a_limit_does_not_hold_back_what_the_guest_waits_for() {
        let limited =
            |rate| course(Mode::Postcopy, &Outlook { limited: true, ..outlook(1e9, rate, 1e9, 1e7) });
        let (idle, busy) = (limited(0.0).unwrap(), limited(3e7).unwrap());
        // 100 s by the limit alone.
        assert!((idle.time_ms / 100_500.0 - 1.0).abs() < 0.01, "{idle:?}");
        assert!(busy.time_ms < 0.6 * idle.time_ms && busy.time_ms > 0.4 * idle.time_ms, "{busy:?}");
    }

    #[test]
    fn rounds_end_in_time_for_a_goal() {
        let o = outlook(1e9, 6e8, 1e9, 1e9);
        let free = course(Mode::Hybrid, &o).unwrap();
        let hurried = course(Mode::Hybrid, &Outlook { within_ms: Some(1_900.0), ..o }).unwrap();
        assert!(hurried.rounds < free.rounds && hurried.time_ms <= 1_900.0, "{free:?} {hurried:?}");
        assert!(free.time_ms > 1_900.0, "{free:?}");
    }

    #[test]
    fn a_small_working_set_is_sent_in_the_pause() {
        // 20 MB that are written over and over: 20 ms of the pause.
        let course = course(Mode::Precopy, &outlook(1e9, 5e9, 2e7, 1e9)).unwrap();
        assert!((25.0..32.0).contains(&course.pause_ms), "{course:?}");
    }

    fn all() -> impl Strategy<Value = Outlook> {
        (1e6..1e11, 0.0..5e9, 0.0..1.0, 1e7..2e10, 1.0..5e3).prop_map(
            |(content, rate, reach, link, pages_in_pause_ms)| Outlook {
                pages_in_pause_ms,
                ..outlook(content, rate, reach * content, link)
            },
        )
    }

    proptest! {
        /// A guest that writes nothing takes the least: the least pause, time and bytes.
        #[test]
        fn writes_cost(o in all()) {
            for mode in [Mode::Precopy, Mode::Hybrid, Mode::Postcopy] {
                let idle = course(mode, &Outlook { writes: Writes::NONE, ..o });
                let (Ok(busy), Ok(idle)) = (course(mode, &o), idle) else { continue };
                prop_assert!(busy.time_ms + 1e-6 >= idle.time_ms, "{mode}: {busy:?} {idle:?}");
                // By more than what stopping at once saves, which pre-copy does for the sake of a busy guest.
                prop_assert!(mode == Mode::Precopy || busy.sent_bytes + 1.0 >= idle.sent_bytes);
                prop_assert!(busy.sent_bytes + 1.0 >= o.content_bytes);
                prop_assert!(busy.time_ms >= o.content_bytes / o.link_bytes_per_s * 1e3);
            }
        }

        /// Of courses with as many rounds to a destination that is ready, that of a busier or larger guest, or over a slower link, takes no less of
        /// anything.
        #[test]
        fn worse_is_not_better(o in all(), factor in 1.0..3.0, which in 0..4) {
            let o = Outlook { beside: Beside { ready_ms: 0.0, ..o.beside }, ..o };
            let shared = |share: f64| Hosts { share: Some(share), ..o.hosts };
            let o = if which == 3 { Outlook { hosts: shared(30.0), ..o } } else { o };
            let mut worse = o;
            match which {
                0 => worse.writes.bytes_per_s *= factor,
                1 => {
                    worse.link_bytes_per_s /= factor;
                    worse.again_bytes_per_s /= factor;
                }
                2 => worse.content_bytes *= factor,
                _ => worse.hosts = shared(30.0 / factor),
            }
            for mode in [Mode::Precopy, Mode::Hybrid, Mode::Postcopy] {
                let (Ok(a), Ok(b)) = (course(mode, &o), course(mode, &worse)) else { continue };
                if a.rounds == b.rounds {
                    prop_assert!(b.time_ms + 1e-3 >= a.time_ms, "{mode} {which}: {a:?} {b:?}");
                    prop_assert!(b.pause_ms + 1e-3 >= a.pause_ms, "{mode} {which}: {a:?} {b:?}");
                    prop_assert!(b.sent_bytes + 1.0 >= a.sent_bytes, "{mode} {which}: {a:?} {b:?}");
                }
            }
        }

        /// With a smaller share of the processors a migration never takes less time, and pauses a guest that stands still no longer. A guest that writes
        /// may be stopped a round earlier.
        #[test]
        fn a_smaller_share_never_takes_less_time(o in all(), share in 1.0..100.0, factor in 1.0..50.0) {
            let of = |share: f64| Outlook { hosts: Hosts { share: Some(share), ..o.hosts }, ..o };
            for mode in [Mode::Precopy, Mode::Hybrid, Mode::Postcopy] {
                let (large, small) = (of(share), of(f64::max(share / factor, 1.0)));
                let idle = |o: Outlook| course(mode, &Outlook { writes: Writes::NONE, ..o }).unwrap();
                let (a, b) = (idle(large), idle(small));
                prop_assert!(b.time_ms + 1e-3 >= a.time_ms, "{mode}: {a:?} {b:?}");
                prop_assert!(b.host_cpu_percent <= Some(share), "{mode}: {b:?}");
                let limit = o.hosts.bytes_per_s * small.hosts.share.unwrap() / 100.0;
                prop_assert!(mode == Mode::Precopy || b.time_ms >= o.content_bytes / limit * 1e3 * 0.999);
                if let (Ok(a), Ok(b)) = (course(mode, &large), course(mode, &small)) && a.rounds == b.rounds {
                    prop_assert!(b.time_ms + 1e-3 >= a.time_ms, "{mode}: {a:?} {b:?}");
                }
            }
        }

        /// Post-copy pauses the guest no longer, whatever it writes.
        #[test]
        fn the_pause_of_postcopy_is_bounded(o in all()) {
            let post = course(Mode::Postcopy, &o).unwrap();
            prop_assert!((post.pause_ms - o.beside.pause_ms).abs() < 1e-9);
        }
    }
}
