//! `vmove account`.

use std::collections::BTreeMap;

use serde::Serialize;
use vmove_bridge_types::account::Record;
use vmove_bridge_types::lease::Usage;
use vmove_bridge_types::requests::AccountQuery;

use super::input::bridge;
use crate::args::clusters::{AccountArgs, SumBy};
use crate::failure::Failure;
use crate::output::{End, say, say_either, table};

pub async fn run(args: AccountArgs, json: bool) -> Result<(), End> {
    let format = match (args.csv, args.apel) {
        (true, _) => "csv",
        (_, true) => "apel",
        _ => "jsonl",
    };
    let query = AccountQuery {
        format: Some(format.to_owned()),
        site: args.site,
        service: args.service,
        holder: args.holder,
        since_ms: args.since,
    };
    let text = bridge(&args.at)?.account(&query).await?;
    match args.sum {
        None => say(&text),
        Some(by) => say_either(&sums(&text, by)?, json, |sums| rows(sums, by)),
    }
}

/// Hours of one holder, project or VM.
#[derive(Debug, Default, Serialize)]
struct Hours {
    leases: u64,
    gpu_hours: f64,
    adapter_hours: f64,
    gpu_share_hours: f64,
    remote_gpu_hours: f64,
    core_hours: f64,
    memory_gib_hours: f64,
}

impl Hours {
    fn add(&mut self, usage: &Usage) {
        #[expect(clippy::cast_precision_loss, reason = "2^53 ms are 285,000 years")]
        let hours = |ms: u64| ms as f64 / 3_600_000.0;
        self.leases += 1;
        self.gpu_hours += hours(usage.gpu_ms);
        self.adapter_hours += hours(usage.adapter_ms);
        self.gpu_share_hours += hours(usage.gpu_share_ms);
        self.remote_gpu_hours += hours(usage.remote_gpu_ms);
        self.core_hours += hours(usage.core_ms);
        self.memory_gib_hours += hours(usage.memory_mib_ms) / 1024.0;
    }
}

fn sums(text: &str, by: SumBy) -> Result<BTreeMap<String, Hours>, Failure> {
    let mut sums: BTreeMap<String, Hours> = BTreeMap::new();
    for line in text.lines() {
        let record: Record = serde_json::from_str(line)
            .map_err(|e| Failure::bad_request(format!("this vmove cannot read the bridge's records: {e}")))?;
        match by {
            SumBy::Holder => sums.entry(record.holder).or_default().add(&record.usage),
            SumBy::Project => {
                let project = record.project.unwrap_or_else(|| "-".to_owned());
                sums.entry(project).or_default().add(&record.usage);
            }
            SumBy::Vm => {
                for (vm, usage) in &record.vms {
                    sums.entry(vm.to_string()).or_default().add(usage);
                }
            }
        }
    }
    Ok(sums)
}

fn rows(sums: &BTreeMap<String, Hours>, by: SumBy) -> String {
    let row = |(name, hours): (&String, &Hours)| {
        let amounts = [
            hours.gpu_hours,
            hours.gpu_share_hours,
            hours.remote_gpu_hours,
            hours.adapter_hours,
            hours.core_hours,
            hours.memory_gib_hours,
        ];
        let amounts = amounts.map(|amount| format!("{amount:.3}"));
        [vec![name.clone(), hours.leases.to_string()], amounts.to_vec()].concat()
    };
    let what = match by {
        SumBy::Holder => "HOLDER",
        SumBy::Project => "PROJECT",
        SumBy::Vm => "VM",
    };
    let rows: Vec<_> = sums.iter().map(row).collect();
    let columns = [
        what,
        "LEASES",
        "GPU-HOURS",
        "SHARE-HOURS",
        "REMOTE-HOURS",
        "ADAPTER-HOURS",
        "CORE-HOURS",
        "GIB-HOURS",
    ];
    table(&columns, &rows)
}
