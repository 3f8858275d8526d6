//! Migrations that succeed, and what is as it was afterwards.

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::guest::Guest;
use vmove_tests::libvirt::{self, Arm, DOMAIN, Pair};
use vmove_tests::scene;

pub fn guest() -> Guest {
    scene::steady_guest().expect("a guest")
}

#[test]
fn virsh_migrates_a_guest_to_and_fro_ten_times() {
    need!(libvirt::ready());
    let pair = Pair::running(&guest()).expect("two hosts");
    for round in 0..10 {
        let from = round % 2;
        pair.migrate(from, &[]).unwrap_or_else(|error| panic!("migration {round}: {error}\n{}", pair.logs()));
        pair.sound_at(1 - from).unwrap_or_else(|error| panic!("after migration {round}: {error:#}"));
    }
    // As other migrations are told of.
    let here = &pair.hosts[0].node;
    let list = here.ask(&["list"]).expect("a list");
    assert_eq!(list["vms"][0]["name"], DOMAIN, "{list}");
    assert_eq!(
        (&list["vms"][0]["libvirt"], &list["vms"][0]["status"]),
        (&Value::Bool(true), &"running".into())
    );
    let history = here.ask(&["history"]).expect("a history");
    let all = history["migrations"].as_array().expect("migrations");
    assert_eq!(all.len(), 10, "{history}");
    assert!(all.iter().all(|one| one["outcome"]["state"] == "done"), "{history}");
    let sent = all.iter().find(|one| one["role"] == "source").expect("one from here");
    assert!(sent["outcome"]["report"]["downtime_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{sent}");
    let done = here.metric("vmove_migrations_total{node=\"a\",outcome=\"done\",role=\"source\"}");
    assert!(done.is_ok(), "{done:?}");
    // Saved to a file with all of its memory, and restored.
    let file = pair.path().join("saved");
    let file = file.to_string_lossy();
    pair.hosts[0].virsh(&["save", DOMAIN, &file]).expect("saved");
    pair.hosts[0].virsh(&["restore", &file]).expect("restored");
    pair.sound_at(0).expect("sound after it was saved and restored");
}

#[test]
fn a_domain_that_is_not_enabled_migrates_as_before() {
    need!(libvirt::ready());
    let pair = Pair::running_as(&guest(), Arm::Plain).expect("two hosts");
    std::thread::sleep(std::time::Duration::from_secs(5));
    pair.migrate(0, &[]).expect("libvirt migrates it");
    assert!(pair.hosts[1].runs().expect("a state"));
    assert!(pair.hosts[1].node.ask(&["list"]).expect("a list")["vms"].as_array().is_some_and(Vec::is_empty));
    assert!(
        pair.hosts[1].node.ask(&["history"]).expect("a history")["migrations"]
            .as_array()
            .is_some_and(Vec::is_empty)
    );
}
