//! A device leaves.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;

use super::{HotplugError, tree};
use crate::{Client, Event, QmpError, client::COMMAND_TIMEOUT};

/// Timeout and intervals of [`unplug`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnplugLimits {
    /// Timeout for the guest to release the device. Linux may need 7 s for the first device on a port with native hot plug, because
    /// the port waits 5 s for a cancellation.
    pub timeout: Duration,
    /// Interval at which the request is repeated: a guest that boots misses the first one. QEMU takes no second one for the first 5 s.
    pub request_interval: Duration,
    /// How long the guest runs on after it has released a device that it was asked for more than once. It carries out the other requests then, and
    /// finds the port empty; a guest that is stopped before takes the next device that comes into the port for the one that it is to release.
    pub settle: Duration,
    /// Interval at which QEMU's device tree is polled, in case the event was missed.
    pub poll_interval: Duration,
}

impl Default for UnplugLimits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(20),
            request_interval: Duration::from_secs(10),
            settle: Duration::from_secs(2),
            poll_interval: Duration::from_millis(250),
        }
    }
}

/// How the release of a device was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Departure {
    /// By the event `DEVICE_DELETED`.
    Event,
    /// The device was missing in the device tree, without an event.
    Tree,
}

/// A device that was unplugged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unplugged {
    /// Time from the first request until the release was noticed, and the guest was ready for another device.
    pub took: Duration,
    /// How the release was noticed.
    pub seen: Departure,
    /// Number of requests to the guest.
    pub requests: u32,
}

/// QEMU's event about a device that is being unplugged.
enum UnplugEvent {
    /// `DEVICE_DELETED`: the guest has released the device.
    Deleted,
    /// `DEVICE_UNPLUG_GUEST_ERROR`: the guest refuses.
    Refused,
}

/// Unplugs the device with this id, and waits until the guest has released it, and has no other request for it. Cancel-safe: a request that was sent
/// remains in effect.
///
/// # Errors
/// [`HotplugError::NoSuchDevice`], [`HotplugError::NotHotpluggable`], [`HotplugError::GuestRefused`], [`HotplugError::GuestKeeps`],
/// [`HotplugError::Qmp`]. After the last two the guest may release the device later, see [`super::find`].
pub async fn unplug(client: &Client, id: &str, limits: UnplugLimits) -> Result<Unplugged, HotplugError> {
    let begun = Instant::now();
    let Released { seen, requests, again } = released(client, id, limits).await?;
    if again {
        tracing::info!(
            device = id,
            requests,
            "the guest was asked more than once for a device: it runs on for a moment"
        );
        tokio::time::sleep(limits.settle).await;
    }
    Ok(Unplugged { took: begun.elapsed(), seen, requests })
}

struct Released {
    seen: Departure,
    requests: u32,
    /// Another request was made, or stood from before.
    again: bool,
}

/// Asks the guest until it has released the device.
async fn released(client: &Client, id: &str, limits: UnplugLimits) -> Result<Released, HotplugError> {
    let begun = Instant::now();
    let until = begun + limits.timeout;
    // Before the request, so that nothing is missed. They fire for an event that names this device.
    let this = |wanted: &str| {
        let wanted = wanted.to_owned();
        move |event: &Event| event.text("device") == Some(wanted.as_str())
    };
    let deleted = client.expect("DEVICE_DELETED", this(id));
    let refused = client.expect("DEVICE_UNPLUG_GUEST_ERROR", this(id));
    // Longer than we wait, so that it is our time limit that ends them.
    let forever = limits.timeout * 2 + COMMAND_TIMEOUT;
    let answered = async {
        tokio::select! {
            event = deleted.wait(forever) => event.map(|_| UnplugEvent::Deleted),
            event = refused.wait(forever) => event.map(|_| UnplugEvent::Refused),
        }
    };
    tokio::pin!(answered);
    let (mut requests, mut again) = (0, false);
    let end = |seen, requests, again| Ok(Released { seen, requests, again });
    let mut ask_at = begun;
    loop {
        if Instant::now() >= ask_at {
            match request(client, id, requests == 0).await? {
                Request::Asked => {
                    again |= requests > 0;
                    requests += 1;
                }
                Request::Pending => again = true,
                Request::Gone => return end(Departure::Tree, requests, again),
            }
            ask_at = Instant::now() + limits.request_interval;
        }
        let pause = limits.poll_interval.min(until.saturating_duration_since(Instant::now()));
        match tokio::time::timeout(pause, &mut answered).await {
            Ok(Ok(UnplugEvent::Deleted)) => return end(Departure::Event, requests, again),
            Ok(Ok(UnplugEvent::Refused)) => return Err(HotplugError::GuestRefused { device: id.to_owned() }),
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {}
        }
        if tree::driver_of(client, id, COMMAND_TIMEOUT).await?.is_none() {
            // The event may have come while we asked.
            let came = tokio::time::timeout(Duration::ZERO, &mut answered).await;
            let seen =
                if matches!(came, Ok(Ok(UnplugEvent::Deleted))) { Departure::Event } else { Departure::Tree };
            return end(seen, requests, again);
        }
        if Instant::now() >= until {
            return Err(HotplugError::GuestKeeps { device: id.to_owned(), waited: limits.timeout, requests });
        }
    }
}

/// What became of a request.
enum Request {
    /// The guest was asked.
    Asked,
    /// It has been asked before, and that stands.
    Pending,
    /// The device was away already.
    Gone,
}

async fn request(client: &Client, id: &str, first: bool) -> Result<Request, HotplugError> {
    let device = || id.to_owned();
    match client.execute_raw("device_del", json!({ "id": id }), COMMAND_TIMEOUT).await {
        Ok(_) => Ok(Request::Asked),
        Err(QmpError::Refused { class, .. }) if class == "DeviceNotFound" => {
            if first {
                Err(HotplugError::NoSuchDevice { device: device() })
            } else {
                Ok(Request::Gone)
            }
        }
        Err(QmpError::Refused { description, .. }) if description.contains("in the process of unplug") => {
            Ok(Request::Pending)
        }
        // Ports with native hot plug say this while their indicator blinks: an earlier request is being dealt with.
        Err(QmpError::Refused { description, .. }) if description.contains("power indicator") => {
            Ok(Request::Pending)
        }
        Err(QmpError::Refused { description, .. }) if description.contains("hotplug") => {
            Err(HotplugError::NotHotpluggable { device: device(), reason: description })
        }
        Err(error) => Err(error.into()),
    }
}
