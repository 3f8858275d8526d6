//! What concerns all VMs of a host.

use std::path::PathBuf;

use super::{Finding, Look, interrupts};

/// A sleep state that takes longer to wake up from is too deep for virtual processors that wait for each other. Unit: microseconds.
const DEEPEST_SLEEP_US: u64 = 10;

/// All that is looked at of a host.
#[must_use]
pub fn of_host(look: &Look<'_>) -> Vec<Finding> {
    let mut findings = vec![
        huge_pages_on_demand(look),
        numa_balancing(look),
        page_merging(look),
        zone_reclaim(look),
        frequency(look),
        sleep_states(look),
        hyperthreads(look),
        clock(look),
        swap(look),
        iommu(look),
    ];
    findings.push(interrupts::of_others(look));
    findings
}

/// The word in brackets of a file such as `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn echo(path: &str, value: &str) -> String {
    format!("echo {value} >/{path}")
}

/// A file that should hold a value, which a write gives it.
fn should_be(look: &Look<'_>, topic: &str, path: &str, value: &str, why: &str) -> Finding {
    let Some(found) = look.read(path) else {
        return Finding::unknown(topic, format!("no /{path}: this kernel does not have it"));
    };
    let now = chosen(&found).unwrap_or(&found).to_owned();
    if now == value {
        return Finding::good(topic, format!("/{path} is {now}"));
    }
    let files = vec![(look.root.join(path), value.to_owned())];
    Finding::writes(topic, format!("/{path} is {now}"), why, files, echo(path, value))
}

fn huge_pages_on_demand(look: &Look<'_>) -> Finding {
    let path = "sys/kernel/mm/transparent_hugepage/enabled";
    match look.read(path).as_deref().and_then(chosen) {
        Some(word @ ("madvise" | "always")) => Finding::good("huge-pages", format!("/{path} is {word}")),
        _ => should_be(
            look,
            "huge-pages",
            path,
            "madvise",
            "what children of forks write, and the memory of QEMU itself, can then be huge pages",
        ),
    }
}

fn numa_balancing(look: &Look<'_>) -> Finding {
    if look.host.nodes.len() < 2 {
        return Finding::good("numa-balancing", "one NUMA node: nothing to balance");
    }
    let path = "proc/sys/kernel/numa_balancing";
    if look.dedicated.is_empty() {
        let now = look.read(path).unwrap_or_else(|| "not there".to_owned());
        return Finding::good("numa-balancing", format!("/{path} is {now}, and no VM is pinned"));
    }
    should_be(
        look,
        "numa-balancing",
        path,
        "0",
        "memory of pinned VMs is where it belongs; looking for better places costs page faults",
    )
}

fn page_merging(look: &Look<'_>) -> Finding {
    let why = "merging equal pages takes huge pages apart and processor time from VMs";
    should_be(look, "page-merging", "sys/kernel/mm/ksm/run", "0", why)
}

fn zone_reclaim(look: &Look<'_>) -> Finding {
    let why = "with it the kernel drops pages of one NUMA node while another has free memory";
    should_be(look, "zone-reclaim", "proc/sys/vm/zone_reclaim_mode", "0", why)
}

fn frequency(look: &Look<'_>) -> Finding {
    let path = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
    let found: Vec<(u32, String)> =
        look.host.cpus().iter().filter_map(|cpu| Some((cpu, look.read(&path(cpu))?))).collect();
    if found.is_empty() {
        return Finding::unknown("governor", "the kernel does not choose frequencies here");
    }
    let other = |governor: &str| governor != "performance";
    let slow: Vec<&(u32, String)> = found.iter().filter(|(_, governor)| other(governor)).collect();
    let Some((_, governor)) = slow.first() else {
        return Finding::good("governor", "all processors have the governor performance");
    };
    let files = slow.iter().map(|(cpu, _)| (look.root.join(path(*cpu)), "performance".to_owned())).collect();
    Finding::writes(
        "governor",
        format!("{} of {} processors have another governor, such as {governor}", slow.len(), found.len()),
        "a processor that first has to speed up delays guests that wake up often",
        files,
        "cpupower frequency-set -g performance".to_owned(),
    )
}

