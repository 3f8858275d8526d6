//! Making room for a VM: folder, RAM files, page tables. Undone as a whole if anything fails.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use vmove_memory::{ByteLen, MemoryDir, PageTable, RamFile};
use vmove_qmp::cmdline::{DestinationCommand, RunLayout};

use super::block::Block;
use super::error::VmFilesError;
use super::guest_memory::GuestMemory;
use crate::command::derive_command;
use crate::node::Node;
use crate::proto::message::{BlockInfo, Prepare};
use vmove_node::latency::Latencies;
use vmove_node::peer::SessionId;
use vmove_node::record::RamFileRecord;

/// A place for a VM that is not there yet.
#[derive(Debug)]
pub(super) struct VmFiles {
    pub layout: RunLayout,
    pub command: Vec<OsString>,
    pub ram: Vec<RamFileRecord>,
    pub tables: Vec<PathBuf>,
    pub memory: Arc<GuestMemory>,
    /// QEMU locks its memory as it starts, all of it.
    pub locked: bool,
    new_folder: bool,
}

/// What there will be; nothing is there yet.
#[derive(Debug)]
pub(super) struct Plan {
    pub layout: RunLayout,
    pub ram: Vec<RamFileRecord>,
    command: DestinationCommand,
}

/// Says which files the room will consist of, so that they can be written down before the first of them is made.
pub(super) fn plan(node: &Node, prepare: &Prepare) -> Result<Plan, VmFilesError> {
    let (layout, command) = derive_command(node, prepare)?;
    let find = |info: &BlockInfo| -> Result<RamFileRecord, VmFilesError> {
        let spec = command.ram.iter().find(|spec| spec.id == info.id);
        let spec = spec.ok_or_else(|| VmFilesError::NoBackend(info.id.clone()))?;
        Ok(RamFileRecord { id: info.id.clone(), path: spec.path.clone(), size: info.size })
    };
    let ram = prepare.blocks.iter().map(find).collect::<Result<_, VmFilesError>>()?;
    Ok(Plan { layout, ram, command })
}

/// Makes the room.
pub(super) fn make(
    node: &Node,
    id: SessionId,
    prepare: &Prepare,
    plan: Plan,
) -> Result<VmFiles, VmFilesError> {
    let Plan { layout, ram, command } = plan;
    let mut undo = Undo::default();
    // A VM that was here before may have left its logs: they stay, whatever becomes of this session.
    let new_folder = !layout.vm_dir.exists();
    std::fs::create_dir_all(&layout.vm_dir)
        .map_err(|source| VmFilesError::Folder { path: layout.vm_dir.clone(), source })?;
    undo.folder = new_folder.then(|| layout.vm_dir.clone());
    let page_maps = MemoryDir::prepare(&node.page_map_dir(), vmove_memory::Backing::Thp)?;
    let dir = MemoryDir::prepare(&layout.memory_dir, layout.backing)?;
    let (mut blocks, mut tables) = (Vec::new(), Vec::new());
    for (index, (info, record)) in prepare.blocks.iter().zip(&ram).enumerate() {
        let name = record.path.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| VmFilesError::FileName(record.path.clone()))?;
        let file = dir.create_ram_file(name, ByteLen(info.size))?;
        undo.files.push(record.path.clone());
        if file.page_size().bytes() != info.page_size {
            return Err(VmFilesError::PageSize {
                backend: info.id.clone(),
                expected: info.page_size,
                found: file.page_size().bytes(),
            });
        }
        let path = GuestMemory::table_path(page_maps.path(), id, index);
        let table = PageTable::create(&path, file.pages())?;
        undo.files.push(path.clone());
        blocks.push(Block::new(file, table)?);
        tables.push(path);
    }
    undo.done();
    let memory = Arc::new(GuestMemory::new(blocks, prepare.spec.verify, latencies(node)));
    let locked = command.locks_memory;
    Ok(VmFiles {
        layout,
        locked,
        command: vmove_node::layout::with_environment(command.argv, &prepare.environment),
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
) -> Result<VmFiles, VmFilesError> {
    let (layout, command) = derive_command(node, prepare)?;
    let (mut blocks, mut tables) = (Vec::new(), Vec::new());
    for (index, record) in ram.iter().enumerate() {
        let file = RamFile::open(&record.path)?;
        let path = GuestMemory::table_path(&node.page_map_dir(), id, index);
        let table = PageTable::open(&path)?;
        table.recover();
        blocks.push(Block::new(file, table)?);
        tables.push(path);
    }
    // Hashes of pages that are mapped already are lost with the process that took them: a recovered session is not verified.
    let memory = Arc::new(GuestMemory::new(blocks, false, latencies(node)));
    let locked = command.locks_memory;
    let command = vmove_node::layout::with_environment(command.argv, &prepare.environment);
    Ok(VmFiles { layout, command, ram: ram.to_vec(), tables, memory, locked, new_folder: false })
}

fn latencies(node: &Node) -> Latencies {
    Latencies::counted_in(Arc::clone(&node.fault_latencies))
}

impl VmFiles {
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
