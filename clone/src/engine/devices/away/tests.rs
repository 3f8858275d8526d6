//! Guests that are played: what they are asked, in which order, and what is written down before.

use std::sync::Mutex;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use vmove_node::devices::NoDevices;
use vmove_node::guest_devices::{InGuestError, Ran};
use vmove_qmp::agent::{ExecRequest, Finish};
use vmove_qmp::hotplug::{Port, Seat, UnplugLimits};

use super::*;

/// A guest with devices, and what it was asked.
#[derive(Debug, Default)]
struct Played {
    /// Ids of the devices that are plugged in.
    plugged: Mutex<Vec<String>>,
    /// Lets none go.
    stubborn: Option<&'static str>,
    /// QEMU does not take it.
    refused: Option<&'static str>,
    /// A script of it fails.
    fails: Option<&'static str>,
    asked: Mutex<Vec<String>>,
}

impl Played {
    fn with(ids: &[&str]) -> Self {
        Self { plugged: Mutex::new(ids.iter().map(|id| (*id).to_owned()).collect()), ..Self::default() }
    }

    fn tell(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

#[async_trait]
impl DeviceMonitor for Played {
    async fn seat(&self, id: &str) -> Result<Option<Seat>, HotplugError> {
        let seat = json!({ "driver": "vfio-pci", "bus": "rp1", "hotpluggable": true });
        let there = self.plugged.lock().unwrap().iter().any(|plugged| plugged == id);
        Ok(there.then(|| serde_json::from_value(seat).unwrap()))
    }

    async fn ports(&self) -> Result<Vec<Port>, HotplugError> {
        Ok(Vec::new())
    }

    async fn unplug(&self, id: &str, limits: UnplugLimits) -> Result<Duration, HotplugError> {
        self.tell(format!("unplug {id}"));
        if self.stubborn == Some(id) {
            let (device, waited) = (id.to_owned(), limits.timeout);
            return Err(HotplugError::GuestKeeps { device, waited, requests: 1 });
        }
        self.plugged.lock().unwrap().retain(|plugged| plugged != id);
        Ok(Duration::ZERO)
    }

    async fn plug(&self, properties: &Map<String, Value>, _: Duration) -> Result<Duration, HotplugError> {
        let id = properties["id"].as_str().unwrap();
        self.tell(format!("plug {id}"));
        if self.refused == Some(id) {
            return Err(HotplugError::Vanished { device: id.to_owned() });
        }
        self.plugged.lock().unwrap().push(id.to_owned());
        Ok(Duration::ZERO)
    }

    async fn run_in_guest(&self, request: &ExecRequest) -> Result<Ran, InGuestError> {
        let script = request.arguments.last().unwrap().clone();
        self.tell(script.clone());
        let finish = Finish::Exit(i64::from(self.fails == Some(script.as_str())));
        Ok(Ran { finish, said: "no".to_owned() })
    }
}

fn guest() -> VmRecord {
    let device = |role: &str, slot: u8| json!({ "request": { "role": role, "address": format!("0000:01:{slot:02x}.0"), "identity": {} }, "id": format!("vmove-{role}"), "bus": "rp1" });
    serde_json::from_value(json!({
        "name": "web", "pid": 0, "pid_start": 0, "qmp_socket": "/q", "vm_dir": "/v", "backing": "thp", "command_line": [], "ram": [],
        "adopted": false, "devices": [device("gpu", 1), device("nic", 2)],
    }))
    .unwrap()
}

fn away(dir: &std::path::Path) -> Away {
    let parting = Parting {
        quiesce: Some("stop job".to_owned()),
        resume: Some("start job".to_owned()),
        ..Parting::default()
    };
    let owed = Owed::new(dir, "f1", parting.clone());
    Away { vm: "web".to_owned(), owed, parting, quiesce_ms: None, done: false }
}

#[tokio::test(start_paused = true)]
async fn a_guest_lets_its_devices_go_and_has_them_back() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, played, mut away) = (guest(), Played::with(&["vmove-gpu", "vmove-nic"]), away(dir.path()));
    away.let_go(&vm, &played, &NoDevices).await.unwrap();
    assert_eq!(played.asked(), ["stop job", "unplug vmove-gpu", "unplug vmove-nic"]);
    // A daemon that is killed now finds both.
    let left = Owed::left(dir.path());
    let found = left[0].of("web");
    assert!(
        found.quiesced && found.asked.len() == 2 && found.asked.iter().all(|a| a.gone_at.is_some()),
        "{found:?}"
    );
    // It is asked once, however often its memory is mapped anew meanwhile.
    away.let_go(&vm, &played, &NoDevices).await.unwrap();
    assert_eq!(played.asked().len(), 3);
    let returned = give_back("n1", &vm, &played, &found, &away.parting).await;
    assert_eq!(played.asked()[3..], ["plug vmove-gpu", "plug vmove-nic", "start job"]);
    assert!(returned.missing.is_empty() && returned.resume_ms.is_some() && returned.resume_problem.is_none());
    assert!(returned.devices.iter().all(|device| device.outage_ms.is_some()), "{returned:?}");
}

