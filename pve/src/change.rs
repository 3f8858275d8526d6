//! The changes that enable a VM, and their undoing; and its lock.

use crate::{Config, PveError, Section, Vmid, arguments};

/// Memory of a VM whose configuration does not say, in MiB.
const DEFAULT_MEMORY: &str = "512";
/// The lock of a VM that moves, as Proxmox VE itself sets it.
const MIGRATE: &str = "migrate";

/// A VM: its number and its configuration.
#[derive(Debug, Clone)]
pub struct Vm {
    vmid: Vmid,
    config: Config,
}

impl Vm {
    /// A VM.
    #[must_use]
    pub const fn new(vmid: Vmid, config: Config) -> Self {
        Self { vmid, config }
    }

    /// Its number.
    #[must_use]
    pub const fn vmid(&self) -> Vmid {
        self.vmid
    }

    /// Its configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The configuration with what vmove needs. A VM that runs gets it in [`Section::Pending`], as `qm set` would write it: until its next start the
    /// configuration still tells what its QEMU has, and `qm migrate` works as before.
    ///
    /// # Errors
    /// [`PveError`]
    pub fn enabled(&self, section: Section) -> Result<Config, PveError> {
        let kept = arguments::without_ours(self.args(section))?;
        let ours = arguments::ours(self.vmid, self.memory(section)?);
        Ok(self.with_args(section, format!("{kept} {ours}").trim()))
    }

    /// The configuration without it.
    ///
    /// # Errors
    /// [`PveError`]
    pub fn disabled(&self, section: Section) -> Result<Config, PveError> {
        let args = self.args(section);
        let kept = arguments::without_ours(args)?;
        if kept == args.trim() {
            return Err(PveError::NotEnabled(self.vmid));
        }
        Ok(self.with_args(section, &kept))
    }

    /// Whether it is enabled: now, or from its next start.
    ///
    /// # Errors
    /// [`PveError`]
    pub fn is_enabled(&self, section: Section) -> Result<bool, PveError> {
        arguments::has_ours(self.args(section), self.vmid, self.memory(section)?)
    }

    /// Another VM whose monitor and memory this one would use: it is a clone or restored copy of that, and `vmove-pve enable` was not run for it.
    ///
    /// # Errors
    /// [`PveError`]
    pub fn copied_from(&self, section: Section) -> Result<Option<Vmid>, PveError> {
        arguments::of_another(self.args(section), self.vmid)
    }

    /// Memory in MiB.
    ///
    /// # Errors
    /// [`PveError::Memory`]
    pub fn memory(&self, section: Section) -> Result<u64, PveError> {
        let text = self.in_effect(section, "memory").unwrap_or(DEFAULT_MEMORY);
        let number = text.strip_prefix("current=").unwrap_or(text);
        number.parse().ok().filter(|mib| *mib > 0).ok_or_else(|| PveError::Memory(text.to_owned()))
    }

    /// What it is locked for.
    #[must_use]
    pub fn lock(&self) -> Option<&str> {
        self.config.value(Section::Main, "lock")
    }

    /// Whether nobody works on it.
    ///
    /// # Errors
    /// [`PveError::Locked`]
    pub fn not_locked(&self) -> Result<(), PveError> {
        match self.lock() {
            Some(lock) => Err(PveError::Locked { vmid: self.vmid, lock: lock.to_owned() }),
            None => Ok(()),
        }
    }

    /// The configuration with the lock of a VM that moves: nobody else starts, moves or changes it.
    ///
    /// # Errors
    /// [`PveError::Locked`]: somebody works on it.
    pub fn locked(&self) -> Result<Config, PveError> {
        self.not_locked()?;
        let mut config = self.config.clone();
        config.set(Section::Main, "lock", MIGRATE);
        Ok(config)
    }

    /// The configuration without that lock; another one stays.
    #[must_use]
    pub fn unlocked(&self) -> Config {
        let mut config = self.config.clone();
        if self.lock() == Some(MIGRATE) {
            config.remove(Section::Main, "lock");
        }
        config
    }

    /// What counts now, or from the next start.
    fn in_effect(&self, section: Section, key: &str) -> Option<&str> {
        let now = self.config.value(Section::Main, key);
        if section != Section::Pending {
            return now;
        }
        self.config.value(Section::Pending, key).or_else(|| now.filter(|_| !self.is_deleted(key)))
    }

    fn args(&self, section: Section) -> &str {
        self.in_effect(section, "args").unwrap_or_default()
    }

    /// Whether the next start takes a key away (`delete: args,!balloon`).
    fn is_deleted(&self, key: &str) -> bool {
        self.deletes().any(|name| name.trim_start_matches('!') == key)
    }

    fn deletes(&self) -> impl Iterator<Item = &str> {
        let all = self.config.value(Section::Pending, "delete").unwrap_or_default();
        all.split([',', ';', ' ']).filter(|name| !name.is_empty())
    }

