//! Memory that was promised to guests on their way here and that they have not touched yet.
//!
//! What is free now is not what can be given away: a guest on its way takes its memory page by page, so of two that come together each would
//! find room, and there would be none for both. Whoever looks whether a guest fits makes a reservation in the same step, and keeps it until
//! the guest has come or will not come. What its files hold by then is no longer free, and no longer reserved.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmove_memory::{MemoryDir, MemoryError};
use vmove_types::Backing;

use crate::layout;

/// Unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// What a guest, or the children of a fork, will take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// What guest memory is made of.
    pub backing: Backing,
    /// Bytes of guest memory.
    pub guest_bytes: u64,
    /// Bytes of the host's memory beside it: QEMU, page maps.
    pub host_bytes: u64,
}

/// Memory of one kind: what is free, and what of that is reserved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Room {
    free: u64,
    /// For whom, and bytes.
    reserved: Vec<(String, u64)>,
}

impl Room {
    /// Of `free` bytes, nothing reserved.
    #[must_use]
    pub const fn of(free: u64) -> Self {
        Self { free, reserved: Vec::new() }
    }

    /// Bytes that nobody was promised.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.reserved.iter().fold(self.free, |left, (_, bytes)| left.saturating_sub(*bytes))
    }
}

/// `3071 MiB`, or with what is reserved: `0 MiB (1200 MiB free, less 1088 MiB reserved for migration 3f… of "db")`.
impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.left() >> 20)?;
        if self.reserved.is_empty() {
            return Ok(());
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let one = |(holder, bytes): &(String, u64)| format!("{} MiB reserved for {holder}", mib(*bytes));
        let reserved: Vec<String> = self.reserved.iter().map(one).collect();
        write!(f, " ({} MiB free, less {})", self.free >> 20, reserved.join(", "))
    }
}

/// Room for what is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rooms {
    /// For guest memory of the kind that is wanted.
    pub guest: Room,
    /// In the host's memory; the same as `guest` where that is tmpfs.
    pub host: Room,
}

/// Bytes of this kind of memory that are free in a folder for guest memory.
pub type FreeMemory = fn(&Path, Backing) -> Result<u64, MemoryError>;

fn free_in(dir: &Path, backing: Backing) -> Result<u64, MemoryError> {
    Ok(MemoryDir::prepare(dir, backing)?.free()?.0)
}

/// All reservations of this node.
#[derive(Debug)]
pub struct Reservations {
    memory_dir: PathBuf,
    free: FreeMemory,
    overcommits: bool,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    next: u64,
    promises: BTreeMap<u64, Promise>,
}

#[derive(Debug)]
struct Promise {
    holder: String,
    wanted: Wanted,
    /// What these files, or the files in these folders, hold of guest memory is taken already.
    files: Vec<PathBuf>,
    /// The kernel has set huge pages aside for it.
    mapped: bool,
}

impl Promise {
    /// Bytes of this kind that it may still take.
    fn open(&self, backing: Backing) -> u64 {
        let host = if backing == Backing::Thp { self.wanted.host_bytes } else { 0 };
        if backing != self.wanted.backing || (self.mapped && backing != Backing::Thp) {
            return host;
        }
        let taken = self.files.iter().map(|path| held_by(path)).sum();
        self.wanted.guest_bytes.saturating_sub(taken).saturating_add(host)
    }
}

/// Bytes of memory in a file, or in the files of a folder; none if there is nothing of the name.
fn held_by(path: &Path) -> u64 {
    let bytes = |meta: &std::fs::Metadata| meta.blocks().saturating_mul(BLOCK_BYTES);
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            let files = std::fs::read_dir(path).into_iter().flatten().flatten();
            files.filter_map(|file| file.metadata().ok()).map(|meta| bytes(&meta)).sum()
        }
        Ok(meta) => bytes(&meta),
        Err(_) => 0,
    }
}

impl Held {
    fn rooms(&self, of: &Reservations, backing: Backing, but: Option<u64>) -> Result<Rooms, MemoryError> {
        let room = |backing| {
            let free = (of.free)(&layout::memory_dir(&of.memory_dir, backing), backing)?;
            let others = self.promises.iter().filter(|(id, _)| Some(**id) != but);
            let open = others.map(|(_, promise)| (promise.holder.clone(), promise.open(backing)));
            Ok::<_, MemoryError>(Room { free, reserved: open.filter(|(_, bytes)| *bytes > 0).collect() })
        };
        let host = room(Backing::Thp)?;
        let guest = if backing == Backing::Thp { host.clone() } else { room(backing)? };
        Ok(Rooms { guest, host })
    }

    fn add(&mut self, holder: &str, wanted: Wanted) -> u64 {
        self.next += 1;
        let promise = Promise { holder: holder.to_owned(), wanted, files: Vec::new(), mapped: false };
        self.promises.insert(self.next, promise);
        self.next
    }
}

impl Reservations {
    /// None yet, of the memory below `memory_dir`.
    #[must_use]
    pub fn new(memory_dir: PathBuf) -> Arc<Self> {
        Self::with_free(memory_dir, free_in)
    }

    /// As [`Reservations::new`], where something else than the kernel says what is free.
    #[must_use]
    pub fn with_free(memory_dir: PathBuf, free: FreeMemory) -> Arc<Self> {
        Arc::new(Self { memory_dir, free, overcommits: false, held: Mutex::default() })
    }

    /// As [`Reservations::new`], for a node whose operator lets guests be larger than its memory: of a guest counts what it holds.
    #[must_use]
    pub fn overcommitting(memory_dir: PathBuf) -> Arc<Self> {
        Arc::new(Self { memory_dir, free: free_in, overcommits: true, held: Mutex::default() })
    }

