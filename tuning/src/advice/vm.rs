//! What concerns one VM.

use std::collections::BTreeMap;

use vmove_types::tuning::{Advice, AdviceState};

use crate::cpus::Cpus;
use crate::host::Host;
use crate::pin::Pin;

/// Less of its memory on other NUMA nodes counts as none: shared libraries, and what QEMU touched before it was bound.
const ASTRAY_BYTES: u64 = 16 << 20;

/// What was found out of a VM.
#[derive(Debug, Default)]
pub struct Looked {
    /// Its name.
    pub vm: String,
    /// Where it is pinned.
    pub pin: Option<Pin>,
    /// Why it is not, though that was asked for.
    pub not_pinned: Option<String>,
    /// Virtual processors that are elsewhere, and where.
    pub astray: Vec<(u32, Cpus)>,
    /// Its memory by NUMA node; none of a child, whose memory is mostly its template's. Unit: bytes.
    pub memory: Option<BTreeMap<u32, u64>>,
    /// Share of its memory that is mapped by huge pages, 0 to 1.
    pub huge_share: Option<f64>,
    /// Its devices, and the NUMA node of each that the kernel knows.
    pub devices: Vec<(String, u32)>,
    /// Somebody else started its QEMU.
    pub adopted: bool,
}

/// What is told of a VM.
#[must_use]
pub fn of_vm(looked: &Looked, host: &Host) -> Vec<Advice> {
    let mut advice = vec![processors(looked)];
    if host.nodes.len() > 1 {
        advice.push(memory(looked));
        advice.extend(devices(looked));
    }
    advice.extend(huge(looked));
    advice
}

fn tell(looked: &Looked, topic: &str, state: AdviceState, found: String) -> Advice {
    Advice { topic: topic.to_owned(), vm: Some(looked.vm.clone()), state, found, better: None, command: None }
}

fn better(looked: &Looked, topic: &str, found: String, why: &str, command: String) -> Advice {
    let (better, command) = (Some(why.to_owned()), Some(command));
    Advice { better, command, ..tell(looked, topic, AdviceState::Better, found) }
}

fn apply(looked: &Looked) -> String {
    format!("vmove tune --apply {}", looked.vm)
}

fn processors(looked: &Looked) -> Advice {
    let topic = "pinning";
    let Some(pin) = &looked.pin else {
        let why = looked.not_pinned.clone().unwrap_or_else(|| "was not asked for".to_owned());
        let command = match (looked.adopted, &looked.not_pinned) {
            (true, _) => "whoever started its QEMU pins it".to_owned(),
            (false, Some(_)) => apply(looked),
            (false, None) => "start it with vmove run --pin".to_owned(),
        };
        let found = format!("not pinned: {why}");
        return better(
            looked,
            topic,
            found,
            "other VMs and the host take its processors at any time",
            command,
        );
    };
    if looked.astray.is_empty() {
        let each = if pin.one_each() { ", one each" } else { "" };
        return tell(
            looked,
            topic,
            AdviceState::Good,
            format!("{} virtual processors on {}{each}", pin.vcpus, pin.set()),
        );
    }
    let list: Vec<String> = looked.astray.iter().map(|(index, cpus)| format!("{index} on {cpus}")).collect();
    let found = format!("virtual processors are not where they belong ({}): {}", pin.set(), list.join("; "));
    Advice {
        state: AdviceState::CanApply,
        ..better(looked, topic, found, "somebody else has moved them", apply(looked))
    }
}

fn memory(looked: &Looked) -> Advice {
    let topic = "numa-memory";
    let mib = |bytes: u64| bytes >> 20;
    let Some(memory) = &looked.memory else {
        let found =
            "it shares the memory of a template; what it writes is where its processors are".to_owned();
        return tell(looked, topic, AdviceState::Unknown, found);
    };
    let list: Vec<String> =
        memory.iter().map(|(node, bytes)| format!("{} MiB on node {node}", mib(*bytes))).collect();
    let found = if list.is_empty() { "no memory yet".to_owned() } else { list.join(", ") };
    let Some(pin) = &looked.pin else {
        return tell(
            looked,
            topic,
            AdviceState::Unknown,
            format!("{found}; the VM is not bound to NUMA nodes"),
        );
    };
    let elsewhere = memory.iter().filter(|(node, _)| !pin.memory.contains(node));
    let astray: u64 = elsewhere.map(|(_, bytes)| bytes).sum();
    if astray <= ASTRAY_BYTES {
        return tell(looked, topic, AdviceState::Good, found);
    }
    let nodes: Cpus = pin.memory.iter().copied().collect();
    let why =
        format!("{} MiB are farther away than NUMA node {nodes}, where the VM's processors are", mib(astray));
    Advice { state: AdviceState::CanApply, ..better(looked, topic, found, &why, apply(looked)) }
}

