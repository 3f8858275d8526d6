//! The memory back ends of a command line, and making shared files of them.

use std::path::PathBuf;
use vmove_types::Backing;

use super::{
    CommandLine, CommandLineError, Item, Obstacle, RamFileSpec, RunLayout, options::Options, size::parse_size,
};

/// Id of the back end that vmove adds to a guest that has none.
pub(super) const OWN_RAM_ID: &str = "vmove-ram0";

/// RAM of a PC without `-m`, in bytes.
const DEFAULT_RAM: u64 = 128 << 20;

/// Kind of a memory back end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RamKind {
    /// `memory-backend-file`
    File,
    /// `memory-backend-ram`
    Ram,
    /// `memory-backend-memfd`
    Memfd,
    /// `memory-backend-shm`
    Shm,
    /// Another, by name.
    Other(String),
}

/// What a memory back end is for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RamUse {
    /// The machine's RAM (`-machine memory-backend=`).
    Main,
    /// RAM of a NUMA node (`-numa node,memdev=`).
    Node,
    /// A device's memory, by the device's type, such as `pc-dimm`.
    Device(String),
    /// Nothing that the command line shows; it may be for a device plugged in later.
    Unknown,
}

/// A memory back end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RamBackend {
    /// Its id.
    pub id: String,
    /// Its kind.
    pub kind: RamKind,
    /// Bytes; `None` if not given or not readable.
    pub size: Option<u64>,
    /// Whether others may map it and see the same bytes.
    pub share: bool,
    /// Its file or, for anonymous huge pages, a directory.
    pub path: Option<PathBuf>,
    /// What it is for.
    pub used_by: RamUse,
}

impl CommandLine {
    /// All memory back ends that the command line names.
    ///
    /// # Errors
    /// [`CommandLineError::Unreadable`].
    pub fn ram_backends(&self) -> Result<Vec<RamBackend>, CommandLineError> {
        let mut found = Vec::new();
        for item in self.named("object") {
            let options = item.options()?;
            let Some(kind) = options.get("qom-type", true).and_then(|kind| ram_kind(&kind)) else {
                continue;
            };
            let id =
                options.get("id", false).ok_or_else(|| item.unreadable("a memory back end needs an id"))?;
            found.push(RamBackend {
                size: options.get("size", false).and_then(|size| parse_size(&size, 1)),
                // Only memfd and shm are shared unless told otherwise.
                share: options.flag("share").unwrap_or(matches!(kind, RamKind::Memfd | RamKind::Shm)),
                path: options.get("mem-path", false).map(PathBuf::from),
                used_by: self.ram_use(&id)?,
                id,
                kind,
            });
        }
        Ok(found)
    }

    fn ram_use(&self, id: &str) -> Result<RamUse, CommandLineError> {
        if self.machine_option("memory-backend").as_deref() == Some(id) {
            return Ok(RamUse::Main);
        }
        for item in self.items.iter().filter(|item| matches!(item.name(), "numa" | "device")) {
            let options = item.options()?;
            if options.get("memdev", false).as_deref() == Some(id) {
                return Ok(match item.name() {
                    "numa" => RamUse::Node,
                    _ => RamUse::Device(options.get("driver", true).unwrap_or_default()),
                });
            }
        }
        Ok(RamUse::Unknown)
    }

    /// RAM size by `-m`, in bytes.
    fn ram_size(&self) -> Result<u64, CommandLineError> {
        let mut size = DEFAULT_RAM;
        for item in self.named("m") {
            if let Some(text) = item.options()?.get("size", true) {
                let parsed = parse_size(&text, 1 << 20).filter(|size| *size > 0);
                // As QEMU rounds it.
                let parsed = parsed.and_then(|size| size.checked_next_multiple_of(8 << 10));
                size = parsed.ok_or_else(|| item.unreadable("a size such as 1G or 1024 is expected"))?;
            }
        }
        Ok(size)
    }

    /// Makes all guest RAM shared files. With `relocate` all files move to the layout's memory directory, else a file
    /// that is shared already stays where it is.
    pub(super) fn share_ram(
        &mut self,
        layout: &RunLayout,
        relocate: bool,
    ) -> Result<Vec<RamFileSpec>, CommandLineError> {
        if !self.has_own_ram()? {
            self.add_ram(layout)?;
        }
        let mut specs = Vec::new();
        let mut obstacles = Vec::new();
        for item in &mut self.items {
            if item.name() != "object" {
                continue;
            }
            let options = item.options()?;
            let Some(kind) = options.get("qom-type", true).and_then(|kind| ram_kind(&kind)) else {
                continue;
            };
            match convert(item, options, &kind, layout, relocate)? {
                Ok(spec) => specs.push(spec),
                Err(obstacle) => obstacles.push(obstacle),
            }
        }
        if obstacles.is_empty() { Ok(specs) } else { Err(CommandLineError::NotMovable(obstacles)) }
    }

