//! Accounting: a record for each lease that has ended.

pub use vmove_bridge_types::account::{End, Record};

use crate::lease::Lease;

/// The record of a lease whose usage was counted to its end.
#[must_use]
pub fn record_of(lease: &Lease, end: End) -> Record {
    Record {
        lease: lease.id.clone(),
        holder: lease.holder.clone(),
        project: lease.project.clone(),
        cluster: lease.cluster.to_string(),
        end,
        granted_wall_ms: lease.granted.wall_ms,
        ended_wall_ms: lease.counted.wall_ms,
        usage: lease.usage,
        gpu_hours: hours(lease.usage.gpu_ms),
        adapter_hours: hours(lease.usage.adapter_ms),
        gpu_share_hours: hours(lease.usage.gpu_share_ms),
        remote_gpu_hours: hours(lease.usage.remote_gpu_ms),
        vms: lease.vms.clone(),
        exact: lease.exact,
    }
}

#[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
fn hours(ms: u64) -> f64 {
    ms as f64 / 3_600_000.0
}

/// First line of the CSV form.
const CSV_HEADER: &str = "lease,holder,cluster,end,granted_wall_ms,ended_wall_ms,held_ms,gpu_hours,adapter_ms,core_ms,memory_mib_ms,exact,gpu_share_ms,remote_gpu_ms";

/// Records as CSV, one line each below a header (RFC 4180, but lines end with `\n`).
#[must_use]
pub fn csv(records: &[Record]) -> String {
    let mut out = format!("{CSV_HEADER}\n");
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
            u.gpu_share_ms.to_string(),
            u.remote_gpu_ms.to_string(),
        ];
        out.push_str(&fields.join(","));
        out.push('\n');
    }
    out
}

/// Records as JSON lines.
#[must_use]
pub fn json_lines(records: &[Record]) -> String {
    records.iter().filter_map(|r| serde_json::to_string(r).ok()).map(|line| line + "\n").collect()
}

/// Records as a message that APEL takes: `APEL-cloud-message: v0.4`, the cloud usage record of EGI, with one record for each VM. Its
/// fields are those of `apel/db/records/cloud.py` in <https://github.com/apel/apel>. What a bridge does not know is `NULL`. CPU time is
/// the time for which cores were leased, since nobody else can use them.
#[must_use]
pub fn apel(records: &[Record], site: &str, service: &str) -> String {
    let mut out = "APEL-cloud-message: v0.4\n".to_owned();
    for record in records {
        for (vm, usage) in &record.vms {
            let held = usage.held_ms.max(1);
            #[expect(clippy::cast_precision_loss, reason = "2^53 core-ms are 285,000 core-years")]
            let cores = usage.core_ms as f64 / held as f64;
            let start = record.granted_wall_ms / 1000;
            let fields = [
                ("RecordCreateTime", (record.ended_wall_ms / 1000).to_string()),
                ("VMUUID", format!("{}/{vm}", record.lease)),
                ("SiteName", plain(site)),
                ("CloudComputeService", plain(service)),
                ("MachineName", vm.to_string()),
                ("LocalUserId", plain(&record.holder)),
                ("LocalGroupId", record.project.as_deref().map_or_else(|| "NULL".to_owned(), plain)),
                ("GlobalUserName", "NULL".to_owned()),
                ("FQAN", "NULL".to_owned()),
                ("Status", "completed".to_owned()),
                ("StartTime", start.to_string()),
                // As measured, also if the time of day has jumped.
                ("EndTime", (start + usage.held_ms / 1000).to_string()),
                ("SuspendDuration", "0".to_owned()),
                ("WallDuration", (usage.held_ms / 1000).to_string()),
                ("CpuDuration", (usage.core_ms / 1000).to_string()),
                ("CpuCount", format!("{cores:.3}")),
                ("NetworkType", "NULL".to_owned()),
                ("NetworkInbound", "NULL".to_owned()),
                ("NetworkOutbound", "NULL".to_owned()),
                ("PublicIPCount", "NULL".to_owned()),
                ("Memory", (usage.memory_mib_ms / held).to_string()),
                ("Disk", "NULL".to_owned()),
                ("BenchmarkType", "NULL".to_owned()),
                ("Benchmark", "NULL".to_owned()),
                ("StorageRecordId", "NULL".to_owned()),
                ("ImageId", "NULL".to_owned()),
                ("CloudType", format!("vmove {}", env!("CARGO_PKG_VERSION"))),
            ];
            out.extend(fields.iter().map(|(name, value)| format!("{name}: {value}\n")));
            out.push_str("%%\n");
        }
    }
    out
}

/// A value is one line.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

/// Quotes a field with a comma, a quote or a line end. A spreadsheet would evaluate a text that begins with `=`, `+`, `-` or `@`: an
/// apostrophe before it prevents that.
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
