//! Memory of its own for a guest whose memory is private: it is copied into the guest's RAM file while the guest runs, and then
//! mapped shared again.
//!
//! What the guest writes meanwhile is told by the kernel (asynchronous write protection) and copied again, round by round; the
//! last round while the guest stands still. QEMU's own descriptor names the RAM file all along, so that afterwards everything
//! is as if the guest had never been forked: it can be moved, forked again, and has huge pages.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmove_memory::{
    ByteLen, ByteRange, DirtyTracker, FileOffset, Injector, Mapping, MemoryError, Precision, Process,
    QemuMapping, RamFile, Replacement, Sharing, descriptors_of, replace_in_qemu, touched_in_qemu,
};
use vmove_node::record::VmRecord;
use vmove_qmp::Client;
use vmove_qmp::inspect::{DeviceKind, VmFacts};
use vmove_types::time::{Mono, ms};

use crate::CloneError;
use crate::check::{hints_of, open_files};
use crate::error::blocking;
use crate::verify::merged;

/// Bytes of a page that is not huge.
const SMALL_PAGE: u64 = 4096;
/// Bytes copied at once: a huge page.
const PART: u64 = 2 << 20;
/// The guest is stopped when so much is left: 2 ms of copying.
const SMALL: u64 = 8 << 20;
/// After so many rounds it is stopped whatever is left.
const ROUNDS: u32 = 12;
/// `stop` drains the disks.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// How it went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Rehomed {
    /// Bytes copied, those of later rounds included.
    pub bytes: u64,
    /// Rounds while the guest ran.
    pub rounds: u32,
    /// How long the guest stood still, in milliseconds.
    pub pause_ms: f64,
    /// All of it, in milliseconds.
    pub total_ms: f64,
}

/// Gives the guest of `vm`, whose memory is mapped privately at `private`, memory of its own.
///
/// # Errors
/// [`CloneError`]; the guest then goes on with its private memory.
pub async fn rehome(
    vm: &VmRecord,
    private: &[QemuMapping],
    client: &Client,
    facts: &VmFacts,
) -> Result<Rehomed, CloneError> {
    let begun = Instant::now();
    let discards = |kind| matches!(kind, DeviceKind::Balloon | DeviceKind::VirtioMem);
    if let Some(device) = facts.devices.iter().find(|d| discards(d.kind)) {
        return Err(CloneError::Task(format!(
            "device {} ({}) gives memory back while it is being copied: detach it (device_del) first",
            device.id, device.driver
        )));
    }
    let (record, mappings) = (vm.clone(), private.to_vec());
    let copy = blocking(move || Copy::open(&record, mappings)).await?;
    let copy = Arc::new(copy);
    let was_running = facts.status == "running";
    // A page that a disk has pinned changes unseen: with direct I/O, only looked at while nothing is in flight.
    let drained = was_running && facts.has_direct_io();
    let tracker = {
        let copy = Arc::clone(&copy);
        let arm = move || Ok(DirtyTracker::arm(&copy.process, &copy.mappings, Precision::Page)?);
        quiesced(client, drained, arm).await?
    };
    let first = Arc::clone(&copy);
    let mut bytes = blocking(move || first.everything()).await?;
    let mut tracker = Some(tracker);
    let mut rounds = 0;
    let mut left = u64::MAX;
    while was_running && rounds < ROUNDS {
        let Some(mut held) = tracker.take() else { break };
        let of_round = Arc::clone(&copy);
        let scan = move || {
            let dirty = of_round.scan(&mut held)?;
            Ok((held, dirty))
        };
        let (held, dirty) = quiesced(client, drained, scan).await?;
        tracker = Some(held);
        let found: u64 = dirty.iter().map(|(_, range)| range.len.0).sum();
        let of_round = Arc::clone(&copy);
        bytes += blocking(move || of_round.copy(&dirty)).await?;
        rounds += 1;
        if found <= SMALL || found > left / 4 * 3 {
            break;
        }
        left = found;
    }
    let pause = switch(client, was_running, &copy, tracker, &mut bytes).await?;
    Ok(Rehomed { bytes, rounds, pause_ms: ms(pause), total_ms: ms(begun.elapsed()) })
}

