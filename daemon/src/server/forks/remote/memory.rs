//! Templates as the distribution sees them: at the parent's node, and where they arrive.

use std::path::Path;
use std::sync::Arc;

use vmove_clone::template::Template;
use vmove_fabric::{Access, Fabric, Region};
use vmove_memory::{Mapping, RamFile};
use vmove_migrate::region::register_kept;
use vmove_spread::{CHUNK, Extent, Layout, SpreadError, Target, non_zero};

use crate::api::problem::chain;

/// Registers a template's memory, and tells what of it is not zero. Holes are not looked at: that would give them memory.
pub fn outgoing(fabric: &dyn Fabric, template: &Template) -> Result<(Vec<Region>, Vec<Extent>), String> {
    let (mut regions, mut order) = (Vec::new(), Vec::new());
    for (number, ram) in (0_u16..).zip(&template.manifest().ram) {
        let file = RamFile::open(&ram.file).map_err(|e| chain(&e))?;
        let mapping = file.map().map_err(|e| chain(&e))?;
        let region = register_kept(fabric, mapping, Access::REMOTE_READ).map_err(|e| chain(&e))?;
        let chunk = u64::from(CHUNK);
        for extent in file.data_extents().map_err(|e| chain(&e))? {
            let first = extent.start.0 / chunk * chunk;
            order.extend(non_zero(number, &region, first..extent.end().0.div_ceil(chunk) * chunk));
        }
        regions.push(region);
    }
    Ok((regions, order))
}

/// A template on its way to this node.
pub struct Incoming {
    pub fabric: Arc<dyn Fabric>,
    pub memory: Vec<Arc<Mapping>>,
}

impl Target for Incoming {
    fn regions(&mut self, layout: &Layout) -> Result<Vec<Region>, SpreadError> {
        let here: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
        let lens = &layout.regions;
        if here != *lens {
            let what = format!("expected memory of {here:?} bytes as in the manifest, found {lens:?}");
            return Err(vmove_fabric::FabricError::Protocol { what }.into());
        }
        let register = |mapping: &Arc<Mapping>| {
            Ok(register_kept(&*self.fabric, Arc::clone(mapping), Access::REMOTE_READ)?)
        };
        self.memory.iter().map(register).collect()
    }

    fn landed(&mut self, _region: u16, _offset: u64) {}
}

/// Bytes of RAM files that have memory.
pub fn allocated(files: &[&Path]) -> u64 {
    let of = |path: &Path| RamFile::open(path).and_then(|file| file.allocated_bytes());
    files.iter().filter_map(|path| of(path).ok()).map(|bytes| bytes.0).sum()
}
