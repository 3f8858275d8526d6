//! What a migration promises before it begins, and what came of that.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::goal::{Goal, Unit};
use crate::spec::Mode;
use crate::units::{format_bytes, format_ms, format_rate};

/// What a migration will be like, computed before it begins from what was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Promise {
    /// How memory will cross.
    pub mode: Mode,
    /// The guest's pause, from STOP to RESUME, as it usually is. Unit: milliseconds.
    pub pause_ms: f64,
    /// What the pause is to be at most in nine of ten migrations, by those of the last 20 to the node; of up to ten it is the longest, which more may
    /// exceed; without any it is the usual pause. A goal for the pause is held to it. Unit: milliseconds. `None`: promised by a vmove that did not
    /// say.
    #[serde(default)]
    pub pause_up_to_ms: Option<f64>,
    /// From the request to the end, without disks. Unit: milliseconds.
    pub time_ms: f64,
    /// Page payload that will cross. Unit: bytes.
    pub sent_bytes: u64,
    /// Pre-copy rounds.
    pub rounds: u32,
    /// What the guest writes, each page counted once, as it was watched. Unit: bytes per second.
    pub dirty_bytes_per_s: f64,
    /// What was counted on of the link. Unit: bytes of page payload per second.
    pub link_bytes_per_s: f64,
    /// What the threads of the migration will use of all processors of a host, of the host that it is more at. Unit: percent. `None`: no migration to
    /// the node has shown what a byte takes, and no share was wanted.
    #[serde(default)]
    pub host_cpu_percent: Option<f64>,
    /// The goals are kept as long as the guest writes no more than this. Unit: bytes per second. `None`: there are no goals, or no rate of writes
    /// that this link could bear breaks them.
    pub holds_to_bytes_per_s: Option<f64>,
    /// What it is computed from, for people.
    pub basis: String,
}

impl Promise {
    /// The value that a goal is about, in its [unit](Goal::unit).
    #[must_use]
    pub fn of(&self, goal: Goal) -> f64 {
        match goal {
            Goal::MaxPause => self.pause_up_to_ms.unwrap_or(self.pause_ms),
            Goal::Within => self.time_ms,
            Goal::HostCpu => self.host_cpu_percent.unwrap_or_default(),
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pause, time) = (format_ms(self.pause_ms), format_ms(self.time_ms));
        write!(f, "{}, pause {pause}", self.mode)?;
        if let Some(up_to) = self.pause_up_to_ms.map(format_ms).filter(|up_to| *up_to != pause) {
            write!(f, " (up to {up_to})")?;
        }
        write!(f, ", {time} in all, {}", format_bytes(self.sent_bytes))?;
        if let Some(share) = self.host_cpu_percent {
            write!(f, ", {share:.1} % of the processors")?;
        }
        if let Some(rate) = self.holds_to_bytes_per_s {
            write!(f, "; the goals hold up to {} of writes", format_rate(rate))?;
        }
        Ok(())
    }
}

/// What came of a goal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Verdict {
    /// Which goal.
    pub goal: Goal,
    /// What the three values count.
    #[serde(default)]
    pub unit: Unit,
    /// What was wanted at most.
    #[serde(alias = "wanted_ms")]
    pub wanted: f64,
    /// What was promised.
    #[serde(alias = "promised_ms")]
    pub promised: f64,
    /// What was measured. `None`: a daemon was started anew meanwhile, or the guest was paused.
    #[serde(alias = "measured_ms")]
    pub measured: Option<f64>,
    /// Whether it was kept, if that was measured.
    pub kept: Option<bool>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = match self.kept {
            Some(true) => "kept",
            Some(false) => "MISSED",
            None => "not measured",
        };
        write!(
            f,
            "{} {}: {kept}; promised {}",
            self.goal,
            self.unit.format(self.wanted),
            self.unit.format(self.promised)
        )?;
        self.measured.map_or(Ok(()), |measured| write!(f, ", measured {}", self.unit.format(measured)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promise_and_verdict_are_told_in_a_line() {
        let promise = Promise {
            mode: Mode::Hybrid,
            pause_ms: 9.0,
            pause_up_to_ms: Some(9.0),
            time_ms: 3100.0,
            sent_bytes: 1288 << 20,
            rounds: 3,
            dirty_bytes_per_s: 1e8,
            link_bytes_per_s: 1e9,
            host_cpu_percent: None,
            holds_to_bytes_per_s: Some(9e8),
            basis: String::new(),
        };
        let told =
            "hybrid, pause 9.0 ms, 3.10 s in all, 1.26 GiB; the goals hold up to 858.31 MiB/s of writes";
        assert_eq!(promise.to_string(), told);
        let uneven = Promise { pause_up_to_ms: Some(14.0), ..promise };
        assert!(uneven.to_string().starts_with("hybrid, pause 9.0 ms (up to 14.0 ms), 3.10 s in all"));
        assert_eq!((uneven.of(Goal::MaxPause), uneven.of(Goal::Within)), (14.0, 3100.0));
        let of_before = Promise { pause_up_to_ms: None, ..uneven };
        assert_eq!(of_before.of(Goal::MaxPause), 9.0);
        let missed = Verdict {
            goal: Goal::MaxPause,
            unit: Unit::Ms,
            wanted: 20.0,
            promised: 9.0,
            measured: Some(31.0),
            kept: Some(false),
        };
        assert_eq!(missed.to_string(), "--max-pause 20.0 ms: MISSED; promised 9.0 ms, measured 31.0 ms");
    }

    #[test]
    fn a_share_is_told_in_percent_and_what_was_written_before_there_were_shares_is_read() {
        let share = Verdict {
            goal: Goal::HostCpu,
            unit: Goal::HostCpu.unit(),
            wanted: 5.0,
            promised: 4.2,
            measured: Some(4.91),
            kept: Some(true),
        };
        assert_eq!(share.to_string(), "--host-cpu 5.0 %: kept; promised 4.2 %, measured 4.9 %");
        let old =
            r#"{"goal":"within","wanted_ms":2000.0,"promised_ms":900.0,"measured_ms":1000.0,"kept":true}"#;
        let read: Verdict = serde_json::from_str(old).unwrap();
        assert_eq!(read.to_string(), "--within 2.00 s: kept; promised 900.0 ms, measured 1.00 s");
    }
}
