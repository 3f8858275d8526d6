//! The guest has all of its memory here: now it gets its devices. Not before that: QEMU pins guest memory for a device, and its main loop would
//! wait for a page that is missing, while whoever brings pages may wait for QEMU (hazard: pinning through missing pages).

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tracing::Instrument as _;
use vmove_node::record::VmRecord;
use vmove_types::device::VmDevice;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

use crate::devices::attach::attach;
use crate::devices::script;
use crate::node::Node;
use crate::proto::message::{DeviceEnd, ScriptEnd};
use crate::vmm::DeviceMonitor;

/// Devices that a guest is to have here.
#[derive(Debug)]
pub(super) enum Giving {
    /// It lacks pages.
    NotYet,
    /// They are plugged in, by a task of its own: that outlives a connection.
    UnderWay(JoinHandle<Given>),
    /// It has them, or it is known why not.
    Done,
}

/// What came of them.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub devices: Vec<DeviceEnd>,
    pub script: Option<ScriptEnd>,
    /// The record with the ports that they are in.
    pub vm: Option<VmRecord>,
}

impl Giving {
    /// Begins, once the guest has all of its memory. `first`: what must be over before guest memory is pinned. `script`: with its time limit.
    pub(super) fn begin(
        &mut self,
        node: &Arc<Node>,
        vm: &VmRecord,
        script: Option<(String, Duration)>,
        first: Option<JoinHandle<()>>,
    ) {
        if !matches!(self, Self::NotYet) {
            return;
        }
        if vm.devices.is_empty() && script.is_none() {
            *self = Self::Done;
            return;
        }
        let (node, vm) = (Arc::clone(node), vm.clone());
        let giving = async move {
            if let Some(first) = first {
                // One that panicked has said so.
                let _ = first.await;
            }
            give(&node, vm, script).await
        };
        *self = Self::UnderWay(vmove_node::task::spawn(giving.in_current_span()));
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Waits for its end. Never ends if none is under way. Cancel-safe.
    pub(super) async fn done(&mut self) -> Given {
        let Self::UnderWay(task) = self else { return std::future::pending().await };
        let given = task.await;
        *self = Self::Done;
        given.unwrap_or_else(|error| {
            tracing::error!(%error, "the guest's devices were not seen to");
            Given::default()
        })
    }
}

async fn give(node: &Node, mut vm: VmRecord, script: Option<(String, Duration)>) -> Given {
    let monitor = match node.config.vmm.monitor(&vm).await {
        Ok(monitor) => monitor,
        Err(error) => {
            let why = chain(&error);
            let failed = |device| DeviceEnd { problem: Some(why.clone()), ..end(device) };
            let devices = vm.devices.iter().map(failed).collect();
            let script = script.map(|_| ScriptEnd { ms: 0.0, problem: Some(why) });
            return Given { devices, script, vm: None };
        }
    };
    let (mut ends, of) = (Vec::new(), vm.clone());
    for device in &mut vm.devices {
        let begun = Mono::now();
        match attach(&*node.config.vmm, &of, &*monitor, device).await {
            Ok(attached) => {
                ends.push(DeviceEnd { begun, plugged: Some(Mono::now()), ..end(device) });
                device.bus = attached.bus;
            }
            Err(error) => ends.push(DeviceEnd { begun, problem: Some(chain(&error)), ..end(device) }),
        }
    }
    let script = match script {
        Some((script, limit)) => Some(run(&*monitor, &script, limit).await),
        None => None,
    };
    Given { devices: ends, script, vm: Some(vm) }
}

fn end(device: &VmDevice) -> DeviceEnd {
    let (role, address) = (device.request.role.clone(), device.request.address.to_string());
    DeviceEnd { role, address, begun: Mono::now(), plugged: None, problem: None }
}

async fn run(monitor: &dyn DeviceMonitor, script: &str, limit: Duration) -> ScriptEnd {
    let begun = Mono::now();
    let ran = script::run(monitor, script, limit).await;
    ScriptEnd { ms: Mono::now().ms_since(begun), problem: ran.err().map(|error| chain(&error)) }
}