fn devices(looked: &Looked) -> Vec<Advice> {
    let Some(pin) = &looked.pin else { return Vec::new() };
    let one = |(device, node): &(String, u32)| {
        let found = format!("{device} is on NUMA node {node}");
        if pin.memory.contains(node) {
            return tell(looked, "device-distance", AdviceState::Good, found);
        }
        let why = "what it writes into the VM's memory crosses between sockets";
        let command = format!("vmove run --pin={node}:{}", pin.cpus.len());
        better(looked, "device-distance", found, why, command)
    };
    looked.devices.iter().map(one).collect()
}

fn huge(looked: &Looked) -> Option<Advice> {
    let share = looked.huge_share?;
    let found = format!("{:.0} % of its memory is mapped by huge pages", share * 100.0);
    if share >= 0.9 {
        return Some(tell(looked, "huge-share", AdviceState::Good, found));
    }
    let why = "each access to other pages may cost a walk of two page tables";
    let command =
        "vmove run --memory hugetlb-2m; a VM that has just started or moved needs a moment".to_owned();
    Some(better(looked, "huge-share", found, why, command))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        let node = |id: u32| crate::host::NumaNode {
            id,
            cpus: [2 * id, 2 * id + 1].into_iter().collect(),
            memory: 8 << 30,
            available: 4 << 30,
            huge: BTreeMap::new(),
            promised: 0,
            distances: vec![10, 20],
        };
        Host { cores: (0..4).map(|cpu| [cpu].into_iter().collect()).collect(), nodes: vec![node(0), node(1)] }
    }

    fn pinned() -> Looked {
        let pin = Pin { cpus: vec![2, 3], memory: vec![1], vcpus: 2, ..Pin::default() };
        let memory = BTreeMap::from([(0, 1 << 20), (1, 1 << 30)]);
        Looked { vm: "web".to_owned(), pin: Some(pin), memory: Some(memory), ..Looked::default() }
    }

    fn states(looked: &Looked) -> Vec<(String, AdviceState)> {
        of_vm(looked, &host()).into_iter().map(|advice| (advice.topic, advice.state)).collect()
    }

    #[test]
    fn a_vm_that_is_where_it_belongs_is_good() {
        let good = |topic: &str| (topic.to_owned(), AdviceState::Good);
        assert_eq!(states(&pinned()), [good("pinning"), good("numa-memory")]);
    }

    #[test]
    fn what_is_elsewhere_is_told_with_the_command_that_moves_it() {
        let mut looked = pinned();
        looked.astray = vec![(1, [0].into_iter().collect())];
        looked.memory.as_mut().unwrap().insert(0, 64 << 20);
        looked.devices = vec![("net0".to_owned(), 0)];
        looked.huge_share = Some(0.5);
        let advice = of_vm(&looked, &host());
        let told = |topic: &str| advice.iter().find(|one| one.topic == topic).unwrap();
        assert_eq!(told("pinning").state, AdviceState::CanApply);
        assert!(told("pinning").found.contains("1 on 0"), "{advice:?}");
        assert_eq!(told("numa-memory").state, AdviceState::CanApply);
        assert!(told("numa-memory").better.as_ref().unwrap().contains("64 MiB are farther away"));
        assert_eq!(told("numa-memory").command.as_deref(), Some("vmove tune --apply web"));
        assert_eq!(told("device-distance").command.as_deref(), Some("vmove run --pin=0:2"));
        assert_eq!(told("huge-share").state, AdviceState::Better);
    }

    #[test]
    fn a_vm_that_is_not_pinned_says_why() {
        let looked = Looked { not_pinned: Some("no room".to_owned()), ..Looked::default() };
        let advice = of_vm(&looked, &host());
        assert_eq!(advice[0].found, "not pinned: no room");
    }
}
