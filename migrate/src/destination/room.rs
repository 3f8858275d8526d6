//! Making room for a VM: folder, RAM files, page tables. Undone as a whole if anything fails.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use vmove_memory::{ByteLen, MemoryDir, PageTable, RamFile};
use vmove_qmp::cmdline::{CommandLine, DestinationCommand, RunLayout};

use super::guest::{Block, GuestMemory};
use crate::node::{Node, backing_named, memory_backing};
use crate::proto::hello::SessionId;
use crate::proto::message::Prepare;
use crate::vm::RamFileRecord;

/// A place for a VM that is not there yet.
#[derive(Debug)]
pub(super) struct Room {
    pub layout: RunLayout,
    pub command: Vec<OsString>,
    pub ram: Vec<RamFileRecord>,
    pub tables: Vec<PathBuf>,
    pub memory: Arc<GuestMemory>,
    /// QEMU locks its memory as it starts, all of it.
    pub locked: bool,
    new_folder: bool,
}

/// The command line of the QEMU that would take this VM here, and where its files would be.
pub(crate) fn plan(node: &Node, prepare: &Prepare) -> Result<(RunLayout, DestinationCommand), String> {
    let backing = backing_named(&prepare.backing).ok_or_else(|| {
        format!("Expected backing thp, hugetlb-2m or hugetlb-1g, found {:?}", prepare.backing)
    })?;
    let layout = node.layout(&prepare.vm, backing);
    let argv = prepare.command_line.iter().map(OsString::from).collect();
    let mut line = CommandLine::parse(argv).map_err(|e| e.to_string())?;
    // An alias such as `q35` is another machine in another QEMU.
    line.pin_machine(&prepare.machine).map_err(|e| e.to_string())?;
    let command = line.derive_destination(&layout).map_err(|e| e.to_string())?;
    Ok((layout, command))
}

/// Makes the room.
pub(super) fn make(node: &Node, id: SessionId, prepare: &Prepare) -> Result<Room, String> {
    let (layout, command) = plan(node, prepare)?;
    let mut undo = Undo::default();
    // A VM that was here before may have left its logs: they stay, whatever becomes of this session.
    let new_folder = !layout.vm_dir.exists();
    std::fs::create_dir_all(&layout.vm_dir)
        .map_err(|e| format!("Could not make {}: {e}", layout.vm_dir.display()))?;
    undo.folder = new_folder.then(|| layout.vm_dir.clone());
    let page_maps =
        MemoryDir::prepare(&node.page_map_dir(), vmove_memory::Backing::Thp).map_err(|e| e.to_string())?;
    let dir =
        MemoryDir::prepare(&layout.memory_dir, memory_backing(layout.backing)).map_err(|e| e.to_string())?;
    let (mut blocks, mut ram, mut tables) = (Vec::new(), Vec::new(), Vec::new());
    for (index, info) in prepare.blocks.iter().enumerate() {
        let spec = command.ram.iter().find(|spec| spec.id == info.id).ok_or_else(|| {
            format!("The command line describes no memory backend {:?}, which the source has", info.id)
        })?;
        let name = spec.path.file_name().and_then(|n| n.to_str()).ok_or("RAM file name is not UTF-8")?;
        let file = dir.create_ram_file(name, ByteLen(info.size)).map_err(|e| e.to_string())?;
        undo.files.push(spec.path.clone());
        if file.page_size().bytes() != info.page_size {
            return Err(format!(
                "Expected pages of {} bytes for {}, found {}",
                info.page_size,
                info.id,
                file.page_size().bytes()
            ));
        }
        let path = GuestMemory::table_path(page_maps.path(), id, index);
        let table = PageTable::create(&path, file.pages()).map_err(|e| e.to_string())?;
        undo.files.push(path.clone());
        blocks.push(Block::new(file, table).map_err(|e| e.to_string())?);
        ram.push(RamFileRecord { id: info.id.clone(), path: spec.path.clone(), size: info.size });
        tables.push(path);
    }
    undo.done();
    let memory = Arc::new(GuestMemory::new(blocks, prepare.spec.verify));
    let locked = command.locks_memory;
    Ok(Room {
        layout,
        locked,
        command: crate::node::with_environment(command.argv, &prepare.environment),
        ram,
        tables,
        memory,
        new_folder,
    })
}

/// Finds the room again that an earlier process made.
pub(super) fn find(
    node: &Node,
    id: SessionId,
    prepare: &Prepare,
    ram: &[RamFileRecord],
) -> Result<Room, String> {
    let (layout, command) = plan(node, prepare)?;
    let (mut blocks, mut tables) = (Vec::new(), Vec::new());
    for (index, record) in ram.iter().enumerate() {
        let file = RamFile::open(&record.path).map_err(|e| e.to_string())?;
        let path = GuestMemory::table_path(&node.page_map_dir(), id, index);
        let table = PageTable::open(&path).map_err(|e| e.to_string())?;
        table.recover();
        blocks.push(Block::new(file, table).map_err(|e| e.to_string())?);
        tables.push(path);
    }
    // Hashes of pages that are mapped already are lost with the process that took them: a recovered session is not verified.
    let memory = Arc::new(GuestMemory::new(blocks, false));
    let locked = command.locks_memory;
    let command = crate::node::with_environment(command.argv, &prepare.environment);
    Ok(Room { layout, command, ram: ram.to_vec(), tables, memory, locked, new_folder: false })
}

impl Room {
    /// Removes the page tables, which a whole guest no longer needs.
    pub(super) fn remove_tables(&self) {
        remove_files(&self.tables);
    }

    /// Removes everything. QEMU must have ended.
    pub(super) fn remove(&self) {
        self.remove_tables();
        for file in &self.ram {
            remove_files(std::slice::from_ref(&file.path));
        }
        if self.new_folder {
            let _ = std::fs::remove_dir_all(&self.layout.vm_dir);
        }
    }
}

pub(super) fn remove_files(paths: &[PathBuf]) {
    for path in paths {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "could not remove");
            }
            _ => {}
        }
    }
}

#[derive(Default)]
struct Undo {
    files: Vec<PathBuf>,
    folder: Option<PathBuf>,
}

impl Undo {
    fn done(&mut self) {
        self.files.clear();
        self.folder = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        remove_files(&self.files);
        if let Some(folder) = self.folder.take() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}
