//! What the journal of a group says.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmove_node::peer::{PeerTarget, SessionId};
use vmove_types::group::GroupReport;
use vmove_types::spec::MigrationSpec;

/// Where a group stands. One step, either way, and no step after that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GroupState {
    /// Any failure brings all guests back.
    Gathering,
    /// Every member is committed, whatever its own journal says.
    Decided,
    /// No member is committed.
    CalledOff,
}

/// Why a group was called off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CalledOff {
    /// The member that was the reason; nothing if it was none of them.
    pub vm: Option<String>,
    /// Why.
    pub why: String,
    /// An operator asked.
    pub cancelled: bool,
    /// It was refused, and nothing was changed.
    pub refused: bool,
}

/// A VM of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemberRecord {
    /// Its name.
    pub vm: String,
    /// The session that moves it at the barrier.
    pub session: SessionId,
    /// Where to.
    pub to: PeerTarget,
    /// Options.
    pub spec: MigrationSpec,
    /// Sessions by which it followed the others later.
    #[serde(default)]
    pub followers: Vec<SessionId>,
}

/// What is to be found again of a group after a kill.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupRecord {
    /// Its id.
    pub id: SessionId,
    /// Its members.
    pub members: Vec<MemberRecord>,
    /// Where it stands.
    pub state: GroupState,
    /// Why it was called off.
    #[serde(default)]
    pub off: Option<CalledOff>,
    /// Decided, and a member is not at its destination: which, why, and what to do.
    #[serde(default)]
    pub incomplete: Option<String>,
    /// Nothing is left to do.
    #[serde(default)]
    pub over: bool,
    /// Figures.
    #[serde(default)]
    pub report: GroupReport,
}

impl CalledOff {
    /// In words.
    pub(crate) fn told(&self) -> String {
        match &self.vm {
            Some(vm) => format!("{vm}: {}", self.why),
            None => self.why.clone(),
        }
    }
}

impl MemberRecord {
    /// The session that moved it last.
    pub(crate) fn last_session(&self) -> SessionId {
        self.followers.last().copied().unwrap_or(self.session)
    }
}

impl GroupRecord {
    /// Whether this session was committed with the others.
    pub(crate) fn has_committed(&self, session: SessionId) -> bool {
        self.state == GroupState::Decided && self.members.iter().any(|member| member.session == session)
    }
}

/// The folder of all groups, beside that of all sessions.
pub(crate) fn groups_dir(sessions_dir: &Path) -> PathBuf {
    sessions_dir.with_file_name("groups")
}

/// The journal of a group.
pub(crate) fn journal_path(sessions_dir: &Path, id: SessionId) -> PathBuf {
    groups_dir(sessions_dir).join(id.to_string()).join("group.jsonl")
}
