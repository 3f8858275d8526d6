//! How much of its host a command line asks for.

use vmove_types::device::PciAddress;

use super::host_device::{addresses, passes_through};
use super::size::parse_size;
use super::{CommandLine, CommandLineError};

/// Levels of a machine's processors: where no maximum is given, their product is one.
const LEVELS: [&str; 8] = ["drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"];

/// What a guest can come to have, with all that may be plugged in later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Virtual processors.
    pub processors: u32,
    /// Memory by `-m`, in bytes; nothing if it does not say.
    pub memory: Option<u64>,
    /// Devices of the host.
    pub host_devices: Vec<PciAddress>,
}

impl CommandLine {
    /// What it asks for.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`], and [`CommandLineError::NotMovable`] with parts of devices, which have no address of their own.
    pub fn wanted(&self) -> Result<Wanted, CommandLineError> {
        let devices: Vec<_> = self.items.iter().filter(|item| passes_through(item)).cloned().collect();
        Ok(Wanted {
            processors: self.processors()?,
            memory: self.most_memory()?,
            host_devices: addresses(devices)?,
        })
    }

    fn processors(&self) -> Result<u32, CommandLineError> {
        let (mut counts, mut levels) = (vec![1], Vec::new());
        for key in ["cpus", "maxcpus"].iter().chain(&LEVELS) {
            let read = |text: &str| text.parse::<u32>().ok();
            let found =
                self.last_of("smp", key, *key == "cpus", "a number of processors is expected", read)?;
            let into = if LEVELS.contains(key) { &mut levels } else { &mut counts };
            into.extend(found);
        }
        counts.push(levels.into_iter().fold(1, u32::saturating_mul));
        Ok(counts.into_iter().max().unwrap_or(1))
    }

    fn most_memory(&self) -> Result<Option<u64>, CommandLineError> {
        let expected = "a size such as 1G or 1024 is expected";
        let size = self.last_of("m", "size", true, expected, |text| parse_size(text, 1 << 20))?;
        let most = self.last_of("m", "maxmem", false, expected, |text| parse_size(text, 1))?;
        Ok(size.max(most))
    }

    /// What a key of an option says. QEMU takes what is given several times as one, in which the last word counts.
    fn last_of<T>(
        &self,
        option: &str,
        key: &str,
        implied: bool,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, CommandLineError> {
        let mut found = None;
        for item in self.named(option) {
            if let Some(text) = item.options()?.get(key, implied) {
                found = Some(read(&text).ok_or_else(|| item.unreadable(expected))?);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &str) -> Result<Wanted, CommandLineError> {
        CommandLine::parse(words.split(' ').map(Into::into).collect())?.wanted()
    }

    #[test]
    fn the_most_that_a_guest_can_come_to_have_is_counted() {
        for (words, processors, memory_mib) in [
            ("qemu", 1, None),
            ("qemu -m 512 -smp 2", 2, Some(512)),
            ("qemu -m 1.5G,slots=2,maxmem=4G --smp cpus=2,maxcpus=8", 8, Some(4096)),
            ("qemu -m size=1G -m 2G -smp sockets=2,cores=4", 8, Some(2048)),
            ("qemu -smp 2,sockets=2,cores=2,threads=2", 8, None),
            ("qemu -smp 4 -smp 2", 2, None),
        ] {
            let wanted = of(words).unwrap();
            let memory = wanted.memory.map(|bytes| bytes >> 20);
            assert_eq!((wanted.processors, memory), (processors, memory_mib), "{words}");
        }
        for (words, expected) in
            [("qemu -smp many", "number of processors"), ("qemu -m 5parsecs", "a size such as")]
        {
            let error = of(words).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn devices_of_the_host_are_found_in_each_way_of_writing() {
        let words = "qemu -device vfio-pci,host=01:00.0 -device virtio-net --device {\"driver\":\"vfio-pci\",\"host\":\"0000:0A:00.1\"} \
            -device vfio-pci-nohotplug,id=a,sysfsdev=/sys/bus/pci/devices/0000:02:00.0";
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        let found: Vec<String> = of(&words).unwrap().host_devices.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["0000:01:00.0", "0000:0a:00.1", "0000:02:00.0"]);
        let mediated =
            "qemu -device vfio-pci,sysfsdev=/sys/bus/mdev/devices/83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
        assert!(matches!(of(mediated), Err(CommandLineError::NotMovable(_))));
        assert!(matches!(of("qemu -device vfio-pci,id=a"), Err(CommandLineError::Unreadable { .. })));
    }
}
