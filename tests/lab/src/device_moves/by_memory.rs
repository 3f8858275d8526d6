//! What guests have counted, as their QEMUs have it in memory: what a guest of a fork writes is in no file.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Counts, DeviceMoves};

/// For a guest to have its function and to work with it.
pub(crate) const WORKS_TIMEOUT: Duration = Duration::from_secs(90);

impl DeviceMoves<'_> {
    pub(crate) fn json(&self, host: usize, words: &str) -> Result<Value> {
        let said = self.moves.must(host, &self.moves.vmove(&format!("--json {words}")))?;
        serde_json::from_str(said.trim()).with_context(|| said.clone())
    }

    /// Names and processes of the VMs of a host.
    pub(crate) fn vms(&self, host: usize) -> Result<Vec<(String, u64)>> {
        let list = self.json(host, "list")?;
        let vms = list["vms"].as_array().with_context(|| list.to_string())?.clone();
        let there = vms.iter().filter(|vm| vm["status"] != "ended");
        let one = |vm: &Value| Some((vm["name"].as_str()?.to_owned(), vm["pid"].as_u64()?));
        Ok(there.filter_map(one).collect())
    }

    fn pid(&self, host: usize, name: &str) -> Result<u64> {
        let vms = self.vms(host)?;
        let found = vms.iter().find(|(vm, _)| vm == name);
        found.map(|(_, pid)| *pid).with_context(|| format!("no {name} among {vms:?}"))
    }

    fn counts_in_memory(&self, host: usize, name: &str) -> Result<Counts> {
        let pid = self.pid(host, name)?;
        let said = self.moves.must(host, &format!("{} counts {pid}", self.host_program("guests")))?;
        let all: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        let of = &all[0];
        let count = |key: &str| of[key].as_u64().with_context(|| said.clone());
        Ok(Counts {
            passes: count("passes")?,
            damaged: count("damaged")?,
            cards: count("cards")?,
            sent: count("sent")?,
            received: count("received")?,
            wrong: count("wrong")?,
            mac: of["mac"].as_str().unwrap_or_default().to_owned(),
        })
    }

    /// The guest goes over its memory, and its functions, so many, send and receive; all that it finds is right. Its first function's address.
    pub(crate) fn works_by_memory(&self, host: usize, name: &str, cards: u64) -> Result<String> {
        let begun = Instant::now();
        let mut before: Option<Counts> = None;
        loop {
            let now = self.counts_in_memory(host, name);
            if let Ok(now) = &now {
                ensure!(now.damaged == 0 && now.wrong == 0, "{name} on h{host}: {now:?}");
                let more = |before: &Counts| {
                    let frames =
                        cards == 0 || (now.sent > before.sent + 4 && now.received > before.received + 4);
                    now.passes > before.passes && frames
                };
                if before.as_ref().is_some_and(more) && now.cards == cards {
                    return Ok(now.mac.clone());
                }
            }
            ensure!(begun.elapsed() < WORKS_TIMEOUT, "{name} on h{host}: {before:?}, then {now:?}");
            if before.is_none() {
                before = now.ok();
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}
