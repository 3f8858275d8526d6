//! What an operator asks of a migration.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::DeviceChoice;
use crate::disk::{ALL_DISKS, DiskPace, DiskPlace, SourceDisks};
use crate::go_home::GoHome;
use crate::goal::Goals;

/// How guest memory crosses, as decided (never `auto`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Rounds while the guest runs at the source; it stops only when what is left fits the downtime limit,
    /// and runs at the destination only when every page is there.
    Precopy,
    /// The guest stops at once, runs at the destination, and pages are fetched when touched.
    Postcopy,
    /// Rounds while another round still pays, then as [`Mode::Postcopy`] for what is dirty.
    Hybrid,
}

impl Mode {
    /// The word used on the command line, in reports and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How guest memory is asked to cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ModeRequest {
    /// Measure the guest's dirty rate and the link, predict, choose, and say why.
    #[default]
    Auto,
    /// See [`Mode::Precopy`].
    Precopy,
    /// See [`Mode::Postcopy`].
    Postcopy,
    /// See [`Mode::Hybrid`].
    Hybrid,
}

impl ModeRequest {
    /// The mode if it was named, `None` for [`ModeRequest::Auto`].
    #[must_use]
    pub const fn fixed(self) -> Option<Mode> {
        match self {
            Self::Auto => None,
            Self::Precopy => Some(Mode::Precopy),
            Self::Postcopy => Some(Mode::Postcopy),
            Self::Hybrid => Some(Mode::Hybrid),
        }
    }
}

impl From<Mode> for ModeRequest {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Precopy => Self::Precopy,
            Mode::Postcopy => Self::Postcopy,
            Mode::Hybrid => Self::Hybrid,
        }
    }
}

impl FromStr for ModeRequest {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "auto" => Ok(Self::Auto),
            "precopy" | "pre-copy" => Ok(Self::Precopy),
            "postcopy" | "post-copy" => Ok(Self::Postcopy),
            "hybrid" => Ok(Self::Hybrid),
            other => Err(format!("expected auto, precopy, postcopy or hybrid, found \"{other}\"")),
        }
    }
}

/// A cap on bulk page traffic.
///
/// Unit: bytes per second of page payload. Urgent (faulted) pages are never held back by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Bandwidth(pub u64);

/// Whether memory is sent ahead while the guest's devices are still plugged in. What was sent so is compared once they have left, since nobody sees what a
/// device writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HeadStart {
    /// If the guest is without its devices for a shorter time then: memory is compared faster than it crosses.
    #[default]
    Auto,
    /// Wherever it is possible.
    Always,
    /// Memory crosses when the devices have left.
    Never,
}

impl FromStr for HeadStart {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            other => Err(format!("expected auto, always or never, found \"{other}\"")),
        }
    }
}

/// Whether a guest moves for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Visit {
    /// It does.
    #[default]
    No,
    /// It goes by demand: only the pages that it touches follow it, and its home keeps its memory until it comes back or stays.
    Go,
    /// It comes back from a visit, with the pages that it has touched there.
    Back,
}

