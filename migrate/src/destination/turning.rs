//! A migration whose pages are still coming becomes a visit: the source is asked to keep the guest's memory, and once it has said so, no more is fetched than
//! the guest touches.
//!
//! What is here by then counts as touched: nobody has noted which of it the guest has written. So on the way home all of it is compared with what is
//! there.

use tokio::sync::watch;

use super::session::Session;
use crate::turning::{Turn, asked};
use vmove_types::go_home::GoHome;
use vmove_types::spec::MigrationSpec;

/// What its session is asked, and has asked the source.
#[derive(Debug)]
pub(super) struct Turning {
    turn: watch::Receiver<Turn>,
    /// The source was asked over this connection, and has not answered.
    asked: Option<GoHome>,
}

impl Turning {
    pub(super) fn of(session: &Session) -> Self {
        let turn = session.node.visits.turning.listen(session.journal.record().id);
        Self { turn, asked: None }
    }

    /// What was asked over an earlier connection has no answer.
    pub(super) fn begin_conversation(&mut self) {
        self.asked = None;
    }

    /// The source's answer is awaited: it must not hear that the guest needs nothing any more.
    pub(super) const fn awaits_source(&self) -> bool {
        self.asked.is_some()
    }

    /// Somebody has asked for it.
    pub(super) fn is_wished(&self) -> bool {
        matches!(*self.turn.borrow(), Turn::Asked(_))
    }

    /// Waits until somebody asks for it, and the source was not asked yet. Cancel-safe.
    pub(super) async fn wish(&mut self) -> GoHome {
        if self.asked.is_some() {
            return std::future::pending().await;
        }
        asked(&mut self.turn).await
    }

    /// The source is asked.
    pub(super) fn asks(&mut self, go_home: GoHome) {
        self.asked = Some(go_home);
    }

    /// The source has answered: what it was asked.
    pub(super) fn answered(&mut self) -> Option<GoHome> {
        self.asked.take()
    }
}

/// Waits for a wish. Never ends for a visit. Cancel-safe.
pub(super) async fn wish_of(turning: &mut Option<Turning>) -> GoHome {
    match turning {
        Some(turning) => turning.wish().await,
        None => std::future::pending().await,
    }
}

impl Session {
    /// Answers whoever has asked for a visit.
    pub(super) fn answer_turn(&self, answer: Turn) {
        self.node.visits.turning.answer(self.journal.record().id, answer);
    }

    /// From here on the guest is on a visit: its home has said that it keeps its memory. Page connections are to be opened anew.
    ///
    /// Safe without its line: a daemon started anew would fetch the rest, and the home be told that it may go. Until it is written the guest is not taken home,
    /// for which the journal is read.
    pub(super) fn become_visit(&mut self, go_home: &GoHome) {
        // Threads that map pages have ended before what is mapped is noted: a daemon that is killed here leaves no page that is mapped and not noted.
        self.pages.renew();
        for block in &self.files.memory.blocks {
            block.table.mark_mapped(block.table.all());
        }
        self.files.memory.demand.begin();
        self.write_owing(|r| {
            let spec = std::mem::take(&mut r.prepare.spec);
            r.prepare.spec = MigrationSpec { go_home: go_home.clone(), ..spec }.of_visit();
        });
        tracing::info!("the migration has become a visit: pages come by demand alone");
    }
}
