//! Pre-copy rounds: scan, name what is dirty, let the destination read it, again while it pays.

use std::sync::Arc;

use tokio::time::Instant;

use super::classify::Classified;
use super::conversation::Heard;
use super::error::{SourceError, Stop};
use super::head_start::note_compared;
use super::memory::Scan;
use super::page_service::{KEEPALIVE_INTERVAL, while_alive};
use super::sample::{Until, max_downtime_ms, stops_at_once};
use super::session::Session;
use super::warm::Warm;
use crate::pending::PageSet;
use crate::plan::{self, Next, Standing};
use crate::proto::message::{RoundBegun, RoundDone, ToDestination, ToSource};
use vmove_node::blocking::spawn_blocking;
use vmove_types::progress::Phase;
use vmove_types::report::RoundStats;
use vmove_types::spec::Mode;
use vmove_types::time::ms;
use vmove_types::vm::Running;

impl Warm {
    /// Decides the mode if that was left open, and runs the rounds of `precopy` and `hybrid`.
    pub(super) async fn rounds(&mut self, session: &mut Session) -> Result<(), Stop> {
        let (mut sample, mut link) = (None, 0.0);
        // What was sent ahead counts from here on; and how busy the guest is without its devices is known.
        let mut standing = if self.compare_next {
            session.publisher.enter(Phase::Rounds);
            Some(self.next_round(session, &mut link).await?)
        } else {
            None
        };
        match (session.spec().mode.fixed(), &standing) {
            (Some(_), _) => "requested".clone_into(&mut session.report.mode_reason),
            // Called again when the destination was slower than the rounds: the choice stands.
            (None, _) if !session.report.mode_reason.is_empty() => {}
            (None, Some(standing)) => self.choose_by(standing, session),
            (None, None) => sample = self.choose_mode(session).await?,
        }
        let name = session.mode.to_string();
        session.report.mode.clone_from(&name);
        session.publisher.update(|p| p.mode = Some(name));
        if session.mode == Mode::Postcopy {
            return Ok(());
        }
        session.publisher.enter(Phase::Rounds);
        self.arm(session).await?;
        if session.mode == Mode::Precopy && session.report.rounds.is_empty() {
            sample = Some(self.sample(session, Until::GuestMayStop).await?);
        }
        if let Some(why) = sample.as_ref().and_then(|sample| stops_at_once(session, sample)) {
            session.report.rounds_reason = why;
            return self.wait_prepared(session).await;
        }
        link = sample.map_or(link, |sample| sample.link.bytes_per_s);
        loop {
            let standing = match standing.take() {
                Some(standing) => standing,
                None => self.next_round(session, &mut link).await?,
            };
            let in_pause_ms = max_downtime_ms(session);
            match plan::next(session.mode, in_pause_ms, standing) {
                Next::Round if let Some(why) = session.out_of_time(standing, in_pause_ms) => {
                    session.report.rounds_reason = why;
                    return Ok(());
                }
                Next::Round => {
                    let warning = plan::not_converging(in_pause_ms, standing);
                    session.publisher.update(|p| p.warning = warning);
                }
                Next::Stop(why) => {
                    session.report.rounds_reason = why;
                    return Ok(());
                }
                Next::GiveUp(why) => {
                    let vm = session.vm().name.clone();
                    return Err(SourceError::NotConverging { vm, why }.into());
                }
            }
        }
    }

    /// A round of all that is pending, and the scan behind it; after a head start, of all that is not, to be compared: what the guest has written since
    /// would differ, and comes in the next one. `link`: page payload per second as far as is known.
    pub(super) async fn next_round(
        &mut self,
        session: &mut Session,
        link: &mut f64,
    ) -> Result<Standing, Stop> {
        let compares = self.compare_next;
        if compares {
            // What the guest wrote while it let its devices go would differ.
            self.scan(session).await?;
        }
        let memory = &self.pages.memory;
        let pending = memory.pending_pages();
        let sets = if compares { memory.not_pending() } else { memory.take_pending() };
        let compared = if compares { sets.iter().map(PageSet::count).sum() } else { 0 };
        let number = u32::try_from(session.report.rounds.len() + 1).unwrap_or(u32::MAX);
        let (done, named) = self.round(number, pending + compared, sets, session).await?;
        // Of the pages, not of what crossed: the next round's parts that are zero or unchanged will not cross either.
        let dealt_with = named * self.pages.memory.page_bytes();
        if compares {
            *link = self.link_rate.measured().unwrap_or(*link);
        } else if done.micros > 0 && dealt_with > 1 << 20 {
            *link = dealt_with as f64 / done.micros as f64 * 1e6;
        }
        let scan = self.scan(session).await?;
        session.publisher.update(|p| p.dirty_pages_per_s = scan.dirty_per_s());
        if let Some(last) = session.report.rounds.last_mut() {
            last.scan_us = scan.took.as_secs_f64() * 1e6;
            last.dirty_pages_per_s = scan.dirty_per_s();
        }
        Ok(Standing {
            rounds: u32::try_from(session.report.rounds.len()).unwrap_or(u32::MAX),
            last_bytes: if compares { dealt_with } else { done.bytes },
            left_bytes: scan.pending_pages * self.pages.memory.page_bytes(),
            link_bytes_per_s: if *link > 0.0 { *link } else { self.known_link(session) },
        })
    }

    /// Page payload per second, of a link on which too little has crossed to measure it.
    fn known_link(&self, session: &Session) -> f64 {
        let remembered = session.node.past.link(&session.to().name, &session.report.fabric);
        self.link_rate.link(session.spec().bandwidth, remembered.as_ref()).bytes_per_s
    }

