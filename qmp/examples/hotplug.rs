//! Unplugs and plugs devices of a running QEMU by hand.
//!
//! `hotplug SOCKET unplug ID [SECONDS]`, `hotplug SOCKET plug KEY=VALUE...`, `hotplug SOCKET find ID`, `hotplug SOCKET ports`; prints JSON.

use std::{path::Path, process::ExitCode, time::Duration};

use serde_json::{Map, Value, json};
use vmove_qmp::{
    Client,
    hotplug::{self, UnplugLimits},
};

const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words).await {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(words: &[String]) -> Result<Value, Box<dyn std::error::Error>> {
    let usage = "hotplug SOCKET unplug ID [SECONDS] | plug KEY=VALUE... | find ID | ports";
    let [socket, act, rest @ ..] = words else { return Err(usage.into()) };
    let client = Client::connect(Path::new(socket), EVENT_TIMEOUT).await?;
    let millis = |time: Duration| time.as_secs_f64() * 1000.0;
    match (act.as_str(), rest) {
        ("unplug", [id, more @ ..]) => {
            let mut limits = UnplugLimits::default();
            if let Some(seconds) = more.first() {
                limits.timeout = Duration::try_from_secs_f64(seconds.parse()?)?;
            }
            let done = hotplug::unplug(&client, id, limits).await?;
            Ok(json!({ "took_ms": millis(done.took), "seen": done.seen, "requests": done.requests }))
        }
        ("plug", pairs) => {
            let pair = |text: &String| {
                let (key, value) = text.split_once('=')?;
                Some((key.to_owned(), Value::from(value)))
            };
            let properties: Option<Map<String, Value>> = pairs.iter().map(pair).collect();
            let done = hotplug::plug(&client, &properties.ok_or(usage)?, EVENT_TIMEOUT).await?;
            Ok(json!({ "took_ms": millis(done.took) }))
        }
        ("find", [id]) => Ok(serde_json::to_value(hotplug::find(&client, id, EVENT_TIMEOUT).await?)?),
        ("ports", []) => Ok(serde_json::to_value(hotplug::ports(&client, EVENT_TIMEOUT).await?)?),
        _ => Err(usage.into()),
    }
}
