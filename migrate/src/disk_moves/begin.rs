//! A move of a disk is looked at, noted and begun.

use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use vmove_node::blocking::run_blocking;
use vmove_node::journal::Journal;
use vmove_node::peer::SessionId;
use vmove_node::record::VmRecord;
use vmove_qmp::QmpError;
use vmove_qmp::access::{self, More};
use vmove_qmp::disks::{DiskFact, MoveOrder};
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::disk_move::{DiskMove, MoveDiskRequest};

use super::error::MoveDiskError;
use super::journals;
use super::record::{MoveRecord, Step};
use super::run::Mover;
use crate::check::moved_disks;
use crate::destination::images;
use crate::disk_holds::Told;
use crate::disk_io::DiskIoWatch;
use crate::engine::{Engine, busy};
use crate::node::Node;
use crate::proto::message::MovedDisk;
use crate::records::{FileId, LeftImage};
use crate::source::disk_choice::{Known, known};

/// The right to move a disk of a VM: no migration of it begins meanwhile. Dropped before the move begins, it is as if nothing had been asked.
#[derive(Debug)]
pub struct DiskHold {
    node: Arc<Node>,
    vm: VmRecord,
    disk: String,
    told: Arc<Told>,
    begun: bool,
}

impl Drop for DiskHold {
    fn drop(&mut self) {
        if !self.begun {
            self.node.disk_moves.forget(&self.told);
        }
    }
}

impl Engine {
    /// Takes the right to move a disk of this VM.
    ///
    /// # Errors
    /// [`MoveDiskError`]: the VM is unknown, in a migration, libvirt's, or another of its disks moves.
    pub fn hold_disk(&self, vm: &str, disk: &str) -> Result<DiskHold, MoveDiskError> {
        // What an earlier process left of migrations must be known.
        if !self.recovered.load(Ordering::Acquire) {
            return Err(MoveDiskError::Starting);
        }
        let begun = DiskMove { vm: vm.to_owned(), disk: disk.to_owned(), ..DiskMove::default() };
        let told = Told::new(begun);
        // Under the lock of sessions: of a migration and a move of a disk that are asked for at once, one is refused.
        let sessions = self.lock();
        if let Some(session) = busy(&sessions, vm, None) {
            return Err(MoveDiskError::InMigration { vm: vm.to_owned(), session });
        }
        let entered = self.node.disk_moves.enter(Arc::clone(&told));
        entered.map_err(|disk| MoveDiskError::Moving { vm: vm.to_owned(), disk })?;
        drop(sessions);
        // As it is now that nothing else changes its disks.
        let record = self.node.vms.get(vm).inspect_err(|_| self.node.disk_moves.forget(&told))?;
        let hold =
            DiskHold { node: Arc::clone(&self.node), vm: record, disk: disk.to_owned(), told, begun: false };
        if hold.vm.libvirt.is_some() { Err(MoveDiskError::Libvirt(vm.to_owned())) } else { Ok(hold) }
    }
}