    /// Whether rounds could still shrink what is left, after those that the destination was too slow for.
    pub(super) fn rounds_would_pay(&self, session: &Session) -> bool {
        let page = self.pages.memory.page_bytes() as f64;
        match (session.mode, session.report.rounds.last()) {
            (Mode::Postcopy, _) => false,
            // A goal has ended the rounds: what is left follows the guest.
            (Mode::Hybrid, _) if session.hurried => false,
            (Mode::Hybrid, Some(last)) => {
                let link = (last.pages - last.zero) as f64 * page / (last.duration_ms.max(0.1) / 1e3);
                plan::could_shrink(last.dirty_pages_per_s * page, link)
            }
            (Mode::Precopy | Mode::Hybrid, _) => true,
        }
    }

    /// One round, or a part of it: returns what the destination read, and how many pages were named that hold something. `planned`: at most so many
    /// pages cross with it and after it, as far as is known.
    pub(super) async fn round(
        &mut self,
        number: u32,
        planned: u64,
        sets: Vec<PageSet>,
        session: &mut Session,
    ) -> Result<(RoundDone, u64), Stop> {
        let begun = Instant::now();
        let page = self.pages.memory.page_bytes();
        session.publisher.update(|p| p.round = number);
        self.pages.refresh_regions(session, &mut self.control).await?;
        let sets = Arc::new(sets);
        let compare = self.compare_next;
        let (named, done) = loop {
            session.publisher.coming(|coming| coming.part(planned * page));
            let round = RoundBegun { number, compare, bytes: planned * page };
            if let Some(done) = self.try_round(round, Arc::clone(&sets), session).await? {
                break done;
            }
        };
        let (pages, zero, duration_ms) = (named.pages, named.zero, ms(begun.elapsed()));
        let stats = RoundStats { pages, zero, duration_ms, ..RoundStats::default() };
        session.report.rounds.push(stats);
        if std::mem::take(&mut self.compare_next) {
            note_compared(session, &stats, page, done.bytes);
        } else {
            self.link_rate.add(&done);
            // What a share of the processors has made of the link says nothing about it.
            session.report.link_bytes_per_s =
                self.link_rate.to_remember(session.spec().bandwidth).filter(|_| !session.cpu.is_shared());
        }
        Ok((done, named.content()))
    }

    /// `None`: page connections were lost and opened anew meanwhile, so nobody knows what has landed.
    async fn try_round(
        &mut self,
        round: RoundBegun,
        sets: Arc<Vec<PageSet>>,
        session: &mut Session,
    ) -> Result<Option<(Classified, RoundDone)>, Stop> {
        let number = round.number;
        self.control.send(&ToDestination::Round(round)).await?;
        let (mut batches, task) = self.pages.memory.name_pages(sets, Arc::clone(&self.pages.gate));
        loop {
            tokio::select! {
                biased;
                step = self.pages.next_step() => {
                    if self.pages.registered(step, session, &mut self.control).await? {
                        return Ok(None);
                    }
                }
                batch = batches.recv() => match batch {
                    Some(batch) => {
                        self.pages.tell_host_cpu(&mut self.control).await?;
                        self.control.send(&ToDestination::Runs(batch)).await?;
                    }
                    None => break,
                },
                // Registering may take long, and the destination must not take us for dead.
                () = tokio::time::sleep(KEEPALIVE_INTERVAL) => self.control.keep_alive().await?,
            }
        }
        let named = task.await.map_err(SourceError::from)?.map_err(SourceError::from)?;
        let pending = self.pages.memory.pending_pages();
        let content = (named.content() + pending) * self.pages.memory.page_bytes();
        session.publisher.coming(|coming| coming.at_most(content));
        self.control.send(&ToDestination::RoundEnd(number)).await?;
        loop {
            match self.next(session).await? {
                Heard::Message(ToSource::RoundDone(done)) if done.round == number => {
                    return Ok(Some((named, done)));
                }
                Heard::PagesRenewed => return Ok(None),
                Heard::Message(ToSource::Prepared) => {}
                Heard::Message(other) => return Err(session.unexpected(&other)),
            }
        }
    }

    /// Begins to follow writes, unless they are followed already. With direct I/O under way a page may change after it was looked at
    /// and before the device is done, so the guest is stopped and its I/O drained for the moment (hazard: direct I/O in flight).
    pub(super) async fn arm(&mut self, session: &Session) -> Result<(), Stop> {
        let memory = Arc::clone(&self.pages.memory);
        if memory.is_armed() {
            return Ok(());
        }
        let armed = self.drained(session, move || memory.arm()).await?;
        Ok(armed.map(drop).map_err(SourceError::memory("follow the guest's writes"))?)
    }

    pub(super) async fn scan(&mut self, session: &Session) -> Result<Scan, Stop> {
        let memory = Arc::clone(&self.pages.memory);
        let scanned = self.drained(session, move || memory.scan()).await?;
        Ok(scanned.map_err(SourceError::memory("find what the guest has written"))?)
    }

    async fn drained<T: Send + 'static>(
        &mut self,
        session: &Session,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, SourceError> {
        let pause = self.direct_io && session.journal.record().was_running;
        if pause {
            self.set_running(Running::Paused).await?;
        }
        let result = while_alive(&mut self.control, spawn_blocking(work)).await;
        if pause {
            self.set_running(Running::Running).await?;
        }
        result
    }
}
