//! Start times of processes, as they are written down: together with the boot of the kernel to which they belong.
//!
//! A process is known by its id and its start time in clock ticks since boot. After a reboot another process may have both. So a record
//! holds the kernel's boot id as well, and what belongs to another boot is read as a start time that no process has. It is another one for
//! each boot and start time, so that two processes of earlier boots are told apart as well.

use std::sync::LazyLock;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Set in the start time of a process of an earlier boot. No process of now has it: it would have started after billions of years.
const GONE: u64 = 1 << 63;

/// The id of this boot of the kernel; empty if the kernel does not tell.
static BOOT: LazyLock<String> = LazyLock::new(|| {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
});

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written<'a> {
    WithBoot {
        ticks: u64,
        #[serde(borrow)]
        boot: std::borrow::Cow<'a, str>,
    },
    /// As written before records held the boot.
    Ticks(u64),
}

/// For `#[serde(with)]`: writes the start time with this boot.
///
/// # Errors
/// The serializer's.
pub fn serialize<S: Serializer>(start: &u64, to: S) -> Result<S::Ok, S::Error> {
    let boot = if start & GONE == 0 { BOOT.as_str() } else { "" };
    Written::WithBoot { ticks: *start, boot: boot.into() }.serialize(to)
}

/// For `#[serde(with)]`: the start time, or one that no process has if it belongs to another boot. One without a boot is taken as it is.
///
/// # Errors
/// The deserializer's.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    Ok(match Written::deserialize(from)? {
        Written::Ticks(ticks) => ticks,
        Written::WithBoot { ticks, boot } if boot == BOOT.as_str() => ticks,
        Written::WithBoot { ticks, boot } => gone(ticks, &boot),
    })
}

/// The same for process ids with their start times.
pub mod processes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Start(#[serde(with = "crate::boot")] u64);

    /// For `#[serde(with)]`.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(processes: &[(u32, u64)], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(processes.iter().map(|(pid, start)| (pid, Start(*start))))
    }

    /// For `#[serde(with)]`.
    ///
    /// # Errors
    /// The deserializer's.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u32, u64)>, D::Error> {
        let processes = Vec::<(u32, Start)>::deserialize(from)?;
        Ok(processes.into_iter().map(|(pid, Start(start))| (pid, start)).collect())
    }
}

/// What stands for a start time of another boot, by FNV-1a; itself when it is written and read again.
fn gone(ticks: u64, boot: &str) -> u64 {
    if ticks & GONE != 0 {
        return ticks;
    }
    let bytes = ticks.to_le_bytes().into_iter().chain(boot.bytes());
    GONE | bytes
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use vmove_memory::Process;

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Record {
        #[serde(with = "super")]
        pid_start: u64,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Servers {
        #[serde(with = "super::processes")]
        servers: Vec<(u32, u64)>,
    }

    fn read(text: &str) -> u64 {
        serde_json::from_str::<Record>(text).unwrap().pid_start
    }

    #[test]
    fn a_process_of_before_a_reboot_is_not_taken_for_one_of_now() {
        let own = Process::open(std::process::id()).unwrap();
        let text = serde_json::to_string(&Record { pid_start: own.start_time() }).unwrap();
        Process::reopen(own.pid(), read(&text)).unwrap();
        // The same id and the same start, of another boot.
        let before = text.replace(BOOT.as_str(), "5b2f3c1e-0000-4000-8000-000000000000");
        assert_ne!(before, text);
        Process::reopen(own.pid(), read(&before)).unwrap_err();
        // Also after it was written again.
        let again = serde_json::to_string(&Record { pid_start: read(&before) }).unwrap();
        assert_eq!(read(&again), read(&before));
        // Nor for one of a third boot.
        assert_ne!(read(&before.replace("5b2f", "5b2e")), read(&before));
    }

    #[test]
    fn a_record_without_a_boot_is_read() {
        assert_eq!(read(r#"{"pid_start": 12345}"#), 12345);
        let old: Servers = serde_json::from_str(r#"{"servers": [[7, 12345], [8, 23456]]}"#).unwrap();
        assert_eq!(old.servers, [(7, 12345), (8, 23456)]);
        let written = serde_json::to_string(&old).unwrap();
        assert!(written.contains(BOOT.as_str()), "{written}");
        assert_eq!(serde_json::from_str::<Servers>(&written).unwrap(), old);
    }
}
