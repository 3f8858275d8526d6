//! What is heard over the control connection, and what is done meanwhile, in every phase.

use super::control::Control;
use super::error::SourceError;
use super::final_pages::FinalPages;
use super::gate::Place;
use super::page_service::PageService;
use super::session::Session;
use crate::ownership::SourceState;
use crate::proto::message::{Counted, ToDestination, ToSource};
use vmove_node::peer::codec::CodecError;
use vmove_types::progress::Phase;

/// What of the guest's memory the destination reads meanwhile.
#[derive(Debug)]
pub(super) enum Serving<'a> {
    /// Nothing (any more).
    Nothing,
    /// What rounds name.
    Rounds(&'a mut PageService),
    /// The rest of the stopped guest's memory.
    Final(&'a mut PageService, &'a mut FinalPages),
}

/// What the phase must know of.
#[derive(Debug)]
pub(super) enum Heard {
    Message(ToSource),
    /// Page connections were lost and opened anew: what a round had named is to be named again.
    PagesRenewed,
}

/// What was waited for, or what was heard before that.
#[derive(Debug)]
pub(super) enum Until<T> {
    Heard(Heard),
    Over(T),
}

/// What was told, or is to be done meanwhile.
enum Next {
    Message(ToSource),
    /// A step of registering; nothing at its end.
    Registered(Option<Place>),
    /// What the destination is to be told of the final pages.
    Tell(ToDestination),
    Ping,
}

impl Session {
    /// The next message that the caller must know of. Meanwhile: keeps the peer informed and informs the operator, passes on pages of
    /// the final set and hashes. Cancel-safe up to the sending of a message.
    pub(super) async fn next(
        &mut self,
        control: &mut Control,
        serving: Serving<'_>,
    ) -> Result<Heard, SourceError> {
        match self.next_until(control, serving, std::future::pending::<()>()).await? {
            Until::Heard(heard) => Ok(heard),
            Until::Over(()) => unreachable!("it never ends"),
        }
    }

    /// The same until something has come to its end, which is never looked at in the middle of a message.
    pub(super) async fn next_until<T>(
        &mut self,
        control: &mut Control,
        mut serving: Serving<'_>,
        end: impl Future<Output = T>,
    ) -> Result<Until<T>, SourceError> {
        tokio::pin!(end);
        loop {
            let next = tokio::select! {
                biased;
                over = &mut end => return Ok(Until::Over(over)),
                message = control.messages.next() => Next::Message(message?),
                next = serving.next() => next,
                () = control.pings.next() => Next::Ping,
            };
            match next {
                Next::Message(message) => {
                    if let Some(heard) = self.message(message, control, &mut serving).await? {
                        return Ok(Until::Heard(heard));
                    }
                }
                Next::Registered(step) => {
                    if let Some(pages) = serving.pages()
                        && pages.registered(step, self, control).await?
                        && serving.is_round()
                    {
                        return Ok(Until::Heard(Heard::PagesRenewed));
                    }
                }
                Next::Tell(message) => {
                    if let Serving::Final(pages, last) = &mut serving
                        && let Some(named) = last.take_named()
                    {
                        self.report.pages_zero = named.zero;
                        let content = named.content() * pages.memory.page_bytes();
                        self.publisher.coming(|coming| coming.at_most(content));
                    }
                    control.send(&message).await?;
                }
                Next::Ping => {
                    control.look_at_silence()?;
                    self.ask_clock(control).await?;
                }
            }
        }
    }

    async fn message(
        &mut self,
        message: ToSource,
        control: &mut Control,
        serving: &mut Serving<'_>,
    ) -> Result<Option<Heard>, SourceError> {
        match message {
            ToSource::Progress(counted) => {
                self.progress(counted, serving);
                if let Some(pages) = serving.pages() {
                    pages.tell_host_cpu(control).await?;
                }
            }
            ToSource::Arrived(arrived) => {
                if !arrived.disks.is_empty() {
                    self.publisher.enter(Phase::DisksAfter);
                    self.memory_is_there();
                }
                self.publisher.update(|p| {
                    (p.arrived, p.faults) = (arrived.blocks, arrived.faults);
                    if !arrived.disks.is_empty() {
                        p.disks = arrived.disks;
                    }
                });
            }
            ToSource::Pong { token, now } => {
                if self.clock.answered(token, now) {
                    self.ask_clock(control).await?;
                }
            }
            ToSource::PagesLost { why, same_fabric } => {
                return self.renew_pages(why, same_fabric, control, serving).await;
            }
            other => return Ok(Some(Heard::Message(other))),
        }
        Ok(None)
    }