/// The options of one migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MigrationSpec {
    /// How memory crosses. Default: [`ModeRequest::Auto`].
    pub mode: ModeRequest,
    /// Longest pause of the guest that `precopy` may cause, and the target `auto` plans for.
    /// Unit: milliseconds of CLOCK_MONOTONIC; range 1 to 60,000; default 300.
    pub max_downtime_ms: u64,
    /// What the migration is to keep; it does not begin if it cannot promise so. Default: nothing, and no promise.
    pub goals: Goals,
    /// Cap on bulk traffic; `None` (default) for no cap.
    #[cfg_attr(feature = "schema", schema(value_type = Option<u64>))]
    pub bandwidth: Option<Bandwidth>,
    /// Leave the guest paused at the destination; it runs after an operator's `cont`.
    pub paused: bool,
    /// Hash every page on both sides and compare, and what takes room on the disks that move. Costs about a second of one core per 5 GiB on each side, and
    /// the disks are read once.
    pub verify: bool,
    /// The guest must be handed over within this time, else the migration is called off and the guest stays at
    /// the source. Unit: milliseconds; default 120,000; 0 for none.
    pub timeout_ms: u64,
    /// Which device of the destination takes the place of each that the guest owns: `ROLE=PCI-ADDRESS`. Further settings (`,mac=…`)
    /// replace those that the guest has.
    pub devices: Vec<DeviceChoice>,
    /// Whether memory is sent ahead while the guest has its devices. Default: [`HeadStart::Auto`]. Post-copy has no head start.
    pub head_start: HeadStart,
    /// What a bridge lets the VM have at the destination, signed by it. Needed where the destination requires grants.
    pub grant: Option<String>,
    /// Run in the guest by its agent (`/bin/sh -c`) before it is asked to let its devices go, such as to stop a job.
    pub quiesce: Option<String>,
    /// Run in the guest by its agent (`/bin/sh -c`) when it has its devices again, here or there.
    pub resume: Option<String>,
    /// Longest time that each of the two may take. Unit: milliseconds; 1 to 600,000; default 30,000.
    pub script_timeout_ms: u64,
    /// Longest time that the guest may take to let a device go. Unit: milliseconds; 1,000 to 600,000; default 20,000.
    pub unplug_timeout_ms: u64,
    /// Disks that move with the guest: the names of drives, devices or block nodes, or `all` for every disk that the guest can write. The
    /// others must be on storage that both nodes see.
    pub disks: Vec<String>,
    /// Where disks are to be at the destination, if not at the path that they have at the source.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub disk_map: Vec<DiskPlace>,
    /// The disks follow after the guest, which does not wait for them: it runs over an image that is served by the source. Default: they are copied
    /// before it leaves.
    pub disks_after: bool,
    /// The share of its pace that the guest keeps at its disks while they are copied, or follow it. Per cent, 0 to 95; default 75.
    #[cfg_attr(feature = "schema", schema(value_type = u8))]
    pub disk_pace: DiskPace,
    /// What becomes of the source's images in the end. Default: [`SourceDisks::Keep`].
    pub source_disks: SourceDisks,
    /// Whether the guest moves for good. Default: [`Visit::No`]. The others are post-copy.
    pub visit: Visit,
    /// What takes a guest that goes for a visit home by itself.
    pub go_home: GoHome,
    /// How much data beside the destination the guest is to read there before it goes home. Of reading it from afar, a visit, and a migration to and
    /// fro, the one that takes the shortest time is chosen; if that is reading from afar, nothing is begun. Unit: bytes; default: the guest goes.
    pub reads_bytes: Option<u64>,
    /// What that data can be read at there. Unit: bytes per second; default 500,000,000.
    pub reads_near_bytes_per_s: Option<u64>,
}

impl Default for MigrationSpec {
    fn default() -> Self {
        Self {
            mode: ModeRequest::Auto,
            max_downtime_ms: 300,
            goals: Goals::default(),
            bandwidth: None,
            paused: false,
            verify: false,
            timeout_ms: 120_000,
            devices: Vec::new(),
            head_start: HeadStart::Auto,
            grant: None,
            quiesce: None,
            resume: None,
            script_timeout_ms: 30_000,
            unplug_timeout_ms: 20_000,
            disks: Vec::new(),
            disk_map: Vec::new(),
            disks_after: false,
            disk_pace: DiskPace::default(),
            source_disks: SourceDisks::Keep,
            visit: Visit::No,
            go_home: GoHome::default(),
            reads_bytes: None,
            reads_near_bytes_per_s: None,
        }
    }
}

