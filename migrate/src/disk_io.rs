//! How long a guest's requests to its disks take while these are copied.

use vmove_qmp::disks::DiskCounters;
use vmove_types::disk::DiskReport;
use vmove_types::disk_latency::{DiskIo, DiskLatency};
use vmove_types::time::Mono;

use crate::giving_way::{Copying, GivingWay, Requests};
use crate::vmm::LeavingMonitor;

/// Over how long the present figures are taken, at least: a guest that does little would have none otherwise.
const RECENT_MS: f64 = 1000.0;

/// Follows the requests to some disks of a guest.
#[derive(Debug)]
pub(crate) struct DiskIoWatch {
    /// By which QEMU knows them.
    devices: Vec<String>,
    /// When the copies were about to begin.
    first: Vec<Option<DiskCounters>>,
    last: Vec<Option<DiskCounters>>,
    /// Since when the present figures are counted, and what there was then.
    since: (Mono, Vec<Option<DiskCounters>>),
    recent: Vec<Option<DiskIo>>,
}

impl DiskIoWatch {
    /// Begins, just before the disks are copied. What QEMU does not tell is left out: nothing fails for want of it.
    pub(crate) async fn begin(monitor: &dyn LeavingMonitor, devices: Vec<String>) -> Self {
        monitor.begin_io_histograms(&devices).await;
        let first = monitor.io_counters(&devices).await.unwrap_or_default();
        Self::going_on(devices, first)
    }

    /// As one that had begun with these counters.
    pub(crate) fn going_on(devices: Vec<String>, first: Vec<Option<DiskCounters>>) -> Self {
        let since = (Mono::now(), first.clone());
        Self { devices, last: first.clone(), first, since, recent: Vec::new() }
    }

    /// What was counted of the disk at this place when it began.
    pub(crate) fn first(&self, place: usize) -> Option<DiskCounters> {
        self.first.get(place)?.clone()
    }

    /// Counts once more.
    pub(crate) async fn look(&mut self, monitor: &dyn LeavingMonitor) {
        let Ok(now) = monitor.io_counters(&self.devices).await else { return };
        let at = Mono::now();
        if at.ms_since(self.since.0) >= RECENT_MS {
            let pairs = now.iter().zip(&self.since.1);
            self.recent = pairs.map(|(now, then)| now.as_ref()?.since(then.as_ref()?)).collect();
            self.since = (at, now.clone());
        }
        self.last = now;
    }

    /// The present figures of the disk at this place.
    pub(crate) fn recent(&self, place: usize) -> Option<DiskIo> {
        self.recent.get(place)?.clone()
    }

    /// What was counted last of the disk at this place.
    pub(crate) fn last(&self, place: usize) -> Option<DiskCounters> {
        self.last.get(place)?.clone()
    }

    /// What there is to tell so far of the disk at this place.
    pub(crate) fn told(&self, place: usize) -> DiskLatency {
        let of = |all: &[Option<DiskCounters>]| all.get(place).cloned().flatten();
        let (first, last) = (of(&self.first), of(&self.last));
        DiskLatency {
            before: first.as_ref().map(DiskCounters::since_start),
            during: last.zip(first).and_then(|(last, first)| last.since(&first)),
            after: None,
            gave_way: None,
        }
    }

    /// Tells the rate of the copies what the guest has done by now, beside what was copied.
    pub(crate) fn show(&self, pace: &mut GivingWay, copying: Copying) {
        pace.look(Mono::now(), Requests::between(&self.first, &self.last), copying);
    }
}

/// Adds to the reports of disks what the guest has done with them at the destination, by their names.
pub(crate) fn tell_after(disks: &mut [DiskReport], io: &[(String, DiskIo)]) {
    for disk in disks {
        disk.latency.after = io.iter().find(|(name, _)| *name == disk.name).map(|(_, io)| io.clone());
    }
}
