//! A node as attributes of GLUE 2 (OGF GFD.147, and its accelerator extension 2.1), as information systems of EGI publish them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::glue2::{networks, vendor};
use crate::model::{Device, DeviceKind, Node, NodeState};

/// LDIF: one object for the node as an execution environment, and one for each model of GPU.
#[must_use]
pub fn glue2(node: &Node) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        // A value that begins or ends with white space, or is not ASCII, would have to be encoded.
        let plain: String = value.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
        if key == "dn" && !text.is_empty() {
            text.push('\n');
        }
        let _ = writeln!(text, "{key}: {}", plain.trim());
    };
    let id = format!("urn:vmove:execution-environment:{}", node.name);
    line("dn", &format!("GLUE2ResourceID={id},o=glue"));
    line("objectClass", "GLUE2ExecutionEnvironment");
    line("GLUE2ResourceID", &id);
    line("GLUE2EntityName", node.name.as_str());
    let platform = match node.cpu.arch.as_ref() {
        "x86_64" => "amd64",
        other => other,
    };
    line("GLUE2ExecutionEnvironmentPlatform", platform);
    line("GLUE2ExecutionEnvironmentVirtualMachine", "FALSE");
    line("GLUE2ExecutionEnvironmentTotalInstances", "1");
    let unavailable = u8::from(node.state != NodeState::Up).to_string();
    line("GLUE2ExecutionEnvironmentUnavailableInstances", &unavailable);
    let mut sockets: Vec<u16> = node.numa.iter().map(|numa| numa.socket.0).collect();
    sockets.sort_unstable();
    sockets.dedup();
    line("GLUE2ExecutionEnvironmentPhysicalCPUs", &sockets.len().to_string());
    line("GLUE2ExecutionEnvironmentLogicalCPUs", &node.cores().to_string());
    line("GLUE2ExecutionEnvironmentCPUModel", &node.cpu.model);
    let huge: u64 = node.numa.iter().map(|numa| numa.huge.pages_2m * 2 + numa.huge.pages_1g * 1024).sum();
    line("GLUE2ExecutionEnvironmentMainMemorySize", &(node.memory().0 + huge).to_string());
    line("GLUE2ExecutionEnvironmentOSFamily", "linux");
    for network in networks(node) {
        line("GLUE2ExecutionEnvironmentNetworkInfo", network);
    }
    for hypervisor in &node.hypervisors {
        line("GLUE2EntityOtherInfo", &format!("hypervisor={hypervisor}"));
    }
    accelerators(node, &id, &mut line);
    text
}

fn accelerators(node: &Node, environment: &str, line: &mut impl FnMut(&str, &str)) {
    let mut models: BTreeMap<(String, String), Vec<&Device>> = BTreeMap::new();
    for device in node.devices.iter().filter(|device| device.kind == DeviceKind::Gpu) {
        let vendor = vendor(device.id.vendor);
        let model = if device.arch.is_empty() {
            device.id.to_string()
        } else {
            format!("{} {}", device.arch, device.id)
        };
        models.entry((vendor, model)).or_default().push(device);
    }
    for (at, ((vendor, model), devices)) in models.into_iter().enumerate() {
        let id = format!("urn:vmove:accelerator-environment:{}:{at}", node.name);
        line("", "");
        line("dn", &format!("GLUE2ResourceID={id},o=glue"));
        line("objectClass", "GLUE2AcceleratorEnvironment");
        line("GLUE2ResourceID", &id);
        line("GLUE2AcceleratorEnvironmentType", "GPU");
        line("GLUE2AcceleratorEnvironmentPhysicalAccelerators", &devices.len().to_string());
        line("GLUE2AcceleratorEnvironmentVendor", &vendor);
        line("GLUE2AcceleratorEnvironmentModel", &model);
        line("GLUE2AcceleratorEnvironmentExecutionEnvironmentForeignKey", environment);
    }
}