impl MigrationSpec {
    /// Checks the ranges.
    ///
    /// # Errors
    /// A sentence that names the field, what was expected and what was found.
    pub fn validate(&self) -> Result<(), String> {
        if !(1..=60_000).contains(&self.max_downtime_ms) {
            return Err(format!("max_downtime_ms: expected 1 to 60000, found {}", self.max_downtime_ms));
        }
        if !(1..=600_000).contains(&self.script_timeout_ms) {
            return Err(format!("script_timeout_ms: expected 1 to 600000, found {}", self.script_timeout_ms));
        }
        if !(1000..=600_000).contains(&self.unplug_timeout_ms) {
            return Err(format!(
                "unplug_timeout_ms: expected 1000 to 600000, found {}",
                self.unplug_timeout_ms
            ));
        }
        for (index, DeviceChoice(device)) in self.devices.iter().enumerate() {
            let mut before = self.devices[..index].iter().map(|choice| &choice.0);
            if before.any(|other| other.role == device.role || other.address == device.address) {
                return Err(format!(
                    "devices: expected each role and each address once, found {device} again"
                ));
            }
        }
        self.validate_disks()?;
        self.validate_goals()?;
        self.validate_visit()?;
        self.validate_reads()?;
        if let Some(Bandwidth(rate)) = self.bandwidth.filter(|b| b.0 < 1 << 20) {
            return Err(format!(
                "bandwidth: expected at least 1 MiB/s (8.4 Mbit), found {rate} bytes per second"
            ));
        }
        Ok(())
    }

    /// Goals do not contradict each other or other options.
    fn validate_goals(&self) -> Result<(), String> {
        let goals = &self.goals;
        goals.validate()?;
        if let Some(pause) = goals.max_pause_ms.filter(|_| self.paused) {
            return Err(format!(
                "goals contradict the options: max_pause_ms {pause} with paused, which leaves the guest paused; leave one of them out"
            ));
        }
        if let Some(within) = goals.within_ms.filter(|within| (1..*within).contains(&self.timeout_ms)) {
            return Err(format!(
                "goals contradict the options: within_ms {within}, and timeout_ms calls the migration off after {}; expected a timeout_ms of at least {within}, or 0 for none",
                self.timeout_ms
            ));
        }
        Ok(())
    }

    /// The same for a migration that becomes a visit: how its memory crossed until then, and what chose that, counts no more.
    #[must_use]
    pub fn of_visit(self) -> Self {
        Self {
            visit: Visit::Go,
            mode: Mode::Postcopy.into(),
            reads_bytes: None,
            reads_near_bytes_per_s: None,
            ..self
        }
    }

