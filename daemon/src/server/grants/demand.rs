//! What a request to start a VM asks of the node.

use vmove_grant::Demand;
use vmove_qmp::{CommandLine, CommandLineError};
use vmove_types::vm::RunRequest;
use vmove_types::{Backing, UnknownBacking};

/// What is asked for cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum DemandError {
    /// Its command line.
    #[error(transparent)]
    CommandLine(#[from] CommandLineError),
    /// The kind of its memory.
    #[error(transparent)]
    Backing(#[from] UnknownBacking),
}

/// What a VM is to be started with, as its command line and its list of devices say. Memory that it does not name in `-m` is counted when QEMU has started.
pub fn demand(request: &RunRequest) -> Result<Demand, DemandError> {
    let line = CommandLine::parse(request.command_line.iter().map(Into::into).collect())?;
    let wanted = line.wanted()?;
    let memory_mib = wanted.memory.unwrap_or(0).div_ceil(1 << 20);
    let mut demand = Demand { cores: wanted.processors, ..Demand::default() };
    match request.memory.parse::<Backing>()? {
        Backing::Thp => demand.memory_mib = memory_mib,
        Backing::Hugetlb2M => demand.huge_2m_mib = memory_mib,
        Backing::Hugetlb1G => demand.huge_1g_mib = memory_mib,
    }
    let asked_for = request.devices.iter().map(|device| device.address);
    demand.devices = wanted.host_devices.into_iter().chain(asked_for).map(|a| a.to_string()).collect();
    Ok(demand)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(memory: &str, line: &str, devices: &[&str]) -> RunRequest {
        RunRequest {
            name: "vm".to_owned(),
            memory: memory.to_owned(),
            command_line: line.split(' ').map(str::to_owned).collect(),
            environment: std::collections::BTreeMap::new(),
            devices: devices.iter().map(|device| device.parse().unwrap()).collect(),
            grant: None,
            pin: None,
        }
    }

    fn of(memory: &str, line: &str) -> Result<Demand, DemandError> {
        demand(&request(memory, line, &[]))
    }

    #[test]
    fn a_command_line_says_what_it_asks_for() {
        let plain = of("thp", "qemu -m 512 -smp 2").unwrap();
        assert_eq!((plain.cores, plain.memory_mib, plain.huge_2m_mib), (2, 512, 0));
        let large = of("hugetlb-2m", "qemu -m 1G,slots=2,maxmem=4G -smp cpus=2,maxcpus=8").unwrap();
        assert_eq!((large.cores, large.memory_mib, large.huge_2m_mib), (8, 0, 4096));
        assert_eq!(of("thp", "qemu").unwrap(), Demand { cores: 1, ..Demand::default() });
        let by_list = request("thp", "qemu -device vfio-pci,host=01:00.0", &["net0=0000:0A:00.1"]);
        assert_eq!(demand(&by_list).unwrap().devices, ["0000:01:00.0", "0000:0a:00.1"]);
        assert!(matches!(of("thp", "qemu -smp many"), Err(DemandError::CommandLine(_))));
        assert!(matches!(of("paper", "qemu"), Err(DemandError::Backing(_))));
    }
}
