//! Making room for a VM: folder, RAM files, page tables. Undone as a whole if anything fails.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmove_memory::{ByteLen, PageTable, RamFile};
use vmove_qmp::cmdline::{DestinationCommand, RunLayout};

use super::block::Block;
use super::error::VmFilesError;
use super::guest_memory::GuestMemory;
use super::homecoming;
use crate::command::derive_command;
use crate::host_cpu::HostCpu;
use crate::node::Node;
use crate::pending::WireSet;
use crate::proto::message::{BlockInfo, Prepare};
use crate::records::DestinationRecord;
use crate::vmm::Vmm;
use vmove_node::disk::{Disk, remove_files};
use vmove_node::latency::Latencies;
use vmove_node::peer::SessionId;
use vmove_node::record::{RamFileRecord, VmRecord};
use vmove_types::spec::Visit;

/// A place for a VM that is not there yet.
#[derive(Debug)]
pub(super) struct VmFiles {
    pub layout: RunLayout,
    pub command: Vec<OsString>,
    pub ram: Vec<RamFileRecord>,
    pub tables: Vec<PathBuf>,
    pub memory: Arc<GuestMemory>,
    /// Which 2 MiB parts of each RAM block had memory at the source when it asked.
    pub held: Vec<WireSet>,
    /// QEMU locks its memory as it starts, all of it.
    pub locked: bool,
    /// QEMU and files are libvirt's, and were there before: neither is started, made or removed.
    pub of_libvirt: bool,
    /// Of a guest that comes home: files that its QEMU starts with, and in whose place it is given its memory.
    pub stand_ins: Vec<RamFile>,
    folder_is_ours: bool,
}

/// What there will be; nothing is there yet.
#[derive(Debug)]
pub(super) struct Plan {
    pub layout: RunLayout,
    pub ram: Vec<RamFileRecord>,
    /// The VM's folder is not there yet. Otherwise a VM that was here before has left its log: it stays, whatever becomes of this session.
    pub folder_is_ours: bool,
    /// Nothing for a QEMU of libvirt's, which waits already.
    command: Option<DestinationCommand>,
    /// That QEMU.
    pub waits: Option<VmRecord>,
    /// What this node has kept of a guest that comes home, in the order of its RAM blocks.
    kept: Vec<PathBuf>,
}

/// Says which files the room will consist of, so that they can be written down before the first of them is made.
pub(super) fn plan(node: &Node, prepare: &Prepare) -> Result<Plan, VmFilesError> {
    if let Some(domain) = &prepare.libvirt {
        return plan_of_libvirt(node, prepare, domain);
    }
    let (layout, command) = derive_command(node, prepare)?;
    let find = |info: &BlockInfo| -> Result<RamFileRecord, VmFilesError> {
        let spec = command.ram.iter().find(|spec| spec.id == info.id);
        let spec = spec.ok_or_else(|| VmFilesError::NoBackend(info.id.clone()))?;
        Ok(RamFileRecord { id: info.id.clone(), path: spec.path.clone(), size: info.size })
    };
    let ram = prepare.blocks.iter().map(find).collect::<Result<_, VmFilesError>>()?;
    let folder_is_ours = !node.disk().exists(&layout.vm_dir);
    let kept = crate::homes::kept_memory(node, prepare)?;
    Ok(Plan { layout, ram, folder_is_ours, command: Some(command), waits: None, kept })
}

/// The files that libvirt's QEMU has, in the order of the source's blocks.
fn plan_of_libvirt(node: &Node, prepare: &Prepare, domain: &str) -> Result<Plan, VmFilesError> {
    let waits = node.config.vmm.expected(domain);
    let waits = waits.ok_or_else(|| VmFilesError::NotExpected(domain.to_owned()))?;
    let find = |info: &BlockInfo| -> Result<RamFileRecord, VmFilesError> {
        let same = |ram: &&RamFileRecord| ram.id == info.id && ram.size == info.size;
        waits.ram.iter().find(same).cloned().ok_or_else(|| VmFilesError::NoBackend(info.id.clone()))
    };
    let ram = prepare.blocks.iter().map(find).collect::<Result<_, VmFilesError>>()?;
    let layout = layout_of_libvirt(node, &waits);
    Ok(Plan { layout, ram, folder_is_ours: false, command: None, waits: Some(waits), kept: Vec::new() })
}

