//! Messages about pages, which mean the same in every phase that lacks pages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::timeout;

use super::error::{DestinationError, PagesLost, RegionsError};
use super::huge_pages;
use super::page_queue::NamedPages;
use super::remote_memory::RemoteMemory;
use super::session::{Control, End, Event, Session};
use super::verify::SourceHashes;
use crate::proto::message::{Regions, ToDestination, ToSource, WireRun};
use vmove_types::problem::chain;
use vmove_types::time::Mono;

/// How often the source hears from us while memory is registered.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);

impl Session {
    /// Deals with what means the same in every phase that lacks pages; gives back what is the phase's own business.
    pub(super) async fn common_event(
        &mut self,
        event: Event,
        control: &mut Control,
    ) -> Result<Option<Event>, End> {
        match event {
            Event::Message(message) => {
                return Ok(self.common_message(message, control).await?.map(Event::Message));
            }
            Event::PagesLost(lost) => self.pages_lost(&lost, control).await?,
            Event::PagesFailed(error) => return Err(error.into()),
            Event::DeviceState(_) => tracing::warn!("a connection for device state that nobody waits for"),
            Event::Frames(_) => tracing::warn!("a connection for frames while there is no QEMU to have them"),
            Event::PageConnection | Event::NothingLeft | Event::Tick => return Ok(Some(event)),
        }
        Ok(None)
    }

    /// Deals with what changes nothing of the round that is being read; the rest waits for its end.
    pub(super) async fn hear_meanwhile(
        &mut self,
        message: ToDestination,
        control: &mut Control,
    ) -> Result<(), End> {
        match message {
            message @ (ToDestination::Ping(_) | ToDestination::HostCpu(_)) => {
                self.common_message(message, control).await.map(drop)
            }
            other => {
                control.put_back(other);
                Ok(())
            }
        }
    }

    async fn common_message(
        &mut self,
        message: ToDestination,
        control: &mut Control,
    ) -> Result<Option<ToDestination>, End> {
        tracing::trace!(name = message.name(), "message");
        match message {
            ToDestination::Ping(token) => control.send(&ToSource::Pong { token, now: Mono::now() }).await?,
            ToDestination::Regions(regions) => self.regions(regions, control).await?,
            ToDestination::HostCpu(used) => {
                self.files.memory.cpu.peer_has_used(used.used_ns, used.processors);
            }
            // Of page connections that are no more: named again when there are others.
            ToDestination::Runs(_) | ToDestination::RoundEnd(_) | ToDestination::FinalEnd
                if self.pages.is_renewing() => {}
            ToDestination::Runs(runs) => self.runs(&runs)?,
            ToDestination::FinalEnd if self.files.memory.is_serving() => {
                if let Some(fill) = self.pages.fill() {
                    fill.all_named.store(true, Ordering::Release);
                }
            }
            other => return Ok(Some(other)),
        }
        Ok(None)
    }

    fn runs(&self, runs: &[WireRun]) -> Result<(), End> {
        let memory = &self.files.memory;
        let Some(fill) = self.pages.fill() else {
            if memory.is_serving() && memory.left() == 0 {
                // Every page was fetched before the source had named them all.
                return Ok(());
            }
            return Err(self.out_of_order("Runs before the page connections"));
        };
        let mut named = Vec::with_capacity(runs.len());
        for run in runs {
            let block = usize::from(run.block);
            let pages = memory.blocks.get(block).and_then(|b| run.range(b.pages()));
            let pages = pages.ok_or(DestinationError::PagesOutside {
                block: run.block,
                start: run.start,
                end: run.start.saturating_add(run.len),
            })?;
            named.push(NamedPages { block, pages, zero: run.zero });
        }
        fill.queue.push(named);
        Ok(())
    }

    /// Page connections failed; the session goes on over others, which the source opens.
    async fn pages_lost(&mut self, lost: &PagesLost, control: &mut Control) -> Result<(), End> {
        // Of threads that have not noticed yet, or have noticed too.
        if self.pages.is_renewing() {
            return Ok(());
        }
        // Other connections would bring no page into a file that is too short.
        for block in &self.files.memory.blocks {
            let whole = block.file.check_whole().and_then(|()| block.mapping().check_whole());
            whole.map_err(|source| End::Failed(block.file_error(source).into()))?;
        }
        let (why, same_fabric) = (huge_pages::told(self, lost, chain(lost)), lost.same_fabric());
        tracing::warn!(why, same_fabric, "page connections lost; asking for others");
        self.pages.renew();
        control.send(&ToSource::PagesLost { why, same_fabric }).await?;
        Ok(())
    }

    /// The source says where its memory can be read.
    async fn regions(&mut self, regions: Regions, control: &mut Control) -> Result<(), End> {
        if regions.blocks.len() != self.files.memory.blocks.len() {
            return Err(self.out_of_order("Regions for another number of RAM blocks"));
        }
        if regions.update && self.pages.is_renewing() {
            return Ok(()); // of the connections that are no more
        }
        let memory = Arc::clone(&self.files.memory);
        let remote = match (regions.update, self.pages.fill()) {
            (true, Some(fill)) => Arc::clone(&fill.remote),
            (true, None) => return Err(self.out_of_order("Regions without page connections")),
            (false, _) => Arc::new(RemoteMemory::new(&memory, regions.fabric)),
        };
        self.pages.renewed();
        let kind = regions.fabric.to_string();
        self.publisher.update(|p| p.fabric = Some(kind));
        let Some(fabric) =
            self.node.config.dialer.fabric(regions.fabric, self.journal.record().prepare.token)
        else {
            return self.pages_lost(&PagesLost::NotOpen(regions.fabric), control).await;
        };
        let (update, taken) = (regions.update, Arc::clone(&remote));
        let mut work =
            vmove_node::blocking::spawn_blocking(move || taken.update(&memory, &*fabric, &regions));
        // It may take seconds for a large guest, and the source must not take us for dead.
        let done = loop {
            match timeout(KEEPALIVE_INTERVAL, &mut work).await {
                Ok(done) => break done.unwrap_or_else(|error| Err(RegionsError::Task(error))),
                Err(_) => self.tell_progress(control).await?,
            }
        };
        // What the source has said in these seconds waits to be read.
        control.count_silence_anew();
        if let Err(error) = done {
            return self.pages_lost(&error.into(), control).await;
        }
        if !update {
            self.pages.set_remote(remote);
        }
        Ok(())
    }
}

/// What a phase makes of the messages of `--verify`; gives back others.
pub(super) fn take_hashes(hashes: &mut SourceHashes, message: ToDestination) -> Option<ToDestination> {
    match message {
        ToDestination::Hashes(some) => hashes.add(some),
        ToDestination::HashesEnd => hashes.end(),
        other => return Some(other),
    }
    None
}
