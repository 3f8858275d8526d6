//! QEMU's run states.

/// QEMU's run state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Runs the guest.
    Running,
    /// Does not.
    Paused,
    /// Waits for device state.
    InMigrate,
    /// Stopped it to send its state.
    FinishMigrate,
    /// Has sent it.
    PostMigrate,
}

impl Status {
    /// QEMU's word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::InMigrate => "inmigrate",
            Self::FinishMigrate => "finish-migrate",
            Self::PostMigrate => "postmigrate",
        }
    }
}