    /// The destination has lost its page connections: opens others, and names again what it may lack.
    async fn renew_pages(
        &mut self,
        why: String,
        same_fabric: bool,
        control: &mut Control,
        serving: &mut Serving<'_>,
    ) -> Result<Option<Heard>, SourceError> {
        match serving {
            Serving::Nothing => Err(SourceError::OutOfOrder {
                to: self.to().clone(),
                message: "PagesLost without page connections",
                state: self.state(),
            }),
            Serving::Rounds(pages) => {
                pages.renew(why, same_fabric, self, control).await?;
                Ok(Some(Heard::PagesRenewed))
            }
            Serving::Final(pages, last) => {
                last.stop_naming();
                pages.renew(why, same_fabric, self, control).await?;
                last.name(pages);
                Ok(None)
            }
        }
    }

    /// Disks follow, which they do when every page is there. Written down for a life of the daemon after this one: QEMU here may be gone by then, and
    /// with it the guest's memory.
    fn memory_is_there(&mut self) {
        if !self.journal.record().memory_is_there {
            self.write_owing(|r| r.memory_is_there = true);
        }
    }

    fn progress(&mut self, counted: Counted, serving: &mut Serving<'_>) {
        self.counted = counted;
        let missing = match serving {
            Serving::Final(pages, _) => {
                pages_missing(counted, self.state()).map(|left| left * pages.memory.page_bytes())
            }
            Serving::Rounds(_) | Serving::Nothing => None,
        };
        self.publisher.landed(counted.landed_bytes, counted.wire_bytes, missing);
    }

    /// Keeps the session alive, and measures how far the destination's clock is from ours.
    pub(super) async fn ask_clock(&mut self, control: &mut Control) -> Result<(), CodecError> {
        let ping = ToDestination::Ping(self.clock.ask());
        control.send(&ping).await
    }
}

impl Serving<'_> {
    /// The same, for another look.
    pub(super) fn again(&mut self) -> Serving<'_> {
        match self {
            Self::Nothing => Serving::Nothing,
            Self::Rounds(pages) => Serving::Rounds(pages),
            Self::Final(pages, last) => Serving::Final(pages, last),
        }
    }

    /// Never ends if there is nothing to do. Cancel-safe.
    async fn next(&mut self) -> Next {
        match self {
            Self::Nothing => std::future::pending().await,
            Self::Rounds(pages) => Next::Registered(pages.next_step().await),
            Self::Final(pages, last) => tokio::select! {
                biased;
                message = last.next() => Next::Tell(message),
                step = pages.next_step() => Next::Registered(step),
            },
        }
    }

    fn pages(&mut self) -> Option<&mut PageService> {
        match self {
            Self::Nothing => None,
            Self::Rounds(pages) | Self::Final(pages, _) => Some(pages),
        }
    }

    const fn is_round(&self) -> bool {
        matches!(self, Self::Rounds(_))
    }
}

/// What the destination lacks, once the final set is applied there. Before, it says 0; so 0 counts only from the commit on.
fn pages_missing(counted: Counted, state: SourceState) -> Option<u64> {
    Some(counted.pages_left).filter(|left| *left > 0 || state == SourceState::Committed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_that_has_not_counted_yet_does_not_have_everything() {
        let missing = |pages_left, state| pages_missing(Counted { pages_left, ..Counted::default() }, state);
        assert_eq!(missing(0, SourceState::Stopped), None, "the final set is not applied yet");
        assert_eq!(missing(7, SourceState::Stopped), Some(7));
        assert_eq!(missing(0, SourceState::Committed), Some(0), "all pages are there");
    }
}
