//! What an operator wants a migration to keep.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::format_ms;

/// What a migration is to keep. It does not begin if it cannot promise so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Goals {
    /// Longest pause of the guest, from STOP to RESUME, in every mode. It takes the place of `max_downtime_ms`, which does not count what the device
    /// state takes. Unit: milliseconds; 1 to 60,000.
    pub max_pause_ms: Option<u64>,
    /// Longest time from the request to the end, when the destination has all memory and the source is free; disks are not counted. Unit:
    /// milliseconds; 100 to 86,400,000.
    pub within_ms: Option<u64>,
    /// Largest share of all processors that the migration's own threads use for copying in the background, at each of the two hosts. It makes the
    /// migration take longer, and never delays what the guest waits for: page faults, and the switchover. Unit: percent; 1 to 100.
    pub host_cpu_percent: Option<u64>,
}

impl Goals {
    /// Nothing is wanted.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.max_pause_ms.is_none() && self.within_ms.is_none() && self.host_cpu_percent.is_none()
    }

    /// What is wanted, one by one, each in its [unit](Goal::unit).
    pub fn each(&self) -> impl Iterator<Item = (Goal, f64)> {
        let all = [
            (Goal::MaxPause, self.max_pause_ms),
            (Goal::Within, self.within_ms),
            (Goal::HostCpu, self.host_cpu_percent),
        ];
        all.into_iter().filter_map(|(goal, wanted)| wanted.map(|wanted| (goal, crate::units::to_f64(wanted))))
    }

    /// Checks the ranges, and that the goals do not contradict each other.
    ///
    /// # Errors
    /// A sentence that names the goals, what was expected and what was found.
    pub fn validate(&self) -> Result<(), String> {
        if let Some(pause) = self.max_pause_ms.filter(|pause| !(1..=60_000).contains(pause)) {
            return Err(format!("goals.max_pause_ms: expected 1 to 60000, found {pause}"));
        }
        if let Some(within) = self.within_ms.filter(|within| !(100..=86_400_000).contains(within)) {
            return Err(format!("goals.within_ms: expected 100 to 86400000, found {within}"));
        }
        if let Some(share) = self.host_cpu_percent.filter(|share| !(1..=100).contains(share)) {
            return Err(format!("goals.host_cpu_percent: expected 1 to 100, found {share}"));
        }
        if let (Some(pause), Some(within)) = (self.max_pause_ms, self.within_ms)
            && pause > within
        {
            return Err(format!(
                "goals contradict each other: the pause is a part of the whole, and expected was a max_pause_ms of at most within_ms ({within}), found {pause}"
            ));
        }
        Ok(())
    }
}

/// One goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// See [`Goals::max_pause_ms`].
    MaxPause,
    /// See [`Goals::within_ms`].
    Within,
    /// See [`Goals::host_cpu_percent`].
    HostCpu,
}

/// What the value of a goal counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Milliseconds.
    #[default]
    Ms,
    /// Percent of all processors of a host.
    Percent,
}

impl Unit {
    /// A value, for people.
    #[must_use]
    pub fn format(self, value: f64) -> String {
        match self {
            Self::Ms => format_ms(value),
            Self::Percent => format!("{value:.1} %"),
        }
    }
}

impl Goal {
    /// What its value counts.
    #[must_use]
    pub const fn unit(self) -> Unit {
        match self {
            Self::MaxPause | Self::Within => Unit::Ms,
            Self::HostCpu => Unit::Percent,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::MaxPause => "--max-pause",
            Self::Within => "--within",
            Self::HostCpu => "--host-cpu",
        })
    }
}
