//! Requests and answers about hooks: what a node does by itself when something happens.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The hooks of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HookList {
    /// In the order in which they are run.
    pub hooks: Vec<HookInfo>,
    /// Events that no hook heard of, because too many came at once.
    pub events_dropped: u64,
    /// What the operator should know of them: misspelt names of QMP events, signals that this host cannot give.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// One hook, and what came of it since the daemon was started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HookInfo {
    /// Its name.
    pub name: String,
    /// The event, as the configuration has it.
    pub on: String,
    /// The VMs: patterns and labels, or `all`.
    #[serde(rename = "for")]
    pub vms: String,
    /// What it does, in words.
    #[serde(rename = "do")]
    pub action: String,
    /// Hooks of one event run from the lowest number to the highest.
    pub order: i32,
    /// Unit: milliseconds.
    pub time_limit_ms: u64,
    /// How often it is tried again after a failure.
    pub retries: u32,
    /// The most runs for a VM, such as `6 in 1h`; none for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<String>,
    /// It says what it would do, and does not do it.
    pub dry_run: bool,
    /// Runs that ended well.
    pub done: u64,
    /// Runs that failed, after the last attempt.
    pub failed: u64,
    /// Requests that it forbade.
    pub forbidden: u64,
    /// Events that were not acted on: too many within the time, or the hook was at work for the same VM.
    pub held_back: u64,
    /// Events that its own action had caused.
    pub loops: u64,
    /// Runs at work now.
    pub at_work: u64,
    /// The last run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<HookRun>,
}

/// How a run of a hook ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HookRun {
    /// Id of the run: in the log, and in what a program is told.
    pub id: String,
    /// The VM, if it was about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// When it began. Unit: seconds since 1970-01-01 UTC.
    pub at: u64,
    /// How long it took. Unit: milliseconds.
    pub took_ms: f64,
    /// From the event until the action began. Unit: milliseconds.
    pub waited_ms: f64,
    /// Attempts.
    pub attempts: u32,
    /// `done`, `failed`, `forbidden`, or `would` for a dry run.
    pub outcome: String,
    /// What came of it, or why it failed; of a program the end of its output.
    pub said: String,
}

/// Tries a hook with an event that is made up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HookTestRequest {
    /// The data of the event, as QEMU or the daemon would give it: an object. Without it, the hook's conditions are taken to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Value>,
    /// The VM that the event is about; without it, every VM of the node is tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Do it, instead of saying what would be done.
    #[serde(default)]
    pub run: bool,
}

/// What a hook would do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HookTest {
    /// Name of the hook.
    pub name: String,
    /// Why it would not run at all: the condition that does not hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
    /// For each VM that it is for: what would be done, or what was done.
    pub runs: Vec<HookTestRun>,
}

/// What a hook would do, or has done, for one VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HookTestRun {
    /// The VM; none of a program that is run once for an event of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// `would`, `done`, `failed` or `forbidden`.
    pub outcome: String,
    /// What, in words.
    pub said: String,
    /// What a program is given on its standard input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Value>,
}