impl DiskHold {
    /// Begins to copy the disk into a new image, which the guest gets when it is whole. Returns once QEMU copies; [`Engine::disks`] tells the
    /// rest.
    ///
    /// # Errors
    /// [`MoveDiskError`]: the guest has its disk as before, and nothing is left of a new image.
    pub async fn begin(mut self, request: MoveDiskRequest) -> Result<DiskMove, MoveDiskError> {
        let to = path(&request.to)?;
        let monitor = self.node.config.vmm.monitor(&self.vm).await?;
        let disk = self.find(known(&self.vm, monitor.disks().await?)?)?;
        let looked = (Arc::clone(&self.node), self.vm.clone(), moved(&disk, &request.to));
        let name = disk.fact.name.clone();
        let mut blockers = run_blocking(move || in_the_way(&looked.0, &looked.1, &looked.2)).await?;
        self.told.update(|told| told.to.clone_from(&request.to));
        if let Some(other) = self.node.disk_moves.other_to(&self.told) {
            let message = format!(
                "Another disk is on its way to {}: disk {} of {:?}; name another path by --to",
                request.to, other.disk, other.vm
            );
            blockers.push(Blocker::new(BlockerCode::DiskPlace, message).about(&name));
        }
        if !blockers.is_empty() {
            return Err(MoveDiskError::Refused { disk: name, blockers });
        }
        let runs = monitor.run_state(RUN_STATE_TIMEOUT).await? == "running";
        let record = self.record(&disk, to, &request, runs)?;
        let node = Arc::clone(&self.node);
        let cluster = disk.fact.cluster;
        let mut journal = run_blocking(move || make(&node, record, disk.fact.size, cluster)).await??;
        let MoveRecord { to, is_device, .. } = journal.record();
        let order = MoveOrder::of(&disk.fact, journal.record().short_id(), to.path.clone(), *is_device);
        let io = DiskIoWatch::begin(&*monitor, vec![disk.fact.device.clone()]).await;
        let _ = journal.update_owing(|r| r.counted = io.first(0));
        let begun = monitor.begin_move(&order, request.bandwidth.unwrap_or(0)).await;
        let still = match begun {
            Ok(still) => still,
            Err(source) => {
                monitor.end_io_histograms().await;
                return Err(self.not_begun(journal, source).await?);
            }
        };
        let _ = journal.update_owing(|r| r.stops_guest = false);
        self.told.update(|told| *told = journal.record().told());
        self.told.update(|told| told.begin_pause_ms = still.as_secs_f64() * 1e3);
        self.begun = true;
        let now = self.told.now();
        tracing::info!(
            vm = now.vm,
            disk = now.disk,
            from = now.from,
            to = now.to,
            id = now.id,
            "a disk moves"
        );
        Mover::new(Arc::clone(&self.node), journal, Arc::clone(&self.told)).spawn();
        Ok(now)
    }

    /// QEMU does not copy. Where it did not answer it may do so all the same: then somebody stays with it until it does not.
    async fn not_begun(
        &mut self,
        journal: Journal<MoveRecord>,
        source: QmpError,
    ) -> Result<MoveDiskError, MoveDiskError> {
        let user = self.node.config.confinement.user.as_ref();
        let user = user.map(|user| format!(" (it runs as {user})")).unwrap_or_default();
        let (disk, path) = (journal.record().disk.clone(), journal.record().to.path.clone());
        if source.is_refusal() {
            run_blocking(move || forget(journal)).await?;
        } else {
            self.told.update(|told| *told = journal.record().told());
            self.begun = true;
            self.told.cancel.cancel();
            Mover::new(Arc::clone(&self.node), journal, Arc::clone(&self.told)).spawn();
        }
        Ok(MoveDiskError::NotOpened { disk, path, user, source: Box::new(source) })
    }

    fn find(&self, all: Vec<Known>) -> Result<Known, MoveDiskError> {
        let refused = |blockers| MoveDiskError::Refused { disk: self.disk.clone(), blockers };
        let names: Vec<&str> = all.iter().map(|disk| disk.fact.name.as_str()).collect();
        let message = format!("{:?} has no disk {}: it has {}", self.vm.name, self.disk, names.join(", "));
        let unknown = Blocker::new(BlockerCode::DiskNotKnown, message).about(&self.disk);
        let is_it = |disk: &Known| disk.fact.names.contains(&self.disk) || disk.fact.name == self.disk;
        let Some(disk) = all.into_iter().find(is_it) else { return Err(refused(vec![unknown])) };
        if disk.fact.read_only {
            let message = format!(
                "Disk {} ({}) can only be read by the guest, and is not moved: start the guest with the other path, or detach it",
                disk.fact.name, disk.fact.file
            );
            return Err(refused(vec![
                Blocker::new(BlockerCode::DiskNotMovable, message).about(&disk.fact.name),
            ]));
        }
        if disk.obstacles.is_empty() { Ok(disk) } else { Err(refused(disk.obstacles)) }
    }

