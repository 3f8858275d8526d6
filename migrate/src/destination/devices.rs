//! The guest has all of its memory here: now it gets its devices. Not before that: QEMU pins guest memory for a device, and its main loop would
//! wait for a page that is missing, while whoever brings pages may wait for QEMU (hazard: pinning through missing pages).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::Instrument as _;
use vmove_node::record::VmRecord;
use vmove_types::device::VmDevice;
use vmove_types::problem::chain;
use vmove_types::time::Mono;

use crate::devices::attach::attach;
use crate::devices::script as in_guest;
use crate::node::Node;
use crate::proto::message::{DeviceEnd, ScriptEnd};
use crate::vmm::DeviceMonitor;

/// Devices that a guest is to have here.
#[derive(Debug)]
pub(super) enum Giving {
    /// It lacks pages.
    NotYet,
    /// They are plugged in, by a task of its own: that outlives a connection.
    UnderWay {
        /// Its end.
        task: JoinHandle<Given>,
        /// Whether the guest has its devices, and a script waits for those of others.
        attached: watch::Receiver<bool>,
    },
    /// It has them, or it is known why not.
    Done,
}

/// A script that is run in the guest once it has its devices.
#[derive(Debug)]
pub(super) struct Script {
    pub text: String,
    /// The longest time that it may take.
    pub limit: Duration,
    /// What is known of the other guests of its group, if there are any.
    pub others: Option<watch::Receiver<Others>>,
}

/// What is known of the other guests of a group, for whose devices a script waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Others {
    /// The source says when they have their devices.
    Awaited,
    /// There is no connection to the source. It is not waited for longer than any lost peer.
    Unknown,
    /// They have their devices.
    HaveDevices,
}

/// How far it is.
pub(super) enum Next {
    /// The guest has its devices, and a script waits for those of others.
    Attached,
    /// Nothing is left to do.
    Done(Box<Given>),
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
    /// Begins, once the guest has all of its memory. `first`: what must be over before guest memory is pinned.
    pub(super) fn begin(
        &mut self,
        node: &Arc<Node>,
        vm: &VmRecord,
        script: Option<Script>,
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
        let (is_attached, attached) = watch::channel(false);
        let giving = async move {
            if let Some(first) = first {
                // One that panicked has said so.
                let _ = first.await;
            }
            give(&node, vm, script, &is_attached).await
        };
        let task = vmove_node::task::spawn(giving.in_current_span());
        *self = Self::UnderWay { task, attached };
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Waits until the source is to be told something (`is_told`: that a script waits), or for the end. Never ends if nothing is under way.
    /// Cancel-safe.
    pub(super) async fn next(&mut self, is_told: bool) -> Next {
        let Self::UnderWay { task, attached } = self else { return std::future::pending().await };
        let given = tokio::select! {
            biased;
            given = task => given,
            Ok(_) = attached.wait_for(|attached| *attached), if !is_told => return Next::Attached,
        };
        *self = Self::Done;
        Next::Done(Box::new(given.unwrap_or_else(|error| {
            tracing::error!(%error, "the guest's devices were not seen to");
            Given::default()
        })))
    }
}

async fn give(
    node: &Node,
    mut vm: VmRecord,
    script: Option<Script>,
    is_attached: &watch::Sender<bool>,
) -> Given {
    let monitor = match node.config.vmm.monitor(&vm).await {
        Ok(monitor) => monitor,
        Err(error) => {
            let why = chain(&error);
            let failed = |device| DeviceEnd { problem: Some(why.clone()), ..end(device) };
            let devices = vm.devices.iter().map(failed).collect();
            let script = script.map(|_| ScriptEnd { problem: Some(why), ..ScriptEnd::default() });
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
        Some(script) => Some(run(&*monitor, script, is_attached, node.config.reconnect_for).await),
        None => None,
    };
    Given { devices: ends, script, vm: Some(vm) }
}

fn end(device: &VmDevice) -> DeviceEnd {
    let (role, address) = (device.request.role.clone(), device.request.address.to_string());
    DeviceEnd { role, address, begun: Mono::now(), plugged: None, problem: None }
}

async fn run(
    monitor: &dyn DeviceMonitor,
    script: Script,
    is_attached: &watch::Sender<bool>,
    without_source: Duration,
) -> ScriptEnd {
    let attached = Mono::now();
    let (mut waited_ms, mut alone) = (None, None);
    if let Some(others) = script.others {
        is_attached.send_replace(true);
        alone = wait_for_others(others, without_source).await.err();
        waited_ms = Some(Mono::now().ms_since(attached));
    }
    let begun = Mono::now();
    let ran = in_guest::run(monitor, &script.text, script.limit).await;
    let problem = ran.err().map(|error| chain(&error)).or_else(|| alone.map(|alone| chain(&alone)));
    ScriptEnd { ms: Mono::now().ms_since(begun), problem, waited_ms }
}

/// A script that is not run at all leaves its guest without work for good: so it is run in the end, and that is told.
#[derive(Debug, thiserror::Error)]
#[error("it was run without waiting any longer for the other guests of its group: the source was lost")]
struct Alone;

/// Waits until they have their devices; without a source for so long.
async fn wait_for_others(mut others: watch::Receiver<Others>, without_source: Duration) -> Result<(), Alone> {
    loop {
        let known = *others.borrow_and_update();
        match known {
            Others::HaveDevices => return Ok(()),
            Others::Awaited => others.changed().await.map_err(|_| Alone)?,
            Others::Unknown => {
                let changed = timeout(without_source, others.changed()).await;
                changed.map_err(|_| Alone)?.map_err(|_| Alone)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_script_waits_for_the_word_and_without_a_source_only_so_long() {
        let limit = Duration::from_secs(300);
        let known = watch::Sender::new(Others::Awaited);
        let mut waiting = tokio::spawn(wait_for_others(known.subscribe(), limit));
        assert!(timeout(limit * 10, &mut waiting).await.is_err(), "a source that is there is waited for");
        known.send_replace(Others::Unknown);
        timeout(limit / 2, &mut waiting).await.unwrap_err();
        known.send_replace(Others::Awaited);
        assert!(timeout(limit * 10, &mut waiting).await.is_err(), "it is back");
        known.send_replace(Others::HaveDevices);
        waiting.await.unwrap().unwrap();

        known.send_replace(Others::Unknown);
        let waiting = tokio::spawn(wait_for_others(known.subscribe(), limit));
        waiting.await.unwrap().unwrap_err();
    }
}
