//! A kernel without `PAGEMAP_SCAN` (before Linux 6.7): only post-copy is possible, and it works.
#![cfg(test)]

use serde_json::json;
use vmove_skip::need;
use vmove_tests::daemon::NodeOptions;
use vmove_tests::guest::Guest;
use vmove_tests::old_kernel;
use vmove_tests::old_kernel::Before;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{Scene, memory_mib, ready, steady, vmove};

#[test]
fn without_pagemap_scan_a_guest_moves_by_post_copy_only() {
    need!(ready());
    need!(old_kernel::possible());
    let sandbox = Sandbox::new().expect("a sandbox");
    let options = NodeOptions { old_kernel: Some(Before::V6_7), ..NodeOptions::default() };
    let guest = Guest::new(memory_mib(&steady()), steady()).expect("a QEMU");
    let scene = Scene::with_options(sandbox, &options, "thp", &guest).expect("a guest");
    let node = scene.a.ask(&["node"]).expect("an answer");
    assert!(node.to_string().contains("PAGEMAP_SCAN"), "`vmove node` does not say what is missing: {node}");

    let check = vmove(&scene.a, &["check", "guest", "--to", "b"]).expect("an answer");
    assert_eq!(check.code, 0, "{} {}", check.answer, check.said);
    assert_eq!(check.answer["modes"], json!(["postcopy"]), "{}", check.answer);
    let why = &check.answer["blockers"][0];
    assert_eq!(why["code"], "no-pagemap-scan", "{}", check.answer);
    assert!(why["message"].as_str().is_some_and(|m| m.contains("6.7") && m.contains("post-copy")), "{why}");

    for mode in ["hybrid", "precopy"] {
        let refused = scene.migrate_to("b", &["--mode", mode]).expect("it ends");
        assert_eq!((refused.code, &refused.answer["guest"]), (3, &"source".into()), "{}", refused.answer);
        assert!(refused.said.contains("no-pagemap-scan"), "{mode}: {}", refused.said);
        scene.unharmed().expect("nothing was changed");
    }

    let end = scene.migrate_to("b", &["--mode", "auto", "--verify"]).expect("it ends");
    assert_eq!(end.code, 0, "{} {}\nb: {}", end.answer, end.said, scene.b.log());
    assert_eq!(end.answer["mode"], "postcopy", "{}", end.answer);
    assert!(end.answer["mode_reason"].as_str().is_some_and(|w| w.contains("PAGEMAP_SCAN")), "{}", end.answer);
    assert_eq!(end.answer["verified"], true, "{}", end.answer);
    scene.arrived().expect("the guest is whole");
}
