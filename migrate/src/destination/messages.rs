//! What each message of the source does.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use vmove_memory::PageRun;

use super::fill::FillEvent;
use super::reach::Reach;
use super::session::{End, OpenRound, Session, TICK};
use super::work::Work;
use crate::clock::Mono;
use crate::ownership::DestinationState;
use crate::pending::PageSet;
use crate::progress::{Outcome, Phase};
use crate::proto::channel::Channel;
use crate::proto::message::{
    DestinationStand, Final, Regions, RoundDone, SourceStand, ToDestination, ToSource, WireRun,
};

/// How often the source hears from us while memory is registered.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

impl Session {
    pub(super) async fn message(
        &mut self,
        message: ToDestination,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        let name = message.name();
        tracing::trace!(session = %self.id, name, "message");
        match message {
            ToDestination::Ping(token) => channel.send(&ToSource::Pong { token, now: Mono::now() }).await?,
            ToDestination::Regions(regions) => {
                self.regions(regions, channel).await?;
            }
            // Of page connections that are no more: named again when there are others.
            ToDestination::Runs(_) | ToDestination::RoundEnd(_) | ToDestination::FinalEnd
                if self.renewing => {}
            ToDestination::Round(number) if !self.room.memory.is_serving() => self.begin_round(number),
            ToDestination::Runs(runs) => self.runs(&runs)?,
            ToDestination::RoundEnd(number) if self.round.as_ref().is_some_and(|r| r.number == number) => {
                self.end_round(channel).await?;
            }
            ToDestination::Stopped(last) if !self.room.memory.is_serving() => {
                self.stopped(&last)?;
                // The device state may have been loaded already.
                self.whole(channel).await?;
            }
            ToDestination::FinalEnd if self.room.memory.is_serving() => {
                if let Some(fill) = self.attempt.fill() {
                    fill.all_named.store(true, std::sync::atomic::Ordering::Release);
                }
            }
            ToDestination::Commit if self.told_loaded => self.commit(channel).await?,
            ToDestination::Abort(why) => return Err(self.source_keeps_the_guest(why)),
            ToDestination::Hashes(hashes) => self.source_hashes.push(hashes),
            ToDestination::HashesEnd => {
                self.all_hashes = true;
                self.whole(channel).await?;
            }
            ToDestination::Released if self.told_complete => return Err(End::Done),
            ToDestination::Resume(stand) => self.resumed_by(stand, channel).await?,
            _ => return Err(self.out_of_order(name)),
        }
        Ok(())
    }

    pub(super) fn out_of_order(&self, what: &str) -> End {
        End::Failed(format!("Protocol violation: {what} in state {:?}", self.state()))
    }

    fn source_keeps_the_guest(&mut self, why: String) -> End {
        match self.state() {
            DestinationState::Filling | DestinationState::Loaded => End::Aborted(why),
            state => End::Failed(format!("Protocol violation: Abort in state {state:?}: the guest is ours")),
        }
    }

    /// The source has dialled again and says where it stands.
    async fn resumed_by(
        &mut self,
        stand: SourceStand,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        if self.state() == DestinationState::Loaded {
            self.qemu_lives(channel).await?;
        }
        let ours = match self.state() {
            DestinationState::Loaded => DestinationStand::Loaded,
            DestinationState::Owner => DestinationStand::Owner,
            DestinationState::Complete => DestinationStand::Complete,
            DestinationState::Filling | DestinationState::Gone => DestinationStand::Gone,
        };
        channel.send(&ToSource::Resume(ours)).await?;
        self.source_hashes.clear();
        self.all_hashes = false;
        self.publisher.update(|p| p.outcome = Outcome::Running);
        match stand {
            SourceStand::Aborted => Err(self.source_keeps_the_guest("the source keeps the guest".to_owned())),
            SourceStand::Committed if ours == DestinationStand::Loaded => self.commit(channel).await,
            SourceStand::Committed => {
                self.told_complete = false;
                Ok(())
            }
        }
    }

    fn begin_round(&mut self, number: u32) {
        self.publisher.enter(Phase::Rounds);
        self.publisher.update(|p| p.round = number);
        let landed_before = self.attempt.counted(&self.room.memory).landed_bytes;
        self.round = Some(OpenRound { number, began: Instant::now(), landed_before });
    }

    fn runs(&mut self, runs: &[WireRun]) -> Result<(), End> {
        let Some(fill) = self.attempt.fill() else {
            return Err(self.out_of_order("Runs before the page connections"));
        };
        let blocks = &self.room.memory.blocks;
        let mut work = Vec::with_capacity(runs.len());
        for run in runs {
            let block = usize::from(run.block);
            let pages = blocks.get(block).and_then(|b| run.range(b.pages()));
            let pages = pages.ok_or_else(|| {
                End::Failed(format!("Protocol violation: {run:?} lies outside the guest's memory"))
            })?;
            work.push(Work { block, pages, zero: run.zero });
        }
        fill.queue.push(work);
        Ok(())
    }

