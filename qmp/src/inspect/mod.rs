//! What a running QEMU is made of, and what of it cannot be moved.
//!
//! Everything is asked over QMP, so it also holds for devices plugged in later. Where QMP does not tell (which `-netdev`
//! is a vhost-user one) the human monitor and the command line fill in.

mod block;
mod blocker;
mod device;
mod host;
mod ram;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Client, CommandLine, QmpError, switchover::MigrationInfo};

pub use block::BlockFact;
pub use blocker::{Blocker, BlockerKind};
pub use device::{DeviceFact, DeviceKind, NetdevFact};
pub use host::{
    HostQemu, InspectHostError, MachineFact, find_program, find_qemus, inspect_binary, is_installed_qemu,
};
pub use ram::{PageKind, RamFact};

/// Deadline of each query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// What a running QEMU is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct VmFacts {
    /// QEMU's process id.
    pub pid: u32,
    /// QEMU's version, such as `10.0.2`.
    pub version: String,
    /// What the distribution adds to it.
    pub package: String,
    /// Machine type with its version, such as `pc-q35-10.0`: `q35` of another QEMU is another machine.
    pub machine: String,
    /// CPU model as given, such as `qemu64` or `host`; `None` where nothing tells.
    pub cpu: Option<String>,
    /// `kvm`, or `tcg` (or another).
    pub accelerator: String,
    /// QEMU's run state, such as `running` or `paused`.
    pub status: String,
    /// The guest's name, if it has one.
    pub name: Option<String>,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Guest RAM.
    pub ram: Vec<RamFact>,
    /// Disks.
    pub block: Vec<BlockFact>,
    /// Devices that matter for a move.
    pub devices: Vec<DeviceFact>,
    /// Network back ends.
    pub netdevs: Vec<NetdevFact>,
    /// QEMU's own reasons why it would not migrate.
    pub qemu_blockers: Vec<String>,
}

impl VmFacts {
    /// Whether any disk bypasses the page cache: its I/O may write guest RAM unseen until the guest is stopped.
    #[must_use]
    pub fn has_direct_io(&self) -> bool {
        self.block.iter().any(|block| block.direct_io)
    }
}

/// Asks QEMU for all facts. Changes nothing. `line` is its command line, if known.
///
/// # Errors
/// Any [`QmpError`] of a query that every QEMU since 7.2 must answer.
pub async fn facts(client: &Client, pid: u32, line: Option<&CommandLine>) -> Result<VmFacts, QmpError> {
    let ask = Ask(client);
    let migration = MigrationInfo::from_reply(&ask.query("query-migrate").await?);
    let kvm = ask.query("query-kvm").await?;
    let cpus = ask.query("query-cpus-fast").await?;
    let status = ask.query("query-status").await?;
    let name = ask.query("query-name").await?;
    let vcpus = cpus.as_array().map_or(0, Vec::len);
    Ok(VmFacts {
        pid,
        version: client.version().to_string(),
        package: client.version().package.trim().to_owned(),
        machine: ask.machine().await?,
        cpu: cpu_model(line),
        accelerator: accelerator(&kvm, line),
        status: text(&status, "status").unwrap_or_default(),
        name: text(&name, "name"),
        vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX),
        ram: ram::facts(&ask).await?,
        block: block::facts(&ask, pid).await?,
        devices: device::facts(&ask).await?,
        netdevs: device::netdevs(&ask).await?,
        qemu_blockers: migration.blocked,
    })
}

/// Threads of the virtual processors: index of the processor, and thread ID. TCG may have one thread for all of them.
///
/// # Errors
/// Any [`QmpError`] of the query.
pub async fn vcpu_threads(client: &Client) -> Result<Vec<(u32, u32)>, QmpError> {
    let cpus = Ask(client).query("query-cpus-fast").await?;
    let number = |cpu: &Value, key: &str| cpu.get(key)?.as_u64()?.try_into().ok();
    let thread = |cpu: &Value| Some((number(cpu, "cpu-index")?, number(cpu, "thread-id")?));
    Ok(cpus.as_array().into_iter().flatten().filter_map(thread).collect())
}

/// Network back ends of a running QEMU.
///
/// # Errors
/// Any [`QmpError`] of the query.
pub async fn netdevs(client: &Client) -> Result<Vec<NetdevFact>, QmpError> {
    device::netdevs(&Ask(client)).await
}

/// Shorthand for queries.
struct Ask<'c>(&'c Client);

impl Ask<'_> {
    async fn query(&self, name: &str) -> Result<Value, QmpError> {
        self.0.execute_raw(name, Value::Null, QUERY_TIMEOUT).await
    }

    async fn with(&self, name: &str, arguments: Value) -> Result<Value, QmpError> {
        self.0.execute_raw(name, arguments, QUERY_TIMEOUT).await
    }

    /// A property of an object; `None` if there is no such object or property.
    async fn property(&self, path: &str, property: &str) -> Result<Option<Value>, QmpError> {
        none_if_refused(self.with("qom-get", json!({ "path": path, "property": property })).await)
    }

    /// Names and types of an object's properties and children.
    async fn list(&self, path: &str) -> Result<Vec<(String, String)>, QmpError> {
        let reply = none_if_refused(self.with("qom-list", json!({ "path": path })).await)?;
        let entries = reply.as_ref().and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        Ok(entries.iter().filter_map(|entry| Some((text(entry, "name")?, text(entry, "type")?))).collect())
    }

    async fn machine(&self) -> Result<String, QmpError> {
        let kind = self.property("/machine", "type").await?;
        let kind = kind.as_ref().and_then(Value::as_str).unwrap_or_default();
        Ok(kind.strip_suffix("-machine").unwrap_or(kind).to_owned())
    }
}

fn none_if_refused(reply: Result<Value, QmpError>) -> Result<Option<Value>, QmpError> {
    match reply {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_refusal() => Ok(None),
        Err(error) => Err(error),
    }
}

fn text(value: &Value, field: &str) -> Option<String> {
    value.get(field).and_then(Value::as_str).map(str::to_owned)
}

fn cpu_model(line: Option<&CommandLine>) -> Option<String> {
    line.and_then(|line| line.option_value("cpu", "model"))
}

fn accelerator(kvm: &Value, line: Option<&CommandLine>) -> String {
    if kvm.get("enabled").and_then(Value::as_bool) == Some(true) {
        return "kvm".to_owned();
    }
    let named = line.and_then(|line| line.option_value("accel", "accel"));
    named.filter(|name| name != "kvm").unwrap_or_else(|| "tcg".to_owned())
}
