//! What the home of a guest that visits another node has kept for its return.

use std::path::PathBuf;

use vmove_memory::RamFile;
use vmove_node::record::RamFileRecord;
use vmove_types::check::{Blocker, BlockerCode};
use vmove_types::spec::Visit;

use crate::group::journals;
use crate::node::Node;
use crate::ownership::SourceState;
use crate::proto::message::{BlockInfo, Home, Prepare};
use crate::records::SourceRecord;

/// A guest is to come home to a node that has not kept its memory.
#[derive(Debug, thiserror::Error)]
#[error(
    "{node} has not kept the memory of {vm:?} for its return: the guest can only stay where it is (`vmove visit {vm} --stay`), and move from there"
)]
pub(crate) struct NotHome {
    node: String,
    vm: String,
}

/// The record of the visit, if this node is the home that waits for its guest.
fn visit(node: &Node, home: Home) -> Option<SourceRecord> {
    let read = journals::read(node.disk(), &node.config.sessions_dir, home.visit);
    let waits = |r: &SourceRecord| {
        let is_it = r.token == home.token && r.spec.visit == Visit::Go;
        is_it && r.state == SourceState::Committed && !r.freed
    };
    read.ok().flatten().filter(waits)
}

/// The files that this node has kept for a guest that comes home, in the order of its RAM blocks; none of another guest.
///
/// # Errors
/// [`NotHome`].
pub(crate) fn kept_memory(node: &Node, prepare: &Prepare) -> Result<Vec<PathBuf>, NotHome> {
    let Some(home) = prepare.home else { return Ok(Vec::new()) };
    let not_home = || NotHome { node: node.config.node.clone(), vm: prepare.vm.clone() };
    let record = visit(node, home).ok_or_else(not_home)?;
    let find = |info: &BlockInfo| {
        let same = |ram: &&RamFileRecord| ram.id == info.id && ram.size == info.size;
        record.vm.ram.iter().find(same).map(|ram| ram.path.clone()).ok_or_else(not_home)
    };
    prepare.blocks.iter().map(find).collect()
}

/// Why a guest cannot come home here.
pub(crate) fn blocker(node: &Node, prepare: &Prepare) -> Option<Blocker> {
    let home = prepare.home?;
    let why = kept_memory(node, prepare).err()?;
    Some(Blocker::new(BlockerCode::NotHome, why.to_string()).about(home.visit.to_string()))
}

/// What of a guest's memory this node has already. Unit: bytes.
pub(crate) fn held_bytes(node: &Node, prepare: &Prepare) -> u64 {
    let allocated = |path: &PathBuf| {
        let file = RamFile::open(path).ok()?;
        Some(file.data_extents().ok()?.iter().map(|extent| extent.len.0).sum::<u64>())
    };
    kept_memory(node, prepare).unwrap_or_default().iter().filter_map(allocated).sum()
}