    async fn end_round(&mut self, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        let Some(fill) = self.attempt.fill().cloned() else {
            return Err(self.out_of_order("RoundEnd before the page connections"));
        };
        // Reads are under way; a dead connection shows as a fill event, a dead peer as silence on its socket.
        loop {
            tokio::select! {
                () = fill.queue.idle() => break,
                Some(event) = self.fill_events.recv() => self.fill_event(event, channel).await?,
                // A round may take long, and nobody else says that we live.
                () = tokio::time::sleep(TICK) => {
                    let counted = self.attempt.counted(&self.room.memory);
                    self.publisher.landed(counted.landed_bytes, counted.wire_bytes, None);
                    channel.send(&ToSource::Progress(counted)).await?;
                }
            }
            if self.renewing {
                return Ok(());
            }
        }
        let Some(round) = self.round.take() else { return Ok(()) };
        let bytes = self.attempt.counted(&self.room.memory).landed_bytes.saturating_sub(round.landed_before);
        let micros = u64::try_from(round.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        channel.send(&ToSource::RoundDone(RoundDone { round: round.number, bytes, micros })).await?;
        Ok(())
    }

    /// The guest has stopped at the source. From here on the page tables say exactly what is missing.
    fn stopped(&mut self, last: &Final) -> Result<(), End> {
        let memory = &self.room.memory;
        if last.sets.len() != memory.blocks.len() || self.launching.is_some() {
            return Err(self.out_of_order("Stopped"));
        }
        for (block, wire) in memory.blocks.iter().zip(&last.sets) {
            let set = PageSet::decode(wire, block.pages())
                .map_err(|e| End::Failed(format!("Protocol violation: {e}")))?;
            for run in set.runs() {
                // Absent pages stay so: their bytes here are known to be zero.
                let run = PageRun::new(vmove_memory::PageIndex(run.start), run.end - run.start);
                mark_old(&block.table, run);
            }
        }
        // QEMU may have written where it had touched; what came there is fetched again.
        for (block, run) in std::mem::take(&mut self.touched) {
            memory.blocks[block].table.mark_stale(run);
        }
        let mode = last.mode;
        self.journal
            .update(|r| {
                r.final_applied = true;
                r.mode = Some(mode);
            })
            .map_err(|e| End::Failed(format!("Could not write the journal: {e}")))?;
        self.whole_first = last.mode == crate::spec::Mode::Precopy;
        self.publisher.enter(Phase::Switchover);
        memory.begin_serving();
        if let Some(fill) = self.attempt.fill() {
            fill.queue.wake();
        }
        let page = memory.blocks.first().map_or(4096, |b| b.page_size.bytes());
        let left = memory.left() * page;
        self.publisher.update(|p| p.bytes_total = p.bytes_total.max(left));
        Ok(())
    }

    /// Page connections failed; the session goes on over others, which the source opens.
    async fn pages_lost(
        &mut self,
        why: String,
        same_fabric: bool,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        // Of threads that have not noticed yet, or have noticed too.
        if self.renewing {
            return Ok(());
        }
        tracing::warn!(session = %self.id, why, same_fabric, "page connections lost; asking for others");
        self.attempt.end();
        while self.fill_events.try_recv().is_ok() {}
        self.round = None;
        self.renewing = true;
        channel.send(&ToSource::PagesLost { why, same_fabric }).await?;
        Ok(())
    }

    /// The source says where its memory can be read.
    async fn regions(&mut self, regions: Regions, channel: &mut Channel<ToDestination>) -> Result<(), End> {
        if regions.blocks.len() != self.room.memory.blocks.len() {
            return Err(self.out_of_order("Regions for another number of RAM blocks"));
        }
        if regions.update && self.renewing {
            return Ok(()); // of the connections that are no more
        }
        let memory = Arc::clone(&self.room.memory);
        let reach = match (regions.update, self.attempt.fill()) {
            (true, Some(fill)) => Arc::clone(&fill.reach),
            (true, None) => return Err(self.out_of_order("Regions without page connections")),
            (false, _) => Arc::new(Reach::new(&memory, regions.fabric)),
        };
        self.renewing = false;
        let kind = regions.fabric.to_string();
        self.publisher.update(|p| p.fabric = Some(kind));
        let Some(fabric) = self.node.config.dialer.fabric(regions.fabric) else {
            let why = format!("{} is not open at the destination (any more)", regions.fabric);
            return self.pages_lost(why, false, channel).await;
        };
        let (update, taken) = (regions.update, Arc::clone(&reach));
        let mut work = tokio::task::spawn_blocking(move || taken.update(&memory, &*fabric, &regions));
        // It may take seconds for a large guest, and the source must not take us for dead.
        let done = loop {
            match timeout(ALIVE_EVERY, &mut work).await {
                Ok(done) => break done.unwrap_or_else(|error| Err(error.to_string())),
                Err(_) => {
                    let counted = self.attempt.counted(&self.room.memory);
                    channel.send(&ToSource::Progress(counted)).await?;
                }
            }
        };
        if let Err(why) = done {
            return self.pages_lost(format!("at the destination: {why}"), false, channel).await;
        }
        if !update {
            self.attempt.set_reach(reach);
        }
        self.start_attempt()
    }

    pub(super) async fn fill_event(
        &mut self,
        event: FillEvent,
        channel: &mut Channel<ToDestination>,
    ) -> Result<(), End> {
        if self.told_complete {
            // From threads that have ended: nothing is missing any more.
            return Ok(());
        }
        match event {
            FillEvent::Broken { why, same_fabric } => self.pages_lost(why, same_fabric, channel).await,
            FillEvent::Gone(why) => Err(End::Failed(why)),
            FillEvent::NothingLeft => self.whole(channel).await,
        }
    }
}

/// A page that the final set names: what is here is old. Pages that never came stay `Absent`, whose bytes are zero.
fn mark_old(table: &vmove_memory::PageTable, run: PageRun) {
    let mut rest = run;
    while !rest.is_empty() {
        let blank = table.prefix(rest, |s| s == vmove_memory::PageState::Absent);
        let after = PageRun::new(blank.end(), rest.len - blank.len);
        let old = table.prefix(after, |s| s != vmove_memory::PageState::Absent);
        table.mark_stale(old);
        rest = PageRun::new(old.end(), after.len - old.len);
    }
}
