//! The command line of a forked child: who it is, and which of its NICs must be replaced.

use super::{CommandLine, CommandLineError, Item, options::Options};

/// What must differ between a guest and its copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildIdentity {
    /// `-name guest=`.
    pub name: String,
    /// UUID of the machine, in its usual text form; none: it stays as it is. A guest sees it where its firmware tables are made anew.
    pub uuid: Option<String>,
    /// VM Generation ID, in the same form. QEMU writes it into the guest's memory when device state is loaded, and tells
    /// the guest.
    pub generation: String,
    /// MAC addresses, one for each of [`CommandLine::nics`].
    pub macs: Vec<String>,
}

/// A NIC given by `-device`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its id, if it has one.
    pub id: Option<String>,
    /// Its network back end.
    pub netdev: String,
    /// Its options in the form `driver,key=value,…`, for `device_add`.
    pub options: String,
    /// Whether its slot is given.
    pub has_address: bool,
}

impl CommandLine {
    /// NICs that can be unplugged and plugged: those given by `-device`.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn nics(&self) -> Result<Vec<Nic>, CommandLineError> {
        let mut found = Vec::new();
        for item in self.named("device") {
            let options = item.options()?;
            let Some(netdev) = options.get("netdev", false) else { continue };
            found.push(Nic {
                id: options.get("id", false),
                netdev,
                options: as_pairs(&options),
                has_address: options.get("addr", false).is_some(),
            });
        }
        Ok(found)
    }

    /// Makes this the command line of a copy of the guest.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn give_identity(&mut self, identity: &ChildIdentity) -> Result<(), CommandLineError> {
        if let Some(uuid) = &identity.uuid {
            self.items.retain(|item| item.name() != "uuid");
            self.items.push(Item::new("-uuid", uuid.as_str()));
        }
        let mut macs = (0..).zip(&identity.macs);
        for item in &mut self.items {
            match item.name() {
                "device" => {
                    let mut options = item.options()?;
                    if is_generation_id(&options) {
                        options.set_text("guid", &identity.generation);
                        item.set_options(&options);
                    } else if options.get("netdev", false).is_some() {
                        let Some((number, mac)) = macs.next() else { continue };
                        options.set_text("mac", mac);
                        if options.get("id", false).is_none() {
                            // By which it is unplugged. It is no part of the device state.
                            options.set_text("id", &format!("vmove-nic{number}"));
                        }
                        item.set_options(&options);
                    }
                }
                "name" => {
                    let mut options = item.options()?;
                    if options.get("guest", true).is_some() {
                        options.set_kind("guest", &identity.name);
                        item.set_options(&options);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// No huge pages are promised to the RAM files: for a QEMU whose RAM is soon to be mapped from elsewhere.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn reserve_nothing(&mut self) -> Result<(), CommandLineError> {
        for item in self.items.iter_mut().filter(|item| item.name() == "object") {
            let mut options = item.options()?;
            if options.get("qom-type", true).as_deref() == Some("memory-backend-file") {
                options.set_flag("reserve", false);
                item.set_options(&options);
            }
        }
        Ok(())
    }

    /// Whether QEMU locks all of its memory as it starts, which gives memory to all of it. With `on-fault` it does not.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn locks_memory(&self) -> Result<bool, CommandLineError> {
        let mut locks = false;
        for item in self.named("overcommit") {
            // Several are one: what a later one does not name stays.
            locks = item.options()?.flag("mem-lock").unwrap_or(locks);
        }
        Ok(locks)
    }

    /// The option by which QEMU is another user than the one that started it, or has another root folder, once it runs; as written.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn gives_up_root(&self) -> Result<Option<String>, CommandLineError> {
        for item in &self.items {
            let gives_up = match item.name() {
                "runas" | "chroot" => true,
                "run-with" => {
                    let options = item.options()?;
                    ["user", "chroot"].iter().any(|key| options.get(key, false).is_some())
                }
                _ => false,
            };
            if gives_up {
                return Ok(Some(format!("{} {}", item.flag.to_string_lossy(), item.text()?)));
            }
        }
        Ok(None)
    }

    /// No memory is locked: for a copy, whose memory is not copied before it is written. Returns whether it would have been.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn lock_nothing(&mut self) -> Result<bool, CommandLineError> {
        let mut locked = false;
        for item in self.items.iter_mut().filter(|item| item.name() == "overcommit") {
            let mut options = item.options()?;
            if options.get("mem-lock", false).is_some_and(|value| value != "off") {
                locked = true;
                options.set_text("mem-lock", "off");
                item.set_options(&options);
            }
        }
        Ok(locked)
    }
}

fn is_generation_id(options: &Options) -> bool {
    options.get("driver", true).as_deref() == Some("vmgenid")
}

