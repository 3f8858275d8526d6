//! Phase Warm, at its end: what comes for the guest is copied from here on.

use super::session::Session;
use super::warm::Warm;
use crate::taps::Tap;
use vmove_node::peer::LinkKind;
use vmove_types::problem::chain;
use vmove_types::report::NetworkStats;

impl Warm {
    /// Begins to copy what comes for the guest. Without that it moves all the same, and the report says why.
    pub(super) async fn copy_frames(&self, session: &mut Session) {
        let taps = match self.monitor.taps(session.vm().pid.unsigned_abs()).await {
            Ok(taps) if taps.is_empty() => return,
            Ok(taps) => taps,
            Err(error) => {
                let problem = Some(chain(&error));
                session.report.network = Some(NetworkStats { problem, ..NetworkStats::default() });
                return;
            }
        };
        let mut problem = None;
        for (index, tap) in (0..=u8::MAX).zip(&taps) {
            if let Err(why) = copy(session, index, tap).await {
                tracing::warn!(tap.interface, why, "frames are not passed on");
                problem.get_or_insert(format!("{}: {why}", tap.interface));
            }
        }
        session.report.network = Some(NetworkStats { problem, ..NetworkStats::default() });
    }
}

async fn copy(session: &mut Session, index: u8, tap: &Tap) -> Result<(), String> {
    let hello = session.hello(LinkKind::Frames, index, session.journal.record().token);
    let link =
        session.node.config.dialer.stream(session.to(), &hello).await.map_err(|error| chain(&error))?;
    session.frames.copy(tap, link).await.map_err(|error| error.to_string())
}
