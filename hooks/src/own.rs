//! The events of this daemon, by name.

/// Events of this daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Own {
    /// A migration was asked for; nothing was begun. May be forbidden.
    BeforeMigration,
    /// A migration enters a phase.
    MigrationPhase,
    /// A migration has ended, well or not.
    AfterMigration,
    /// A fork was asked for; nothing was begun. May be forbidden.
    BeforeFork,
    /// A fork enters a phase.
    ForkPhase,
    /// A fork has ended, well or not.
    AfterFork,
    /// A child was loaded and is about to run. May be forbidden: the child is ended then.
    ChildStart,
    /// A child has ended.
    ChildEnd,
    /// A migration has lost its peer after the hand-over.
    PeerLost,
    /// A VM was started or adopted here, or came to be as a child.
    VmStarted,
    /// A VM has ended, by itself or on request.
    VmEnded,
}

impl Own {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::BeforeMigration,
        Self::MigrationPhase,
        Self::AfterMigration,
        Self::BeforeFork,
        Self::ForkPhase,
        Self::AfterFork,
        Self::ChildStart,
        Self::ChildEnd,
        Self::PeerLost,
        Self::VmStarted,
        Self::VmEnded,
    ];

    /// As in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BeforeMigration => "before-migration",
            Self::MigrationPhase => "migration-phase",
            Self::AfterMigration => "after-migration",
            Self::BeforeFork => "before-fork",
            Self::ForkPhase => "fork-phase",
            Self::AfterFork => "after-fork",
            Self::ChildStart => "child-start",
            Self::ChildEnd => "child-end",
            Self::PeerLost => "peer-lost",
            Self::VmStarted => "vm-started",
            Self::VmEnded => "vm-ended",
        }
    }

    /// Somebody waits for the hook's word, and obeys it.
    #[must_use]
    pub const fn may_be_forbidden(self) -> bool {
        matches!(self, Self::BeforeMigration | Self::BeforeFork | Self::ChildStart)
    }
}
