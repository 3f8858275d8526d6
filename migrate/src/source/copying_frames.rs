//! Phase Warm, at its end: what comes for the guest is copied from here on.

use super::session::Session;
use super::warm::Warm;
use crate::taps::Tap;
use vmove_node::peer::{LinkError, LinkKind};
use vmove_types::problem::chain;
use vmove_types::report::NetworkStats;

/// Why frames of a tap are not passed on.
#[derive(Debug, thiserror::Error)]
enum NotCopied {
    /// There is no connection for them.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The tap, or the connection, does not do.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl Warm {
    /// Begins to copy what comes for the guest. Without that it moves all the same, and the report says why.
    pub(super) async fn copy_frames(&self, session: &mut Session) {
        let problem = match &self.taps {
            Ok(taps) if taps.is_empty() => return,
            Ok(taps) => copy_all(session, taps).await,
            Err(error) => Some(chain(error)),
        };
        session.report.network = Some(NetworkStats { problem, ..NetworkStats::default() });
    }
}

/// The first problem, if there is one.
async fn copy_all(session: &mut Session, taps: &[Tap]) -> Option<String> {
    let mut problem = None;
    for (index, tap) in (0..=u8::MAX).zip(taps) {
        if let Err(error) = copy(session, index, tap).await {
            let why = chain(&error);
            tracing::warn!(tap.interface, why, "frames are not passed on");
            problem.get_or_insert(format!("{}: {why}", tap.interface));
        }
    }
    problem
}

async fn copy(session: &mut Session, index: u8, tap: &Tap) -> Result<(), NotCopied> {
    let hello = session.hello(LinkKind::Frames, index, session.journal.record().token);
    let link = session.node.config.dialer.stream(session.to(), &hello).await?;
    Ok(session.frames.copy(tap, link).await?)
}