    fn with_args(&self, section: Section, args: &str) -> Config {
        let mut config = self.config.clone();
        if section == Section::Main {
            match args {
                "" => config.remove(Section::Main, "args"),
                _ => config.set(Section::Main, "args", args),
            }
            return config;
        }
        let now = self.config.value(Section::Main, "args").unwrap_or_default();
        let mut deletes: Vec<&str> =
            self.deletes().filter(|name| name.trim_start_matches('!') != "args").collect();
        if args.is_empty() && !now.is_empty() {
            deletes.push("args");
        }
        if deletes.is_empty() {
            config.remove(Section::Pending, "delete");
        } else {
            config.set(Section::Pending, "delete", &deletes.join(","));
        }
        if args == now || args.is_empty() {
            config.remove(Section::Pending, "args");
        } else {
            config.set(Section::Pending, "args", args);
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "#web\nargs: -cpu 'host,+x y'\nmemory: 2048\nname: web\n\n[snap]\nargs: -y\n";

    fn vm(text: &str) -> Vm {
        Vm::new("100".parse().unwrap(), Config::read(text))
    }

    fn again(config: &Config) -> Vm {
        vm(&config.text())
    }

    #[test]
    fn what_enables_is_undone_to_the_byte() {
        let bare = PLAIN.replace("args: -cpu 'host,+x y'\n", "");
        for text in [PLAIN.to_owned(), bare, PLAIN.replace('\n', "\r\n"), "name: web\n".to_owned()] {
            for section in [Section::Main, Section::Pending] {
                let enabled = again(&vm(&text).enabled(section).unwrap());
                assert!(enabled.is_enabled(section).unwrap(), "{}", enabled.config.text());
                assert_eq!(
                    enabled.enabled(section).unwrap(),
                    enabled.config,
                    "a second time changes nothing"
                );
                assert_eq!(enabled.disabled(section).unwrap().text(), text);
            }
        }
    }

    #[test]
    fn what_runs_keeps_its_arguments_until_it_starts_again() {
        let enabled = again(&vm(PLAIN).enabled(Section::Pending).unwrap());
        assert_eq!(enabled.config.value(Section::Main, "args"), Some("-cpu 'host,+x y'"));
        assert!(!enabled.is_enabled(Section::Main).unwrap());
        // And the other way round: disabled while it runs with ours.
        let runs = again(&vm(PLAIN).enabled(Section::Main).unwrap());
        let disabled = again(&runs.disabled(Section::Pending).unwrap());
        assert!(disabled.is_enabled(Section::Main).unwrap());
        assert_eq!(disabled.config.value(Section::Pending, "args"), Some("-cpu 'host,+x y'"));
        assert_eq!(disabled.enabled(Section::Pending).unwrap(), runs.config, "changed one's mind");
    }

    #[test]
    fn arguments_that_were_ours_alone_are_deleted_at_the_next_start() {
        let runs = again(&vm("name: web\n").enabled(Section::Main).unwrap());
        let disabled = again(&runs.disabled(Section::Pending).unwrap());
        assert_eq!(disabled.config.value(Section::Pending, "delete"), Some("args"));
        assert!(!disabled.is_enabled(Section::Pending).unwrap());
        assert_eq!(disabled.enabled(Section::Pending).unwrap(), runs.config);
    }

    #[test]
    fn memory_that_is_pending_counts_at_the_next_start() {
        let pending = vm("memory: 2048\nname: web\n\n[PENDING]\nmemory: current=4096\n");
        assert!(pending.enabled(Section::Pending).unwrap().text().contains("size=4096M"));
        assert!(pending.enabled(Section::Main).unwrap().text().contains("size=2048M"));
        assert!(vm("name: x\n").enabled(Section::Main).unwrap().text().contains("size=512M"));
        assert!(matches!(vm("memory: much\n").enabled(Section::Main), Err(PveError::Memory(_))));
        // After the size was changed, it is no longer enabled.
        let enabled = vm("memory: 2048\n").enabled(Section::Main).unwrap().text();
        assert!(!vm(&enabled.replace("memory: 2048", "memory: 4096")).is_enabled(Section::Main).unwrap());
    }

    #[test]
    fn a_lock_is_ours_to_take_away_only_if_it_is_that_of_a_move() {
        let locked = again(&vm(PLAIN).locked().unwrap());
        assert_eq!(locked.lock(), Some("migrate"));
        assert!(matches!(locked.locked(), Err(PveError::Locked { .. })));
        assert_eq!(locked.unlocked().text(), PLAIN);
        let backup = vm("lock: backup\nname: web\n");
        assert_eq!(backup.unlocked().text(), backup.config.text());
        assert!(matches!(backup.locked(), Err(PveError::Locked { lock, .. }) if lock == "backup"));
        assert!(vm("name: x\n\n[snap]\nlock: y\n").lock().is_none());
    }

    #[test]
    fn nothing_is_undone_where_nothing_was_done() {
        assert!(matches!(vm(PLAIN).disabled(Section::Main), Err(PveError::NotEnabled(_))));
    }
}
