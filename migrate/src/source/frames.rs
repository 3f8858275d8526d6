//! The end of frames that come here for a guest that has left, and the report on them.

use std::time::Duration;

use super::session::Session;
use crate::proto::message::Complete;

/// What is there when the destination is whole goes to it within this time, for each tap.
const LAST_FRAMES_TIMEOUT: Duration = Duration::from_millis(200);

/// Nothing more comes here for the guest.
pub(super) async fn end(session: &mut Session, figures: &Complete) {
    let passed = std::mem::take(&mut session.frames).end(LAST_FRAMES_TIMEOUT).await;
    if let Some(network) = &mut session.report.network {
        network.frames_passed_on = passed.frames;
        network.frames_lost = passed.lost;
        network.announced_ms = figures.announced_ms;
    }
}
