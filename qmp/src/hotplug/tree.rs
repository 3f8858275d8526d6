//! Where devices sit in QEMU's tree of objects.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::HotplugError;
use crate::{Client, QmpError};

/// Where QEMU lists devices that have an id.
const PERIPHERAL: &str = "/machine/peripheral";

/// A device that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Seat {
    /// QEMU's type, such as `vfio-pci`.
    pub driver: String,
    /// Name of its bus, such as `rp1` or `pcie.0`, as `device_add` takes it.
    pub bus: String,
    /// Whether it can leave while the guest runs, for all that QEMU knows.
    pub hotpluggable: bool,
}

/// A PCI Express port that takes one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Port {
    /// Its id, as `device_add` takes it for `bus=`.
    pub id: String,
    /// QEMU's type, such as `pcie-root-port`.
    pub driver: String,
    /// Whether devices can come and go.
    pub hotplug: bool,
    /// Whether a device is in it.
    pub taken: bool,
}

/// The device of this id, if it is there.
///
/// # Errors
/// [`HotplugError::Qmp`].
pub async fn find(client: &Client, id: &str, deadline: Duration) -> Result<Option<Seat>, HotplugError> {
    let Some(driver) = driver_of(client, id, deadline).await? else { return Ok(None) };
    let path = format!("{PERIPHERAL}/{id}");
    // It may go between two questions.
    let Some(bus) = get(client, &path, "parent_bus", deadline).await? else { return Ok(None) };
    let Some(hotpluggable) = get(client, &path, "hotpluggable", deadline).await? else { return Ok(None) };
    let bus = bus.as_str().unwrap_or_default();
    Ok(Some(Seat {
        driver,
        bus: bus.rsplit('/').next().unwrap_or_default().to_owned(),
        hotpluggable: hotpluggable.as_bool().unwrap_or(false),
    }))
}

/// The type of the device of this id, if it is there.
pub(super) async fn driver_of(
    client: &Client,
    id: &str,
    deadline: Duration,
) -> Result<Option<String>, QmpError> {
    let all = children(client, PERIPHERAL, deadline).await?;
    Ok(all.into_iter().find(|(name, _)| name == id).map(|(_, driver)| driver))
}

/// The PCI Express ports that have an id, in QEMU's order. A fork or a destination puts devices into those that are free.
///
/// # Errors
/// [`HotplugError::Qmp`].
pub async fn ports(client: &Client, deadline: Duration) -> Result<Vec<Port>, HotplugError> {
    let mut found = Vec::new();
    for (id, driver) in children(client, PERIPHERAL, deadline).await? {
        if !driver.starts_with("pcie-root-port") && driver != "xio3130-downstream" && driver != "ioh3420" {
            continue;
        }
        let path = format!("{PERIPHERAL}/{id}");
        // `x-native-hotplug` and the like do not count: with ACPI, devices come and go all the same.
        let hotplug = get(client, &path, "hotplug", deadline).await?.and_then(|on| on.as_bool());
        let seats = list(client, &format!("{path}/{id}"), deadline).await?;
        let taken = seats.iter().any(|(name, _)| name.starts_with("child["));
        found.push(Port { id, driver, hotplug: hotplug.unwrap_or(true), taken });
    }
    Ok(found)
}

/// Children of an object with their types.
async fn children(
    client: &Client,
    path: &str,
    deadline: Duration,
) -> Result<Vec<(String, String)>, QmpError> {
    let all = list(client, path, deadline).await?;
    let child = |kind: &str| Some(kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned());
    Ok(all.into_iter().filter_map(|(name, kind)| Some((name, child(&kind)?))).collect())
}

/// Properties of an object with their types; none if it is not there.
async fn list(client: &Client, path: &str, deadline: Duration) -> Result<Vec<(String, String)>, QmpError> {
    let reply = none_if_refused(client.execute_raw("qom-list", json!({ "path": path }), deadline).await)?;
    let rows = reply.and_then(|reply| reply.as_array().cloned()).unwrap_or_default();
    let text = |row: &Value, key: &str| Some(row.get(key)?.as_str()?.to_owned());
    Ok(rows.iter().filter_map(|row| Some((text(row, "name")?, text(row, "type")?))).collect())
}

async fn get(
    client: &Client,
    path: &str,
    property: &str,
    deadline: Duration,
) -> Result<Option<Value>, QmpError> {
    let what = json!({ "path": path, "property": property });
    none_if_refused(client.execute_raw("qom-get", what, deadline).await)
}

fn none_if_refused(reply: Result<Value, QmpError>) -> Result<Option<Value>, QmpError> {
    match reply {
        Err(error) if error.is_refusal() => Ok(None),
        other => other.map(Some),
    }
}