    /// Whether of a guest counts only what it holds, not what it may come to hold.
    #[must_use]
    pub const fn overcommits(&self) -> bool {
        self.overcommits
    }

    /// For whom there are reservations.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        self.lock().promises.values().map(|promise| promise.holder.clone()).collect()
    }

    /// Below it are the RAM files of the node's VMs, by the kind of their memory.
    #[must_use]
    pub fn memory_dir(&self) -> &Path {
        &self.memory_dir
    }

    /// Reserves what is wanted if it `fits` into what is neither taken nor reserved; nobody else reserves in between. The outer error is that of
    /// looking, the inner one that of `fits`. May mount memory folders, so it may block for a moment.
    ///
    /// # Errors
    /// [`MemoryError`] if it is not known what is free.
    pub fn reserve<E>(
        self: &Arc<Self>,
        holder: &str,
        wanted: Wanted,
        fits: impl FnOnce(&Rooms) -> Result<(), E>,
    ) -> Result<Result<Reservation, E>, MemoryError> {
        let mut held = self.lock();
        let rooms = held.rooms(self, wanted.backing, None)?;
        Ok(fits(&rooms).map(|()| Reservation { all: self.clone(), id: held.add(holder, wanted) }))
    }

    /// Reserves without looking: an earlier life of the daemon has promised it.
    #[must_use]
    pub fn promised(self: &Arc<Self>, holder: &str, wanted: Wanted) -> Reservation {
        Reservation { all: self.clone(), id: self.lock().add(holder, wanted) }
    }

    /// What there is of one kind.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn room(&self, backing: Backing) -> Result<Room, MemoryError> {
        Ok(self.lock().rooms(self, backing, None)?.guest)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Single insertions and removals: a panic leaves nothing half done.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that others cannot be promised, until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    all: Arc<Reservations>,
    id: u64,
}

impl Reservation {
    /// Guest memory comes to be in these files, or in the files of these folders: what they hold is no longer reserved.
    pub fn in_files(&self, files: Vec<PathBuf>) {
        self.change(|promise| promise.files = files);
    }

    /// QEMU has mapped the guest's memory. From then on the kernel keeps the huge pages of it from others.
    pub fn mapped(&self) {
        self.change(|promise| promise.mapped = true);
    }

    /// Reserves something else instead, if that `fits` beside the other reservations. Otherwise all is as it was.
    ///
    /// # Errors
    /// As [`Reservations::reserve`].
    pub fn replace<E>(
        &self,
        wanted: Wanted,
        fits: impl FnOnce(&Rooms) -> Result<(), E>,
    ) -> Result<Result<(), E>, MemoryError> {
        let mut held = self.all.lock();
        let rooms = held.rooms(&self.all, wanted.backing, Some(self.id))?;
        let fitting = fits(&rooms);
        if let (Ok(()), Some(promise)) = (&fitting, held.promises.get_mut(&self.id)) {
            promise.wanted = wanted;
        }
        Ok(fitting)
    }

    fn change(&self, change: impl FnOnce(&mut Promise)) {
        if let Some(promise) = self.all.lock().promises.get_mut(&self.id) {
            change(promise);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.all.lock().promises.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn guest(mib: u64) -> Wanted {
        Wanted { backing: Backing::Thp, guest_bytes: mib * MIB, host_bytes: MIB }
    }

    fn open(all: &Reservations, backing: Backing) -> Vec<u64> {
        all.lock().promises.values().map(|promise| promise.open(backing) / MIB).collect()
    }

    #[test]
    fn what_has_come_is_no_longer_reserved() {
        let dir = tempfile::tempdir().unwrap();
        let all = Reservations::new(dir.path().to_owned());
        let held = all.promised("migration 1", guest(8));
        assert_eq!(open(&all, Backing::Thp), [9]);
        let file = dir.path().join("ram");
        std::fs::write(&file, vec![1; 3 << 20]).unwrap();
        held.in_files(vec![file, dir.path().join("not there yet")]);
        assert_eq!(open(&all, Backing::Thp), [6]);
        held.in_files(vec![dir.path().to_owned()]);
        assert_eq!(open(&all, Backing::Thp), [6]);
        drop(held);
        assert!(open(&all, Backing::Thp).is_empty());
    }

    #[test]
    fn huge_pages_are_the_kernels_to_keep_once_they_are_mapped() {
        let all = Reservations::new(PathBuf::from("/nowhere"));
        let held = all.promised("migration 1", Wanted { backing: Backing::Hugetlb2M, ..guest(8) });
        assert_eq!((open(&all, Backing::Hugetlb2M), open(&all, Backing::Thp)), (vec![8], vec![1]));
        held.mapped();
        assert_eq!((open(&all, Backing::Hugetlb2M), open(&all, Backing::Thp)), (vec![0], vec![1]));
        assert_eq!(open(&all, Backing::Hugetlb1G), [0]);
    }

    #[test]
    fn a_room_says_what_is_reserved_and_for_whom() {
        let reserved =
            vec![("migration 1 of \"db\"".to_owned(), 600 * MIB), ("fork 2".to_owned(), 500 * MIB)];
        let room = Room { free: 1000 * MIB, reserved };
        assert_eq!(room.left(), 0);
        assert_eq!(
            room.to_string(),
            "0 MiB (1000 MiB free, less 600 MiB reserved for migration 1 of \"db\", 500 MiB reserved for fork 2)"
        );
        assert_eq!(Room::of(7 * MIB).to_string(), "7 MiB");
    }
}
