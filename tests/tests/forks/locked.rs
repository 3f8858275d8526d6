//! Forks of guests with locked memory. It cannot be mapped again, so it is write-protected and copied while they run.
#![cfg(test)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{light, until};
use vmove_tests::forks::{
    ForkPhase, Parent, done, journals, kill_in_fork_after, names, template_files, vfork,
};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, memory_mib, ready};

/// A guest that writes while its memory is copied, but does not use two cores completely.
fn busy() -> Config {
    Config { rate: Rate::PagesPerSecond(20_000), ..light() }
}

fn locked(node: &Node, config: &Config) -> Parent {
    let mut guest = Guest::new(memory_mib(config), config.clone()).expect("a QEMU");
    guest.extra.extend(["-overcommit", "mem-lock=on"].map(str::to_owned));
    let parent = Parent::start(node, NAME, "thp", guest).expect("the guest runs");
    assert!(locked_kib(node, NAME) >= u64::from(memory_mib(config)) << 10, "it is locked");
    parent
}

/// Locked memory of a VM's QEMU.
fn locked_kib(node: &Node, vm: &str) -> u64 {
    let pid = node.vm(vm).expect("it is listed").pid;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("a line");
    line.split_ascii_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Journals of forks.
fn nothing_is_left(node: &Node) {
    assert_eq!(template_files(node), Vec::<PathBuf>::new());
    assert_eq!(journals(node), Vec::<PathBuf>::new());
    assert_eq!(node.vms().expect("a list"), [NAME]);
}

#[test]
fn a_locked_guest_under_load_is_copied_and_can_be_forked_again() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let a = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = locked(&a, &busy());
    let config = busy();
    let pages = u64::from(memory_mib(&config)) << 8;
    for round in 1..=2 {
        let answer = done(&a, &["create", NAME, "--count", "1", "--verify"]).expect("a child");
        let freeze = &answer["freeze"];
        eprintln!("pause {} ms, {freeze}", answer["parent_pause_ms"]);
        assert_eq!(freeze["way"], "write-protected", "{answer}");
        assert!(freeze["why"].as_str().is_some_and(|why| why.contains("mem-lock=on")), "{freeze}");
        let count = |key: &str| freeze[key].as_u64().expect("a number");
        assert_eq!(count("pages_by_faults") + count("pages_by_copy"), pages, "each once: {freeze}");
        assert!(count("pages_by_faults") > 0, "it wrote meanwhile: {freeze}");
        assert!(count("kept_bytes") > 0 && count("kept_bytes") <= pages << 12, "{freeze}");
        assert!(answer.get("own_memory").is_none(), "the parent kept its own memory: {answer}");
        let warning = answer["warnings"][0].as_str().unwrap_or_default();
        assert!(warning.contains("not locked"), "{answer}");
        let boot = parent.sound(&a, NAME).expect("the parent is sound").boot;
        for name in names(&answer) {
            assert_eq!(parent.sound(&a, &name).expect("a child is sound").boot, boot);
            assert_eq!(locked_kib(&a, &name), 0, "{name}");
            assert_eq!(done(&a, &["tree", &name]).expect("a tree")["private"], true);
        }
        assert!(locked_kib(&a, NAME) > 0, "the parent still is");
        assert_eq!(done(&a, &["tree", NAME]).expect("a tree")["private"], false, "round {round}");
        for name in names(&answer) {
            done(&a, &["kill", &name]).expect("it ends");
        }
        nothing_is_left(&a);
    }
}

fn bytes(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).expect("it opens");
    let mut all = vec![0; usize::try_from(file.metadata().expect("stat").len()).expect("small")];
    file.read_exact_at(&mut all, 0).expect("it reads");
    all
}

/// A paused guest writes nearly nothing, so its memory can be compared with the copy. It writes a little, because QEMU leaves its saved
/// state only by `cont` and `stop`, and the guest runs for about 50 us between them.
#[test]
fn the_template_of_a_locked_guest_is_its_memory() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = locked(&node, &light());
    node.ask(&["pause", NAME]).expect("it pauses");
    let saved = done(&node, &["template", "save", NAME, "golden"]).expect("a template");
    assert_eq!(saved["freeze"]["way"], "write-protected", "{saved}");
    assert_eq!(node.vm(NAME).expect("it is listed").status, "paused");
    let (ram, copy) = (node.vm(NAME).expect("it is listed").ram, template_files(&node));
    let (memory, before) = (bytes(&ram[0].path), bytes(&copy[0]));
    let pages = memory.len() / 4096;
    let differ = memory.chunks(4096).zip(before.chunks(4096)).filter(|(a, b)| a != b).count();
    eprintln!("{differ} of {pages} pages differ");
    assert!(differ < pages / 100, "{differ} of {pages} pages of the copy are not its memory");
    node.ask(&["resume", NAME]).expect("it resumes");
    parent.sound(&node, NAME).expect("it runs on");
    let answer =
        done(&node, &["create", "--template", "golden", "--count", "2", "--verify"]).expect("children");
    for name in names(&answer) {
        parent.sound(&node, &name).expect("sound");
        assert_eq!(locked_kib(&node, &name), 0);
    }
    assert!(bytes(&copy[0]) == before, "nobody writes to the template");
}

