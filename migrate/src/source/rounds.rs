//! Pre-copy rounds: scan, name what is dirty, let the destination read it, again while it pays.

use std::time::{Duration, Instant};

use super::classify::Classified;
use super::memory::Scan;
use super::session::{Session, Stop};
use crate::clock::ms;
use crate::pending::PageSet;
use crate::plan::{self, Next, Outlook, Standing};
use crate::progress::Phase;
use crate::proto::message::{RoundDone, ToDestination, ToSource};
use crate::report::RoundStats;
use crate::spec::Mode;

/// Content read to learn the link's rate before a mode is chosen.
const PROBE_BYTES: u64 = 64 << 20;
/// Writes are watched for this long before a mode is chosen.
const SAMPLE: Duration = Duration::from_millis(100);

impl Session {
    /// Decides the mode if that was left open, and runs the rounds of `precopy` and `hybrid`.
    pub(super) async fn rounds(&mut self) -> Result<(), Stop> {
        let mut link = 0.0;
        match self.spec.mode.fixed() {
            Some(_) => "requested".clone_into(&mut self.report.mode_reason),
            // Called again when the destination was slower than the rounds: the choice stands.
            None if self.report.mode_reason.is_empty() => link = self.choose_mode().await?,
            None => {}
        }
        let name = self.mode.to_string();
        self.report.mode.clone_from(&name);
        self.publisher.update(|p| p.mode = Some(name));
        if self.mode == Mode::Postcopy {
            return Ok(());
        }
        self.publisher.enter(Phase::Rounds);
        if !self.memory()?.is_armed() {
            self.arm().await?;
        }
        loop {
            let sets = self.memory()?.take_pending();
            let (done, planned) = self.round(sets).await?;
            // Of the pages, not of what crossed: the next round's parts that are zero or unchanged will not cross either.
            let dealt_with = planned * self.memory()?.page_bytes();
            if done.micros > 0 && dealt_with > 1 << 20 {
                link = dealt_with as f64 / done.micros as f64 * 1e6;
            }
            let scan = self.scan().await?;
            self.publisher.update(|p| p.dirty_pages_per_s = scan.dirty_per_s());
            if let Some(last) = self.report.rounds.last_mut() {
                last.scan_us = scan.took.as_secs_f64() * 1e6;
                last.dirty_pages_per_s = scan.dirty_per_s();
            }
            let standing = Standing {
                rounds: u32::try_from(self.report.rounds.len()).unwrap_or(u32::MAX),
                last_bytes: done.bytes,
                left_bytes: scan.pending_pages * self.memory()?.page_bytes(),
                link_bytes_per_s: if link > 0.0 { link } else { 1e9 },
            };
            #[expect(clippy::cast_precision_loss, reason = "milliseconds below 60,000")]
            let limit = self.spec.max_downtime_ms as f64;
            match plan::next(self.mode, limit, standing) {
                Next::Round => {}
                Next::Stop(why) => {
                    self.report.rounds_reason = why;
                    return Ok(());
                }
                Next::GiveUp(why) => return Err(Stop::Failed(format!("{} {why}", self.vm.name))),
            }
        }
    }

    /// Whether rounds could still shrink what is left, after those that the destination was too slow for.
    pub(super) fn rounds_would_pay(&mut self) -> Result<bool, Stop> {
        let page = self.memory()?.page_bytes() as f64;
        Ok(match (self.mode, self.report.rounds.last()) {
            (Mode::Postcopy, _) => false,
            (Mode::Hybrid, Some(last)) => {
                let link = (last.pages - last.zero) as f64 * page / (last.duration_ms.max(0.1) / 1e3);
                plan::could_shrink(last.dirty_pages_per_s * page, link)
            }
            (Mode::Precopy | Mode::Hybrid, _) => true,
        })
    }

    /// One round: returns what the destination read, and how many pages were named.
    async fn round(&mut self, sets: Vec<PageSet>) -> Result<(RoundDone, u64), Stop> {
        let begun = Instant::now();
        let number = u32::try_from(self.report.rounds.len() + 1).unwrap_or(u32::MAX);
        let planned: u64 = sets.iter().map(PageSet::count).sum();
        let page = self.memory()?.page_bytes();
        self.round_began = (planned * page, self.counted.landed_bytes);
        self.publisher.update(|p| {
            p.round = number;
            p.bytes_total = planned * page;
        });
        self.refresh_regions().await?;
        self.in_round = true;
        let (named, done) = loop {
            if let Some(done) = self.try_round(number, sets.clone()).await? {
                break done;
            }
        };
        self.in_round = false;
        self.report.rounds.push(RoundStats {
            pages: named.pages,
            zero: named.zero,
            duration_ms: ms(begun.elapsed()),
            ..RoundStats::default()
        });
        Ok((done, named.pages - named.zero))
    }

