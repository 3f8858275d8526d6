//! The ways to move a guest that the benchmark compares.

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;

use crate::beacon::BeaconPage;
use crate::bench::ballast::Ballast;
use crate::bench::cpu::Role;
use crate::sandbox::Sandbox;

/// The backing of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// A file on a tmpfs with `huge=advise`.
    Thp,
    /// A file on a hugetlbfs of 2 MiB pages.
    #[value(name = "hugetlb-2m")]
    #[serde(rename = "hugetlb-2m")]
    Hugetlb2M,
}

impl Backing {
    /// The name for `vmove run --memory`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thp => "thp",
            Self::Hugetlb2M => "hugetlb-2m",
        }
    }

    /// Mounts a file system of this kind that holds `bytes`.
    ///
    /// # Errors
    /// When mounting is not permitted.
    pub fn mount(self, sandbox: &Sandbox, name: &str, bytes: u64) -> Result<PathBuf> {
        match self {
            Self::Thp => sandbox.mount_thp(name),
            Self::Hugetlb2M => {
                let folder = sandbox.mount_hugetlb(name, bytes)?;
                Ballast::warm_huge_pages(bytes)?;
                Ok(folder)
            }
        }
    }
}

/// Which program moves the guest, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// QEMU's pre-copy.
    QemuPrecopy,
    /// QEMU's pre-copy with `multifd`.
    QemuMultifd,
    /// QEMU's post-copy from the beginning on.
    QemuPostcopy,
    /// The same with `postcopy-preempt`.
    QemuPreempt,
    /// QEMU's pre-copy, switched to post-copy after the first pass.
    QemuHybrid,
    /// The same with `postcopy-preempt`.
    QemuHybridPreempt,
    /// [`Self::QemuMultifd`] with `align=2M` for RAM: without it, QEMU gets no huge pages on tmpfs.
    QemuMultifdAligned,
    /// [`Self::QemuPostcopy`], the same.
    QemuPostcopyAligned,
    /// [`Self::QemuHybrid`], the same.
    QemuHybridAligned,
    /// `vmove migrate --mode precopy`.
    VmovePrecopy,
    /// `vmove migrate --mode postcopy`.
    VmovePostcopy,
    /// `vmove migrate --mode hybrid`.
    VmoveHybrid,
    /// `vmove migrate --mode auto`.
    VmoveAuto,
    /// [`Self::QemuMultifdAligned`] over QEMU's TLS.
    QemuMultifdTls,
    /// [`Self::VmoveHybrid`] between daemons that speak TLS to each other.
    VmoveHybridTls,
    /// [`Self::VmovePostcopy`], the same.
    VmovePostcopyTls,
}

impl Mode {
    /// All modes without TLS, QEMU's first.
    pub const PLAIN: [Self; 13] = [
        Self::QemuPrecopy,
        Self::QemuMultifd,
        Self::QemuPostcopy,
        Self::QemuPreempt,
        Self::QemuHybrid,
        Self::QemuHybridPreempt,
        Self::QemuMultifdAligned,
        Self::QemuPostcopyAligned,
        Self::QemuHybridAligned,
        Self::VmovePrecopy,
        Self::VmovePostcopy,
        Self::VmoveHybrid,
        Self::VmoveAuto,
    ];

    /// The modes that there are with TLS, each after the same without.
    pub const TLS: [Self; 6] = [
        Self::QemuMultifdAligned,
        Self::QemuMultifdTls,
        Self::VmoveHybrid,
        Self::VmoveHybridTls,
        Self::VmovePostcopy,
        Self::VmovePostcopyTls,
    ];

