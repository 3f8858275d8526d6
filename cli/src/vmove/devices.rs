//! `vmove devices`.

use vmove_client::Client;
use vmove_types::device::{NodeDevice, NodeDeviceList};
use vmove_types::problem::Exit;

use crate::args::vmove::DeviceOfVm;
use crate::output::{End, note, say, say_json, table};

pub async fn attach(client: &Client, args: &DeviceOfVm, json: bool) -> Result<Exit, End> {
    let device = client.attach_device(&args.vm, &args.role).await?;
    if json {
        say_json(&device)?;
    } else {
        say(&format!("{:?} has its device {}", args.vm, device.request))?;
    }
    Ok(Exit::Done)
}

pub async fn list(client: &Client, json: bool) -> Result<Exit, End> {
    let list = client.devices().await?;
    if json {
        say_json(&list)?;
        return Ok(Exit::Done);
    }
    list.notes.iter().for_each(|text| note(&format!("vmove: {text}")));
    say(&describe(&list))?;
    Ok(Exit::Done)
}

fn describe(list: &NodeDeviceList) -> String {
    if list.devices.is_empty() && list.parts.is_empty() {
        return "No PCI devices on this node that a VM could have".to_owned();
    }
    let mut rows: Vec<Vec<String>> = list.devices.iter().map(row).collect();
    rows.extend(list.parts.iter().map(|part| {
        let of = part.device.map_or_else(String::new, |device| format!(" of {device}"));
        let kind = format!("{}{of}", part.kind);
        let model = part.model.clone().unwrap_or_else(|| "-".to_owned());
        vec![
            part.name.clone(),
            kind,
            model,
            "-".to_owned(),
            "-".to_owned(),
            "-".to_owned(),
            format!("no: {}", part.refused),
        ]
    }));
    table(&["DEVICE", "KIND", "MODEL", "DRIVER", "GROUP", "VM", "CAN BE GIVEN"], &rows)
}

fn row(device: &NodeDevice) -> Vec<String> {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let kind = match (&device.physical_function, device.max_virtual_functions) {
        (Some(pf), _) => format!("{}, function of {pf}", device.kind),
        (None, Some(most)) => {
            format!("{}, {} of {most} functions", device.kind, device.virtual_functions.len())
        }
        (None, None) => device.kind.clone(),
    };
    let owner = device.owner.as_ref().map(|owner| {
        let how = match (&owner.lease, owner.held) {
            (Some(lease), _) => format!(" (lease {lease})"),
            (None, false) => " (on its way)".to_owned(),
            (None, true) => String::new(),
        };
        format!("{} as {}{how}", owner.vm, owner.role)
    });
    let given = match (&device.refused, &device.owner) {
        (Some(why), _) => format!("no: {why}"),
        (None, Some(_)) => "given".to_owned(),
        (None, None) => "yes".to_owned(),
    };
    let state = device.own_state.as_ref().map_or_else(String::new, |state| format!("; {}", state.words));
    vec![
        device.address.to_string(),
        kind,
        device.model.clone(),
        or_none(device.driver.clone()),
        or_none(device.group.map(|group| group.to_string())),
        or_none(owner),
        format!("{given}{state}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_says_who_has_it_and_why_it_cannot_be_given() {
        let list: NodeDeviceList = serde_json::from_str(
            r#"{"devices": [
                {"address": "0000:01:00.0", "kind": "nic", "model": "8086:10c9", "driver": "igb", "group": 3, "max_virtual_functions": 7,
                 "virtual_functions": ["0000:01:10.0"], "refused": "it is a physical function; use another device", "moves": "-"},
                {"address": "0000:01:10.0", "kind": "nic", "model": "8086:10ca", "physical_function": "0000:01:00.0", "group": 4,
                 "owner": {"vm": "web", "role": "net0", "held": true}, "moves": "-"},
                {"address": "0000:02:00.0", "kind": "gpu", "model": "10de:20b0", "group": 5, "moves": "-"}],
              "parts": [{"kind": "mediated", "name": "c8b3", "device": "0000:02:00.0", "refused": "it could never be moved"}]}"#,
        )
        .unwrap();
        let text = describe(&list);
        for words in [
            "nic, 1 of 7 functions",
            "no: it is a physical function; use another device",
            "nic, function of 0000:01:00.0",
            "web as net0",
            "mediated of 0000:02:00.0",
            "no: it could never be moved",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(
            text.lines().any(|line| line.starts_with("0000:02:00.0") && line.trim_end().ends_with("yes")),
            "{text}"
        );
    }
}
