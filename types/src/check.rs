//! Everything that stands in the way of a migration, found before anything is changed.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::choice::Choice;
use crate::device::OwnState;
use crate::promise::Promise;
use crate::spec::Mode;

macro_rules! blocker_codes {
    ($($(#[doc = $meaning:literal])* $name:ident = $word:literal,)*) => {
        /// What stands in the way, as a stable word. New words may be added; `docs/errors.md` says what to do about each.
        ///
        /// It is that word in JSON and between daemons.
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(from = "String", into = "String")]
        #[non_exhaustive]
        pub enum BlockerCode {
            $($(#[doc = $meaning])* $name,)*
            /// A word that this version does not know: the other daemon is newer.
            Unknown(String),
        }

        impl BlockerCode {
            /// Every code that this version knows.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The word.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $word,)*
                    Self::Unknown(word) => word,
                }
            }
        }
    };
}

blocker_codes! {
    /// Guest memory is not a shared file.
    RamNotShared = "ram-not-shared",
    /// Guest memory is private since a fork.
    PrivateRam = "private-ram",
    /// Guest memory is in files that are elsewhere than the node's folder for guest memory (forks).
    RamPlace = "ram-place",
    /// A device of the host is passed to the guest.
    Vfio = "vfio",
    /// The guest shares memory with another process.
    Ivshmem = "ivshmem",
    /// A vDPA device writes to guest memory.
    Vdpa = "vdpa",
    /// A process beside QEMU writes to guest memory.
    VhostUser = "vhost-user",
    /// Something outside of QEMU writes to guest memory (forks).
    OutsideWriter = "outside-writer",
    /// A device that the guest owns cannot leave it, or another one that is to take its place cannot be had.
    Device = "device",
    /// The destination takes only VMs that a bridge has granted, and this one has no grant that is good there.
    Grant = "grant",
    /// A device of the host cannot come along.
    HostDevice = "host-device",
    /// The CPU model depends on the host.
    CpuModel = "cpu-model",
    /// QEMU is in a state from which it cannot be moved or forked.
    RunState = "run-state",
    /// QEMU itself refuses to be migrated.
    QemuRefuses = "qemu-refuses",
    /// QEMU itself refuses to be forked.
    Qemu = "qemu",
    /// Something that has no word of its own.
    Other = "other",
    /// The kernel cannot follow a guest's writes.
    NoPagemapScan = "no-pagemap-scan",
    /// QEMU's monitor at the source does not answer.
    Monitor = "monitor",
    /// The other node does not answer.
    Unreachable = "unreachable",
    /// The VM is in a migration already.
    Busy = "busy",
    /// The guest is to come home to a node that has not kept its memory.
    NotHome = "not-home",
    /// The name of the VM cannot be used at the destination.
    Name = "name",
    /// The destination has a VM of this name.
    NameTaken = "name-taken",
    /// The two nodes have no fabric in common.
    NoCommonFabric = "no-common-fabric",
    /// The destination has too little memory.
    Memory = "memory",
    /// The destination has too few free huge pages.
    HugePages = "huge-pages",
    /// The destination could not make room for the VM.
    NoRoom = "no-room",
    /// The destination does not have the QEMU of the source.
    QemuMissing = "qemu-missing",
    /// The destination takes no guests from the source.
    PeerNotAccepted = "peer-not-accepted",
    /// The destination does not let other nodes start this QEMU.
    QemuNotAllowed = "qemu-not-allowed",
    /// The destination does not let other nodes use this option of QEMU.
    OptionNotAllowed = "option-not-allowed",
    /// The destination does not let other nodes set this environment variable for QEMU.
    EnvironmentNotAllowed = "environment-not-allowed",
    /// The user as whom QEMU runs at the destination may not open something.
    QemuUser = "qemu-user",
    /// The destination's QEMU is older than the source's.
    QemuVersion = "qemu-version",
    /// The destination's QEMU does not know the machine type.
    MachineType = "machine-type",
    /// The command line cannot be used at the destination.
    CommandLine = "command-line",
    /// Two QEMUs on one host would use the same file or socket.
    SamePath = "same-path",
    /// The guest's memory is locked, and this kernel cannot take it over.
    MemoryLocked = "memory-locked",
    /// Somebody else follows faults or writes of the guest's memory.
    MemoryWatched = "memory-watched",
    /// A balloon device would give memory back that children share.
    Balloon = "balloon",
    /// The destination does not see a disk, or sees another file.
    DiskNotShared = "disk-not-shared",
    /// A disk is not on the command line.
    DiskNotKnown = "disk-not-known",
    /// Another VM writes to the disk, or may.
    DiskShared = "disk-shared",
    /// No disk of this name can move, or it cannot move as it is.
    DiskNotMovable = "disk-not-movable",
    /// A goal cannot be kept.
    Goal = "goal",
    /// The destination has no room or no place for a disk.
    DiskPlace = "disk-place",
    /// A job of QEMU is at work on the disk.
    DiskBusy = "disk-busy",
    /// The chain of images below the disk cannot be used.
    DiskChain = "disk-chain",
    /// The disk is no file.
    DiskNoFile = "disk-no-file",
    /// The disk has a format that children cannot have an overlay of.
    DiskFormat = "disk-format",
    /// The disk is encrypted.
    DiskEncrypted = "disk-encrypted",
    /// QEMU does not lock the disk.
    DiskUnlocked = "disk-unlocked",
    /// An overlay for the disk could not be made.
    NoOverlay = "no-overlay",
}

impl From<&str> for BlockerCode {
    fn from(word: &str) -> Self {
        let known = Self::ALL.iter().find(|code| code.as_str() == word).cloned();
        known.unwrap_or_else(|| Self::Unknown(word.to_owned()))
    }
}

impl From<String> for BlockerCode {
    fn from(word: String) -> Self {
        Self::from(word.as_str())
    }
}

impl From<BlockerCode> for String {
    fn from(code: BlockerCode) -> Self {
        code.as_str().to_owned()
    }
}

impl fmt::Display for BlockerCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One reason why a VM cannot move as asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Blocker {
    /// A stable word for programs: `ram-not-shared`, `vhost-user`, `vfio`, `qemu-version`, `machine-type`,
    /// `no-pagemap-scan`, `memory`, `huge-pages`, `disk-not-shared`, `direct-io`, `name-taken`, `busy`, ...
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub code: BlockerCode,
    /// What was expected, what was found, what to do: for people.
    pub message: String,
    /// The device, block node, memory backend or file it is about, if any.
    pub subject: Option<String>,
    /// It only rules out these modes (empty: it rules out all). Example: `no-pagemap-scan` leaves `postcopy`.
    pub modes: Vec<String>,
}

impl Blocker {
    /// A blocker for every mode.
    #[must_use]
    pub fn new(code: BlockerCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), subject: None, modes: Vec::new() }
    }

    /// Names what it is about.
    #[must_use]
    pub fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    /// Restricts it to some modes.
    #[must_use]
    pub fn only_for(mut self, modes: &[Mode]) -> Self {
        self.modes = modes.iter().map(|m| m.to_string()).collect();
        self
    }

    /// Whether it rules out `mode`.
    #[must_use]
    pub fn rules_out(&self, mode: Mode) -> bool {
        self.modes.is_empty() || self.modes.iter().any(|m| m == mode.as_str())
    }
}

