//! What must hold after each step, and what must not be left at the end.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::field::{Field, Seen};
use super::harm::{Harm, Kind};
use super::operator::end_everything;
use super::patience::Patience;
use crate::daemon::Node;
use crate::fleet::qemu_pids;
use crate::forks::{journals, template_files};
use crate::scene::{NAME, gone_from, page_maps};

/// For a daemon to tidy up after it has answered.
const TIDY_TIMEOUT: Duration = Duration::from_secs(15);
/// Descriptors that a daemon may hold more than at its first rest: connections of requests that are ending, runtimes that grew.
const SPARE_DESCRIPTORS: usize = 4;

/// The guest runs at node `at` and nowhere else, it has not gone back, all its memory is right, and nothing is left of the step.
///
/// # Errors
/// The harm.
pub fn check(field: &mut Field, at: usize, seen: Seen) -> Result<()> {
    if seen.doubled {
        return Err(Harm::of(Kind::Doubled, "the guest worked at both nodes for a second"));
    }
    let other = &field.nodes[1 - at];
    gone_from(other).map_err(|error| Harm::of(Kind::Left, format!("{error:#}")))?;
    sound(field, at, NAME)?;
    let beats = field.guest.beacon(&field.nodes[at], NAME)?.beats;
    if beats < seen.beats {
        let text = format!("it was in period {}, and is in {beats} again", seen.beats);
        return Err(Harm::of(Kind::Doubled, text));
    }
    at_rest(field, at)?;
    field.home = at;
    Ok(())
}

/// The VM checks all its memory once more and finds no error.
///
/// # Errors
/// [`Kind::Corrupt`], or [`Kind::Stuck`] if it does not work.
pub fn sound(field: &Field, at: usize, name: &str) -> Result<()> {
    let node = &field.nodes[at];
    let mut patience = Patience::of(TIDY_TIMEOUT);
    // The end of a migration is told before its hands are off the VM.
    while !patience.is_over() && !node.vm(name).is_ok_and(|vm| vm.status == "running") {
        std::thread::sleep(Duration::from_millis(20));
    }
    let Err(error) = field.guest.sound(node, name) else { return Ok(()) };
    let errors = field.guest.beacon(node, name).map_or(0, |beacon| beacon.errors);
    let kind = if errors > 0 { Kind::Corrupt(errors) } else { Kind::Stuck };
    Err(Harm::of(kind, format!("{error:#}")))
}

/// Nothing is left of a migration or a fork but the guest at node `at`.
///
/// # Errors
/// [`Kind::Left`].
pub fn at_rest(field: &mut Field, at: usize) -> Result<()> {
    tidied(|| {
        let mut left = Vec::new();
        for (number, node) in field.nodes.iter().enumerate() {
            let qemus = qemu_pids(node);
            if qemus.len() != usize::from(number == at) {
                left.push(format!("QEMUs {qemus:?} at {}", node.name()));
            }
            left.extend(remnants(node));
            left.extend(at_work(node));
            left.extend(qemus.into_iter().filter_map(registered));
        }
        left
    })?;
    for number in 0..2 {
        let Some(pid) = field.nodes[number].pid() else { continue };
        let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let first = *field.descriptors.entry((pid, number == at)).or_insert_with(open);
        tidied(|| match open() {
            open if open <= first + SPARE_DESCRIPTORS => Vec::new(),
            open => vec![format!(
                "{open} descriptors of daemon {pid}, which had {first} at rest: {}",
                targets(pid)
            )],
        })?;
    }
    Ok(())
}

fn targets(pid: i32) -> String {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let all: Vec<_> = entries
        .filter_map(|entry| Some(std::fs::read_link(entry.path()).ok()?.display().to_string()))
        .collect();
    all.join(" ")
}

/// Migrations that a daemon takes for running.
fn at_work(node: &Node) -> Option<String> {
    match node.ask(&["status"]) {
        Ok(status) if status["migrations"].as_array().is_some_and(Vec::is_empty) => None,
        Ok(status) => Some(format!("at work at {}: {}", node.name(), status["migrations"])),
        Err(error) => Some(format!("{error:#}")),
    }
}