fn sleep_states(look: &Look<'_>) -> Finding {
    let topic = "sleep-states";
    let cpus = if look.dedicated.is_empty() { look.host.cpus() } else { look.dedicated.clone() };
    let mut deep: Vec<(PathBuf, String)> = Vec::new();
    let mut slowest = 0;
    let mut any = false;
    for cpu in cpus.iter() {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle");
        for state in look.list(&folder) {
            any = true;
            let file = |name: &str| format!("{folder}/{state}/{name}");
            let latency = look.read(&file("latency")).and_then(|text| text.parse().ok()).unwrap_or(0);
            if latency > DEEPEST_SLEEP_US && look.read(&file("disable")).as_deref() == Some("0") {
                deep.push((look.root.join(file("disable")), "1".to_owned()));
                slowest = slowest.max(latency);
            }
        }
    }
    if !any {
        return Finding::unknown(topic, "the kernel tells of no sleep states here");
    }
    if deep.is_empty() {
        return Finding::good(topic, format!("processors wake up within {DEEPEST_SLEEP_US} us"));
    }
    Finding::writes(
        topic,
        format!("processors {cpus} may sleep so deeply that they need {slowest} us to wake up"),
        "interrupts of passed-through devices, and page faults, wait for that long",
        deep,
        format!("cpupower -c {cpus} idle-set -D {DEEPEST_SLEEP_US}"),
    )
}

fn hyperthreads(look: &Look<'_>) -> Finding {
    let topic = "hyperthreads";
    let half = |core: &&crate::cpus::Cpus| {
        let taken = core.and(&look.dedicated).len();
        taken > 0 && taken < core.len()
    };
    let threads = look.host.cores.iter().map(crate::cpus::Cpus::len).max().unwrap_or(1);
    if threads < 2 {
        return Finding::good(topic, "a core has one thread");
    }
    match look.host.cores.iter().find(half) {
        None => Finding::good(topic, "no VM has only some of the threads of a core"),
        Some(core) => Finding::better(
            topic,
            format!("a VM has some of the threads {core} of one core, and shares its caches with others"),
            "a VM with whole cores is not slowed down by its neighbours",
            "vmove run --pin with a multiple of the threads of a core",
        ),
    }
}

fn clock(look: &Look<'_>) -> Finding {
    let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    match look.read(path) {
        None => Finding::unknown("clock", format!("no /{path}")),
        Some(clock) if matches!(clock.as_str(), "tsc" | "kvm-clock" | "arch_sys_counter") => {
            Finding::good("clock", format!("the clock is {clock}"))
        }
        Some(clock) => Finding::better(
            "clock",
            format!("the clock is {clock}"),
            "with another clock than tsc, each look at the time leaves the guest or the kernel's fast path",
            "dmesg | grep -i tsc    # says why the kernel does not trust it",
        ),
    }
}

fn swap(look: &Look<'_>) -> Finding {
    let swaps = look.read("proc/swaps").unwrap_or_default();
    match swaps.lines().nth(1).and_then(|line| line.split_whitespace().next()) {
        None => Finding::good("swap", "no swap: guest memory stays in memory"),
        Some(device) => Finding::better(
            "swap",
            format!("{device} is swap"),
            "guest memory on tmpfs can be swapped out, and a guest then waits for the disk",
            format!("swapoff {device}    # or use --memory hugetlb-2m, which is never swapped"),
        ),
    }
}

fn iommu(look: &Look<'_>) -> Finding {
    if !look.passthrough {
        return Finding::good("iommu", "no VM has a device of the host");
    }
    let line = look.read("proc/cmdline").unwrap_or_default();
    if look.list("sys/class/iommu").is_empty() {
        return Finding::better(
            "iommu",
            "no IOMMU is in use",
            "without one no device can be passed through",
            "add intel_iommu=on iommu=pt (AMD: iommu=pt) to the kernel's parameters, and switch VT-d or AMD-Vi on in the firmware",
        );
    }
    if line.split_whitespace().any(|word| word == "iommu=pt") {
        return Finding::good(
            "iommu",
            "an IOMMU is in use, and the host's own devices pass it by (iommu=pt)",
        );
    }
    Finding::better(
        "iommu",
        "an IOMMU is in use, also for the host's own devices",
        "these are slowed down for nothing",
        "add iommu=pt to the kernel's parameters",
    )
}