#[tokio::test(start_paused = true)]
async fn a_device_that_stays_is_told_and_the_others_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, mut away) = (guest(), away(dir.path()));
    let played = Played { stubborn: Some("vmove-nic"), ..Played::with(&["vmove-gpu", "vmove-nic"]) };
    let error = away.let_go(&vm, &played, &NoDevices).await.unwrap_err();
    assert!(error.message().contains("did not let its device nic go"), "{}", error.message());
    assert_eq!(error.failure().exit_code, 1);
    let found = away.owed.of("web");
    let returned = give_back("n1", &vm, &played, &found, &away.parting).await;
    assert_eq!(played.plugged.lock().unwrap().len(), 2);
    assert_eq!(returned.devices.len(), 1, "the one that stayed was never away: {returned:?}");
    assert_eq!(played.asked().last().unwrap(), "start job");
}

#[tokio::test(start_paused = true)]
async fn a_device_that_does_not_come_back_is_named_with_what_mends_it() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, mut away) = (guest(), away(dir.path()));
    let played = Played { refused: Some("vmove-gpu"), ..Played::with(&["vmove-gpu", "vmove-nic"]) };
    away.let_go(&vm, &played, &NoDevices).await.unwrap();
    let returned = give_back("n1", &vm, &played, &away.owed.of("web"), &away.parting).await;
    assert_eq!(returned.missing.len(), 1);
    assert_eq!(returned.missing[0].mend, "vmove devices attach web gpu");
    let lacks = returned.devices.iter().find(|device| device.role == "gpu").unwrap();
    assert!(lacks.problem.is_some() && lacks.outage_ms.is_none(), "{lacks:?}");
    assert_eq!(*played.plugged.lock().unwrap(), ["vmove-nic"], "the other one is back");
}

#[tokio::test(start_paused = true)]
async fn a_script_that_fails_ends_it_before_a_device_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, mut away) = (guest(), away(dir.path()));
    let played = Played { fails: Some("stop job"), ..Played::with(&["vmove-gpu"]) };
    let error = away.let_go(&vm, &played, &NoDevices).await.unwrap_err();
    assert!(error.message().contains("stop job"), "{}", error.message());
    give_back("n1", &vm, &played, &away.owed.of("web"), &away.parting).await;
    assert_eq!(played.asked(), ["stop job", "start job"]);
}

#[tokio::test(start_paused = true)]
async fn a_device_that_the_guest_lacks_is_not_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (vm, mut away) = (guest(), away(dir.path()));
    let played = Played::with(&["vmove-nic"]);
    away.let_go(&vm, &played, &NoDevices).await.unwrap();
    let returned = give_back("n1", &vm, &played, &away.owed.of("web"), &away.parting).await;
    assert_eq!(returned.devices.len(), 1);
    assert_eq!(*played.plugged.lock().unwrap(), ["vmove-nic"]);
}
