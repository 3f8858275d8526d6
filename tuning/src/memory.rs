//! Where memory is.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

/// Memory by NUMA node of a process that maps these RAM files, as `/proc/PID/numa_maps` tells it (`proc_pid_numa_maps(5)`): that of the files, and what
/// it has allocated. None if it maps none of the files: a child, whose memory is mostly that of a template, which is not its own. Unit: bytes.
///
/// # Errors
/// There is no such process, or the kernel knows of no NUMA.
pub fn by_node(process: u32, files: &[PathBuf]) -> io::Result<Option<BTreeMap<u32, u64>>> {
    Ok(read(&std::fs::read_to_string(format!("/proc/{process}/numa_maps"))?, files))
}

/// The NUMA node of a PCI device, if the kernel knows it.
#[must_use]
pub fn node_of_device(address: &str) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // -1: it is not known.
    text.trim().parse().ok()
}

fn read(text: &str, files: &[PathBuf]) -> Option<BTreeMap<u32, u64>> {
    let (mut nodes, mut own) = (BTreeMap::new(), false);
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(file) = words.iter().find_map(|word| word.strip_prefix("file=")) {
            if !files.iter().any(|path| path.to_str() == Some(file)) {
                continue;
            }
            own = true;
        }
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
    own.then_some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_all_sizes_are_summed_by_node_without_files_of_others() {
        let text = "7f0000000000 bind:1 file=/ram/web mapped=512 N1=512 kernelpagesize_kB=4\n\
                    7f0040000000 default heap anon=3 N0=512 N1=1024 kernelpagesize_kB=4\n\
                    7f0050000000 default file=/lib/libc.so.6 mapped=3 N0=300 kernelpagesize_kB=4\n\
                    7f0060000000 default stack anon=3 Nx=1 kernelpagesize_kB=4\n";
        let own = ["/ram/web".into()];
        assert_eq!(read(text, &own), Some(BTreeMap::from([(0, 2 << 20), (1, 6 << 20)])));
        assert_eq!(read(text, &["/ram/other".into()]), None, "a child of web");
        let huge = "7f0000000000 default file=/huge/web huge dirty=3 N0=1 N1=2 kernelpagesize_kB=2048\n";
        assert_eq!(read(huge, &["/huge/web".into()]), Some(BTreeMap::from([(0, 2 << 20), (1, 4 << 20)])));
    }
}