fn layout_of_libvirt(node: &Node, vm: &VmRecord) -> RunLayout {
    let (qmp_socket, vm_dir) = (vm.qmp_socket.clone(), vm.vm_dir.clone());
    RunLayout { qmp_socket, vm_dir, ..node.layout(&vm.name, vm.backing) }
}

/// Makes the room.
pub(super) fn make(
    node: &Node,
    id: SessionId,
    prepare: &Prepare,
    plan: Plan,
    held: Vec<WireSet>,
) -> Result<VmFiles, VmFilesError> {
    let Plan { layout, ram, folder_is_ours, command, waits, kept } = plan;
    let (disk, vmm) = (node.disk(), &*node.config.vmm);
    let mut undo = Undo { disk, files: Vec::new(), folder: None };
    if waits.is_none() {
        disk.create_dir_all(&layout.vm_dir)
            .map_err(|source| VmFilesError::Folder { path: layout.vm_dir.clone(), source })?;
        undo.folder = folder_is_ours.then(|| layout.vm_dir.clone());
        let opened = layout.confinement.open_folder(&layout.vm_dir);
        opened.map_err(|source| VmFilesError::Folder { path: layout.vm_dir.clone(), source })?;
    }
    let page_maps = vmm.page_map_dir(&node.page_map_dir())?;
    let (mut blocks, mut tables, mut stand_ins) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (info, record)) in prepare.blocks.iter().zip(&ram).enumerate() {
        let file = if waits.is_some() {
            RamFile::open(&record.path)?
        } else {
            let file = make_ram_file(vmm, &prepare.vm, &layout, record);
            if file.is_ok() {
                undo.files.push(record.path.clone());
            }
            file?
        };
        if file.page_size().bytes() != info.page_size {
            return Err(VmFilesError::PageSize {
                backend: info.id.clone(),
                expected: info.page_size,
                found: file.page_size().bytes(),
            });
        }
        let path = GuestMemory::table_path(&page_maps, id, index);
        let table = PageTable::create(&path, file.pages())?;
        undo.files.push(path.clone());
        if let Some(kept) = kept.get(index) {
            undo.files.push(homecoming::beside(&record.path));
            let home = homecoming::link(kept, &record.path)?;
            blocks.push(Block::at_home(home, table)?);
            stand_ins.push(file);
        } else {
            blocks.push(Block::new(file, table)?);
        }
        tables.push(path);
    }
    undo.done();
    let memory = Arc::new(GuestMemory::new(blocks, prepare.spec.verify, latencies(node), cpu(node, prepare)));
    if prepare.spec.visit == Visit::Go {
        memory.demand.begin();
    }
    let (locked, argv) = command.map_or((false, Vec::new()), |command| (command.locks_memory, command.argv));
    Ok(VmFiles {
        layout,
        locked,
        of_libvirt: waits.is_some(),
        command: vmove_node::layout::with_environment(argv, &prepare.environment),
        ram,
        tables,
        memory,
        held,
        stand_ins,
        folder_is_ours,
    })
}

fn make_ram_file(
    vmm: &dyn Vmm,
    vm: &str,
    layout: &RunLayout,
    record: &RamFileRecord,
) -> Result<RamFile, VmFilesError> {
    let name = record.path.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| VmFilesError::FileName(record.path.clone()))?;
    let file = vmm.create_ram_file(vm, &layout.memory_dir, layout.backing, name, ByteLen(record.size))?;
    let given = layout.confinement.give(&record.path);
    given.map_err(|source| VmFilesError::Folder { path: record.path.clone(), source })?;
    Ok(file)
}

