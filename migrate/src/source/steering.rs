//! What a session keeps of its goals while it goes on.

use tokio::time::Instant;

/// How goals say how a migration goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steering {
    /// In which what is left must cross for pre-copy to stop the guest. Unit: milliseconds.
    pub pages_in_pause_ms: Option<f64>,
    /// When all is to be done.
    pub until: Option<Instant>,
    /// What the pause and the end take beside pages. Unit: milliseconds.
    pub rest_ms: f64,
    /// The mode was not the operator's choice.
    pub may_turn: bool,
}