/// The form that the human monitor takes.
fn as_pairs(options: &Options) -> String {
    let Options::Json(map) = options else { return options.to_string() };
    let mut pairs = Options::parse("").unwrap_or(Options::Pairs(<_>::default()));
    pairs.set_kind("driver", &options.get("driver", false).unwrap_or_default());
    for key in map.keys().filter(|key| *key != "driver") {
        pairs.set_text(key, &options.get(key, false).unwrap_or_default());
    }
    pairs.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> CommandLine {
        CommandLine::parse(std::iter::once(&"qemu").chain(words).map(Into::into).collect()).unwrap()
    }

    fn identity() -> ChildIdentity {
        ChildIdentity {
            name: "a,b".to_owned(),
            uuid: Some("u".to_owned()),
            generation: "g".to_owned(),
            macs: vec!["52:00:00:00:00:01".to_owned(), "52:00:00:00:00:02".to_owned()],
        }
    }

    fn words(line: &CommandLine) -> Vec<String> {
        line.to_argv().into_iter().skip(1).map(|w| w.into_string().unwrap()).collect()
    }

    #[test]
    fn a_child_differs_in_everything_that_must_be_unique() {
        let mut line = line(&[
            "-uuid",
            "old",
            "-name",
            "parent,debug-threads=on",
            "-device",
            "vmgenid,guid=auto",
            "-device",
            "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:01",
            "-device",
            r#"{"driver":"e1000","netdev":"n1","id":"x"}"#,
            "-device",
            "virtio-blk-pci,drive=d",
        ]);
        line.give_identity(&identity()).unwrap();
        assert_eq!(
            words(&line),
            [
                "-name",
                "a,,b,debug-threads=on",
                "-device",
                "vmgenid,guid=g",
                "-device",
                "virtio-net-pci,netdev=n0,mac=52:00:00:00:00:01,id=vmove-nic0",
                "-device",
                r#"{"driver":"e1000","id":"x","mac":"52:00:00:00:00:02","netdev":"n1"}"#,
                "-device",
                "virtio-blk-pci,drive=d",
                "-uuid",
                "u",
            ]
        );
    }

    #[test]
    fn nics_are_told_in_the_form_of_the_human_monitor() {
        let line = line(&[
            "-device",
            "virtio-net-pci,netdev=n0,addr=5",
            "-device",
            r#"{"driver":"e1000","netdev":"n1","id":"x"}"#,
        ]);
        let nics = line.nics().unwrap();
        assert_eq!(nics[0].options, "virtio-net-pci,netdev=n0,addr=5");
        assert!(nics[0].has_address && !nics[1].has_address);
        assert_eq!(nics[1].options, "e1000,id=x,netdev=n1");
        assert_eq!(nics[1].id.as_deref(), Some("x"));
    }

    #[test]
    fn copies_lock_no_memory() {
        for value in ["on", "on-fault"] {
            let mut line = line(&["-overcommit", &format!("mem-lock={value},cpu-pm=on"), "-m", "1G"]);
            assert!(line.lock_nothing().unwrap());
            assert_eq!(words(&line)[1], "mem-lock=off,cpu-pm=on");
            assert!(!line.lock_nothing().unwrap(), "it is off now");
        }
        assert!(!line(&["-m", "1G"]).lock_nothing().unwrap());
    }

    #[test]
    fn memory_that_is_locked_as_qemu_starts_is_known() {
        let locks = |words: &[&str]| line(words).locks_memory().unwrap();
        assert!(locks(&["-overcommit", "mem-lock=on,cpu-pm=on"]));
        assert!(locks(&["-overcommit", "mem-lock=yes", "-overcommit", "cpu-pm=on"]));
        assert!(!locks(&["-overcommit", "mem-lock=on", "-overcommit", "mem-lock=off"]));
        assert!(!locks(&["-overcommit", "mem-lock=on-fault"]));
        assert!(!locks(&["-overcommit", "cpu-pm=on", "-m", "1G"]));
    }

    #[test]
    fn who_gives_up_root_is_known() {
        let found = |words: &[&str]| line(words).gives_up_root().unwrap();
        let giving_up = [
            ["-runas", "nobody"],
            ["--runas", "65534:65534"],
            ["-chroot", "/var/empty"],
            ["-run-with", "user=nobody"],
            ["-run-with", "async-teardown=on,user=65534:65534"],
            ["-run-with", "chroot=/var/empty"],
        ];
        for words in giving_up {
            assert_eq!(found(&["-S", words[0], words[1], "-m", "1G"]), Some(words.join(" ")));
        }
        assert_eq!(found(&["-run-with", "async-teardown=on", "-name", "user=x", "-append", "-runas"]), None);
    }

    #[test]
    fn huge_pages_are_not_promised_twice() {
        let mut line = line(&["-object", "memory-backend-file,id=r,size=1G,mem-path=/x,share=on"]);
        line.reserve_nothing().unwrap();
        assert_eq!(words(&line)[1], "memory-backend-file,id=r,size=1G,mem-path=/x,share=on,reserve=off");
    }
}
