//! Pre-copy rounds: scan, name what is dirty, let the destination read it, again while it pays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::classify::Classified;
use super::memory::Scan;
use super::pages::{ALIVE_EVERY, next_step};
use super::session::{Session, Stop};
use crate::clock::ms;
use crate::pending::PageSet;
use crate::plan::{self, Next, Standing};
use crate::progress::Phase;
use crate::proto::message::{RoundDone, ToDestination, ToSource};
use crate::report::RoundStats;
use crate::spec::Mode;

impl Session {
    /// Decides the mode if that was left open, and runs the rounds of `precopy` and `hybrid`.
    pub(super) async fn rounds(&mut self) -> Result<(), Stop> {
        let mut sample = None;
        match self.spec.mode.fixed() {
            Some(_) => "requested".clone_into(&mut self.report.mode_reason),
            // Called again when the destination was slower than the rounds: the choice stands.
            None if self.report.mode_reason.is_empty() => sample = self.choose_mode().await?,
            None => {}
        }
        let name = self.mode.to_string();
        self.report.mode.clone_from(&name);
        self.publisher.update(|p| p.mode = Some(name));
        if self.mode == Mode::Postcopy {
            return Ok(());
        }
        self.publisher.enter(Phase::Rounds);
        self.arm().await?;
        if self.mode == Mode::Precopy && self.report.rounds.is_empty() {
            sample = Some(self.sample().await?);
        }
        if let Some(why) = sample.as_ref().and_then(|sample| self.stops_at_once(sample)) {
            self.report.rounds_reason = why;
            return self.wait_prepared().await;
        }
        let mut link = sample.map_or(0.0, |sample| sample.link_bytes_per_s);
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
            match plan::next(self.mode, self.max_downtime_ms(), standing) {
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
    pub(super) async fn round(&mut self, sets: Vec<PageSet>) -> Result<(RoundDone, u64), Stop> {
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
        let (mut batches, task) = self.memory()?.name_pages(sets, Arc::clone(&self.gate));
        loop {
            tokio::select! {
                step = next_step(&mut self.registering) => if self.registered(step).await? {
                    return Ok(None);
                },
                batch = batches.recv() => match batch {
                    Some(batch) => self.send(&ToDestination::Runs(batch)).await?,
                    None => break,
                },
                // Registering may take long, and the destination must not take us for dead.
                () = tokio::time::sleep(ALIVE_EVERY) => self.send(&ToDestination::Ping(0)).await?,
            }
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

    /// Begins to follow writes, unless they are followed already. With direct I/O under way a page may change after it was looked at
    /// and before the device is done, so the guest is stopped and its I/O drained for the moment (hazard: direct I/O in flight).
    pub(super) async fn arm(&mut self) -> Result<(), Stop> {
        let memory = self.memory()?.clone();
        if memory.is_armed() {
            return Ok(());
        }
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
        let result = self.meanwhile_alive(tokio::task::spawn_blocking(work)).await;
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
