//! What a command line says of the rights that QEMU has, and what is added where it says nothing.

use super::{CommandLine, Item};
use crate::confine::{Confinement, LockedMemory};

/// What `-sandbox` refuses beside the system calls that it refuses always.
const DENIED_CALLS: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

impl CommandLine {
    /// With which rights its QEMU is started: as root if it names a user to change to by itself.
    #[must_use]
    pub fn confined(&self, confinement: &Confinement) -> Confinement {
        let user = confinement.user.clone().filter(|_| !self.names_user());
        Confinement { user, sandbox: confinement.sandbox }
    }

    /// Whether it names a user for QEMU to change to.
    #[must_use]
    pub fn names_user(&self) -> bool {
        let named = |item: &Item| item.options().is_ok_and(|options| options.get("user", false).is_some());
        self.named("runas").next().is_some() || self.named("run-with").any(named)
    }

    /// Whether QEMU locks memory, at once or bit by bit.
    pub(crate) fn locks_any_memory(&self) -> bool {
        let value = |item: &Item| item.options().ok()?.get("mem-lock", false);
        self.named("overcommit").filter_map(value).last().is_some_and(|value| value != "off")
    }

    /// How much memory its QEMU must be able to lock as it starts.
    pub fn locked_memory(&self) -> LockedMemory {
        if self.locks_any_memory() {
            return LockedMemory::All;
        }
        if !self.has_host_devices() {
            return LockedMemory::Usual;
        }
        let backends = self.ram_backends().unwrap_or_default();
        LockedMemory::UpTo(with_devices(backends.iter().filter_map(|backend| backend.size).sum()))
    }

    /// Whether QEMU runs programs for its networks.
    #[must_use]
    pub fn runs_programs(&self) -> bool {
        self.taps().iter().any(|tap| tap.runs_programs)
    }

    /// Adds the filter of system calls that this asks for, unless it says itself what it wants.
    pub(super) fn filter_calls(&mut self, confinement: &Confinement) {
        if !confinement.sandbox || self.named("sandbox").next().is_some() {
            return;
        }
        let mut denied = DENIED_CALLS.to_owned();
        if self.names_user() {
            denied = denied.replace(",elevateprivileges=deny", "");
        }
        if confinement.user.is_none() && self.runs_programs() {
            denied = denied.replace(",spawn=deny", "");
        }
        self.items.push(Item::new("-sandbox", denied));
    }
}

/// Bytes that a QEMU must be able to lock for devices of the host, with so many bytes of guest memory: the kernel counts some memory of
/// the devices, too.
#[must_use]
pub fn with_devices(ram: u64) -> u64 {
    ram.saturating_add(1 << 30)
}

#[cfg(test)]
mod tests {
    use crate::confine::QemuUser;

    use super::*;

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(std::iter::once(&"qemu").chain(words).map(Into::into).collect()).unwrap()
    }

    fn filter(words: &[&str], confinement: &Confinement) -> Option<String> {
        let mut line = line(words);
        line.filter_calls(confinement);
        line.named("sandbox").map(|item| item.text().unwrap().to_owned()).last()
    }

    #[test]
    fn what_a_command_line_says_itself_stays() {
        let user = QemuUser::find("daemon").unwrap();
        let confinement = Confinement { user: user.clone(), sandbox: true };
        assert_eq!(line(&["-m", "1G"]).confined(&confinement), confinement);
        assert_eq!(filter(&["-m", "1G"], &confinement).as_deref(), Some(DENIED_CALLS));
        assert_eq!(filter(&["-sandbox", "off"], &confinement).as_deref(), Some("off"));
        for own in [
            &["-runas", "nobody"][..],
            &["-run-with", "user=nobody"],
            &["-run-with", "async-teardown=on,user=a"],
        ] {
            assert_eq!(line(own).confined(&confinement).user, None, "{own:?}");
            let argument = filter(own, &confinement).unwrap();
            assert!(!argument.contains("elevateprivileges") && argument.contains("spawn=deny"), "{argument}");
        }
        assert_eq!(line(&["-run-with", "async-teardown=on"]).confined(&confinement).user, user);
        let root = Confinement { user: None, sandbox: true };
        assert!(!filter(&["-netdev", "tap,id=n"], &root).unwrap().contains("spawn"), "its script must run");
        assert_eq!(filter(&["-netdev", "tap,id=n"], &Confinement::default()), None);
    }
}