    /// `None`: page connections were lost and opened anew meanwhile, so nobody knows what has landed.
    async fn try_round(
        &mut self,
        number: u32,
        sets: Vec<PageSet>,
    ) -> Result<Option<(Classified, RoundDone)>, Stop> {
        self.send(&ToDestination::Round(number)).await?;
        let (mut batches, task) = self.memory()?.name_pages(sets);
        while let Some(batch) = batches.recv().await {
            self.send(&ToDestination::Runs(batch)).await?;
        }
        let named = task.await.map_err(|e| e.to_string())??;
        self.send(&ToDestination::RoundEnd(number)).await?;
        loop {
            match self.next().await? {
                ToSource::RoundDone(done) if done.round == number => return Ok(Some((named, done))),
                ToSource::PagesRenewed => return Ok(None),
                ToSource::Prepared => {}
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Watches the guest and the link for a moment. Returns the link's rate.
    async fn choose_mode(&mut self) -> Result<f64, Stop> {
        let can_track = vmove_memory::DirtyTracker::supported().is_ok();
        let content_bytes = self.memory()?.content_bytes();
        let (mut link, mut dirty) = (0.0, 0.0);
        if can_track {
            self.arm().await?;
            let begun = Instant::now();
            let page = self.memory()?.page_bytes();
            let (probe, rest) = probe_sets(self.memory()?.take_pending(), PROBE_BYTES / page);
            self.memory()?.put_back(&rest);
            let (done, _) = self.round(probe).await?;
            link = if done.micros > 0 && done.bytes > 0 {
                done.bytes as f64 / done.micros as f64 * 1e6
            } else {
                1e9
            };
            tokio::time::sleep(SAMPLE.saturating_sub(begun.elapsed())).await;
            let scan = self.scan().await?;
            dirty = scan.dirty_per_s() * page as f64;
        }
        let (mode, why) = plan::choose(Outlook {
            content_bytes,
            dirty_bytes_per_s: dirty,
            link_bytes_per_s: link,
            #[expect(clippy::cast_precision_loss, reason = "milliseconds below 60,000")]
            max_downtime_ms: self.spec.max_downtime_ms as f64,
            can_track,
        });
        self.mode = mode;
        self.report.mode_reason = why;
        Ok(link)
    }

    /// Begins to follow writes. With direct I/O under way a page may change after it was looked at and before the device is done, so
    /// the guest is stopped and its I/O drained for the moment (hazard: direct I/O in flight).
    pub(super) async fn arm(&mut self) -> Result<(), Stop> {
        let memory = self.memory()?.clone();
        self.drained(move || memory.arm().map(drop)).await
    }

    pub(super) async fn scan(&mut self) -> Result<Scan, Stop> {
        let memory = self.memory()?.clone();
        self.drained(move || memory.scan()).await
    }

    async fn drained<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, Stop> {
        let pause = self.direct_io && self.journal.record().was_running;
        if pause {
            self.monitor("stop").await?;
        }
        let result = tokio::task::spawn_blocking(work).await.map_err(|e| e.to_string());
        if pause {
            self.monitor("cont").await?;
        }
        Ok(result??)
    }

    async fn monitor(&self, command: &str) -> Result<(), Stop> {
        let client = self.client.as_ref().ok_or_else(|| "no monitor".to_owned())?;
        let reply = client.execute_raw(command, serde_json::Value::Null, Duration::from_secs(10)).await;
        reply.map(drop).map_err(|e| Stop::Failed(crate::destination::chain(&e)))
    }

    pub(super) fn unexpected(&self, message: &ToSource) -> Stop {
        match message {
            ToSource::Failed(why) => Stop::Failed(format!("{}: {why}", self.to)),
            ToSource::Refused(blockers) => Stop::Refused(blockers.clone()),
            other => Stop::Failed(format!(
                "Protocol violation by {}: {} in state {:?}",
                self.to,
                other.name(),
                self.state()
            )),
        }
    }
}

/// The first `pages` pages with content, and the rest.
fn probe_sets(sets: Vec<PageSet>, pages: u64) -> (Vec<PageSet>, Vec<PageSet>) {
    let mut left = pages;
    sets.into_iter()
        .map(|mut rest| {
            let mut probe = PageSet::empty(rest.capacity());
            let runs: Vec<_> = rest.runs().collect();
            for run in runs {
                let take = (run.end - run.start).min(left);
                probe.insert(run.start..run.start + take);
                left -= take;
            }
            probe.runs().collect::<Vec<_>>().into_iter().for_each(|r| rest.remove(r));
            (probe, rest)
        })
        .unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_and_its_rest_are_the_whole() {
        let mut set = PageSet::full(100);
        set.remove(10..20);
        let (probe, rest) = probe_sets(vec![set.clone(), PageSet::full(5)], 30);
        assert_eq!(probe[0].count() + probe[1].count(), 30);
        let mut both = probe[0].clone();
        both.union(&rest[0]);
        assert_eq!(both, set);
        assert_eq!(rest[1].count(), 5);
    }
}
