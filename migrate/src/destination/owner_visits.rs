//! What [`Owner`] does about visits: the guest came for one, or its migration becomes one; it goes home, stays, or ends.

use tokio::time::Instant;

use super::error::DestinationError;
use super::owner::Owner;
use super::session::{Control, End, Session};
use super::turning::Turning;
use crate::owed::TRY_AGAIN;
use crate::proto::message::ToSource;
use crate::turning::Turn;
use crate::visits::{Said, VisitStand};
use vmove_types::go_home::GoHome;
use vmove_types::progress::{GoingHome, VISIT};
use vmove_types::report::VisitEnd;

impl Owner {
    /// The guest is here for a visit from here on.
    pub(super) fn begin_visit(&mut self, session: &Session) {
        let record = session.journal.record();
        let going_home = GoingHome::of(&record.prepare.spec.go_home);
        session.publisher.update(|p| {
            p.mode = Some(VISIT.to_owned());
            p.going_home = going_home;
        });
        (self.visit, self.turning) = (Some(session.node.visits.listen(record.id)), None);
    }

    /// Somebody wants the migration to be a visit: the source is asked whether it can be the guest's home.
    pub(super) async fn ask_home(
        &mut self,
        go_home: GoHome,
        session: &Session,
        control: &mut Control,
    ) -> Result<(), End> {
        if self.figures.is_some() {
            session.answer_turn(Turn::Refused("all of the guest's memory has followed it".to_owned()));
            return Ok(());
        }
        control.send(&ToSource::KeepHome(go_home.clone())).await?;
        self.turning.iter_mut().for_each(|turning| turning.asks(go_home.clone()));
        Ok(())
    }

    /// The source's answer to that.
    pub(super) async fn kept_home(
        &mut self,
        refused: Option<String>,
        session: &mut Session,
        control: &mut Control,
    ) -> Result<(), End> {
        let Some(go_home) = self.turning.as_mut().and_then(Turning::answered) else {
            return Err(session.out_of_order("KeptHome"));
        };
        if let Some(why) = refused {
            session.answer_turn(Turn::Refused(why));
            return Ok(());
        }
        session.become_visit(&go_home);
        self.begin_visit(session);
        session.answer_turn(Turn::Turned);
        control.send(&ToSource::ByDemand).await?;
        Ok(())
    }

    /// The guest of a visit is not here any more.
    pub(super) const fn is_away(&self) -> bool {
        matches!(self.visit_end, Some(VisitEnd::Home | VisitEnd::Ended))
    }

    /// Looks whether QEMU has ended here while the guest was on a visit: then it needs nothing of its home any more. False if it was told before.
    pub(super) fn ended_on_visit(&mut self) -> bool {
        if self.visit.is_none() || self.visit_end.is_some() || self.process.alive() {
            return false;
        }
        let went = self.visit.as_ref().is_some_and(|visit| visit.stand() == VisitStand::WentHome);
        let end = if went { VisitEnd::Home } else { VisitEnd::Ended };
        tracing::info!(?end, "the guest's QEMU has ended after its visit, or in it");
        self.visit_end = Some(end);
        true
    }

    /// What was said of a visit.
    pub(super) fn visit_is(&mut self, said: Said, session: &mut Session) -> Result<(), DestinationError> {
        match said {
            Said::WentHome => self.visit_end = Some(VisitEnd::Home),
            Said::NotHome(why) => session.publisher.update(|p| {
                p.going_home.iter_mut().for_each(|going| going.failed = Some(why.clone()));
            }),
            Said::Stays => {
                // Written down first: it is not begun twice, but a daemon started anew goes on with it.
                session.write(|r| r.stays = true)?;
                (self.visit, self.visit_end) = (None, Some(VisitEnd::Stayed));
                let mode = session.journal.record().mode.map(|mode| mode.to_string());
                session.publisher.update(|p| {
                    p.mode = mode;
                    p.going_home = None;
                });
                session.files.memory.demand.end();
                session.pages.fill().iter().for_each(|fill| fill.queue.wake());
                tracing::info!("the guest stays: the rest of its memory is fetched");
            }
        }
        Ok(())
    }

    /// Tries to write down that the guest is on a visit, if that is owed.
    pub(super) fn write_owed(&mut self, session: &mut Session) {
        let due = self.tried.is_none_or(|tried| tried.elapsed() >= TRY_AGAIN);
        if self.visit.is_some() && session.journal.is_owed() && due {
            self.tried = Some(Instant::now());
            match session.journal.write_owed() {
                Ok(()) => session.publisher.can_write(),
                Err(error) => session.publisher.cannot_write(session.journal.path(), &error),
            }
        }
    }
}
