//! Frames that come for the guest while it stands still, and the report on them.

use std::time::Duration;

use super::session::Session;
use super::warm::Warm;
use crate::frames::Tap;
use crate::proto::message::Complete;
use vmove_node::peer::LinkKind;
use vmove_types::problem::chain;
use vmove_types::report::NetworkStats;

/// What is there when the destination is whole goes to it within this time, for each tap.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_millis(200);

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

/// Nothing more comes here for the guest.
pub(super) async fn end(session: &mut Session, figures: &Complete) {
    let passed = std::mem::take(&mut session.frames).end(LAST_FRAMES_TIMEOUT).await;
    if let Some(network) = &mut session.report.network {
        network.frames_passed_on = passed.frames;
        network.frames_lost = passed.lost;
        network.announced_ms = figures.announced_ms;
    }
}