    /// A visit leaves most of the memory where it is: what needs all of it at the destination is not for visits.
    fn validate_visit(&self) -> Result<(), String> {
        let may_visit = self.visit == Visit::Go || self.reads_bytes.is_some();
        if !may_visit && self.go_home.is_some() {
            return Err(
                "go_home: expected a guest that goes for a visit (visit = \"go\"), found none".to_owned()
            );
        }
        self.go_home.validate()?;
        if self.visit == Visit::No {
            return Ok(());
        }
        let refused = [
            (!matches!(self.mode.fixed(), None | Some(Mode::Postcopy)), "another mode than postcopy"),
            (self.verify, "verify"),
            (!self.devices.is_empty(), "devices"),
            (!self.disks.is_empty(), "disks that move"),
            (self.quiesce.is_some() || self.resume.is_some(), "scripts in the guest"),
            (self.goals != Goals::default(), "goals"),
        ];
        match refused.iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(format!(
                "visit: expected none of the options that need all memory at the destination, found {what}; leave it out, or migrate for good"
            )),
            None => Ok(()),
        }
    }

    /// What a guest is to read decides how it goes, so nothing else does.
    fn validate_reads(&self) -> Result<(), String> {
        let Some(bytes) = self.reads_bytes else {
            return match self.reads_near_bytes_per_s {
                Some(_) => Err("reads_near_bytes_per_s: expected reads_bytes with it, found none".to_owned()),
                None => Ok(()),
            };
        };
        if bytes == 0 {
            return Err("reads_bytes: expected at least 1, found 0".to_owned());
        }
        if let Some(rate) = self.reads_near_bytes_per_s.filter(|rate| *rate < 1 << 20) {
            return Err(format!(
                "reads_near_bytes_per_s: expected at least 1 MiB/s, found {rate} bytes per second"
            ));
        }
        let refused = [
            (self.mode.fixed().is_some(), "a mode"),
            (self.visit != Visit::No, "a visit"),
            (!self.goals.is_empty(), "goals"),
            (self.paused, "paused"),
        ];
        match refused.iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(format!(
                "reads_bytes: expected that it decides how the guest goes, found {what}; leave one of them out"
            )),
            None => Ok(()),
        }
    }

    fn validate_disks(&self) -> Result<(), String> {
        if self.disks.len() > 1 && self.disks.iter().any(|name| name == ALL_DISKS) {
            return Err(format!(
                "disks: expected {ALL_DISKS} alone, or names, found {}",
                self.disks.join(",")
            ));
        }
        if let Some(name) = self.disks.iter().find(|name| name.is_empty()) {
            return Err(format!("disks: expected names, found {name:?}"));
        }
        if self.disks.is_empty() && !self.disk_map.is_empty() {
            return Err("disk_map: expected disks that move (`--disks`), found none".to_owned());
        }
        for (index, place) in self.disk_map.iter().enumerate() {
            let mut before = self.disk_map[..index].iter();
            if before.any(|other| other.name == place.name || other.path == place.path) {
                return Err(format!("disk_map: expected each disk and each path once, found {place} again"));
            }
        }
        self.validate_disks_after()
    }

    /// A guest whose disks follow it runs at the destination, by itself.
    fn validate_disks_after(&self) -> Result<(), String> {
        if !self.disks_after {
            return Ok(());
        }
        if self.disks.is_empty() {
            return Err("disks_after: expected disks that move (`--disks`), found none".to_owned());
        }
        let refused = [
            (self.paused, "paused: its disks are not opened before it runs"),
            (!self.devices.is_empty(), "devices"),
            (self.reads_bytes.is_some(), "reads_bytes, by which it may go for a visit"),
        ];
        match refused.iter().find(|(given, _)| *given) {
            Some((_, what)) => Err(format!(
                "disks_after: expected a guest that runs at the destination without what needs its disks there, found {what}; leave one of them out"
            )),
            None => Ok(()),
        }
    }

    /// Whether disks are copied while the guest runs at the source.
    #[must_use]
    pub fn copies_disks_first(&self) -> bool {
        !self.disks.is_empty() && !self.disks_after
    }

    /// The time limit up to the hand-over, if there is one. It does not count the time in which disks are copied.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        (self.timeout_ms > 0).then(|| Duration::from_millis(self.timeout_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_auto() {
        let spec = MigrationSpec::default();
        assert_eq!(spec.validate(), Ok(()));
        assert_eq!(spec.mode.fixed(), None);
    }

    #[test]
    fn each_range_is_checked() {
        let bad = MigrationSpec { max_downtime_ms: 0, ..MigrationSpec::default() };
        assert!(bad.validate().unwrap_err().contains("found 0"));
        let bad = MigrationSpec { bandwidth: Some(Bandwidth(10)), ..MigrationSpec::default() };
        assert!(bad.validate().unwrap_err().contains("found 10 bytes"));
        let devices = |texts: [&str; 2]| texts.map(|text| text.parse().unwrap()).to_vec();
        let bad = MigrationSpec { devices: devices(["a=1:0.0", "a=1:0.1"]), ..MigrationSpec::default() };
        assert!(bad.validate().unwrap_err().contains("found a=0000:01:00.1 again"));
        let disks = |names: &[&str], map: &[&str]| MigrationSpec {
            disks: names.iter().map(|&name| name.to_owned()).collect(),
            disk_map: map.iter().map(|text| text.parse().unwrap()).collect(),
            ..MigrationSpec::default()
        };
        assert!(disks(&["all", "vda"], &[]).validate().unwrap_err().contains("found all,vda"));
        assert!(disks(&[], &["vda=/x"]).validate().unwrap_err().contains("--disks"));
        assert!(disks(&["all"], &["a=/x", "b=/x"]).validate().unwrap_err().contains("found b=/x again"));
        assert_eq!(disks(&["a", "b"], &["a=/x", "b=/y"]).validate(), Ok(()));
        let after = |names: &[&str]| MigrationSpec { disks_after: true, ..disks(names, &[]) };
        assert!(after(&[]).validate().unwrap_err().contains("--disks"));
        assert_eq!(after(&["all"]).validate(), Ok(()));
        assert!(!after(&["all"]).copies_disks_first() && disks(&["all"], &[]).copies_disks_first());
        let paused = MigrationSpec { paused: true, ..after(&["all"]) };
        assert!(paused.validate().unwrap_err().contains("found paused"));
        let bad = MigrationSpec { unplug_timeout_ms: 1, ..MigrationSpec::default() };
        assert!(bad.validate().unwrap_err().contains("unplug_timeout_ms"));
    }

    #[test]
    fn what_needs_all_memory_is_not_for_visits() {
        let go = MigrationSpec { visit: Visit::Go, ..MigrationSpec::default() };
        assert_eq!(go.validate(), Ok(()));
        let verified = MigrationSpec { verify: true, ..go.clone() };
        assert!(verified.validate().unwrap_err().contains("found verify"));
        let hybrid = MigrationSpec { mode: ModeRequest::Hybrid, ..go.clone() };
        assert!(hybrid.validate().unwrap_err().contains("another mode than postcopy"));
        let hurried = MigrationSpec { goals: with_goals(Some(20), None).goals, ..go };
        assert!(hurried.validate().unwrap_err().contains("found goals"));
    }

    fn with_goals(pause: Option<u64>, within: Option<u64>) -> MigrationSpec {
        let goals = Goals { max_pause_ms: pause, within_ms: within, ..Goals::default() };
        MigrationSpec { goals, ..MigrationSpec::default() }
    }

    #[test]
    fn goals_that_contradict_are_refused_by_name() {
        assert_eq!(with_goals(Some(20), Some(60_000)).validate(), Ok(()));
        let why = |spec: MigrationSpec| spec.validate().unwrap_err();
        assert!(why(with_goals(Some(0), None)).contains("max_pause_ms: expected 1 to 60000, found 0"));
        assert!(why(with_goals(None, Some(1))).contains("within_ms: expected 100 to 86400000, found 1"));
        let share = |percent| {
            let goals = Goals { host_cpu_percent: Some(percent), ..Goals::default() };
            MigrationSpec { goals, ..MigrationSpec::default() }.validate()
        };
        assert_eq!((share(1), share(100)), (Ok(()), Ok(())));
        for bad in [0, 101] {
            let expected = format!("goals.host_cpu_percent: expected 1 to 100, found {bad}");
            assert_eq!(share(bad), Err(expected));
        }
        assert!(why(with_goals(Some(20_000), Some(10_000))).contains("contradict each other"));
        let paused = MigrationSpec { paused: true, ..with_goals(Some(20), None) };
        assert!(why(paused).contains("max_pause_ms 20 with paused"));
        let called_off = why(with_goals(None, Some(300_000)));
        assert!(called_off.contains("timeout_ms calls the migration off after 120000"), "{called_off}");
        assert_eq!(MigrationSpec { timeout_ms: 0, ..with_goals(None, Some(300_000)) }.validate(), Ok(()));
    }

    #[test]
    fn modes_parse_and_unknown_ones_say_what_was_found() {
        assert_eq!("hybrid".parse(), Ok(ModeRequest::Hybrid));
        assert!("rdma".parse::<ModeRequest>().unwrap_err().contains("\"rdma\""));
        assert_eq!("never".parse(), Ok(HeadStart::Never));
        assert!("no".parse::<HeadStart>().unwrap_err().contains("\"no\""));
    }
}
