//! Templates as the distribution sees them: at the parent's node, and where they arrive.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::oneshot;
use vmove_clone::service::Chunks;
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
    /// Told what travels, once that is known.
    pub known: Option<oneshot::Sender<Arc<Chunks>>>,
    pub chunks: Option<Arc<Chunks>>,
}

impl Target for Incoming {
    fn regions(&mut self, layout: &Layout) -> Result<Vec<Region>, SpreadError> {
        let lens = &layout.regions;
        let here: Vec<u64> = self.memory.iter().map(|mapping| mapping.len().0).collect();
        let protocol = |what| vmove_fabric::FabricError::Protocol { what };
        if here != *lens {
            let what = format!("expected memory of {here:?} bytes as in the manifest, found {lens:?}");
            return Err(protocol(what).into());
        }
        if let Some(known) = self.known.take() {
            let travelling =
                layout.extents().iter().map(|extent| (extent.region, extent.first, extent.count));
            let chunks = Chunks::new(lens, travelling).map_err(|e| protocol(chain(&e)))?;
            let chunks = Arc::new(chunks);
            self.chunks = Some(chunks.clone());
            // Nobody waits for it any more if the fork was given up.
            let _ = known.send(chunks);
        }
        let register = |mapping: &Arc<Mapping>| {
            Ok(register_kept(&*self.fabric, Arc::clone(mapping), Access::REMOTE_READ)?)
        };
        self.memory.iter().map(register).collect()
    }

    fn landed(&mut self, region: u16, offset: u64) {
        if let Some(chunks) = &self.chunks {
            chunks.landed(region, offset);
        }
    }
}

/// Bytes of RAM files that have memory.
pub fn allocated(files: &[&Path]) -> u64 {
    let of = |path: &Path| RamFile::open(path).and_then(|file| file.allocated_bytes());
    files.iter().filter_map(|path| of(path).ok()).map(|bytes| bytes.0).sum()
}