/// Runs `work` with the guest stopped and drained, if that is needed.
async fn quiesced<T: Send + 'static>(
    client: &Client,
    needed: bool,
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, CloneError> {
    if !needed {
        return blocking(work).await;
    }
    client.execute_raw("stop", Value::Null, COMMAND_TIMEOUT).await?;
    let done = blocking(work).await;
    client.execute_raw("cont", Value::Null, COMMAND_TIMEOUT).await?;
    done
}

/// The last round and the new mapping, while the guest stands still.
async fn switch(
    client: &Client,
    was_running: bool,
    copy: &Arc<Copy>,
    tracker: Option<DirtyTracker>,
    bytes: &mut u64,
) -> Result<Duration, CloneError> {
    let begun = Mono::now();
    if was_running {
        client.execute_raw("stop", Value::Null, COMMAND_TIMEOUT).await?;
    }
    let last = Arc::clone(copy);
    let work = move || {
        let mut copied = 0;
        if let Some(mut tracker) = tracker {
            let dirty = last.scan(&mut tracker)?;
            copied = last.copy(&dirty)?;
        }
        last.map_shared()?;
        Ok(copied)
    };
    let done = blocking(work).await;
    if was_running {
        client.execute_raw("cont", Value::Null, COMMAND_TIMEOUT).await?;
    }
    *bytes += done?;
    Ok(if was_running { Mono::now().since(begun) } else { Duration::ZERO })
}

fn give_huge_pages(file: &RamFile) -> Result<(), CloneError> {
    let Err(error) = file.allocate(file.range()) else { return Ok(()) };
    file.punch(file.range())?;
    let (mib, page) = (file.len().0 >> 20, file.page_size().bytes() >> 20);
    let full = matches!(&error, MemoryError::Path { source, .. } if source.kind() == std::io::ErrorKind::StorageFull);
    if !full {
        return Err(error.into());
    }
    Err(CloneError::NoRoom(format!(
        "memory of its own needs {mib} MiB of free huge pages of {page} MiB, found less: reserve more with vm.nr_hugepages"
    )))
}

/// A guest's private memory, and the file that it goes to.
struct Copy {
    process: Process,
    files: Vec<RamFile>,
    targets: Vec<Arc<Mapping>>,
    mappings: Vec<QemuMapping>,
    replacements: Vec<Replacement>,
    memory: File,
}

impl Copy {
    fn open(vm: &VmRecord, mappings: Vec<QemuMapping>) -> Result<Self, CloneError> {
        let process = Process::reopen(vm.pid.unsigned_abs(), vm.pid_start)?;
        let maps = process.maps()?;
        for mapping in &mappings {
            let there = maps.iter().any(|entry| {
                entry.hva <= mapping.hva && mapping.hva.0 < entry.hva.0 + entry.len.0 && !entry.shared
            });
            if !there {
                return Err(CloneError::Task(format!(
                    "the memory of {:?} is not mapped as it was left by the fork",
                    vm.name
                )));
            }
        }
        let files = open_files(vm)?;
        Injector::prepare(&process)?;
        let hints = hints_of(&process, &mappings)?;
        let mut replacements = Vec::new();
        for (at, hints) in mappings.iter().zip(hints) {
            let file = &files[at.file_index];
            let held = descriptors_of(&process, file.identity())?;
            let fd_in_qemu = held.first().copied().ok_or_else(|| {
                CloneError::Task(format!("QEMU holds no descriptor of {}", file.path().display()))
            })?;
            replacements.push(Replacement { at: *at, fd_in_qemu, sharing: Sharing::Shared, hints });
        }
        let mut targets = Vec::new();
        for file in &files {
            // What an attempt that was cut off has left.
            file.punch(file.range())?;
            // Where the machine has no huge page left, to touch a hole kills: us while copying, and QEMU later.
            if file.page_size().bytes() > SMALL_PAGE {
                give_huge_pages(file)?;
            }
            targets.push(file.map()?);
        }
        let path = format!("/proc/{}/mem", process.pid());
        let memory = File::open(&path).map_err(CloneError::io("read", path.as_ref()))?;
        Ok(Self { process, files, targets, mappings, replacements, memory })
    }

