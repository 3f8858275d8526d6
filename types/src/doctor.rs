//! What a host has and lacks for moving guests, as `vmove doctor` tells it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Area {
    /// Moving guests at all.
    Moving,
    /// Guest memory in huge pages.
    HugePages,
    /// Pages that cross by RDMA.
    Rdma,
    /// Devices of the host for guests.
    Passthrough,
    /// Networks of guests.
    Network,
    /// Forks of guests.
    Forks,
    /// `vmoved` itself, its settings and its peers.
    Daemon,
}

impl Area {
    /// All of them, in the order in which they are told.
    pub const ALL: [Self; 7] = [
        Self::Moving,
        Self::HugePages,
        Self::Rdma,
        Self::Passthrough,
        Self::Network,
        Self::Forks,
        Self::Daemon,
    ];

    /// Stable word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Moving => "moving",
            Self::HugePages => "huge-pages",
            Self::Rdma => "rdma",
            Self::Passthrough => "passthrough",
            Self::Network => "network",
            Self::Forks => "forks",
            Self::Daemon => "daemon",
        }
    }
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Area {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|area| area.word() == text);
        let words = || Self::ALL.map(Self::word).join(", ");
        found.ok_or_else(|| format!("expected one of {}, found \"{text}\"", words()))
    }
}

/// How a thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FindingState {
    /// As it should be.
    Ok,
    /// It works in part, or could be better.
    Limited,
    /// What the area needs is not there. Of [`Area::Moving`]: no guest can be moved.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What it is about.
    pub area: Area,
    /// What was looked at, a stable word: `kernel`, `qemu`, ...
    pub topic: String,
    /// How it is.
    pub state: FindingState,
    /// What was found.
    pub found: String,
    /// What was expected; absent if all is well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// How to mend it: a command or a setting where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

impl Finding {
    /// Something that is as it should be.
    #[must_use]
    pub fn ok(area: Area, topic: &str, found: impl Into<String>) -> Self {
        let (topic, found) = (topic.to_owned(), found.into());
        Self { area, topic, state: FindingState::Ok, found, expected: None, mend: None }
    }

    /// Something that is not.
    #[must_use]
    pub fn wrong(
        area: Area,
        topic: &str,
        state: FindingState,
        found: impl Into<String>,
        expected: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        let (expected, mend) = (Some(expected.into()), Some(mend.into()));
        Self { state, expected, mend, ..Self::ok(area, topic, found) }
    }
}

/// All that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Version of the `vmoved` that has looked.
    pub version: String,
    /// Version of its protocol.
    pub protocol: u16,
    /// Where the daemon of this host would be asked.
    pub control: String,
    /// Whether guests can be moved: nothing of [`Area::Moving`] is missing.
    pub moving: bool,
    /// In the order of [`Area::ALL`].
    pub findings: Vec<Finding>,
}