/// The answer to `vmove check`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct CheckReport {
    /// Name of the VM.
    pub vm: String,
    /// The node asked about.
    pub destination: String,
    /// All blockers; empty when the VM can move in every mode.
    pub blockers: Vec<Blocker>,
    /// What is not a blocker but should be known (direct I/O, slow backing, ...).
    pub warnings: Vec<String>,
    /// Modes that remain.
    pub modes: Vec<String>,
    /// Fabric that would be used and why.
    pub fabric: String,
    /// What a migration with these options would be like. `None`: the VM cannot move, or its guest could not be watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promise: Option<Promise>,
    /// Whether the guest would go, if the options say how much data it is to read there. `None`: they do not, the VM cannot move, or its guest could
    /// not be watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
    /// Devices of the node that the guest owns: how each would be moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceWay>,
}

/// How a device that a guest owns would be moved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DeviceWay {
    /// What it is to the guest.
    pub role: String,
    /// Its address here.
    pub source: String,
    /// The device that would take its place, if one was named.
    pub destination: Option<String>,
    /// `unplug`: the guest is without it during the move. `failover`: so it is, and its network goes on over the partner. `none`: see the
    /// blockers.
    pub way: String,
    /// For people: what happens, and for how long the guest would be without it.
    pub message: String,
    /// How long the guest would be without it. Unit: milliseconds. An estimate, which knows neither the guest nor the network.
    pub outage_ms: Option<u64>,
    /// Whether it can carry its own state (VFIO migration, version 2), and what that is worth here, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_state: Option<OwnState>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_its_word_and_words_of_newer_daemons_are_kept() {
        for code in BlockerCode::ALL {
            let json = serde_json::to_value(code).unwrap();
            assert_eq!(json, serde_json::json!(code.as_str()));
            assert_eq!(&serde_json::from_value::<BlockerCode>(json).unwrap(), code);
        }
        let newer: BlockerCode = serde_json::from_str("\"moon-phase\"").unwrap();
        assert_eq!(newer, BlockerCode::Unknown("moon-phase".to_owned()));
        assert_eq!(serde_json::to_string(&newer).unwrap(), "\"moon-phase\"");
    }
}
