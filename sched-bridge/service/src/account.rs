//! Records of what was used, one for each lease that ended.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::lease::{Lease, LeaseId, Usage};

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Its holder gave it back.
    Released,
    /// No heartbeat came in time.
    Expired,
    /// All its VMs have ended.
    VmsEnded,
}

/// A lease that has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Record {
    /// The lease.
    pub lease: LeaseId,
    /// Who had it.
    pub holder: String,
    /// The virtual cluster.
    pub cluster: String,
    /// How it ended.
    pub end: End,
    /// When it was granted, by the time of day. Unit: milliseconds since 1970-01-01 00:00 UTC.
    pub granted_wall_ms: u64,
    /// When it ended, likewise. The difference of the two is off if the time of day jumped; `usage` is not.
    pub ended_wall_ms: u64,
    /// What was used.
    pub usage: Usage,
    /// Hours of GPUs: `usage.gpu_ms` / 3 600 000.
    pub gpu_hours: f64,
    /// All of the usage is by clocks that do not jump. Otherwise a part was measured across a reboot or by several machines, by the
    /// time of day, at most twice the time to live for each gap.
    pub exact: bool,
}

impl Record {
    /// The record of a lease whose usage was counted to its end.
    #[must_use]
    pub fn of(lease: &Lease, end: End) -> Self {
        Self {
            lease: lease.id.clone(),
            holder: lease.holder.clone(),
            cluster: lease.cluster.to_string(),
            end,
            granted_wall_ms: lease.granted.wall_ms,
            ended_wall_ms: lease.counted.wall_ms,
            usage: lease.usage,
            gpu_hours: hours(lease.usage.gpu_ms),
            exact: lease.exact,
        }
    }
}

/// 2^53 ms are 285,000 years: nothing is lost.
#[allow(clippy::cast_precision_loss)]
fn hours(ms: u64) -> f64 {
    ms as f64 / 3_600_000.0
}

/// First line of the CSV form.
pub const CSV_HEAD: &str = "lease,holder,cluster,end,granted_wall_ms,ended_wall_ms,held_ms,gpu_hours,adapter_ms,core_ms,memory_mib_ms,exact";

/// One line a record, with a head (RFC 4180, but with `\n` as the end of a line).
#[must_use]
pub fn csv(records: &[Record]) -> String {
    let mut out = format!("{CSV_HEAD}\n");
    for r in records {
        let end =
            serde_json::to_value(r.end).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let u = r.usage;
        let fields = [
            quote(r.lease.as_str()),
            quote(&r.holder),
            quote(&r.cluster),
            end,
            r.granted_wall_ms.to_string(),
            r.ended_wall_ms.to_string(),
            u.held_ms.to_string(),
            format!("{:.6}", r.gpu_hours),
            u.adapter_ms.to_string(),
            u.core_ms.to_string(),
            u.memory_mib_ms.to_string(),
            r.exact.to_string(),
        ];
        out.push_str(&fields.join(","));
        out.push('\n');
    }
    out
}

/// One JSON object a line.
#[must_use]
pub fn json_lines(records: &[Record]) -> String {
    records.iter().filter_map(|r| serde_json::to_string(r).ok()).map(|line| line + "\n").collect()
}

/// Quotes where a comma, a quote or a line end would be misread. A spreadsheet takes a text that begins with `=`, `+`, `-` or `@` for a
/// formula: an apostrophe before it keeps it a text.
fn quote(text: &str) -> String {
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text.to_owned() };
    if text.contains(['"', ',', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_break_a_table_are_quoted() {
        assert_eq!(quote("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(quote("=1+1"), "'=1+1");
        assert_eq!(quote("alice"), "alice");
    }
}
