//! Blocks of nodes (Slurm's topology/block) as a tree: blocks that are joined for larger jobs are below one switch.

use super::names::valid;
use super::{Builder, Origin, Style, SwitchId, SwitchName, SwitchSpec, Topology, TopologyError};

/// Sizes in nodes: `2,4` or `[2, 4]`.
pub(super) fn sizes(text: &str, line: usize) -> Result<Vec<u32>, TopologyError> {
    let words = text.trim_matches(['[', ']']).split(',').map(str::trim).filter(|word| !word.is_empty());
    let parse = |word: &str| {
        let size = word.parse::<u32>().ok().filter(|size| *size > 0);
        size.ok_or_else(|| {
            TopologyError::syntax(line, format!("block size {word:?}"), "numbers of nodes, at least 1")
        })
    };
    check(words.map(parse).collect::<Result<_, _>>()?, line)
}

/// Each size must be a power of two times the smallest. Gives them in order.
pub(super) fn check(mut sizes: Vec<u32>, line: usize) -> Result<Vec<u32>, TopologyError> {
    sizes.sort_unstable();
    sizes.dedup();
    let first = sizes.first().copied().unwrap_or(1).max(1);
    let bad = sizes.iter().find(|size| *size % first != 0 || !(*size / first).is_power_of_two());
    match bad {
        Some(bad) => Err(TopologyError::syntax(
            line,
            format!("block size {bad} beside {first}"),
            "each size a power of two times the smallest",
        )),
        None => Ok(sizes),
    }
}

/// A tree of blocks in their order: as many side by side as the second size is times the first, and so on.
pub(super) fn build(
    blocks: Vec<(SwitchSpec, usize)>,
    sizes: Option<(Vec<u32>, usize)>,
) -> Result<Topology, TopologyError> {
    let smallest = blocks.iter().map(|(block, _)| block.nodes.len()).min().unwrap_or(1).max(1);
    let (sizes, line) = sizes.unwrap_or((vec![u32::try_from(smallest).unwrap_or(u32::MAX)], 0));
    let first = sizes.first().copied().unwrap_or(1).max(1);
    let mut builder = Builder::new();
    let mut level: Vec<SwitchName> = Vec::new();
    for (block, line) in blocks {
        if block.nodes.len() < first as usize {
            return Err(TopologyError::syntax(
                line,
                format!("block {} has only {} nodes", block.name, block.nodes.len()),
                format!("at least {first}, the smallest of BlockSizes"),
            ));
        }
        level.push(block.name.clone());
        builder.add(block, Origin::line(line));
    }
    let mut joined = 1;
    for size in sizes.iter().skip(1).map(|size| size / first).chain([u32::MAX]) {
        if level.len() < 2 {
            break;
        }
        let by = (size / joined) as usize;
        let mut above = Vec::new();
        for (at, below) in level.chunks(by.max(2)).enumerate() {
            let name = if size == u32::MAX {
                "all-blocks".to_owned()
            } else {
                format!("blocks-{}-{at}", size * first)
            };
            let mut spec = SwitchSpec::new(valid(SwitchName::new(name), line)?);
            spec.switches = below.to_vec();
            above.push(spec.name.clone());
            builder.add(spec, Origin::line(line));
        }
        (level, joined) = (above, size);
    }
    builder.build(Style::Block { sizes })
}

/// The blocks of a topology of blocks, in order.
pub(super) fn blocks(topology: &Topology) -> impl Iterator<Item = SwitchId> {
    topology.ids().filter(|id| topology.switch(*id).children.is_empty())
}