/// Page maps, journals of forks, and templates.
fn remnants(node: &Node) -> Vec<String> {
    let paths = page_maps(node.folder()).into_iter().chain(journals(node)).chain(template_files(node));
    paths.map(|path| path.display().to_string()).collect()
}

/// A mapping of a QEMU that is still registered with a userfaultfd.
fn registered(pid: i32) -> Option<String> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    let mut flags = flags.filter(|flags| flags.split(' ').any(|flag| matches!(flag, "um" | "uw" | "ui")));
    flags.next().map(|flags| format!("memory of QEMU {pid} registered with a userfaultfd ({})", flags.trim()))
}

/// Waits until nothing is found, but not for long.
fn tidied(mut find: impl FnMut() -> Vec<String>) -> Result<()> {
    let mut patience = Patience::of(TIDY_TIMEOUT);
    loop {
        let left = find();
        if left.is_empty() {
            return Ok(());
        }
        if patience.is_over() {
            return Err(Harm::of(Kind::Left, left.join(", ")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Ends the guest and looks at everything that the soak can have left, also after a restart of both daemons.
///
/// # Errors
/// [`Kind::Left`] and the like.
pub fn nothing_left(mut field: Field) -> Result<()> {
    end_everything(&field)?;
    for again in [false, true] {
        if again {
            for node in &mut field.nodes {
                node.stop()?;
                node.run()?;
            }
        }
        for node in &field.nodes {
            gone_from(node).map_err(|error| Harm::of(Kind::Left, format!("{error:#}")))?;
        }
        tidied(|| {
            let mut left: Vec<_> = field.nodes.iter().flat_map(remnants).collect();
            left.extend(field.nodes.iter().flat_map(|node| files_in(&node.memory())));
            left.extend(field.nodes.iter().filter_map(huge_pages));
            let mounts = field.sandbox().mounts().into_iter().filter(|mount| !is_to_stay(&field, mount));
            left.extend(mounts.map(|mount| mount.display().to_string()));
            left.extend(
                field
                    .sandbox()
                    .processes()
                    .into_iter()
                    .filter(|pid| !is_daemon(&field, *pid))
                    .map(|pid| format!("process {pid}")),
            );
            left.extend(field.nodes.iter().filter_map(namespace));
            left
        })?;
    }
    Ok(())
}

/// A daemon mounts its folder of guest memory when it first needs it, and leaves it mounted.
fn is_to_stay(field: &Field, mount: &PathBuf) -> bool {
    field.mounts.contains(mount) || field.nodes.iter().any(|node| *mount == node.memory().join("thp"))
}

fn is_daemon(field: &Field, pid: i32) -> bool {
    field.nodes.iter().any(|node| node.pid() == Some(pid))
}

fn files_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |path: PathBuf| {
        if path.is_dir() { files_in(&path) } else { vec![path.display().to_string()] }
    };
    entries.flat_map(|entry| of(entry.path())).collect()
}

/// Huge pages that a daemon still has mapped, though there is no guest.
fn huge_pages(node: &Node) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid()?)).ok()?;
    let line = status.lines().find(|line| line.starts_with("HugetlbPages:"))?;
    (line.split_ascii_whitespace().nth(1)? != "0").then(|| format!("{line} of daemon {}", node.name()))
}

/// A namespace of a daemon that is not the one in which it was started.
fn namespace(node: &Node) -> Option<String> {
    let pid = node.pid()?;
    let kinds = ["mnt", "net", "pid", "user", "ipc", "uts"];
    let other = kinds.into_iter().find(|kind| {
        let link = |whose: &str| std::fs::read_link(format!("/proc/{whose}/ns/{kind}")).ok();
        link(&pid.to_string()) != link("self")
    })?;
    Some(format!("a {other} namespace of daemon {}", node.name()))
}
