//! Disks that move with their guest: which, where to, and what is told of them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::disk_latency::{DiskIo, DiskLatency};

/// The word that stands for every disk that the guest can write.
pub const ALL_DISKS: &str = "all";

/// Where a disk is to be at the destination: `NAME=PATH`.
///
/// The path is that of a file that is not there yet, or of a block device of the disk's size. It is absolute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DiskPlace {
    /// By which QEMU knows the disk: the id of its drive or device, or its node name.
    pub name: String,
    /// Path at the destination.
    pub path: String,
}

impl FromStr for DiskPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && path.starts_with('/') => {
                Ok(Self { name: name.to_owned(), path: path.to_owned() })
            }
            _ => Err(format!("expected NAME=/ABSOLUTE/PATH, found {text:?}")),
        }
    }
}

impl TryFrom<String> for DiskPlace {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DiskPlace> for String {
    fn from(place: DiskPlace) -> Self {
        place.to_string()
    }
}

impl fmt::Display for DiskPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.path)
    }
}

/// What becomes of the source's images once the guest and all of its memory are at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SourceDisks {
    /// They stay, under another name: that of the image and `.moved-` with the ID of the migration.
    #[default]
    Keep,
    /// They are deleted. Block devices stay as they are.
    Delete,
}

impl FromStr for SourceDisks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "delete" => Ok(Self::Delete),
            other => Err(format!("expected keep or delete, found {other:?}")),
        }
    }
}

/// The share of its pace that a guest keeps at its disks while they are copied: the copies are slowed down as far as that takes.
///
/// Unit: per cent, 0 to 95; default 75. 0: the disks are copied as fast as they can be. Pace is how many requests the guest gets done in a time, one
/// after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct DiskPace(u8);

impl DiskPace {
    /// The largest: a copy must end, too.
    const MOST: u8 = 95;

    /// In per cent.
    #[must_use]
    pub const fn percent(self) -> u8 {
        self.0
    }
}

impl Default for DiskPace {
    fn default() -> Self {
        Self(75)
    }
}

impl TryFrom<u8> for DiskPace {
    type Error = String;

    fn try_from(percent: u8) -> Result<Self, String> {
        if percent > Self::MOST {
            return Err(format!(
                "expected a pace of 0 to {} per cent of the guest's requests to its disks, found {percent}: the copies need the rest",
                Self::MOST
            ));
        }
        Ok(Self(percent))
    }
}

impl From<DiskPace> for u8 {
    fn from(pace: DiskPace) -> Self {
        pace.0
    }
}

impl FromStr for DiskPace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.strip_suffix('%').unwrap_or(text);
        let percent = digits.parse::<u8>();
        percent.map_err(|_| format!("expected a percentage such as 75%, found {text:?}"))?.try_into()
    }
}

impl fmt::Display for DiskPace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

/// What it costs if the source is lost while disks follow their guest.
#[must_use]
pub fn cost_of_disks_after(source: &str, destination: &str) -> String {
    format!(
        "the disks follow the guest (--disks-after): until all of them are at {destination}, the guest needs {source}. If {source} or its images are lost before that, what has \
         not crossed is lost: the guest's reads of it wait for ever, and what it has \
         written since is at {destination} alone. A raw image becomes qcow2"
    )
}

/// How far the copy of a disk is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct DiskProgress {
    /// Its name.
    pub name: String,
    /// Bytes to be dealt with, holes included; it grows by what the guest writes meanwhile.
    pub bytes_total: u64,
    /// Bytes of these that are dealt with.
    pub bytes_done: u64,
    /// Bytes per second that are dealt with, over the last seconds: copies come in bursts, and rest for the guest.
    pub rate_bytes_per_s: f64,
    /// Estimated milliseconds until it is in step, where that can be said.
    pub eta_ms: Option<f64>,
    /// The copy holds all but what the guest is writing.
    pub in_step: bool,
    /// The guest's requests to it over the last second or so; `None` before that.
    #[serde(default)]
    pub io: Option<DiskIo>,
    /// It is copied more slowly than it could be, for the guest's requests.
    #[serde(default)]
    pub gives_way: bool,
}

