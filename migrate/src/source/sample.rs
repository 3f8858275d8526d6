//! What the guest writes and what the link carries, watched for a moment before it is decided how to go on.

use std::time::Duration;

use tokio::time::Instant;

use super::error::{SourceError, Stop};
use super::session::Session;
use super::warm::Warm;
use crate::pending::PageSet;
use crate::plan::{self, Link, LinkKnown, Outlook, Standing};
use vmove_types::report::RoundStats;
use vmove_types::spec::Mode;

/// Sent first, and from then on twice as much each time: a slow link is known soon, and a fast one is not left idle.
const FIRST_PART: u64 = 1 << 20;
/// The guest's writes are watched for at least this long.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// What was seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// What moves the memory.
    pub link: Link,
    /// Bytes of pages that the guest wrote while it was watched, each page counted once.
    dirty_bytes: u64,
    watched: Duration,
    /// Bytes of pages that may hold something and that the destination lacks.
    left_bytes: u64,
}

/// When enough was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The link was measured.
    LinkIsKnown,
    /// Pre-copy can stop the guest for the rest, or all was sent.
    GuestMayStop,
}

impl Warm {
    /// Sends what the guest holds, a part after the other, and watches what it writes meanwhile.
    pub(super) async fn sample(&mut self, session: &mut Session, until: Until) -> Result<Sample, Stop> {
        self.arm(session).await?;
        self.pages.memory.forget_seen();
        let begun = Instant::now();
        let page = self.pages.memory.page_bytes();
        let before = session.report.rounds.len();
        // All parts are one round, for who looks, too.
        let number = u32::try_from(before + 1).unwrap_or(u32::MAX);
        let looks = SourceError::memory("look at what the guest holds");
        let remembered = session.node.past.link(&session.to().name, &session.report.fabric);
        let (mut part, mut from) = (FIRST_PART, (0, 0));
        loop {
            let sets = self.pages.memory.take_content((part / page).max(1), &mut from).map_err(looks)?;
            let is_last = sets.iter().all(PageSet::is_empty);
            if is_last {
                tokio::time::sleep(SAMPLE_INTERVAL.saturating_sub(begun.elapsed())).await;
            } else {
                let named: u64 = sets.iter().map(PageSet::count).sum();
                let planned = named + self.pages.memory.pending_pages();
                self.round(number, planned, sets, session).await?;
                let parts = session.report.rounds.split_off(before);
                session.report.rounds.extend(parts.into_iter().reduce(RoundStats::followed_by));
                part *= 2;
                if begun.elapsed() < SAMPLE_INTERVAL || self.link_rate.measured().is_none() {
                    continue;
                }
            }
            let link = self.link_rate.link(session.spec().bandwidth, remembered.as_ref());
            let mut sample = self.seen_since(begun, link, session).await?;
            // More would be sent in vain, and take from what starts QEMU there.
            if !self.prepared && stops_at_once(session, &sample).is_some() {
                self.wait_prepared(session).await?;
                // What was found stands, if the rest still fits.
                sample.left_bytes = self.seen_since(begun, link, session).await?.left_bytes;
            }
            let enough = until == Until::LinkIsKnown || stops_at_once(session, &sample).is_some();
            if is_last || enough {
                return Ok(sample);
            }
        }
    }

    async fn seen_since(&mut self, begun: Instant, link: Link, session: &Session) -> Result<Sample, Stop> {
        self.scan(session).await?;
        let (dirty_pages, left_pages) =
            self.pages.memory.seen().map_err(SourceError::memory("look at what the guest holds"))?;
        let page = self.pages.memory.page_bytes();
        Ok(Sample {
            link,
            dirty_bytes: dirty_pages * page,
            watched: begun.elapsed(),
            left_bytes: left_pages * page,
        })
    }

    /// Chooses a mode by what is seen, where the kernel can watch a guest's writes.
    pub(super) async fn choose_mode(&mut self, session: &mut Session) -> Result<Option<Sample>, Stop> {
        let can_track = session.node.config.vmm.can_follow_writes();
        let content_bytes = self.pages.memory.content_bytes();
        let sample = if can_track { Some(self.sample(session, Until::LinkIsKnown).await?) } else { None };
        let (mode, why) = plan::choose(Outlook {
            content_bytes,
            dirty_bytes_per_s: sample
                .map_or(0.0, |s| s.dirty_bytes as f64 / s.watched.as_secs_f64().max(1e-3)),
            link: sample.map_or(Link { bytes_per_s: 0.0, known: LinkKnown::Assumed }, |s| s.link),
            max_downtime_ms: max_downtime_ms(session),
            can_track,
        });
        session.mode = mode;
        session.report.mode_reason = why;
        Ok(sample)
    }
}

impl Warm {
    /// Chooses a mode by what is left after a head start.
    pub(super) fn choose_by(&self, standing: &Standing, session: &mut Session) {
        let page = self.pages.memory.page_bytes() as f64;
        let (mode, why) = plan::choose(Outlook {
            content_bytes: standing.left_bytes,
            dirty_bytes_per_s: session
                .report
                .rounds
                .last()
                .map_or(0.0, |round| round.dirty_pages_per_s * page),
            link: self.link_rate.link(session.spec().bandwidth, None),
            max_downtime_ms: max_downtime_ms(session),
            can_track: true,
        });
        session.mode = mode;
        session.report.mode_reason = why;
    }
}

/// Why pre-copy need not send anything more before the guest is stopped; `None` if it had better.
pub(super) fn stops_at_once(session: &Session, sample: &Sample) -> Option<String> {
    let left = Standing {
        rounds: 0,
        last_bytes: 0,
        left_bytes: sample.left_bytes,
        link_bytes_per_s: sample.link.bytes_per_s,
    };
    let stops = || plan::stop_at_once(max_downtime_ms(session), left, sample.dirty_bytes, sample.watched);
    (session.mode == Mode::Precopy).then(stops).flatten()
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds below 60,000")]
pub(super) fn max_downtime_ms(session: &Session) -> f64 {
    let goal = session.steering.as_ref().and_then(|steering| steering.pages_in_pause_ms);
    goal.unwrap_or(session.spec().max_downtime_ms as f64)
}