    /// The name in tables and legends.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::QemuPrecopy => "QEMU pre-copy",
            Self::QemuMultifd => "QEMU multifd",
            Self::QemuPostcopy => "QEMU post-copy",
            Self::QemuPreempt => "QEMU post-copy+preempt",
            Self::QemuHybrid => "QEMU hybrid",
            Self::QemuHybridPreempt => "QEMU hybrid+preempt",
            Self::QemuMultifdAligned => "QEMU multifd, align=2M",
            Self::QemuPostcopyAligned => "QEMU post-copy, align=2M",
            Self::QemuHybridAligned => "QEMU hybrid, align=2M",
            Self::VmovePrecopy => "vmove precopy",
            Self::VmovePostcopy => "vmove postcopy",
            Self::VmoveHybrid => "vmove hybrid",
            Self::VmoveAuto => "vmove auto",
            Self::QemuMultifdTls => "QEMU multifd, align=2M, TLS",
            Self::VmoveHybridTls => "vmove hybrid, TLS",
            Self::VmovePostcopyTls => "vmove postcopy, TLS",
        }
    }

    /// Whether this is a mode of QEMU with `align=2M`. Users of QEMU must set this themselves; vmove aligns by itself.
    #[must_use]
    pub const fn is_aligned(self) -> bool {
        matches!(
            self,
            Self::QemuMultifdAligned
                | Self::QemuPostcopyAligned
                | Self::QemuHybridAligned
                | Self::QemuMultifdTls
        )
    }

    /// Whether what crosses is encrypted.
    #[must_use]
    pub const fn is_encrypted(self) -> bool {
        matches!(self, Self::QemuMultifdTls | Self::VmoveHybridTls | Self::VmovePostcopyTls)
    }

    /// Whether this is a mode of vmove.
    #[must_use]
    pub const fn is_vmove(self) -> bool {
        matches!(
            self,
            Self::VmovePrecopy
                | Self::VmovePostcopy
                | Self::VmoveHybrid
                | Self::VmoveAuto
                | Self::VmoveHybridTls
                | Self::VmovePostcopyTls
        )
    }
}

/// The mover's report on a finished move. Times are in nanoseconds of [`crate::sampler::now`].
#[derive(Debug, Clone, Default)]
pub struct Moved {
    /// When the request was made. The destination's QEMU starts after it.
    pub requested: u64,
    /// When the destination was ready, and memory or state began to cross.
    pub began: u64,
    /// When everything was at the destination.
    pub ended: u64,
    /// When the guest ran at the destination, according to the tool's report or QEMU's event.
    pub resumed: Option<u64>,
    /// From the source's STOP event to the destination's RESUME event, in milliseconds.
    pub downtime_ms: f64,
    /// Bytes on the wire, as counted by the mover.
    pub wire_bytes: u64,
    /// Page faults at the destination: count, median, 99th percentile, longest, in microseconds.
    pub faults: Option<FaultTimes>,
    /// Time of a scan for dirty pages, in microseconds per GiB of guest memory.
    pub scan_us_per_gib: Option<f64>,
    /// Further remarks, in a few words.
    pub note: String,
}

/// Latency of page faults in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct FaultTimes {
    /// How many.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Longest.
    pub max_us: f64,
}

/// A guest that runs and can be moved once.
pub trait Movable {
    /// Its beacon.
    ///
    /// # Errors
    /// When it cannot be found.
    fn beacon(&self) -> Result<BeaconPage>;

    /// Its RAM files at the source.
    fn ram(&self) -> Vec<PathBuf>;

    /// The RAM file at the destination, once it exists.
    fn destination_ram(&self) -> Box<dyn FnMut() -> Option<PathBuf> + Send>;

    /// Processes that take part now, with their roles. Called repeatedly, because some start and end during the move.
    fn processes(&self) -> Box<dyn FnMut() -> Vec<(i32, Role)> + Send>;

    /// Moves the guest. Returns when the move has ended; the guest may not be at full rate yet.
    ///
    /// # Errors
    /// When it fails or is refused.
    fn migrate(&mut self) -> Result<Moved>;

    /// The guest's output at both nodes.
    fn console(&self) -> String;
}
