//! Guests that fork themselves: children share a job, the parent collects the results. Also what is refused.
#![cfg(test)]

use std::time::{Duration, Instant};

use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::forks::{PORT, Parent};
use vmove_tests::guest::{Guest, VIRTIO, failures};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, STEP_TIMEOUT, memory_mib, ready};

fn task() -> Config {
    Config { working_set_mib: 8, rate: Rate::PagesPerSecond(500), verify: 2_000, ..Config::default() }
}

fn stage(config: &str, task: Config) -> (Node, Parent, Sandbox) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let options = NodeOptions { config: config.to_owned(), ..NodeOptions::default() };
    let node = Node::start(&sandbox, "a", options).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&task), task).expect("a QEMU");
    guest.modules = VIRTIO.into_iter().chain(["virtio_console"]).collect();
    guest.extra = PORT.map(str::to_owned).to_vec();
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    (node, parent, sandbox)
}

/// Waits until the guest has printed `words`. Returns all of its output.
fn printed(node: &Node, words: &str) -> String {
    let deadline = Instant::now() + STEP_TIMEOUT;
    loop {
        let console = node.vm(NAME).expect("it is listed").console();
        let failed = failures(&console);
        assert!(failed.is_empty(), "{failed:#?}");
        if console.contains(words) {
            return console;
        }
        assert!(Instant::now() < deadline, "the guest never said {words:?}: {console} {}", node.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The line in which the guest printed an answer.
fn line<'a>(console: &'a str, what: &str) -> &'a str {
    let start = format!("VMOVE-GUEST PORT {what}: ");
    console
        .lines()
        .find_map(|line| line.strip_prefix(&start))
        .unwrap_or_else(|| panic!("no {what} in {console}"))
}

#[test]
fn a_guest_shares_a_job_with_its_children() {
    need!(ready());
    let task = Config { fork: 4, ..task() };
    let (node, parent, _sandbox) = stage("[fork]\nfrom-guest = true\nmax-children = 4\n", task);
    let console = printed(&node, "VMOVE-GUEST JOB done");
    eprintln!(
        "{}",
        console.lines().filter(|l| l.contains("JOB") || l.contains("PORT")).collect::<Vec<_>>().join("\n")
    );
    assert!(line(&console, "kill").contains(r#""children":4"#), "{console}");
    assert_eq!(line(&console, "join").matches(r#""lost":"killed""#).count(), 4, "{console}");
    for round in ["round 0: 4 children", "round 1: 4 children"] {
        assert!(console.contains(round), "{round}: {console}");
    }
    // Children end with their results.
    let deadline = Instant::now() + Duration::from_secs(10);
    while node.vms().expect("a list") != [NAME] {
        assert!(Instant::now() < deadline, "{:?}", node.vms());
        std::thread::sleep(Duration::from_millis(50));
    }
    parent.sound(&node, NAME).expect("the parent is sound");
}

#[test]
fn what_a_guest_may_not_do_is_answered() {
    need!(ready());
    let task = Config { misbehave: true, ..task() };
    let (node, parent, _sandbox) = stage("[fork]\nfrom-guest = true\nmax-children = 3\n", task);
    let console = printed(&node, "came too fast");
    for what in ["garbage", "unknown", "ticket", "exit", "long"] {
        assert!(line(&console, what).contains(r#""error":"bad-request""#), "{what}: {console}");
    }
    assert!(line(&console, "zero").contains("error"), "{console}");
    assert!(line(&console, "many").contains(r#""error":"forbidden""#), "{console}");
    assert!(line(&console, "many").contains("3 are allowed"), "{console}");
    let fast: u32 = line(&console, "flood").split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    assert!(fast > 0, "{console}");
    assert_eq!(node.vms().expect("a list"), [NAME]);
    parent.sound(&node, NAME).expect("the guest is sound");
}

#[test]
fn all_guests_together_get_no_more_than_the_host_gives_them() {
    need!(ready());
    let task = Config { misbehave: true, ..task() };
    let limits = "from-guest = true\nmax-children = 2000000\nfrom-guest-max-mib = 1000\n";
    let (node, parent, _sandbox) = stage(&format!("[fork]\n{limits}"), task);
    let console = printed(&node, "came too fast");
    let many = line(&console, "many");
    assert!(
        many.contains(r#""error":"forbidden""#) && many.contains("all guests together have 1000 MiB"),
        "{console}"
    );
    assert!(node.log().contains("a guest may not fork itself as it asked"), "{}", node.log());
    assert_eq!(node.vms().expect("a list"), [NAME]);
    parent.sound(&node, NAME).expect("the guest is sound");
}

#[test]
fn a_guest_cannot_fork_itself_unless_the_host_lets_it() {
    need!(ready());
    let task = Config { misbehave: true, ..task() };
    let (node, _parent, _sandbox) = stage("", task);
    let console = printed(&node, "came too fast");
    for what in ["zero", "many", "ticket"] {
        assert!(line(&console, what).contains(r#""error":"forbidden""#), "{what}: {console}");
    }
    assert_eq!(node.vms().expect("a list"), [NAME]);
}
