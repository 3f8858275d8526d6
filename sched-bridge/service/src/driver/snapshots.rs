//! Guests at one moment: paused, forked, kept as templates, and run again from these. By `vfork --json` beside `vmove`.

use std::time::Duration;

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};
use serde_json::Value;
use vmove_grant::GrantedDevice;
use vmove_types::fork_report::ChildNic;

use super::{Ended, VmoveCommand};

/// A guest that was forked once.
#[derive(Debug, Clone, PartialEq)]
pub struct Forked {
    /// From the request until the parent, which was paused, ran on. None if it was not paused.
    pub ran_on: Option<Duration>,
    /// How long the parent stood still for the fork itself.
    pub stood_still: Duration,
    /// The network of the child.
    pub network: String,
    /// Its NICs.
    pub nics: Vec<ChildNic>,
    /// What the operator should know.
    pub notes: Vec<String>,
}

/// A guest that was kept as a template.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    /// From the request until the guest, which was paused, ran on. None if it was not paused.
    pub ran_on: Option<Duration>,
    /// How long it stood still for its freeze.
    pub stood_still: Duration,
    /// Size on disk. Unit: bytes.
    pub disk_bytes: u64,
    /// Roles of the devices that it owned.
    pub roles: Vec<String>,
}

/// A guest that runs again.
#[derive(Debug, Clone, PartialEq)]
pub struct Restored {
    /// Its network.
    pub network: String,
}

/// What can be done with guests at one moment. Errors are the message of the node's daemon, or why it does not answer.
#[async_trait]
pub trait Snapshots {
    /// Pauses a guest for this time at most: it runs on by itself then.
    async fn pause(&self, node: &NodeName, vm: &VmName, limit: Duration) -> Result<(), String>;

    /// Lets a guest run.
    async fn resume(&self, node: &NodeName, vm: &VmName) -> Result<(), String>;

    /// Gives a guest memory of its own, if an earlier fork has left it none: before it is paused, since it takes time.
    async fn give_own_memory(&self, node: &NodeName, vm: &VmName) -> Result<(), String>;

    /// Forks a guest once. A guest that is paused runs on as soon as it is frozen.
    async fn fork(
        &self,
        (from, vm): (&NodeName, &VmName),
        (to, child): (&NodeName, &VmName),
        devices: &[GrantedDevice],
    ) -> Result<Forked, String>;

    /// Keeps a guest as a template. A guest that is paused runs on as soon as it is frozen.
    async fn save(&self, node: &NodeName, vm: &VmName, template: &str) -> Result<Saved, String>;

    /// Lets the guest of a template run again.
    async fn restore(
        &self,
        node: &NodeName,
        template: &str,
        vm: &VmName,
        devices: &[GrantedDevice],
    ) -> Result<Restored, String>;

    /// Names of the templates that a node sees.
    async fn templates(&self, node: &NodeName) -> Result<Vec<String>, String>;

    /// Removes a template. One that is not there is no error.
    async fn remove_template(&self, node: &NodeName, template: &str) -> Result<(), String>;
}

impl VmoveCommand {
    /// Runs a program, and gives back its answer if it has succeeded.
    async fn answer(
        &self,
        node: &NodeName,
        program: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Value, String> {
        let ended = self.run_program(node, program, arguments, limit).await.map_err(|e| e.to_string())?;
        // 4: done, and something is left to do, of which the answer tells.
        if matches!(ended.exit_code, Some(0 | 4)) { Ok(ended.answer) } else { Err(failure(&ended)) }
    }
}

/// Why a program has failed: what it says, or else what became of the one child.
fn failure(ended: &Ended) -> String {
    let of_child = ended.answer["children"][0]["error"].as_str();
    let of_host = ended.answer["hosts"][0]["error"].as_str();
    of_child.or(of_host).map_or_else(|| ended.message(), str::to_owned)
}

const VFORK: &str = "vfork";

#[async_trait]
impl Snapshots for VmoveCommand {
    async fn pause(&self, node: &NodeName, vm: &VmName, limit: Duration) -> Result<(), String> {
        let time = format!("--for={}ms", limit.as_millis());
        let arguments = ["pause", time.as_str(), "--", vm.as_str()];
        self.answer(node, super::VMOVE, &arguments, self.time_limits.act).await.map(drop)
    }

