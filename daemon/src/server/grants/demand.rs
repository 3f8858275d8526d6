//! What a request to start a VM asks of the node.

use vmove_grant::Demand;
use vmove_types::Backing;
use vmove_types::vm::RunRequest;

/// What a VM is to be started with, as its command line and its list of devices say. Memory that it does not name in `-m` is counted when QEMU has started.
pub fn demand(request: &RunRequest) -> Result<Demand, String> {
    let words = &request.command_line;
    let values = |names: &'static [&'static str]| {
        words.windows(2).filter(move |pair| names.contains(&pair[0].as_str())).map(|pair| pair[1].as_str())
    };
    let mut demand = Demand { cores: 1, ..Demand::default() };
    for value in values(&["-smp", "--smp"]) {
        demand.cores = processors(value)?;
    }
    let mut memory = 0;
    for value in values(&["-m", "--m"]) {
        memory = memory_mib(value)?;
    }
    match request.memory.parse::<Backing>().map_err(|e| e.to_string())? {
        Backing::Thp => demand.memory_mib = memory,
        Backing::Hugetlb2M => demand.huge_2m_mib = memory,
        Backing::Hugetlb1G => demand.huge_1g_mib = memory,
    }
    let asked_for = request.devices.iter().map(|device| device.address.to_string());
    demand.devices = values(&["-device", "--device"]).filter_map(host_device).chain(asked_for).collect();
    Ok(demand)
}

/// The keys of an option, and its first value, which may have no key.
fn parts(value: &str) -> impl Iterator<Item = (&str, &str)> {
    value.split(',').map(|part| part.split_once('=').unwrap_or(("", part)))
}

/// `N`, `cpus=N`, and `maxcpus=N` for those that are plugged later.
fn processors(value: &str) -> Result<u32, String> {
    let wrong = |found: &str| format!("-smp {value}: expected a number of processors, found {found:?}");
    let named = parts(value).filter(|(key, _)| matches!(*key, "" | "cpus" | "maxcpus"));
    let counts = named.map(|(_, count)| count.parse::<u32>().map_err(|_| wrong(count)));
    let most = counts.collect::<Result<Vec<u32>, String>>()?.into_iter().max();
    let Some(most) = most else {
        // Sockets times cores times threads.
        let factors = parts(value).map(|(_, count)| count.parse::<u32>().map_err(|_| wrong(count)));
        return factors
            .collect::<Result<Vec<u32>, String>>()
            .map(|all| all.iter().fold(1_u32, |a, b| a.saturating_mul(*b)));
    };
    Ok(most)
}

/// `N`, `size=N`, and `maxmem=N` for what is plugged later; without a unit in MiB.
fn memory_mib(value: &str) -> Result<u64, String> {
    let named = parts(value).filter(|(key, _)| matches!(*key, "" | "size" | "maxmem"));
    let sizes = named.map(|(_, size)| {
        let split = size.find(|c: char| !c.is_ascii_digit()).unwrap_or(size.len());
        let (number, unit) = size.split_at(split);
        let number: Option<u64> = number.parse().ok();
        let mib = match (number, unit.to_ascii_uppercase().as_str()) {
            (Some(number), "" | "M" | "MB" | "MIB") => Some(number),
            (Some(number), "G" | "GB" | "GIB") => number.checked_mul(1 << 10),
            (Some(number), "T" | "TB" | "TIB") => number.checked_mul(1 << 20),
            (Some(number), "K") => Some(number.div_ceil(1 << 10)),
            _ => None,
        };
        mib.ok_or_else(|| format!("-m {value}: expected a size such as 512M, found {size:?}"))
    });
    Ok(sizes.collect::<Result<Vec<u64>, String>>()?.into_iter().max().unwrap_or(0))
}

/// The address of a passthrough device.
fn host_device(value: &str) -> Option<String> {
    let is_json = value.trim_start().starts_with('{');
    let address = if is_json {
        let value: serde_json::Value = serde_json::from_str(value).ok()?;
        (value["driver"].as_str()?.starts_with("vfio-pci"))
            .then(|| value["host"].as_str().map(str::to_owned))??
    } else {
        let driver = parts(value).find(|(key, _)| matches!(*key, "" | "driver"))?.1;
        if !driver.starts_with("vfio-pci") {
            return None;
        }
        parts(value).find(|(key, _)| matches!(*key, "host" | "sysfsdev"))?.1.to_owned()
    };
    let address = address.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    // QEMU takes addresses without their domain.
    Some(if address.matches(':').count() == 1 { format!("0000:{address}") } else { address })
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
        }
    }

    fn of(memory: &str, line: &str) -> Result<Demand, String> {
        demand(&request(memory, line, &[]))
    }

    #[test]
    fn a_command_line_says_what_it_asks_for() {
        let plain = of("thp", "qemu -m 512 -smp 2").unwrap();
        assert_eq!((plain.cores, plain.memory_mib, plain.huge_2m_mib), (2, 512, 0));
        let large = of("hugetlb-2m", "qemu -m 1G,slots=2,maxmem=4G -smp cpus=2,maxcpus=8").unwrap();
        assert_eq!((large.cores, large.memory_mib, large.huge_2m_mib), (8, 0, 4096));
        assert_eq!(of("thp", "qemu -smp sockets=2,cores=4").unwrap().cores, 8);
        assert_eq!(of("thp", "qemu").unwrap(), Demand { cores: 1, ..Demand::default() });
        let devices = "qemu -device vfio-pci,host=01:00.0 -device virtio-net -device {\"driver\":\"vfio-pci\",\"host\":\"0000:0A:00.1\"}";
        assert_eq!(of("thp", devices).unwrap().devices, ["0000:01:00.0", "0000:0a:00.1"]);
        let by_list = request("thp", "qemu -device vfio-pci,host=01:00.0", &["net0=0000:0A:00.1"]);
        assert_eq!(demand(&by_list).unwrap().devices, ["0000:01:00.0", "0000:0a:00.1"]);
        for (line, words) in
            [("qemu -smp many", "number of processors"), ("qemu -m 5parsecs", "expected a size")]
        {
            assert!(of("thp", line).unwrap_err().contains(words), "{line}");
        }
    }
}
