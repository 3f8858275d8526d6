//! `do`: what a hook does.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::rate::Rate;

/// What a hook does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Moves the VM.
    Migrate(Where),
    /// Makes children of it on this node.
    Fork {
        /// How many.
        count: ForkCount,
        /// They stay as the guest was at that moment.
        paused: bool,
    },
    /// Keeps the guest as it is now, as a template.
    SaveTemplate {
        /// What it is called.
        name: TemplateName,
        /// Of those that this hook has made of the VM, only so many of the newest stay.
        keep: Option<usize>,
    },
    /// Stops its processors.
    Pause,
    /// Runs a program.
    Run {
        /// Its path.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<String>,
    },
}

/// Where a VM is moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Where {
    /// To the first of these that takes it.
    Nodes(Vec<String>),
    /// To where the bridge puts what is on this node.
    Bridge,
}

/// How many children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkCount(pub usize);

/// The name of a template, with `{vm}` and `{time}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateName(String);

impl TemplateName {
    /// Reads it.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        if !text.contains("{time}") {
            return Err(format!(
                "expected {{time}} in the name, since a template of the same name is not replaced, found \"{text}\""
            ));
        }
        let rest = text.replace("{vm}", "").replace("{time}", "");
        if rest.contains(['{', '}', '/']) {
            return Err(format!(
                "expected {{vm}} and {{time}} as the only braces and no slash, found \"{text}\""
            ));
        }
        Ok(Self(text.to_owned()))
    }

    /// For a VM at a time: `web-20261125-140000`.
    #[must_use]
    pub fn at(&self, vm: &str, time: &str) -> String {
        self.0.replace("{vm}", vm).replace("{time}", time)
    }

    /// Whether a template has such a name, of this VM.
    #[must_use]
    pub fn fits(&self, vm: &str, name: &str) -> bool {
        let plain = self.0.replace("{vm}", vm);
        let Some((before, after)) = plain.split_once("{time}") else { return false };
        let Some(time) = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after)) else {
            return false;
        };
        time.len() == "20261125-140000".len() && time.chars().all(|c| c.is_ascii_digit() || c == '-')
    }
}

impl Action {
    /// Whether it needs a VM.
    #[must_use]
    pub const fn needs_vm(&self) -> bool {
        !matches!(self, Self::Run { .. })
    }

    /// The most runs for a VM, unless the operator says otherwise: a guest can cause some events as often as it likes.
    pub(crate) const fn usual_rate(&self) -> Rate {
        match self {
            Self::Run { .. } => Rate { count: 60, within: Duration::from_secs(60) },
            _ => Rate { count: 6, within: Duration::from_secs(3600) },
        }
    }

    /// How long an attempt may take, unless the operator says otherwise.
    pub(crate) const fn usual_time_limit(&self, somebody_waits: bool) -> Duration {
        Duration::from_secs(match self {
            Self::Run { .. } if somebody_waits => 10,
            Self::Run { .. } | Self::Pause => 30,
            Self::Fork { .. } | Self::SaveTemplate { .. } => 600,
            Self::Migrate(_) => 3600,
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Migrate(Where::Nodes(nodes)) => write!(f, "migrate to {}", nodes.join(" or ")),
            Self::Migrate(Where::Bridge) => f.write_str("migrate to where the bridge says"),
            Self::Fork { count: ForkCount(count), paused } => {
                write!(f, "fork {count}{}", if *paused { ", kept paused" } else { "" })
            }
            Self::SaveTemplate { name, keep } => {
                write!(f, "save template {}", name.0)?;
                keep.map_or(Ok(()), |keep| write!(f, ", keep {keep}"))
            }
            Self::Pause => f.write_str("pause"),
            Self::Run { program, arguments } => {
                write!(f, "run {}", program.display())?;
                arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_of_a_hook_are_known_by_their_names() {
        let name = TemplateName::read("{vm}-auto-{time}").unwrap();
        let made = name.at("web", "20261125-140000");
        assert_eq!(made, "web-auto-20261125-140000");
        assert!(name.fits("web", &made));
        for other in
            ["web-auto-by-hand-000000", "web-20261125-140000", "db-auto-20261125-140000", "web-auto-"]
        {
            assert!(!name.fits("web", other), "{other}");
        }
        assert!(TemplateName::read("{time}-{host}").is_err() && TemplateName::read("a/{time}").is_err());
    }
}
