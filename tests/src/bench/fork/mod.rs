//! The benchmark of forks: how soon children run, how long the forked guest pauses, how much memory children take; and the same with
//! QEMU alone, in the same run.
//!
//! | Module | Owns |
//! |---|---|
//! | [`local`] | forks on one host, with and without prepared QEMUs; `template save` |
//! | [`again`] | one guest forked again and again, its lost work, and its migration right after a fork |
//! | [`memory`] | memory of idle children, of each and in total |
//! | [`qemu`] | the same with QEMU alone: state saved, copied and loaded; VM templating |
//! | [`hosts`] | forks to other hosts, and the traffic on the parent's link |
//! | [`goals`] | the promises |
//! | [`report`] | tables, JSON |

pub mod again;
pub mod goals;
pub mod hosts;
pub mod local;
pub mod memory;
pub mod qemu;
pub mod report;

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;
use vmove_guest::config::{Config, Rate};

use crate::guest::Guest;

/// A guest of `memory_mib` that has filled `live_mib` of its memory and rewrites `pages_per_second` of these pages.
///
/// # Errors
/// When there is no QEMU to run it.
pub fn guest(memory_mib: u32, live_mib: u32, pages_per_second: u32) -> Result<Guest> {
    let config = Config {
        working_set_mib: live_mib / 4,
        cold_mib: live_mib - live_mib / 4,
        rate: Rate::PagesPerSecond(pages_per_second),
        verify: pages_per_second,
        period_us: 20_000,
        ..Config::default()
    };
    Guest::new(memory_mib, config)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// A figure in an answer.
fn number(answer: &Value, field: &str) -> Result<f64> {
    answer[field].as_f64().with_context(|| format!("expected a number as `{field}`, found {answer}"))
}

/// Name and process id of each child in an answer of `vfork create`.
fn children(answer: &Value) -> Result<Vec<(String, i32)>> {
    let all = answer["children"].as_array().with_context(|| format!("no children in {answer}"))?;
    let child = |child: &Value| {
        let pid = child["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        Some((child["name"].as_str()?.to_owned(), pid?))
    };
    all.iter().map(|c| child(c).with_context(|| format!("no name or process id of a child: {c}"))).collect()
}
