//! Plugging a device in.

use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use super::{HotplugError, PlugRefusal, tree};
use crate::{Client, QmpError, client::COMMAND_TIMEOUT};

/// A device that was plugged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plugged {
    /// Time of `device_add`. For `vfio-pci` all guest memory is pinned in it, and QEMU's main loop stands.
    pub took: Duration,
}

/// Plugs a device in: `properties` as `device_add` takes them, with `driver`, `id` and `bus`. `deadline` must allow for pinning all guest
/// memory; after [`QmpError::Timeout`] QEMU may still take the device.
///
/// # Errors
/// [`HotplugError::NotPlugged`] with the kind of the reason, [`HotplugError::Vanished`], [`HotplugError::Qmp`].
pub async fn plug(
    client: &Client,
    properties: &Map<String, Value>,
    deadline: Duration,
) -> Result<Plugged, HotplugError> {
    let id = properties.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    // QEMU 7.2 puts a second device into a slot of the port that no guest looks at.
    let port = properties.get("bus").and_then(Value::as_str).unwrap_or_default();
    if tree::ports(client, COMMAND_TIMEOUT)
        .await?
        .iter()
        .any(|known| known.id == port && known.hotplug && known.taken)
    {
        let description = format!("a device sits in port {port:?} already");
        return Err(HotplugError::NotPlugged { device: id, refusal: PlugRefusal::PortTaken, description });
    }
    let begun = Instant::now();
    match client.execute_raw("device_add", Value::Object(properties.clone()), deadline).await {
        Ok(_) => {}
        Err(QmpError::Refused { description, .. }) => {
            let refusal = PlugRefusal::of(&description);
            return Err(HotplugError::NotPlugged { device: id, refusal, description });
        }
        Err(error) => return Err(error.into()),
    }
    let took = begun.elapsed();
    // A device without an id cannot be looked for, nor unplugged by anybody.
    if tree::driver_of(client, &id, COMMAND_TIMEOUT).await?.is_none() {
        return Err(HotplugError::Vanished { device: id });
    }
    Ok(Plugged { took })
}
