//! Forks a guest into children inside one program, saves a template and forks that, too, without a daemon. Ends all of them on Enter.
//!
//! ```console
//! # cargo run -p vmove-clone --example one_into_many -- FOLDER 2 3 qemu-system-x86_64 -m 128 -nodefaults -display none …
//! guest: process 4711
//! guest: forked in 187 ms, stood still for 6.4 ms, id 59a1c1cf4a0f4c6c8e7a7bd8f0d2a6b1
//! guest.1: process 4730, verified
//! …
//! warm: saved, 18 MiB on disk, guest stood still for 5.9 ms
//! warm: forked in 142 ms, id 0f2a0d3c7b7e4a74a2f4a4a9d1a0c9e5
//! warm.1: process 4760, verified
//! …
//! all run: Enter ends them
//! ```
//!
//! If it is killed, its guests stay. Started over the same folder it takes the guest up, ends what else was left, and begins again.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use vmove_clone::embed::{EmbedError, Node, STAND_BY, stand_by};
use vmove_types::fork::{ForkRequest, TemplateRequest};
use vmove_types::problem::chain;

const GUEST: &str = "guest";
const TEMPLATE: &str = "warm";

/// `folder` must be on a disk; the guest works for so long before it is forked.
async fn run(folder: &Path, work: Duration, count: usize, qemu: Vec<String>) -> Result<(), EmbedError> {
    let node = Node::builder("a", folder.join("state"), folder.join("run"))
        // This program stands by: the guest runs while it gets memory of its own after a fork.
        .standby("/proc/self/exe")
        .start()
        .await?;
    let forked = fork_both(&node, work, count, qemu).await;
    // They would run on without this program.
    let ended = end_all_but(&node, None).await;
    node.close().await;
    forked.and(ended)
}

/// Forks the guest, and a template of it.
async fn fork_both(node: &Node, work: Duration, count: usize, qemu: Vec<String>) -> Result<(), EmbedError> {
    // What a program that was killed has left.
    let taken_up = node.vms().await.into_iter().find(|vm| vm.name == GUEST);
    if let Some(guest) = taken_up {
        // The fork in which it was killed is undone first.
        node.at_rest(GUEST).await;
        end_all_but(node, Some(GUEST)).await?;
        println!("{GUEST}: taken up, process {}", guest.pid);
    } else {
        println!("{GUEST}: process {}", node.run(GUEST, qemu).await?.summary.pid);
    }
    tokio::time::sleep(work).await;
    let of_guest = ForkRequest { vm: Some(GUEST.to_owned()), ..ForkRequest::default() };
    fork(node, GUEST, ForkRequest { count, verify: true, ..of_guest }).await?;
    let (vm, name) = (GUEST.to_owned(), TEMPLATE.to_owned());
    let saved = node.save_template(TemplateRequest { vm, name, ..TemplateRequest::default() }).await?;
    let (mib, pause) = (saved.disk_bytes >> 20, saved.parent_pause_ms.unwrap_or_default());
    println!("{TEMPLATE}: saved, {mib} MiB on disk, guest stood still for {pause:.1} ms");
    let of_template = ForkRequest { template: Some(TEMPLATE.to_owned()), ..ForkRequest::default() };
    fork(node, TEMPLATE, ForkRequest { count, verify: true, ..of_template }).await?;
    println!("all run: Enter ends them");
    let enter = || std::io::stdin().read_line(&mut String::new());
    let _ = tokio::task::spawn_blocking(enter).await;
    Ok(())
}

/// Forks a guest or a template, and tells of the children.
async fn fork(node: &Node, parent: &str, request: ForkRequest) -> Result<(), EmbedError> {
    let report = node.fork(request).await?;
    let (all, pause, id) = (report.all_running_ms, report.parent_pause_ms, &report.id);
    let stood = if parent == TEMPLATE { String::new() } else { format!(" stood still for {pause:.1} ms,") };
    println!("{parent}: forked in {all:.0} ms,{stood} id {id}");
    for child in &report.children {
        let how = match (&child.error, child.verified) {
            (Some(why), _) => why.as_str(),
            (None, Some(true)) => "verified",
            (None, _) => "PAGES DIFFER",
        };
        println!("{}: process {}, {how}", child.name, child.pid);
    }
    Ok(())
}

/// Ends VMs, and removes templates.
async fn end_all_but(node: &Node, stays: Option<&str>) -> Result<(), EmbedError> {
    for vm in node.vms().await.iter().filter(|vm| Some(vm.name.as_str()) != stays) {
        node.stop(&vm.name, true).await?;
    }
    for template in node.templates().await? {
        node.remove_template(&template.name).await?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    if words.peek().is_some_and(|word| word == STAND_BY) {
        return stand_by();
    }
    let (Some(folder), Some(Ok(seconds)), Some(Ok(count))) =
        (words.next(), words.next().map(|word| word.parse()), words.next().map(|word| word.parse()))
    else {
        eprintln!("one_into_many FOLDER SECONDS CHILDREN QEMU [ARGUMENTS]");
        return ExitCode::from(2);
    };
    let work = Duration::from_secs(seconds);
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    match runtime.block_on(run(folder.as_ref(), work, count, words.collect())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("one_into_many: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}
