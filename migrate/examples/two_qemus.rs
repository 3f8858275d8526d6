//! Moves a guest from one QEMU to another inside one program, there and back, without a daemon.
//!
//! ```console
//! # cargo run -p vmove-migrate --example two_qemus -- FOLDER 3 qemu-system-x86_64 -m 128 -nodefaults -display none …
//! a to b: hybrid, paused for 8.1 ms, 0.41 s in all, every page verified
//! b to a: hybrid, paused for 7.6 ms, 0.39 s in all, every page verified
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use vmove_migrate::embed::{EmbedError, Node};
use vmove_node::peer::PeerPolicy;
use vmove_types::problem::chain;
use vmove_types::spec::MigrationSpec;

/// `folder` must be on a disk; the guest works for so long between the moves.
async fn run(folder: &Path, work: Duration, qemu: Vec<String>) -> Result<(), EmbedError> {
    // Guests that come may be started with this program, wherever it lies.
    let policy = PeerPolicy {
        qemu_binaries: Some(qemu.iter().take(1).map(Into::into).collect()),
        ..PeerPolicy::default()
    };
    let node = |name: &str| {
        let of = folder.join(name);
        Node::builder(name, of.join("state"), of.join("run")).peers(policy.clone()).start()
    };
    let (a, b) = (node("a").await?, node("b").await?);
    a.run("guest", qemu).await?;
    let moved = there_and_back(&a, &b, work).await;
    // It would run on without this program.
    for node in [&a, &b] {
        let _ = node.registry().stop("guest", true).await;
    }
    moved
}

async fn there_and_back(a: &Node, b: &Node, work: Duration) -> Result<(), EmbedError> {
    for (name, from, to) in [("a to b", a, b), ("b to a", b, a)] {
        tokio::time::sleep(work).await;
        let spec = MigrationSpec { verify: true, ..MigrationSpec::default() };
        let report = from.migrate("guest", to.address(), spec).await?;
        let verified = if report.verified == Some(true) { "every page verified" } else { "PAGES DIFFER" };
        let (mode, pause, all) = (&report.mode, report.downtime_ms, report.total_ms / 1e3);
        println!("{name}: {mode}, paused for {pause:.1} ms, {all:.2} s in all, {verified}");
    }
    tokio::time::sleep(work).await;
    Ok(())
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let (Some(folder), Some(Ok(seconds))) = (words.next(), words.next().map(|word| word.parse())) else {
        eprintln!("two_qemus FOLDER SECONDS QEMU [ARGUMENTS]");
        return ExitCode::from(2);
    };
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    match runtime.block_on(run(folder.as_ref(), Duration::from_secs(seconds), words.collect())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("two_qemus: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}