    fn record(
        &self,
        disk: &Known,
        to: PathBuf,
        request: &MoveDiskRequest,
        runs: bool,
    ) -> Result<MoveRecord, MoveDiskError> {
        let DiskFact { name, node, file, format, chain, .. } = &disk.fact;
        // Without one there is an obstacle. The file itself, where the command line names a link to it.
        let (image, from) = disk.image.clone().unwrap_or_default();
        let written = from.clone();
        let from = from.canonicalize().unwrap_or(from);
        let at = FileId::at(&from);
        let from_file =
            at.map_err(|source| MoveDiskError::Io { action: "look at", path: from.clone(), source })?;
        let left = |path: PathBuf, file| LeftImage { name: name.clone(), path, file };
        Ok(MoveRecord {
            id: SessionId::random(),
            vm: self.vm.clone(),
            disk: name.clone(),
            names: disk.fact.names.clone(),
            node: node.clone(),
            below: chain.iter().filter(|below| *below != file).map(PathBuf::from).collect(),
            file: file.into(),
            image,
            own: self.vm.overlays.contains(&written),
            written,
            from: left(from, from_file),
            is_device: to.exists(),
            to: left(to, None),
            format: if format == "qcow2" { "qcow2" } else { "raw" }.to_owned(),
            source_disks: request.source_disks,
            bandwidth: request.bandwidth,
            disk_pace: Some(request.disk_pace),
            stops_guest: runs,
            device: disk.fact.device.clone(),
            counted: None,
            began_at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            step: Step::Making,
        })
    }
}

/// For QEMU's answer to what its guest does.
const RUN_STATE_TIMEOUT: Duration = Duration::from_secs(10);

/// A path that an image can have.
fn path(text: &str) -> Result<PathBuf, MoveDiskError> {
    let bad = |c: char| c.is_control() || matches!(c, '{' | '}');
    let path = PathBuf::from(text);
    let named = path.file_name().is_some();
    if path.is_absolute() && named && !text.chars().any(bad) {
        Ok(path)
    } else {
        Err(MoveDiskError::BadPath(text.to_owned()))
    }
}

/// The disk as one that comes from elsewhere.
fn moved(disk: &Known, to: &str) -> MovedDisk {
    let fact = &disk.fact;
    MovedDisk {
        name: fact.name.clone(),
        image: String::new(),
        format: if fact.format == "qcow2" { "qcow2" } else { "raw" }.to_owned(),
        size: fact.size,
        allocated: fact.allocated,
        cluster: fact.cluster,
        to: Some(to.to_owned()),
    }
}

/// What stands in the way of the new image. Blocks.
fn in_the_way(node: &Node, vm: &VmRecord, disk: &MovedDisk) -> Vec<Blocker> {
    let mut found = moved_disks::blockers_here(&node.config.node, &vm.vm_dir, disk);
    found.extend(in_own_folders(node, disk));
    // One that somebody else started has the rights that they gave it: QEMU says what it cannot open.
    if !found.is_empty() || vm.adopted {
        return found;
    }
    let to = disk.to.clone().unwrap_or_default();
    let argv: Vec<_> = vm.command_line.iter().map(Into::into).collect();
    let more = More { made: vec![PathBuf::from(&to)], ..More::default() };
    let denied = access::denied(&argv, &node.layout(&vm.name, vm.backing), &more).unwrap_or_default();
    let about = denied.into_iter().filter(|denied| denied.subject.contains(&to));
    found.extend(
        about.map(|denied| Blocker::new(BlockerCode::QemuUser, denied.message).about(denied.subject)),
    );
    found
}

/// Files in vmoved's own folders go with VMs and migrations, whatever they are.
fn in_own_folders(node: &Node, disk: &MovedDisk) -> Option<Blocker> {
    let to = Path::new(disk.to.as_deref()?);
    let folder = to.parent()?.canonicalize().ok()?;
    let state = node.config.sessions_dir.parent().unwrap_or(&node.config.sessions_dir);
    let own = [&node.config.run_dir, &node.config.memory_dir, state];
    let own =
        own.into_iter().filter_map(|own| own.canonicalize().ok()).find(|own| folder.starts_with(own))?;
    let message = format!(
        "{} is in {}, a folder of vmoved's own, which it cleans up: name another path by --to",
        to.display(),
        own.display()
    );
    Some(Blocker::new(BlockerCode::DiskPlace, message).about(&disk.name))
}

/// Notes the move, and makes the new image. Blocks. Nothing is left if it fails.
fn make(
    node: &Node,
    record: MoveRecord,
    size: u64,
    cluster: u64,
) -> Result<Journal<MoveRecord>, MoveDiskError> {
    let dir = journals(node);
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| MoveDiskError::Io { action, path, source }
    };
    node.disk().create_dir_all(&dir).map_err(failed("make", &dir))?;
    let file = dir.join(format!("{}.jsonl", record.id));
    let mut journal = Journal::create_on(node.disk(), &file, record).map_err(failed("write", &file))?;
    // A disk outlives the kernel, and so must what is known of it.
    let synced = journal.sync().and_then(|()| node.disk().sync_dir(&dir));
    if let Err(error) = synced {
        forget(journal);
        return Err(failed("write", &file)(error));
    }
    let made = make_image(node, &mut journal, size, cluster);
    match made {
        Ok(()) => Ok(journal),
        Err(error) => {
            forget(journal);
            Err(error)
        }
    }
}