    async fn resume(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        self.answer(node, super::VMOVE, &["resume", "--", vm.as_str()], self.time_limits.act).await.map(drop)
    }

    async fn give_own_memory(&self, node: &NodeName, vm: &VmName) -> Result<(), String> {
        self.answer(node, VFORK, &["promote", "--", vm.as_str()], self.time_limits.act).await.map(drop)
    }

    async fn fork(
        &self,
        (from, vm): (&NodeName, &VmName),
        (to, child): (&NodeName, &VmName),
        devices: &[GrantedDevice],
    ) -> Result<Forked, String> {
        let mut arguments = vec![
            "create".to_owned(),
            "--count=1".to_owned(),
            "--let-run".to_owned(),
            format!("--name={child}"),
        ];
        if to != from {
            arguments.push(format!("--to={}", self.address(to)));
        }
        arguments
            .extend(devices.iter().map(|device| format!("--device=1:{}={}", device.role, device.address)));
        arguments.extend(["--".to_owned(), vm.to_string()]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let told = self.answer(from, VFORK, &arguments, self.time_limits.migrate).await?;
        let made = &told["children"][0];
        if made["name"] != child.as_str() {
            return Err(format!("expected a child {child} in the answer of vfork, found {made}"));
        }
        Ok(Forked {
            ran_on: time(&told["ran_on_ms"]),
            stood_still: time(&told["parent_stood_still_ms"]).unwrap_or_default(),
            network: made["network"].as_str().unwrap_or_default().to_owned(),
            nics: serde_json::from_value(made["nics"].clone()).unwrap_or_default(),
            notes: texts(&told["warnings"]),
        })
    }

    async fn save(&self, node: &NodeName, vm: &VmName, template: &str) -> Result<Saved, String> {
        let arguments = ["template", "save", "--let-run", "--", vm.as_str(), template];
        let told = self.answer(node, VFORK, &arguments, self.time_limits.migrate).await?;
        Ok(Saved {
            ran_on: time(&told["ran_on_ms"]),
            stood_still: time(&told["parent_pause_ms"]).unwrap_or_default(),
            disk_bytes: told["disk_bytes"].as_u64().unwrap_or_default(),
            roles: texts(&told["roles"]),
        })
    }

    async fn restore(
        &self,
        node: &NodeName,
        template: &str,
        vm: &VmName,
        devices: &[GrantedDevice],
    ) -> Result<Restored, String> {
        let mut arguments = vec!["template".to_owned(), "restore".to_owned(), format!("--name={vm}")];
        arguments.extend(devices.iter().map(|device| format!("--device={}={}", device.role, device.address)));
        arguments.extend(["--".to_owned(), template.to_owned()]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let told = self.answer(node, VFORK, &arguments, self.time_limits.migrate).await?;
        Ok(Restored { network: told["child"]["network"].as_str().unwrap_or_default().to_owned() })
    }

    async fn templates(&self, node: &NodeName) -> Result<Vec<String>, String> {
        let told = self.answer(node, VFORK, &["template", "list"], self.time_limits.look).await?;
        let all = told["templates"].as_array().into_iter().flatten();
        Ok(all.filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect())
    }

    async fn remove_template(&self, node: &NodeName, template: &str) -> Result<(), String> {
        if !self.templates(node).await?.iter().any(|known| known == template) {
            return Ok(());
        }
        let arguments = ["template", "rm", "--", template];
        self.answer(node, VFORK, &arguments, self.time_limits.act).await.map(drop)
    }
}

/// A time of a report.
fn time(value: &Value) -> Option<Duration> {
    value.as_f64().and_then(|ms| Duration::try_from_secs_f64(ms / 1000.0).ok())
}

fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().into_iter().flatten();
    all.filter_map(|text| text.as_str().map(str::to_owned)).collect()
}