    /// Whether the machine's RAM comes from back ends already.
    fn has_own_ram(&self) -> Result<bool, CommandLineError> {
        let used = |backend: &RamBackend| matches!(backend.used_by, RamUse::Main | RamUse::Node);
        Ok(self.ram_backends()?.iter().any(used))
    }

    /// Adds a back end for a guest that has its RAM by `-m` alone.
    fn add_ram(&mut self, layout: &RunLayout) -> Result<(), CommandLineError> {
        let size = self.ram_size()?;
        let mut options = Options::parse("memory-backend-file").unwrap_or(Options::Pairs(<_>::default()));
        options.set_text("id", OWN_RAM_ID);
        options.set_text("size", &size.to_string());
        options.set_text("mem-path", &path_text(layout, OWN_RAM_ID)?);
        options.set_flag("share", true);
        self.items.push(Item::new("-object", options.to_string()));
        self.items.push(Item::new("-machine", format!("memory-backend={OWN_RAM_ID}")));
        Ok(())
    }
}

/// A huge page of x86-64.
const HUGE_PAGE: u64 = 2 << 20;

/// Makes one back end a shared file.
fn convert(
    item: &mut Item,
    mut options: Options,
    kind: &RamKind,
    layout: &RunLayout,
    relocate: bool,
) -> Result<Result<RamFileSpec, Obstacle>, CommandLineError> {
    if let RamKind::Other(_) = kind {
        let reason = "memory of this kind cannot be a shared file";
        return Ok(Err(Obstacle::of(item, reason, "use memory-backend-file,share=on")));
    }
    let id = options.get("id", false).ok_or_else(|| item.unreadable("a memory back end needs an id"))?;
    let size = options.get("size", false).and_then(|size| parse_size(&size, 1)).filter(|size| *size > 0);
    let size = size.ok_or_else(|| item.unreadable("a memory back end needs a size"))?;
    let page = layout.backing.page_bytes();
    if size % page != 0 {
        let reason = "its size is no multiple of the page size of the chosen memory";
        return Ok(Err(Obstacle::of(item, reason, "use a multiple of 2 MiB (or 1 GiB), or --memory thp")));
    }
    let old_path = options.get("mem-path", false).map(PathBuf::from);
    // QEMU makes a nameless file in a directory: nobody else could map that.
    let named = old_path.as_ref().is_some_and(|path| !layout.vm_dir.join(path).is_dir());
    let keep = !relocate && *kind == RamKind::File && options.flag("share") == Some(true) && named;
    let path = match old_path.filter(|_| keep) {
        Some(path) => path,
        None => {
            options.set_text("mem-path", &path_text(layout, &id)?);
            layout.ram_file(&id)
        }
    };
    if *kind != RamKind::File {
        options.set_kind("qom-type", "memory-backend-file");
        // Properties of memory-backend-memfd that a file does not have.
        for key in ["hugetlb", "hugetlbsize", "seal"] {
            options.remove(key);
        }
    }
    options.set_flag("share", true);
    let huge = layout.backing == Backing::Thp && size % HUGE_PAGE == 0;
    if huge && matches!(options, Options::Pairs(_)) && options.get("align", false).is_none() {
        // Without it QEMU maps a file on tmpfs at any multiple of 4 KiB, and the kernel cannot map huge pages there.
        options.set_text("align", "2M");
    }
    if options.flag("discard-data") == Some(true) {
        // QEMU would empty the file when it ends, under whoever still reads it.
        options.set_flag("discard-data", false);
    }
    item.set_options(&options);
    Ok(Ok(RamFileSpec { id, path, size }))
}

fn path_text(layout: &RunLayout, id: &str) -> Result<String, CommandLineError> {
    let path = layout.ram_file(id);
    path.to_str().map(str::to_owned).ok_or_else(|| CommandLineError::Unreadable {
        option: "mem-path".to_owned(),
        value: path.display().to_string(),
        expected: "the memory directory must have an UTF-8 path",
    })
}

fn ram_kind(qom_type: &str) -> Option<RamKind> {
    Some(match qom_type.strip_prefix("memory-backend-")? {
        "file" => RamKind::File,
        "ram" => RamKind::Ram,
        "memfd" => RamKind::Memfd,
        "shm" => RamKind::Shm,
        other => RamKind::Other(other.to_owned()),
    })
}
