//! A scheduler that empties a node: moves its VMs, one after the other, to the first of the other nodes that takes them.
//!
//! scheduler FOLDER FROM TO...    nodes as HOST:PORT; FOLDER has client.pem, client.key and ca.pem. A [[client]] entry of FROM names the
//!                                certificate, with the role operator. Ends with 1 if a VM stays.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use vmove_client::{Client, TlsFiles};
use vmove_types::migration::MigrateRequest;
use vmove_types::progress::Outcome;
use vmove_types::spec::MigrationSpec;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, from, to @ ..] = words.as_slice() else { return Err("scheduler FOLDER FROM TO...".into()) };
    let file = |name| Path::new(folder).join(name);
    let files = TlsFiles { cert: file("client.pem"), key: file("client.key"), ca: file("ca.pem") };
    let node = Client::connect_tls(from, &files)?;
    let mut all_left = true;
    for vm in node.vms().await?.vms.into_iter().filter(|vm| vm.status == "running") {
        match evacuate(&node, &vm.name, to).await {
            Ok(place) => println!("{}: {place}", vm.name),
            Err(why) => {
                println!("{} stays: {why}", vm.name);
                all_left = false;
            }
        }
    }
    Ok(if all_left { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn evacuate(node: &Client, vm: &str, to: &[String]) -> Result<String, Box<dyn Error>> {
    let mut why = "no other node was named".to_owned();
    for to in to {
        if let Some(blocker) = node.check(vm, to, &MigrationSpec::default()).await?.blockers.first() {
            why = format!("{to} does not take it: {}", blocker.message);
            continue;
        }
        let request = MigrateRequest { vm: vm.to_owned(), to: to.clone(), options: MigrationSpec::default() };
        let mut watched = node.follow_migration(&node.migrate(&request).await?.id).await?;
        while let Some(now) = watched.next().await? {
            match now.outcome {
                Outcome::Done { report } => {
                    let (total, pause) = (report.total_ms, report.downtime_ms);
                    return Ok(format!("at {to} after {total:.0} ms, paused for {pause:.1} ms"));
                }
                Outcome::Failed { error, .. } => why = format!("not to {to}: {error}"),
                Outcome::Refused { blockers } => why = format!("not to {to}: {blockers:?}"),
                Outcome::Running | Outcome::Reconnecting { .. } => {}
            }
        }
    }
    Err(why.into())
}
