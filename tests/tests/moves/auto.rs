//! What `auto` knows of the link, and what its reason says.
#![cfg(test)]

use vmove_guest::config::{Config, Rate};
use vmove_skip::need;
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, Scene, ready, vmove};

fn reason(end: &End) -> String {
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    end.answer["mode_reason"].as_str().expect("a reason").to_owned()
}

/// A guest with too little memory in use to measure a link by it.
fn tiny() -> Config {
    Config { working_set_mib: 1, cold_mib: 1, rate: Rate::PagesPerSecond(50), ..payload::light() }
}

#[test]
fn auto_measures_the_link_and_remembers_it_for_guests_too_small_to_measure_it() {
    need!(ready());
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = payload::guest(sandbox.path(), Accel::Tcg, &tiny(), KvmPages::None).expect("an image");
    let mut scene = Scene::in_sandbox(sandbox, "thp", &small).expect("a guest");
    let assumed = reason(&scene.migrate_to("b", &["--mode", "auto"]).expect("it ends"));
    assert!(assumed.contains("link is not measured"), "{assumed}");
    let back = vmove(&scene.b, &["migrate", NAME, "--to", "a"]).expect("it ends");
    assert_eq!(back.answer["link_bytes_per_s"], serde_json::Value::Null, "{}", back.answer);

    let large = vmove_tests::guest::Guest::new(320, vmove_tests::scene::steady()).expect("a QEMU");
    scene.a.run_guest("large", "thp", &large).expect("a second guest");
    let moved = vmove(&scene.a, &["migrate", "large", "--to", "b"]).expect("it ends");
    let measured = reason(&moved);
    assert!(measured.contains("link moves"), "{measured}");
    // A loopback of any machine.
    assert!(moved.answer["link_bytes_per_s"].as_f64().is_some_and(|rate| rate > 1e8), "{}", moved.answer);

    // It outlives the daemon.
    scene.a.stop().expect("it ends");
    scene.a.run().expect("it starts");
    let remembered = reason(&scene.migrate_to("b", &["--mode", "auto"]).expect("it ends"));
    assert!(remembered.contains("in the last migration to this node"), "{remembered}");
    scene.arrived().expect("the guest is whole");
}

#[test]
fn auto_counts_on_a_trial_of_the_fabric_where_no_migration_has_measured_it() {
    need!(ready());
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let small = payload::guest(sandbox.path(), Accel::Tcg, &tiny(), KvmPages::None).expect("an image");
    let scene = Scene::in_sandbox(sandbox, "thp", &small).expect("a guest");
    scene.a.vmove(&["fabric", "check", "b"]).expect("it is tried");
    let tried = reason(&scene.migrate_to("b", &["--mode", "auto"]).expect("it ends"));
    assert!(tried.contains("in `vmove fabric check`"), "{tried}");
    scene.arrived().expect("the guest is whole");
}

#[test]
fn auto_knows_the_limit_that_it_was_given() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let end = scene.migrate_to("b", &["--mode", "auto", "--bandwidth", "40MiB"]).expect("it ends");
    let why = reason(&end);
    assert!(why.contains("link may be used for 40.00 MiB/s"), "{why}");
    assert_eq!(end.answer["link_bytes_per_s"], serde_json::Value::Null, "{}", end.answer);
    scene.arrived().expect("the guest is whole");
}
