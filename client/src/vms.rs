//! Requests about VMs.

use vmove_http::client::encoded;
use vmove_types::check::CheckReport;
use vmove_types::device::VmDevice;
use vmove_types::spec::MigrationSpec;
use vmove_types::vm::{AdoptRequest, RunRequest, Running, StateRequest, Stopped, VmDetail, VmList};

use crate::{Client, Error};

/// VMs. Each request fails if the daemon refuses it or does not answer.
#[expect(clippy::missing_errors_doc, reason = "said once, above")]
impl Client {
    /// All VMs of the node.
    pub async fn vms(&self) -> Result<VmList, Error> {
        self.0.get("/v1/vms").await
    }

    /// Starts a VM that can be moved.
    pub async fn run(&self, request: &RunRequest) -> Result<VmDetail, Error> {
        self.0.post("/v1/vms", request).await
    }

    /// Takes in a QEMU that somebody else started.
    pub async fn adopt(&self, request: &AdoptRequest) -> Result<VmDetail, Error> {
        self.0.post("/v1/vms:adopt", request).await
    }

    /// Everything about one VM.
    pub async fn vm(&self, name: &str) -> Result<VmDetail, Error> {
        self.0.get(&path(name, "")).await
    }

    /// Ends a VM; with `force` also when its monitor does not answer, and when it was adopted.
    pub async fn stop(&self, name: &str, force: bool) -> Result<Stopped, Error> {
        self.0.delete(&format!("{}?force={force}", path(name, ""))).await
    }

    /// Pauses a guest, or lets it run.
    pub async fn set_state(&self, name: &str, state: Running) -> Result<VmDetail, Error> {
        self.0.put(&path(name, "/state"), &StateRequest { state, for_ms: None }).await
    }

    /// Pauses a guest, which runs on by itself after this time, unless somebody pauses it again or lets it run before. Unit: milliseconds, 1 to
    /// 86,400,000.
    pub async fn pause_for(&self, name: &str, for_ms: u64) -> Result<VmDetail, Error> {
        let request = StateRequest { state: Running::Paused, for_ms: Some(for_ms) };
        self.0.put(&path(name, "/state"), &request).await
    }

    /// Releases an adopted VM; it runs on.
    pub async fn forget(&self, name: &str) -> Result<Stopped, Error> {
        self.0.act(&path(name, "/forget")).await
    }

    /// Everything in the way of a migration. Changes nothing.
    /// Of `options`, those about devices, disks, mode, bandwidth, downtime, goals and reads count.
    pub async fn check(&self, name: &str, to: &str, options: &MigrationSpec) -> Result<CheckReport, Error> {
        let list = |key: &str, parts: Vec<String>| {
            if parts.is_empty() { String::new() } else { format!("&{key}={}", encoded(&parts.join(";"))) }
        };
        // An older daemon does not know what is new, and is not told of defaults.
        let usual = MigrationSpec::default().max_downtime_ms;
        let number = |key: &str, value: Option<u64>| list(key, value.iter().map(u64::to_string).collect());
        let more = [
            list("devices", options.devices.iter().map(ToString::to_string).collect()),
            list("disks", options.disks.clone()),
            list("disk_map", options.disk_map.iter().map(ToString::to_string).collect()),
            list("disks_after", options.disks_after.then(|| true.to_string()).into_iter().collect()),
            list("mode", options.mode.fixed().map(|mode| mode.to_string()).into_iter().collect()),
            number("bandwidth", options.bandwidth.map(|limit| limit.0)),
            number("max_downtime_ms", Some(options.max_downtime_ms).filter(|ms| *ms != usual)),
            number("max_pause_ms", options.goals.max_pause_ms),
            number("within_ms", options.goals.within_ms),
            number("reads_bytes", options.reads_bytes),
            number("reads_near_bytes_per_s", options.reads_near_bytes_per_s),
            number("host_cpu_percent", options.goals.host_cpu_percent),
        ]
        .concat();
        self.0.get(&format!("{}?to={}{more}", path(name, "/check"), encoded(to))).await
    }

    /// Gives a VM a device that it should have and lacks.
    pub async fn attach_device(&self, name: &str, role: &str) -> Result<VmDevice, Error> {
        self.0.act(&path(name, &format!("/devices/{}/attach", encoded(role)))).await
    }
}

pub(crate) fn path(name: &str, rest: &str) -> String {
    format!("/v1/vms/{}{rest}", encoded(name))
}