    /// Copies all that the guest has: what its QEMU maps, and what the frozen file holds.
    fn everything(&self) -> Result<u64, CloneError> {
        let mut copied = 0;
        for mapping in &self.mappings {
            let mut ranges = self.frozen_data(mapping)?;
            touched_in_qemu(&self.process, std::slice::from_ref(mapping), |_, run| {
                ranges.push(mapping.page_size.range_of(run));
            })?;
            let ranges: Vec<_> = merged(ranges).into_iter().map(|range| (*mapping, range)).collect();
            copied += self.copy(&ranges)?;
        }
        Ok(copied)
    }

    /// Parts of the frozen file with memory. The file may have lost its name; the mapping leads to it.
    fn frozen_data(&self, mapping: &QemuMapping) -> Result<Vec<ByteRange>, CloneError> {
        let first = self.process.maps()?.into_iter().find(|entry| entry.hva == mapping.hva);
        let Some(entry) = first else { return Ok(vec![mapping.file_range()]) };
        let end = entry.hva.0 + entry.len.0;
        let path = format!("/proc/{}/map_files/{:x}-{end:x}", self.process.pid(), entry.hva.0);
        // Without the right to open it, everything counts as data.
        let Ok(frozen) = RamFile::open(path.as_ref()) else { return Ok(vec![mapping.file_range()]) };
        let extents = frozen.data_extents()?;
        Ok(extents.into_iter().filter_map(|r| r.intersection(mapping.file_range())).collect())
    }

    fn scan(&self, tracker: &mut DirtyTracker) -> Result<Vec<(QemuMapping, ByteRange)>, CloneError> {
        let mut dirty = Vec::new();
        for index in 0..self.files.len() {
            let mut ranges = Vec::new();
            tracker.scan_and_rearm(index, |run| ranges.push(self.files[index].page_size().range_of(run)))?;
            for mapping in self.mappings.iter().filter(|m| m.file_index == index) {
                let here = ranges.iter().filter_map(|r| r.intersection(mapping.file_range()));
                dirty.extend(merged(here.collect()).into_iter().map(|range| (*mapping, range)));
            }
        }
        Ok(dirty)
    }

    fn copy(&self, ranges: &[(QemuMapping, ByteRange)]) -> Result<u64, CloneError> {
        let mut copied = 0;
        let mut buffer = vec![0; usize::try_from(PART).unwrap_or(0)];
        for (mapping, range) in ranges {
            let mut at = range.start.0;
            while at < range.end().0 {
                let len = (PART - at % PART).min(range.end().0 - at);
                let part = &mut buffer[..ByteLen(len).as_usize()];
                let hva = mapping.hva.0 + (at - mapping.file_offset.0);
                self.memory
                    .read_exact_at(part, hva)
                    .map_err(CloneError::io("read memory of", "QEMU".as_ref()))?;
                self.put(mapping, at, part)?;
                copied += len;
                at += len;
            }
        }
        Ok(copied)
    }

    /// Zeros go nowhere that is a hole already.
    fn put(&self, mapping: &QemuMapping, at: u64, part: &[u8]) -> Result<(), CloneError> {
        let target = &self.targets[mapping.file_index];
        let range = ByteRange::new(FileOffset(at), ByteLen(part.len() as u64));
        let zero = part.iter().all(|byte| *byte == 0);
        if zero && self.files[mapping.file_index].is_hole(range)? {
            return Ok(());
        }
        Ok(target.copy_in(range.start, part)?)
    }

    fn map_shared(&self) -> Result<(), CloneError> {
        Ok(replace_in_qemu(&self.process, &self.replacements, &[])?)
    }
}
