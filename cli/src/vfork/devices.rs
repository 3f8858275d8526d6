//! What is said of devices of guests that were forked.

use vmove_types::fork_devices::ParentDevice;
use vmove_types::fork_report::ForkReport;
use vmove_types::problem::Exit;
use vmove_types::units::format_ms;

use crate::output::note;

/// How long the parent was without its devices, and which the children got.
pub fn describe(done: &ForkReport) -> String {
    let mut text = describe_away(&done.parent, &done.devices);
    for child in &done.children {
        for device in &child.devices {
            let mac = device.mac.as_ref().map(|mac| format!(", {mac}")).unwrap_or_default();
            let state = match device.plug_ms {
                Some(took) => format!("plugged in within {}", format_ms(took)),
                None => "not plugged in".to_owned(),
            };
            text.push_str(&format!(
                "{} has {} ({}{mac}): {state}\n",
                child.name, device.role, device.address
            ));
        }
    }
    text
}

/// How long a guest was without its devices.
pub fn describe_away(vm: &str, devices: &[ParentDevice]) -> String {
    let one = |device: &ParentDevice| {
        let ParentDevice { role, address, .. } = device;
        let (Some(outage), Some(away), Some(plug)) = (device.outage_ms, device.away_ms, device.plug_ms)
        else {
            return format!("{vm} lacks its device {role} ({address})\n");
        };
        format!(
            "{vm} was without {role} ({address}) for {}: {} to let it go, {} away, {} to plug it in\n",
            format_ms(outage),
            format_ms(device.unplug_ms),
            format_ms(away),
            format_ms(plug)
        )
    };
    devices.iter().map(one).collect()
}

/// How a command ends whose guest got these back.
pub fn exit(devices: &[ParentDevice]) -> Exit {
    if devices.iter().any(|device| device.problem.is_some()) { Exit::NeedsRecovery } else { Exit::Done }
}

/// Tells of each device that is missing, and of scripts that did not end as they should.
pub fn warn(done: &ForkReport) {
    for device in &done.devices {
        lacks(&done.parent, &device.role, device.problem.as_deref(), device.mend.as_deref(), "");
    }
    script(&done.parent, done.resume_problem.as_deref());
    for child in &done.children {
        for device in &child.devices {
            let on = format!(" on {}", child.node);
            lacks(&child.name, &device.role, device.problem.as_deref(), device.mend.as_deref(), &on);
        }
        script(&child.name, child.resume_problem.as_deref());
    }
}

fn lacks(vm: &str, role: &str, problem: Option<&str>, mend: Option<&str>, on: &str) {
    if let Some(why) = problem {
        let mend = mend.unwrap_or("vmove devices attach");
        note(&format!("vfork: {vm} lacks its device {role}: {why}; `{mend}`{on} gives it to it"));
    }
}

fn script(vm: &str, problem: Option<&str>) {
    if let Some(why) = problem {
        note(&format!("vfork: {vm}: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_was_away_and_one_that_is_missing_are_told_apart() {
        let back = ParentDevice {
            role: "nic".to_owned(),
            address: "0000:01:10.0".to_owned(),
            unplug_ms: 100.0,
            away_ms: Some(20.0),
            plug_ms: Some(80.0),
            outage_ms: Some(200.0),
            ..ParentDevice::default()
        };
        let text = describe_away("web", std::slice::from_ref(&back));
        assert!(text.contains("web was without nic (0000:01:10.0) for 200"), "{text}");
        let missing = ParentDevice { away_ms: None, problem: Some("gone".to_owned()), ..back };
        let text = describe_away("web", &[missing]);
        assert_eq!(text, "web lacks its device nic (0000:01:10.0)\n");
    }
}
