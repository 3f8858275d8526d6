//! What a command line that another node wrote may have QEMU do on this one.
//!
//! QEMU runs here with the command line of the node that sends the guest, as root if the operator wants that. Some options run programs, write
//! files, or let others control QEMU: they give that node this one. So an option is taken only if it is known here and does nothing of the kind.
//! The guest's own files (disks, firmware, kernel) may be anywhere, since both nodes name them by the same path.
//!
//! Each thing that is refused has a name (its *rule*), such as `netdev.script`; an operator who needs it lifts that rule.

mod places;
mod rules;
#[cfg(test)]
mod tests;

use super::{CommandLine, CommandLineError, Item};

/// An option of another node's command line that is refused here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// The option with its argument, as written.
    pub option: String,
    /// By this name it can be allowed.
    pub rule: String,
    /// What it would do.
    pub why: &'static str,
}

impl std::fmt::Display for Forbidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} (rule {})", self.option, self.why, self.rule)
    }
}

/// A rule that a part of a command line breaks, and what that part would do.
type Broken = (String, &'static str);

impl CommandLine {
    /// Everything that a command line of another node may not have done here. `lifted`: names of rules that do not hold, such as
    /// `netdev.script`; `netdev.*` lifts all that begin so, `*` lifts all.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn forbidden(&self, lifted: &[String]) -> Result<Vec<Forbidden>, CommandLineError> {
        let mut found = Vec::new();
        let monitors = self.monitor_chardevs()?;
        for item in &self.items {
            let broken = rules::broken(item, &monitors)?;
            let holding = broken.into_iter().filter(|(rule, _)| !lifted.iter().any(|name| lifts(name, rule)));
            found.extend(holding.map(|(rule, why)| Forbidden { option: written(item), rule, why }));
        }
        Ok(found)
    }

    /// Character devices that are monitors.
    fn monitor_chardevs(&self) -> Result<Vec<String>, CommandLineError> {
        let mut found = Vec::new();
        for item in self.named("mon") {
            found.extend(item.options()?.get("chardev", true));
        }
        for item in ["monitor", "qmp", "qmp-pretty"].iter().flat_map(|name| self.named(name)) {
            found.extend(item.text()?.strip_prefix("chardev:").map(str::to_owned));
        }
        Ok(found)
    }
}

fn lifts(name: &str, rule: &str) -> bool {
    name == rule || name.strip_suffix('*').is_some_and(|start| rule.starts_with(start))
}

fn written(item: &Item) -> String {
    let value = item.value.as_ref().map(|value| value.to_string_lossy().into_owned());
    [Some(item.flag.to_string_lossy().into_owned()), value]
        .into_iter()
        .flatten()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}