/// What became of a disk that moved.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskReport {
    /// Its name.
    pub name: String,
    /// Path at the source.
    pub from: String,
    /// Path at the destination.
    pub to: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// Size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// Bytes that the image took at the source when the copy began.
    pub allocated_bytes: u64,
    /// Bytes that crossed for it, headers included.
    pub sent_bytes: u64,
    /// From the begin of the copy until it was in step for the first time, in milliseconds. Of a disk that followed its guest: from the first look at
    /// it until all disks were there.
    pub copy_ms: f64,
    /// It followed its guest, which ran at the destination meanwhile.
    pub after: bool,
    /// How long the guest stood still when its disks began to be copied, in milliseconds: all disks of a guest begin together. 0 with QEMUs before
    /// 8.0 and from 11.1 on, and if it was paused.
    pub begin_pause_ms: f64,
    /// How long the guest's requests to it took, before, during and after.
    pub latency: DiskLatency,
    /// Where the source's image is now; `None` if it was deleted.
    pub left_at: Option<String>,
    /// What `--verify` found; `None`: not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified: Option<DiskVerified>,
    /// Why it could not be put aside or deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// What `--verify` found of a disk that moved: the image here, as the guest left it, against the disk that it has at the destination.
///
/// Both are read in chunks. What the guest has written at the destination before it was read there cannot be compared any more.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct DiskVerified {
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Chunks that are equal on both sides, holes among them.
    pub equal_chunks: u64,
    /// Chunks that differ because the guest has written to them since it runs at the destination.
    pub written_chunks: u64,
    /// Chunks that differ, and that the guest has not written to: damage.
    pub differing_chunks: u64,
    /// Where the first of these begins in the disk, in bytes.
    pub first_difference: Option<u64>,
    /// Bytes that were read at the source. Holes are not read.
    pub source_read_bytes: u64,
    /// Bytes that were read at the destination.
    pub destination_read_bytes: u64,
    /// How long it took, in milliseconds, with all disks that were compared beside it.
    pub took_ms: f64,
    /// Why not all of it could be compared.
    pub problem: Option<String>,
}

impl DiskVerified {
    /// Whether the disk is the one that the guest left; `None` if that is not known.
    #[must_use]
    pub const fn is_right(&self) -> Option<bool> {
        match (self.differing_chunks, &self.problem) {
            (0, None) => Some(true),
            (0, Some(_)) => None,
            _ => Some(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_its_text() {
        let place: DiskPlace = "vda=/srv/a=b.img".parse().unwrap();
        assert_eq!((place.name.as_str(), place.path.as_str()), ("vda", "/srv/a=b.img"));
        assert_eq!(serde_json::to_string(&place).unwrap(), "\"vda=/srv/a=b.img\"");
        for bad in ["vda", "=/x", "vda=relative", "vda="] {
            assert!(bad.parse::<DiskPlace>().unwrap_err().contains("NAME=/ABSOLUTE/PATH"), "{bad}");
        }
        assert_eq!("90%".parse::<DiskPace>().map(DiskPace::percent), Ok(90));
        assert_eq!("0".parse::<DiskPace>().map(|pace| pace.to_string()), Ok("0%".to_owned()));
        assert!("100%".parse::<DiskPace>().unwrap_err().contains("0 to 95"));
        assert!("fast".parse::<DiskPace>().unwrap_err().contains("such as 75%"));
        assert!(serde_json::from_str::<DiskPace>("96").unwrap_err().to_string().contains("0 to 95"));
        assert_eq!("delete".parse(), Ok(SourceDisks::Delete));
        assert!("move".parse::<SourceDisks>().unwrap_err().contains("keep or delete"));
    }
}
