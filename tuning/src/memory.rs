//! Where memory is.

use std::collections::BTreeMap;
use std::io;

/// Memory of a process by NUMA node, as `/proc/PID/numa_maps` tells it (`proc_pid_numa_maps(5)`). Unit: bytes.
///
/// # Errors
/// There is no such process, or the kernel knows of no NUMA.
pub fn by_node(process: u32) -> io::Result<BTreeMap<u32, u64>> {
    Ok(read(&std::fs::read_to_string(format!("/proc/{process}/numa_maps"))?))
}

/// The NUMA node of a PCI device, if the kernel knows it.
#[must_use]
pub fn node_of_device(address: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // -1: it is not known.
    text.trim().parse().ok()
}

fn read(text: &str) -> BTreeMap<u32, u64> {
    let mut nodes = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let page_kib = words.iter().find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse().ok());
        for word in &words {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) else {
                continue;
            };
            if let (Ok(node), Ok(pages)) = (node.parse::<u32>(), pages.parse::<u64>()) {
                *nodes.entry(node).or_default() += pages * (page_kib.unwrap_or(4) << 10);
            }
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_all_sizes_are_summed_by_node() {
        let text = "7f0000000000 bind:1 file=/ram/web shared=2 mapped=512 N1=512 kernelpagesize_kB=4\n\
                    7f0040000000 default file=/huge/web huge dirty=3 N0=1 N1=2 kernelpagesize_kB=2048\n\
                    7f0050000000 default stack anon=3 Nx=1 kernelpagesize_kB=4\n";
        assert_eq!(read(text), BTreeMap::from([(0, 2 << 20), (1, 6 << 20)]));
    }

    #[test]
    fn this_process_has_memory_on_its_nodes() {
        match by_node(std::process::id()) {
            Ok(nodes) => assert!(nodes.values().sum::<u64>() > 100_000, "{nodes:?}"),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "a kernel without NUMA: {error}"),
        }
    }
}