/// Finds the room again that an earlier process made.
pub(super) fn find(
    node: &Node,
    record: &DestinationRecord,
    ram: &[RamFileRecord],
) -> Result<VmFiles, VmFilesError> {
    let DestinationRecord { id, prepare, folder_is_ours, .. } = record;
    let of_libvirt = record.vm.as_ref().filter(|vm| vm.libvirt.is_some());
    let (layout, command) = match of_libvirt {
        Some(vm) => (layout_of_libvirt(node, vm), None),
        None => derive_command(node, prepare).map(|(layout, command)| (layout, Some(command)))?,
    };
    let (mut blocks, mut tables) = (Vec::new(), Vec::new());
    for (index, file) in ram.iter().enumerate() {
        let file = RamFile::open(&file.path)?;
        let path = GuestMemory::table_path(&node.page_map_dir(), *id, index);
        let table = PageTable::open(&path)?;
        table.recover();
        blocks.push(Block::new(file, table)?);
        tables.push(path);
    }
    // Hashes of pages that are mapped already are lost with the process that took them: a recovered session is not verified.
    let memory = Arc::new(GuestMemory::new(blocks, false, latencies(node), cpu(node, prepare)));
    if record.is_visit() {
        memory.demand.begin();
    }
    let (locked, argv) = command.map_or((false, Vec::new()), |command| (command.locks_memory, command.argv));
    let command = vmove_node::layout::with_environment(argv, &prepare.environment);
    let (ram, folder_is_ours) = (ram.to_vec(), *folder_is_ours);
    let (of_libvirt, held, stand_ins) = (of_libvirt.is_some(), Vec::new(), Vec::new());
    Ok(VmFiles { layout, command, ram, tables, memory, held, locked, of_libvirt, stand_ins, folder_is_ours })
}

/// Bounded as the operator wants it.
fn cpu(node: &Node, prepare: &Prepare) -> HostCpu {
    HostCpu::new(prepare.spec.goals.host_cpu_percent, node.config.vmm.page_workers())
}

fn latencies(node: &Node) -> Latencies {
    Latencies::counted_in(Arc::clone(&node.fault_latencies))
}

impl VmFiles {
    /// Removes the page tables, which a whole guest no longer needs. False if one of them is still there.
    pub(super) fn remove_tables(&self, disk: &dyn Disk) -> bool {
        remove_files(disk, &self.tables)
    }

    /// Removes everything, as [`remove_of`] does. QEMU must have ended. False if a page table is still there.
    pub(super) fn remove(&self, disk: &dyn Disk) -> bool {
        let removed = self.remove_tables(disk);
        if self.of_libvirt {
            return removed;
        }
        let folder = self.folder_is_ours.then_some(&self.layout.vm_dir);
        remove_of(disk, &self.ram, &self.layout.qmp_socket, folder);
        removed
    }
}

/// Removes RAM files, and what a guest that was to come home had beside them.
pub(super) fn remove_ram<'a>(disk: &dyn Disk, ram: impl IntoIterator<Item = &'a RamFileRecord>) {
    for file in ram {
        remove_files(disk, [&file.path, &homecoming::beside(&file.path)]);
    }
}

/// Removes what a VM has that never ran here: its memory and its folder. Of a folder that is not to be removed, only the socket goes.
pub(super) fn remove_of(disk: &dyn Disk, ram: &[RamFileRecord], socket: &Path, folder: Option<&PathBuf>) {
    remove_ram(disk, ram);
    let Some(folder) = folder else {
        remove_files(disk, [socket]);
        return;
    };
    match disk.remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %folder.display(), %error, "could not remove the folder of a VM that never arrived");
        }
        _ => {}
    }
}

struct Undo<'a> {
    disk: &'a dyn Disk,
    files: Vec<PathBuf>,
    folder: Option<PathBuf>,
}

impl Undo<'_> {
    fn done(&mut self) {
        self.files.clear();
        self.folder = None;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        remove_files(self.disk, &self.files);
        if let Some(folder) = self.folder.take() {
            let _ = self.disk.remove_dir_all(&folder);
        }
    }
}

/// After the end of a VM that came here and has no record: nobody else removes its memory.
pub(crate) fn remove_ended(node: &Node, record: &DestinationRecord) {
    let Some(vm) = record.vm.as_ref().filter(|vm| vm.libvirt.is_none() && !node.vms.has(&vm.name)) else {
        return;
    };
    remove_of(node.disk(), &vm.ram, &vm.qmp_socket, None);
}
