//! Guests at one moment: paused, forked, kept as templates, and run again from these. By `vfork --json` beside `vmove`.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use sched_bridge::model::{NodeName, VmName};
use serde_json::Value;
use vmove_grant::{Grant, GrantedDevice};
use vmove_types::fork_report::ChildNic;

use super::{Ended, VmoveCommand};

/// A child that is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedChild {
    /// Its node.
    pub node: NodeName,
    /// Its name.
    pub vm: VmName,
    /// What it gets in place of the devices of its parent.
    pub devices: Vec<GrantedDevice>,
    /// What it may have there. Serial number and end are the driver's to set.
    pub grant: Grant,
}

/// A guest that was forked.
#[derive(Debug, Clone, PartialEq)]
pub struct Forked {
    /// From the request until the parent, which was paused, ran on. None if it was not paused.
    pub ran_on: Option<Duration>,
    /// How long the parent stood still for the fork itself.
    pub stood_still: Duration,
    /// Its children, as they were asked for.
    pub children: Vec<ForkedChild>,
    /// What the operator should know.
    pub notes: Vec<String>,
}

/// A child that runs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ForkedChild {
    /// Its network.
    pub network: String,
    /// Its NICs.
    pub nics: Vec<ChildNic>,
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

    /// Forks a guest, at one moment. A guest that is paused runs on as soon as it is frozen. All children run then; otherwise some may.
    async fn fork(&self, from: &NodeName, vm: &VmName, children: &[WantedChild]) -> Result<Forked, String>;

    /// Keeps a guest as a template. A guest that is paused runs on as soon as it is frozen.
    async fn save(&self, node: &NodeName, vm: &VmName, template: &str) -> Result<Saved, String>;

    /// Lets the guest of a template run again, as this VM.
    async fn restore(&self, template: &str, wanted: &WantedChild) -> Result<Restored, String>;

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

    /// Names are in the order in which children are dealt out: those of the parent's node first, then those of each other node.
    fn fork_arguments(
        &self,
        from: &NodeName,
        vm: &VmName,
        children: &[WantedChild],
    ) -> Result<Vec<String>, String> {
        let (mut ordered, away): (Vec<&WantedChild>, Vec<&WantedChild>) =
            children.iter().partition(|child| child.node == *from);
        let here = ordered.len();
        let mut by_node: BTreeMap<&NodeName, Vec<&WantedChild>> = BTreeMap::new();
        away.into_iter().for_each(|child| by_node.entry(&child.node).or_default().push(child));
        let mut arguments =
            vec!["create".to_owned(), format!("--count={}", children.len()), "--let-run".to_owned()];
        if !by_node.is_empty() {
            arguments.push(format!("--here={here}"));
        }
        for (node, own) in by_node {
            arguments.push(format!("--to={}", self.address(node)));
            arguments.push(format!("--share={}", own.len()));
            ordered.extend(own);
        }
        for (place, child) in ordered.iter().enumerate() {
            arguments.push(format!("--name={}", child.vm));
            arguments.extend(self.signed(&child.grant)?.map(|text| format!("--grant={}={text}", child.vm)));
            let devices = child.devices.iter();
            arguments.extend(
                devices.map(|device| format!("--device={}:{}={}", place + 1, device.role, device.address)),
            );
        }
        arguments.extend(["--".to_owned(), vm.to_string()]);
        Ok(arguments)
    }
}

/// Why a program has failed: what it says, or else what became of the first child or host that has failed.
fn failure(ended: &Ended) -> String {
    let all = [&ended.answer["children"], &ended.answer["hosts"]];
    let mut errors =
        all.into_iter().filter_map(Value::as_array).flatten().filter_map(|one| one["error"].as_str());
    errors.next().map_or_else(|| ended.message(), str::to_owned)
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

    async fn fork(&self, from: &NodeName, vm: &VmName, children: &[WantedChild]) -> Result<Forked, String> {
        let arguments = self.fork_arguments(from, vm, children)?;
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let told = self.answer(from, VFORK, &arguments, self.time_limits.migrate).await?;
        let made = told["children"].as_array().cloned().unwrap_or_default();
        let one = |wanted: &WantedChild| {
            let child = made.iter().find(|child| child["name"] == wanted.vm.as_str());
            let child = child.ok_or_else(|| {
                format!("expected a child {} in the answer of vfork, found none", wanted.vm)
            })?;
            Ok(ForkedChild {
                network: child["network"].as_str().unwrap_or_default().to_owned(),
                nics: serde_json::from_value(child["nics"].clone()).unwrap_or_default(),
            })
        };
        Ok(Forked {
            ran_on: time(&told["ran_on_ms"]),
            stood_still: time(&told["parent_stood_still_ms"]).unwrap_or_default(),
            children: children.iter().map(one).collect::<Result<_, String>>()?,
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

    async fn restore(&self, template: &str, wanted: &WantedChild) -> Result<Restored, String> {
        let WantedChild { node, vm, devices, grant } = wanted;
        let mut arguments = vec!["template".to_owned(), "restore".to_owned(), format!("--name={vm}")];
        arguments.extend(devices.iter().map(|device| format!("--device={}={}", device.role, device.address)));
        arguments.extend(self.signed(grant)?.map(|text| format!("--grant={text}")));
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
