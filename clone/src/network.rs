//! The network of a child: cut off until the child has MAC addresses of its own.
//!
//! A NIC keeps its address in the device state, and the guest's driver knows it by heart; so a child would speak with its
//! parent's. Its back ends are therefore switched off before it runs (a back end's switch is not part of the device
//! state), each NIC is unplugged and one like it, with a fresh address, is plugged into the same slot. The guest sees a new
//! network card. Only then is the back end switched on.

use std::time::Duration;

use serde_json::{Value, json};
use vmove_qmp::cmdline::Nic;
use vmove_qmp::{Client, QmpError, inspect};

/// A question to QEMU.
const ASK: Duration = Duration::from_secs(10);
/// Time that a guest gets to let go of a NIC.
pub const UNPLUG: Duration = Duration::from_secs(15);

/// Switches all network back ends off; returns their ids. QEMU does not list every kind of them (not a `hubport`), so those of
/// `nics`, which the command line names, are added.
///
/// # Errors
/// Those of QEMU's monitor.
pub async fn isolate(client: &Client, nics: &[Nic]) -> Result<Vec<String>, QmpError> {
    let netdevs = inspect::netdevs(client).await?;
    let mut ids: Vec<String> = netdevs.into_iter().map(|netdev| netdev.id).collect();
    for nic in nics {
        if !ids.contains(&nic.netdev) {
            ids.push(nic.netdev.clone());
        }
    }
    for id in &ids {
        set_link(client, id, false).await?;
    }
    Ok(ids)
}

async fn set_link(client: &Client, id: &str, up: bool) -> Result<(), QmpError> {
    client.execute_raw("set_link", json!({ "name": id, "up": up }), ASK).await.map(drop)
}

/// Replaces each NIC and switches its back end on. `nics` are those of the child's own command line: with ids and fresh
/// addresses. A guest gets `patience` to let go of each ([`UNPLUG`], more for one that waits for its memory). Returns what to say of
/// the network: `none`, `up`, or what is down and why.
pub async fn bring_up(client: &Client, netdevs: &[String], nics: &[Nic], patience: Duration) -> String {
    if netdevs.is_empty() {
        return "none".to_owned();
    }
    let mut down = Vec::new();
    for id in netdevs {
        let nic = nics.iter().find(|nic| nic.netdev == *id);
        let done = match nic {
            Some(nic) => replace(client, nic, patience).await,
            None => Err("its NIC was not given by -device and cannot be replaced".to_owned()),
        };
        let done = match done {
            Ok(()) => set_link(client, id, true).await.map_err(|error| error.to_string()),
            Err(why) => Err(why),
        };
        if let Err(why) = done {
            down.push(format!("{id} is down: {why}"));
        }
    }
    if down.is_empty() { "up".to_owned() } else { down.join("; ") }
}

async fn replace(client: &Client, nic: &Nic, patience: Duration) -> Result<(), String> {
    let id = nic.id.as_deref().ok_or("its NIC has no id")?;
    let words = |error: QmpError| error.to_string();
    let slot = if nic.has_address { String::new() } else { slot(client, id).await.map_err(words)? };
    let wanted = id.to_owned();
    let gone = client.expect("DEVICE_DELETED", move |event| event.text("device") == Some(wanted.as_str()));
    client.execute_raw("device_del", json!({ "id": id }), ASK).await.map_err(words)?;
    gone.wait(patience).await.map_err(|_| {
        format!(
            "the guest did not let go of {id} within {} s (does it know PCI hotplug?)",
            patience.as_secs()
        )
    })?;
    let command = format!("device_add {}{slot}", nic.options);
    let said = client
        .execute_raw("human-monitor-command", json!({ "command-line": command }), ASK)
        .await
        .map_err(words)?;
    match said.as_str().map(str::trim).filter(|text| !text.is_empty()) {
        None => Ok(()),
        Some(text) => Err(format!("{id} could not be plugged: {text}")),
    }
}

/// Where the NIC is plugged, as options: a NIC in another slot would not be found again when the child is moved.
async fn slot(client: &Client, id: &str) -> Result<String, QmpError> {
    let object = format!("/machine/peripheral/{id}");
    let get = |property: &'static str| {
        client.execute_raw("qom-get", json!({ "path": object, "property": property }), ASK)
    };
    let address = get("addr").await?;
    let bus = get("parent_bus").await?;
    let mut options = String::new();
    if let Some(bus) = bus.as_str().and_then(|path| path.rsplit('/').next()) {
        options.push_str(&format!(",bus={bus}"));
    }
    match address {
        Value::String(text) => options.push_str(&format!(",addr={text}")),
        Value::Number(number) => {
            // Device and function in one number.
            let number = number.as_u64().unwrap_or(0);
            options.push_str(&format!(",addr={:02x}.{:x}", number >> 3, number & 7));
        }
        _ => {}
    }
    Ok(options)
}