/// Where the tmpfs with the guest memory of `node` is mounted.
fn memory_mount(node: &Node) -> String {
    let file = node.vm(NAME).expect("it is listed").ram[0].path.clone();
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    let holds = points.filter(|point| file.starts_with(point));
    holds.max_by_key(|point| point.len()).expect("a mount").to_owned()
}

/// Sets the size of a tmpfs: false if more is in it already.
fn resize(mount: &str, size: &str) -> bool {
    let done = std::process::Command::new("mount")
        .args(["-o", &format!("remount,size={size}"), mount])
        .output()
        .expect("mount runs");
    done.status.success()
}

#[test]
fn a_copy_without_room_is_given_up_and_the_guest_goes_on() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let config = "[fork]\ncopy-limit-mib = 8\n".to_owned();
    let node =
        Node::start(&sandbox, "a", NodeOptions { config, ..NodeOptions::default() }).expect("a daemon");
    let parent = locked(&node, &light());
    let refused = |node: &Node, words: &[&str]| {
        let end = vfork(node, &["create", NAME, "--count", "2"]).expect("an answer");
        assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
        for word in words {
            assert!(end.said.contains(word), "{word}: {}", end.said);
        }
        eprintln!("{}", end.said.trim());
        parent.sound(node, NAME).expect("the guest runs on");
        nothing_is_left(node);
    };
    refused(&node, &["its limit of 8 MiB", "MiB kept", "copy-limit-mib"]);
}

/// The tmpfs has enough space when the fork begins, but not later.
#[test]
fn a_copy_that_fills_its_memory_is_given_up_and_the_guest_goes_on() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = locked(&node, &light());
    let used = u64::from(memory_mib(&light()));
    let memory = memory_mount(&node);
    // Refused before anything is begun.
    assert!(resize(&memory, &format!("{}m", used + 64)), "the guest alone takes more than {used} MiB");
    let end = vfork(&node, &["create", NAME, "--count", "2"]).expect("an answer");
    assert_eq!(end.code, 3, "{} {}", end.answer, end.said);
    assert!(end.said.contains(&format!("{used} MiB of template + 2 x (32 MiB of QEMU")), "{}", end.said);

    assert!(resize(&memory, "100%"));
    std::thread::scope(|scope| {
        let forking = scope.spawn(|| vfork(&node, &["create", NAME, "--count", "2"]));
        while template_files(&node).is_empty() {
            assert!(!forking.is_finished(), "it ends without a copy");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The copy stands still meanwhile. Its end gets room for 4 MiB more at most.
        let daemon = Pid::from_raw(node.pid().expect("it runs"));
        kill(daemon, Signal::SIGSTOP).expect("it stops");
        let mut sizes = (used + 4..2 * used).step_by(4).map(|mib| format!("{mib}m"));
        let fits = sizes.any(|size| resize(&memory, &size));
        kill(daemon, Signal::SIGCONT).expect("it goes on");
        assert!(fits, "the copy was there at once");
        let end = forking.join().expect("no panic").expect("an answer");
        assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
        for word in ["given up", "no memory left", "Free memory"] {
            assert!(end.said.contains(word), "{word}: {}", end.said);
        }
        eprintln!("{}", end.said.trim());
    });
    parent.sound(&node, NAME).expect("the guest runs on");
    nothing_is_left(&node);
    assert!(resize(&memory, "100%"));
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can still be forked");
    parent.sound(&node, &names(&answer)[0]).expect("sound");
}

#[test]
fn a_daemon_killed_while_memory_is_protected_leaves_the_guest_running() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let parent = locked(&node, &busy());
    let page = parent.page(&node.vm(NAME).expect("it is listed")).expect("a beacon");
    let mut hit = 0;
    for after_ms in [0, 1, 3, 6, 10, 20, 40] {
        let found = kill_in_fork_after(&mut node, 1, ForkPhase::Keeping, || {
            if after_ms > 0 {
                // Without this wait, the guest may still be stopped, and stays so until the daemon is restarted.
                let first = page.read().expect("a beacon");
                until("the guest runs again", || page.read().is_some_and(|now| now.beats > first.beats));
            }
            std::thread::sleep(Duration::from_millis(after_ms));
        });
        // Without a daemon, memory is not protected any more, so the guest must not wait.
        if found == ForkPhase::Keeping && after_ms > 0 {
            hit += 1;
            let first = page.read().expect("a beacon");
            until("the guest writes on without a daemon", || {
                page.read().is_some_and(|now| now.beats > first.beats + 20)
            });
        }
        node.run().expect("the next life");
        parent.sound(&node, NAME).unwrap_or_else(|error| panic!("after {after_ms} ms: {error:#}"));
        for child in node.vms().expect("a list").iter().filter(|name| *name != NAME) {
            done(&node, &["kill", child]).expect("it ends");
        }
        nothing_is_left(&node);
        assert_eq!(done(&node, &["tree", NAME]).map_or(Value::Null, |tree| tree["private"].clone()), false);
    }
    assert!(hit >= 2, "killed {hit} times while memory was protected");
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can still be forked");
    parent.sound(&node, &names(&answer)[0]).expect("sound");
}
