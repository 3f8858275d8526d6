//! A migration under way becomes a visit: what its session is asked, and what it answers.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;
use vmove_node::peer::SessionId;
use vmove_types::go_home::GoHome;

/// How far one is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Turn {
    /// Nobody has asked for it.
    #[default]
    No,
    /// It is to become one, from which this takes the guest home by itself.
    Asked(GoHome),
    /// It goes on as it was.
    Refused(String),
    /// It is one.
    Turned,
}

/// By session.
#[derive(Debug, Default)]
pub(crate) struct Turning {
    turns: Mutex<HashMap<SessionId, watch::Sender<Turn>>>,
}

impl Turning {
    /// Asks the session, which answers some time later. One that has become a visit stays so.
    pub(crate) fn ask(&self, id: SessionId, go_home: GoHome) -> watch::Receiver<Turn> {
        self.with(id, |turn| {
            turn.send_if_modified(|turn| {
                let changes = *turn != Turn::Turned;
                if changes {
                    *turn = Turn::Asked(go_home);
                }
                changes
            });
            turn.subscribe()
        })
    }

    /// What the session is asked.
    pub(crate) fn listen(&self, id: SessionId) -> watch::Receiver<Turn> {
        self.with(id, watch::Sender::subscribe)
    }

    /// The session's answer.
    pub(crate) fn answer(&self, id: SessionId, answer: Turn) {
        self.with(id, |turn| turn.send_replace(answer));
    }

    /// The session has ended: whoever waits for an answer gets none.
    pub(crate) fn forget(&self, id: SessionId) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    fn with<T>(&self, id: SessionId, what: impl FnOnce(&watch::Sender<Turn>) -> T) -> T {
        what(self.turns.lock().unwrap_or_else(PoisonError::into_inner).entry(id).or_default())
    }
}

/// What a session is asked, if it is. Cancel-safe.
pub(crate) async fn asked(turn: &mut watch::Receiver<Turn>) -> GoHome {
    match turn.wait_for(|turn| matches!(turn, Turn::Asked(_))).await.map(|turn| turn.clone()) {
        Ok(Turn::Asked(go_home)) => go_home,
        _ => std::future::pending().await,
    }
}

/// What came of it: [`Turn::Refused`] or [`Turn::Turned`], or [`Turn::No`] if the session has ended. Cancel-safe.
pub(crate) async fn answered(turn: &mut watch::Receiver<Turn>) -> Turn {
    let answer = turn.wait_for(|turn| matches!(turn, Turn::Refused(_) | Turn::Turned)).await;
    answer.map(|turn| turn.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_session_answers_whoever_asked_and_its_end_is_heard() {
        let (turning, id) = (Turning::default(), SessionId::random());
        let mut session = turning.listen(id);
        let go_home = GoHome { after_ms: Some(5000), ..GoHome::default() };
        let mut asker = turning.ask(id, go_home.clone());
        assert_eq!(asked(&mut session).await, go_home);
        turning.answer(id, Turn::Refused("it owns devices".to_owned()));
        assert_eq!(answered(&mut asker).await, Turn::Refused("it owns devices".to_owned()));
        // Asked again.
        let mut asker = turning.ask(id, GoHome::default());
        assert_eq!(asked(&mut session).await, GoHome::default());
        turning.answer(id, Turn::Turned);
        assert_eq!(answered(&mut asker).await, Turn::Turned);
        let mut late = turning.ask(id, go_home);
        assert_eq!(answered(&mut late).await, Turn::Turned, "it stays a visit");
        let mut other = turning.ask(SessionId::random(), GoHome::default());
        drop(session);
        turning.turns.lock().unwrap().clear();
        assert_eq!(answered(&mut other).await, Turn::No);
    }
}
