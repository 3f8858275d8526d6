//! Memory is sent ahead while the guest has its devices, so that it is without them for a shorter time.
//!
//! What a device writes is seen by no tracker, so nothing that crosses meanwhile counts as sent. When the devices have left, the first round names all memory
//! again that the guest's processors have not written since, and the destination fetches only what is different from what it has, by fingerprints (see
//! `Endpoint::post_read_changed`). The guest's own writes are followed from before the first page crosses, and cross in the rounds behind that.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use vmove_fabric::FabricKind;
use vmove_types::progress::Phase;
use vmove_types::report::{HeadStartStats, RoundStats};
use vmove_types::spec::{HeadStart, Mode};
use vmove_types::time::ms;

use super::error::{SourceError, Stop};
use super::page_service::while_alive;
use super::sample::Until;
use super::session::Session;
use super::warm::Warm;
use crate::plan::{self, Next};
use vmove_node::blocking::spawn_blocking;

impl Warm {
    /// Sends memory ahead, if the guest owns devices and is without them for a shorter time then.
    pub(super) async fn head_start(&mut self, session: &mut Session) -> Result<(), Stop> {
        if session.vm().devices.is_empty() {
            return Ok(());
        }
        if let Some(why) = self.impossible(session) {
            session.report.head_start = Some(HeadStartStats { reason: why, ..HeadStartStats::default() });
            return Ok(());
        }
        session.publisher.enter(Phase::HeadStart);
        let begun = Instant::now();
        let (made, reason) = self.send_ahead(session).await?;
        // All that has crossed may have been written by a device since.
        if made {
            self.compare_next = true;
        } else {
            self.pages.memory.name_all_again();
        }
        let rounds = std::mem::take(&mut session.report.rounds);
        session.report.head_start = Some(HeadStartStats {
            made,
            reason,
            rounds: u32::try_from(rounds.len()).unwrap_or(u32::MAX),
            sent_bytes: self.link_rate.bytes(),
            duration_ms: ms(begun.elapsed()),
            ..HeadStartStats::default()
        });
        Ok(())
    }

    /// Why memory cannot be sent ahead.
    fn impossible(&self, session: &Session) -> Option<String> {
        let spec = session.spec();
        let why = if spec.head_start == HeadStart::Never {
            "not asked for (--head-start never)"
        } else if spec.mode.fixed() == Some(Mode::Postcopy) {
            "post-copy sends no memory before the guest is stopped"
        } else if self.pages.fabric() != FabricKind::Tcp {
            "this fabric cannot compare memory on both sides; tcp can"
        } else if !session.node.config.vmm.can_follow_writes() {
            "the kernel cannot follow the guest's writes"
        } else {
            return None;
        };
        Some(why.to_owned())
    }

    /// Whether all memory was sent, and why or why not.
    async fn send_ahead(&mut self, session: &mut Session) -> Result<(bool, String), Stop> {
        // `auto` chooses later: a job that is at rest by then writes less.
        let mut link = self.sample(session, Until::LinkIsKnown).await?.link.bytes_per_s;
        let compared = self.compared_per_s().await?;
        let (pays, why) = plan::head_start(link, compared);
        if !pays && session.spec().head_start == HeadStart::Auto {
            return Ok((false, why));
        }
        while let Next::Round = plan::next(Mode::Hybrid, 0.0, self.next_round(session, &mut link).await?) {}
        Ok((true, why))
    }

    /// How much memory is compared in a second, by all bulk connections together: what one thread takes for a part of it here. The other side computes the
    /// same fingerprints at the same time.
    async fn compared_per_s(&mut self) -> Result<f64, Stop> {
        let memory = Arc::clone(&self.pages.memory);
        let hashing = spawn_blocking(move || {
            let begun = Instant::now();
            memory.hash_some().map(|bytes| (bytes, begun.elapsed()))
        });
        let hashed = while_alive(&mut self.control, hashing).await?;
        let (bytes, took) = hashed.map_err(SourceError::memory("look at what the guest holds"))?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(usize::from(self.pages.bulk_connections()));
        Ok(bytes as f64 / took.max(Duration::from_micros(1)).as_secs_f64() * threads as f64)
    }
}

/// The round that compares, for the report.
pub(super) fn note_compared(session: &mut Session, round: &RoundStats, page_bytes: u64, changed_bytes: u64) {
    if let Some(stats) = &mut session.report.head_start {
        stats.compared_bytes = (round.pages - round.zero) * page_bytes;
        stats.changed_bytes = changed_bytes;
        stats.compare_ms = round.duration_ms;
    }
}