fn make_image(
    node: &Node,
    journal: &mut Journal<MoveRecord>,
    size: u64,
    cluster: u64,
) -> Result<(), MoveDiskError> {
    let MoveRecord { id, from, to, format, .. } = journal.record().clone();
    let image_failed = |source| MoveDiskError::Io { action: "make", path: to.path.clone(), source };
    let disk = MovedDisk {
        name: to.name.clone(),
        image: String::new(),
        format,
        size,
        allocated: 0,
        cluster,
        to: to.path.to_str().map(str::to_owned),
    };
    let made =
        images::make_one(&disk, &to.path, id, (&node.config.confinement, None)).map_err(image_failed)?;
    let path = journal.path().to_owned();
    let noted = journal.update(|r| {
        r.to.file = made;
        r.step = Step::Copying;
    });
    noted.map_err(|source| MoveDiskError::Io { action: "write", path, source })?;
    let to = journal.record().to.clone();
    images::settle_one(id, &to).map_err(image_failed)?;
    make_alike(&from, &to).map_err(image_failed)?;
    let folder = to.path.parent().unwrap_or(&to.path);
    node.disk().sync_dir(folder).map_err(image_failed)
}

/// Gives the new image the owner and the mode of the old one: whoever opens that can open this.
fn make_alike(from: &LeftImage, to: &LeftImage) -> std::io::Result<()> {
    let (Some(known), Some(file)) = (from.file, to.file) else { return Ok(()) };
    let old = from.path.symlink_metadata()?;
    let no_follow = (rustix::fs::OFlags::NOFOLLOW.bits()).cast_signed();
    let new = OpenOptions::new().read(true).custom_flags(no_follow).open(&to.path)?;
    let found = new.metadata()?;
    // Whoever may write to the folders may have put others there.
    if FileId::of(&found) != Some(file) || FileId::of(&old) != Some(known) {
        return Err(std::io::Error::other("another file has its name now"));
    }
    fchown(&new, Some(old.uid()), Some(old.gid()))?;
    new.set_permissions(Permissions::from_mode(old.mode() & 0o777))
}

/// Removes the new image of a disk that QEMU does not copy, and the journal. Blocks.
pub(super) fn forget(journal: Journal<MoveRecord>) -> bool {
    let record = journal.record();
    let removed = images::remove_one(record.id, &record.to.path, record.to.file);
    let path = journal.path().to_owned();
    drop(journal);
    removed && std::fs::remove_file(path).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_an_absolute_path_that_can_stand_on_a_command_line() {
        assert_eq!(path("/srv/a b,c.img").unwrap(), Path::new("/srv/a b,c.img"));
        for bad in ["", "a.img", "/", "/srv/..", "/a\nb", "/{vm_dir}/a"] {
            assert!(path(bad).unwrap_err().to_string().contains("absolute path"), "{bad:?}");
        }
    }

    #[test]
    fn the_new_image_is_as_accessible_as_the_old_one_and_another_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let image = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, "").unwrap();
            LeftImage { name: "vda".to_owned(), file: FileId::at(&path).unwrap(), path }
        };
        let (from, to) = (image("old"), image("new"));
        std::fs::set_permissions(&from.path, Permissions::from_mode(0o640)).unwrap();
        make_alike(&from, &to).unwrap();
        assert_eq!(to.path.metadata().unwrap().mode() & 0o777, 0o640);
        std::fs::remove_file(&to.path).unwrap();
        std::os::unix::fs::symlink(&from.path, &to.path).unwrap();
        make_alike(&from, &to).unwrap_err();
        std::fs::remove_file(&to.path).unwrap();
        let _other = image("other");
        std::fs::rename(dir.path().join("other"), &to.path).unwrap();
        std::fs::set_permissions(&to.path, Permissions::from_mode(0o600)).unwrap();
        make_alike(&from, &to).unwrap_err();
        assert_eq!(to.path.metadata().unwrap().mode() & 0o777, 0o600);
    }
}
