//! Guests that fork themselves to other hosts: their children share a job there, and the parent collects the results, whatever becomes of
//! daemons and links meanwhile.
#![cfg(test)]

use std::time::{Duration, Instant};

use serde_json::Value;
use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::fleet::{Fleet, Setup, fleet_with, host, lose, ready, until};
use vmove_tests::guest::failures;
use vmove_tests::scene::{NAME, STEP_TIMEOUT};

/// Seconds for which children wait before they end, where something is to happen meanwhile.
const HOLD_S: u32 = 12;

fn task(fork: u32) -> Config {
    Config { working_set_mib: 8, rate: Rate::PagesPerSecond(500), verify: 2_000, fork, ..Config::default() }
}

/// Nodes n1 to n`count`; children are dealt out to `to`.
fn fleet(count: u8, task: Config, to: &str, more: &str) -> Fleet {
    let setup = Setup { config: Some(task), port: true, ..Setup::default() };
    fleet_with(count, &setup, |_| format!("from-guest = true\nfrom-guest-to = {to}\n{more}"))
}

fn console(fleet: &Fleet) -> String {
    fleet.nodes[0].vm(NAME).expect("it is listed").console()
}

/// Waits until the parent has printed `words`, and nothing went wrong in it. Returns all of its output.
fn printed(fleet: &Fleet, words: &str) -> String {
    let deadline = Instant::now() + 2 * STEP_TIMEOUT;
    loop {
        let console = console(fleet);
        let failed = failures(&console);
        assert!(failed.is_empty(), "{failed:#?} {}", fleet.nodes[0].log());
        if console.contains(words) {
            return console;
        }
        assert!(
            Instant::now() < deadline,
            "the guest never said {words:?}: {console} {:#?}",
            fleet.nodes.iter().map(|node| node.log()).collect::<Vec<_>>()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What the guest printed of its answers of this kind.
fn answers(console: &str, what: &str) -> Vec<Value> {
    let start = format!("VMOVE-GUEST PORT {what}: ");
    let lines = console.lines().filter_map(|line| line.strip_prefix(&start));
    lines.map(|line| serde_json::from_str(line).expect("an answer is JSON")).collect()
}

/// No child is left anywhere, and nothing that was noted of a ticket.
fn is_clean(fleet: &Fleet) {
    nothing_is_left(fleet);
    fleet.parent.sound(&fleet.nodes[0], NAME).expect("the parent is sound");
}

fn nothing_is_left(fleet: &Fleet) {
    for node in &fleet.nodes {
        let own: &[&str] = if node.name() == "n1" { &[NAME] } else { &[] };
        until("its children have ended", || node.vms().expect("a list") == own);
        for folder in ["tickets", "answers"] {
            let path = node.folder().join("state/forks").join(folder);
            let left = || {
                std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>()
            };
            until(&format!("{} has nothing in {folder}", node.name()), || left().is_empty());
        }
    }
}

#[test]
fn eight_children_on_four_hosts_share_a_job_and_are_joined() {
    need!(ready());
    let fleet = fleet(4, task(8), r#"["self", "n2", "n3", "n4"]"#, "max-children = 8\n");
    let console = printed(&fleet, "VMOVE-GUEST JOB done");
    // Those that are killed, on all hosts; then two rounds.
    assert_eq!(answers(&console, "kill")[0]["children"], 8, "{console}");
    let joined = answers(&console, "join");
    let lost = joined[0]["children"].as_array().expect("children").iter().filter(|c| c["lost"] == "killed");
    assert_eq!(lost.count(), 8, "{console}");
    let forks = answers(&console, "fork");
    assert_eq!(forks.len(), 2, "{console}");
    for (fork, joined) in forks.iter().zip(&joined[1..]) {
        assert_eq!((&fork["role"], &fork["size"]), (&"parent".into(), &8.into()));
        let indexes: Vec<u64> = joined["children"]
            .as_array()
            .expect("children")
            .iter()
            .filter_map(|c| c["index"].as_u64())
            .collect();
        assert_eq!(indexes, (1..=8).collect::<Vec<_>>(), "{console}");
        let path = format!("/v1/forks/{}", fork["ticket"].as_str().expect("a ticket"));
        let (status, progress) = fleet.nodes[0].rest("GET", &path, &Value::Null).expect("an answer");
        assert_eq!(status, 200, "{progress}");
        let report = &progress["report"];
        let on = |node: &str| {
            report["children"].as_array().expect("children").iter().filter(|c| c["node"] == node).count()
        };
        assert_eq!(["n1", "n2", "n3", "n4"].map(on), [2; 4], "{report}");
        // Memory comes to each host once, for both of its children.
        let memory = report["distribution"]["memory_bytes"].as_u64().expect("bytes");
        for node in ["n2", "n3", "n4"] {
            let of = |whence: &str| host(report, node)[whence].as_u64().expect("bytes");
            let came = of("from_root_bytes") + of("from_hosts_bytes") + of("multicast_bytes");
            #[allow(clippy::cast_precision_loss)]
            let copies = came as f64 / memory as f64;
            eprintln!("{node}: {copies:.3} copies of {memory} bytes");
            assert!((0.9..1.2).contains(&copies), "{node}: {report}");
        }
    }
    is_clean(&fleet);
}

#[test]
fn a_ticket_outlives_the_daemon_of_its_guest() {
    need!(ready());
    let task = Config { hold_s: HOLD_S, ..task(4) };
    let mut fleet = fleet(2, task, r#"["self", "n2"]"#, "");
    printed(&fleet, "VMOVE-GUEST PORT fork: ");
    // The guest waits in its join. Its children end while nobody is there to hear them.
    let noted = fleet.nodes[0].folder().join("state/forks/answers").join(format!("{NAME}.json"));
    until("its join is noted", || std::fs::read_to_string(&noted).is_ok_and(|text| text.contains("join")));
    fleet.nodes[0].crash();
    std::thread::sleep(Duration::from_secs(u64::from(HOLD_S) + 4));
    fleet.nodes[0].run().expect("a daemon");
    let console = printed(&fleet, "VMOVE-GUEST JOB done");
    assert!(console.contains("round 0: 4 children"), "{console}");
    is_clean(&fleet);
}

#[test]
fn children_keep_their_results_for_a_daemon_of_their_host_that_is_killed() {
    need!(ready());
    let task = Config { hold_s: HOLD_S, ..task(4) };
    let mut fleet = fleet(2, task, r#"["self", "n2"]"#, "");
    printed(&fleet, "VMOVE-GUEST PORT fork: ");
    fleet.nodes[1].crash();
    std::thread::sleep(Duration::from_secs(u64::from(HOLD_S) + 4));
    assert!(answers(&console(&fleet), "join").is_empty(), "two of its children have not been heard");
    fleet.nodes[1].run().expect("a daemon");
    printed(&fleet, "round 0: 4 children");
    printed(&fleet, "VMOVE-GUEST JOB done");
    is_clean(&fleet);
}

#[test]
fn a_result_comes_when_the_link_is_back() {
    need!(ready());
    let task = Config { hold_s: HOLD_S, ..task(2) };
    let fleet = fleet(2, task, r#"["n2"]"#, "");
    printed(&fleet, "VMOVE-GUEST PORT fork: ");
    fleet.networks.cut(2, true).expect("the link is cut");
    until("its children have ended behind the cut", || fleet.nodes[1].vms().expect("a list").is_empty());
    assert!(answers(&console(&fleet), "join").is_empty(), "nobody could tell");
    fleet.networks.cut(2, false).expect("the link is back");
    let begun = Instant::now();
    printed(&fleet, "round 0: 2 children");
    eprintln!("the results came {} ms after the link", begun.elapsed().as_millis());
    is_clean(&fleet);
}

#[test]
fn a_host_has_results_on_its_disk_until_they_are_fetched() {
    need!(ready());
    let task = Config { hold_s: HOLD_S, ..task(2) };
    let mut fleet = fleet(2, task, r#"["n2"]"#, "");
    printed(&fleet, "VMOVE-GUEST PORT fork: ");
    fleet.networks.cut(2, true).expect("the link is cut");
    until("its children have ended behind the cut", || fleet.nodes[1].vms().expect("a list").is_empty());
    fleet.nodes[1].crash();
    fleet.nodes[1].run().expect("a daemon");
    fleet.networks.cut(2, false).expect("the link is back");
    printed(&fleet, "round 0: 2 children");
    is_clean(&fleet);
}

#[test]
fn a_guest_is_answered_however_far_its_fork_had_come() {
    need!(ready());
    let mut fleet = fleet(2, Config { hold_s: 1, ..task(4) }, r#"["self", "n2"]"#, "");
    until("the guest asks", || fleet.nodes[0].log().contains("a guest forks itself"));
    fleet.nodes[0].crash();
    fleet.nodes[0].run().expect("a daemon");
    // Either it is told that there are no children, or it has some, of which those that did not run are lost.
    until("the guest is answered", || {
        let console = console(&fleet);
        let refused = console.contains(r#""error":"fork-failed""#);
        refused || !answers(&console, "join").is_empty()
    });
    let console = console(&fleet);
    eprintln!(
        "{}",
        console
            .lines()
            .filter(|line| line.contains("PORT") || line.contains("ERROR"))
            .collect::<Vec<_>>()
            .join("\n")
    );
    nothing_is_left(&fleet);
}

#[test]
fn each_host_takes_as_many_as_it_lets_guests_have() {
    need!(ready());
    let setup = Setup { config: Some(Config { hold_s: 1, ..task(6) }), port: true, ..Setup::default() };
    let fleet = fleet_with(4, &setup, |number| {
        let own = match number {
            2 => "from-guest = false\n",
            3 => "from-guest = true\nfrom-guest-max-children = 1\n",
            4 => "from-guest = true\nfrom-guest-max-depth = 1\n",
            _ => "from-guest = true\n",
        };
        format!("{own}from-guest-to = [\"n2\", \"n3\", \"n4\"]\n")
    });
    let console = printed(&fleet, "VMOVE-GUEST JOB done");
    assert_eq!(answers(&console, "fork")[0]["size"], 2, "{console}");
    assert!(fleet.nodes[0].log().contains("this host lets no guest fork itself"), "{}", fleet.nodes[0].log());
    assert!(fleet.nodes[0].log().contains("all guests together have 1"), "{}", fleet.nodes[0].log());
    is_clean(&fleet);
}

#[test]
fn children_of_children_count_among_those_of_the_first_guest() {
    need!(ready());
    // Two children, and two of the first of these to ask: the third and fourth of three.
    let task = Config { nest: 2, ..task(2) };
    let fleet = fleet(1, task, r#"["self"]"#, "max-children = 3\n");
    until("a child is refused", || {
        let said = |child: &str| fleet.nodes[0].vm(child).map(|vm| vm.console()).unwrap_or_default();
        ["guest.1", "guest.2"].iter().all(|child| said(child).contains("3 are allowed"))
    });
}

#[test]
fn children_of_a_host_that_is_lost_for_good_count_as_lost() {
    need!(ready());
    let task = Config { hold_s: 600, ..task(2) };
    let mut fleet = fleet(2, task, r#"["n2"]"#, "from-guest-lost-after-s = 5\n");
    printed(&fleet, "VMOVE-GUEST PORT fork: ");
    lose(&mut fleet.nodes[1]);
    let begun = Instant::now();
    until("the guest is told", || !answers(&console(&fleet), "join").is_empty());
    let joined = &answers(&console(&fleet), "join")[0];
    eprintln!("told after {} ms: {joined}", begun.elapsed().as_millis());
    for child in joined["children"].as_array().expect("children") {
        assert_eq!(child["lost"], "its host cannot be reached", "{joined}");
    }
    assert!(begun.elapsed() > Duration::from_secs(5));
}

#[test]
fn children_fork_themselves_as_deep_as_the_host_lets_them() {
    need!(ready());
    let task = Config { nest: 2, ..task(2) };
    let fleet = fleet(2, task, r#"["self", "n2"]"#, "from-guest-max-depth = 2\n");
    let console = printed(&fleet, "VMOVE-GUEST JOB done");
    assert!(console.contains("round 0: 2 children"), "{console}");
    is_clean(&fleet);
    // One child was forked on its parent's node, the other one elsewhere; each has forked to both.
    let ran = |node: usize| fleet.nodes[node].log().matches("a guest forks itself").count();
    assert_eq!([ran(0), ran(1)], [2, 1], "{} {}", fleet.nodes[0].log(), fleet.nodes[1].log());
}
