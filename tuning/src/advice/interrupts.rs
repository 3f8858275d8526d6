//! Interrupts keep off processors that VMs have for themselves.

use super::{Finding, Look};
use crate::cpus::Cpus;

/// Interrupts of the host that may come on processors of VMs. Those of devices of VMs (`vfio`) belong there.
pub(super) fn of_others(look: &Look<'_>) -> Finding {
    let topic = "interrupts";
    if look.dedicated.is_empty() {
        return Finding::good(topic, "no VM is pinned");
    }
    let elsewhere = look.host.cpus().without(&look.dedicated);
    let mut files = Vec::new();
    for irq in look.list("proc/irq") {
        let folder = format!("proc/irq/{irq}");
        let file = format!("{folder}/smp_affinity_list");
        // The name of an interrupt's handler is a folder.
        let of_a_vm = look.list(&folder).iter().any(|name| name.starts_with("vfio"));
        let now = look.read(&format!("{folder}/effective_affinity_list"));
        let Some(now) = now.and_then(|text| text.parse::<Cpus>().ok()) else { continue };
        if !of_a_vm && !now.and(&look.dedicated).is_empty() {
            files.push((look.root.join(file), elsewhere.to_string()));
        }
    }
    if files.is_empty() {
        return Finding::good(topic, format!("those of the host keep off {}", look.dedicated));
    }
    Finding::writes(
        topic,
        format!("{} interrupts of the host come on processors {} of VMs", files.len(), look.dedicated),
        "each takes a virtual processor off its work",
        files,
        format!(
            "set IRQBALANCE_BANNED_CPULIST={} in /etc/default/irqbalance, if irqbalance runs",
            look.dedicated
        ),
    )
}
