//! Devices of this node by hand; prints JSON.
//!
//! `devices list`, `devices take JOURNAL VM ROLE=ADDRESS[,…]`, `devices give-back JOURNAL VM ROLE [SECONDS]`,
//! `devices recover JOURNAL [LIVING-VM...]`, `devices claims JOURNAL`, `devices probe ADDRESS`, `devices free GROUP SECONDS`.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmove_devices::rtnetlink::Rtnetlink;
use vmove_devices::{Ledger, NodeDevices, Sys, bind, migration, shared};

const UNPLUG_TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words.iter().map(String::as_str).collect::<Vec<_>>()) {
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

fn run(words: &[&str]) -> Result<Value, Box<dyn std::error::Error>> {
    let sys = Sys::new(Path::new("/"));
    let ledger = |path: &str| Ledger::open(Path::new(path), sys.clone(), Box::new(Rtnetlink));
    let begun = Instant::now();
    let millis = |since: Instant| since.elapsed().as_secs_f64() * 1000.0;
    let seconds = |text: &str| -> Result<Duration, Box<dyn std::error::Error>> {
        Ok(Duration::try_from_secs_f64(text.parse()?)?)
    };
    Ok(match words {
        ["list"] => json!({ "pci": NodeDevices::read(&sys), "parts": shared::read(&sys) }),
        ["take", journal, vm, request] => {
            let claim = ledger(journal)?.take(vm, &request.parse()?)?;
            json!({ "claim": claim, "took_ms": millis(begun) })
        }
        ["give-back", journal, vm, role, limit @ ..] => {
            let limit = limit.first().map_or(Ok(UNPLUG_TIMEOUT), |text| seconds(text))?;
            ledger(journal)?.give_back(vm, role, limit)?;
            json!({ "took_ms": millis(begun) })
        }
        ["recover", journal, living @ ..] => {
            let errors = ledger(journal)?.recover(|vm| living.contains(&vm), UNPLUG_TIMEOUT);
            json!({ "errors": errors.iter().map(ToString::to_string).collect::<Vec<_>>(), "took_ms": millis(begun) })
        }
        ["claims", journal] => json!(ledger(journal)?.claims()),
        ["probe", address] => json!(migration::probe(&sys, address.parse()?)?),
        ["free", group, limit] => {
            let waited = bind::wait_until_free(&sys, group.parse()?, seconds(limit)?)?;
            json!({ "waited_ms": waited.as_secs_f64() * 1000.0 })
        }
        _ => {
            return Err(
                "devices list | take | give-back | recover | claims | probe | free; see the source".into()
            );
        }
    })
}
