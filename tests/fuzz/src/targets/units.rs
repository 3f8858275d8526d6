//! Sizes, rates and times that people write, and bodies of requests to the daemon.

use serde::de::DeserializeOwned;
use vmove_types::fork::ForkRequest;
use vmove_types::problem::Problem;
use vmove_types::spec::{MigrationSpec, ModeRequest};
use vmove_types::units::{
    format_bytes, format_ms, format_rate, parse_bytes, parse_duration, parse_rate, to_f64,
};
use vmove_types::vm::RunRequest;

use super::{Target, text};

pub const UNITS: Target = Target {
    name: "units",
    what: "sizes, rates and times, and bodies of requests to the daemon",
    feed: units,
    seeds: || {
        text(&[
            "512MiB",
            "2.5 Gbit/s",
            "1m30s",
            "none",
            "postcopy",
            r#"{"mode":"hybrid","max_downtime_ms":50,"bandwidth":1048576,"paused":true,"timeout_ms":0}"#,
            r#"{"vm":"web","count":3,"nodes":["a:1"],"way":"two-stage","here":1}"#,
            r#"{"code":"no-room","message":"full"}"#,
        ])
    },
    words: &[
        "GiB",
        "Mbit",
        "/s",
        "µs",
        "ms",
        "h",
        "d",
        ".",
        "1e9",
        "99999999999999999999",
        "\"mode\":",
        "\"auto\"",
        "null",
    ],
    mutations: 900_000,
};

fn units(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(found) = parse_bytes(text) {
        drop(format_bytes(found));
    }
    if let Ok(rate) = parse_rate(text) {
        assert!(rate > 0);
        drop(format_rate(to_f64(rate)));
    }
    if let Ok(time) = parse_duration(text) {
        drop(format_ms(time.as_secs_f64() * 1000.0));
    }
    drop(text.parse::<ModeRequest>());
    drop(json::<MigrationSpec>(text).map(|spec| (spec.validate(), spec.timeout())));
    drop((json::<ForkRequest>(text), json::<RunRequest>(text), json::<Problem>(text)));
}

fn json<T: DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}
