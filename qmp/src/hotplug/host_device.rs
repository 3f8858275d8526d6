//! A device of the host for a guest that runs.

use serde_json::{Map, Value};
use vmove_types::device::VmDevice;

/// Properties whose value is a text even if it looks like a number or a switch.
const TEXTS: &[&str] = &[
    "addr",
    "display",
    "enable-migration",
    "failover_pair_id",
    "romfile",
    "x-igd-gms",
    "x-pre-copy-dirty-page-tracking",
    "x-migration-load-config-after-iter",
];

/// What `device_add` takes for this device, for [`plug`](fn@super::plug).
#[must_use]
pub fn properties(device: &VmDevice) -> Map<String, Value> {
    let own = [
        ("driver", "vfio-pci".to_owned()),
        ("host", device.request.address.to_string()),
        ("id", device.id.clone()),
        ("bus", device.bus.clone()),
    ];
    let further = device.properties.iter().map(|(key, value)| (key.clone(), value_of(key, value)));
    own.into_iter().map(|(key, value)| (key.to_owned(), value.into())).chain(further).collect()
}

/// As QEMU since 9.2 wants them: it no longer reads switches and numbers from texts.
fn value_of(key: &str, value: &str) -> Value {
    if TEXTS.contains(&key) {
        return value.into();
    }
    let number =
        value.strip_prefix("0x").map_or_else(|| value.parse().ok(), |hex| i64::from_str_radix(hex, 16).ok());
    match value {
        "on" | "yes" | "true" | "y" => true.into(),
        "off" | "no" | "false" | "n" => false.into(),
        _ => number.map_or_else(|| value.into(), Value::from),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_is_plugged_with_what_it_had_at_the_start() {
        let properties_of = [
            ("rombar", "0"),
            ("x-vga", "on"),
            ("addr", "5"),
            ("romfile", "7"),
            ("x-pci-device-id", "0x10ca"),
        ];
        let device = VmDevice {
            request: "net=0000:17:00.2,mac=52:54:00:12:34:56".parse().unwrap(),
            id: "hostdev0".to_owned(),
            bus: "rp1".to_owned(),
            properties: properties_of.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        };
        let expected = json!({
            "driver": "vfio-pci", "host": "0000:17:00.2", "id": "hostdev0", "bus": "rp1", "rombar": 0, "x-vga": true, "addr": "5",
            "romfile": "7", "x-pci-device-id": 0x10ca,
        });
        assert_eq!(Value::Object(properties(&device)), expected);
    }
}
