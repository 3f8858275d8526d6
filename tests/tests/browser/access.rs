//! The page without a mouse, without eyes, and on a small screen.
#![cfg(test)]

use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::browser::{Browser, Look};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;

use crate::served::{Served, ready};

/// Names of everything that has this role, as a screen reader has them.
fn named(tree: &Value, role: &str) -> Vec<String> {
    let nodes = tree["nodes"].as_array().expect("nodes");
    let of_role = nodes.iter().filter(|node| node["role"]["value"] == role && node["ignored"] != true);
    of_role.map(|node| node["name"]["value"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn keys_names_and_small_screens_are_enough() {
    need!(ready());
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let (a, _b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two nodes");
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
    a.run_guest("web", "thp", &guest.expect("a guest")).expect("it runs");
    let report = a.migrate("web", "b", &[]).expect("it moves");
    let page = Served::of(&a).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    let link = format!("a[href=\"#/migration/{}\"]", report.id);
    browser.wait(&tab, &format!("document.querySelector({link:?}) !== null")).expect("the migration");

    let tree = browser.ask(&tab, "Accessibility.getFullAXTree", &json!({})).expect("a tree");
    for (role, wanted) in [
        ("main", ""),
        ("region", "VMs"),
        ("region", "Past migrations"),
        ("table", "Past migrations"),
        ("columnheader", "Where"),
        ("rowheader", "web"),
        ("searchbox", "Only names with"),
        ("link", "To the content"),
    ] {
        assert!(
            named(&tree, role).iter().any(|name| name == wanted),
            "{role} {wanted}: {:?}",
            named(&tree, role)
        );
    }

    // From the top of the page to the migration by the tabulator alone, and into it.
    let at = "document.activeElement.getAttribute('href')";
    let wanted = format!("#/migration/{}", report.id);
    let steps = (1..30).find(|_| {
        browser.press(&tab, "Tab").expect("a key");
        browser.value(&tab, at).expect("a value") == wanted.as_str()
    });
    assert!(steps.is_some(), "no link to the migration by keys");
    let outline =
        browser.value(&tab, "getComputedStyle(document.activeElement).outlineStyle").expect("a style");
    assert_eq!(outline, "solid", "what has the focus is seen");
    browser.press(&tab, "Enter").expect("a key");
    browser.wait_for_text(&tab, "h1", "web to b").expect("the migration");
    assert_eq!(
        browser.value(&tab, "document.activeElement.id").expect("a value"),
        "view",
        "the focus is at what is new"
    );
    let tree = browser.ask(&tab, "Accessibility.getFullAXTree", &json!({})).expect("a tree");
    for phases in ["From the request to the end", "From STOP to RESUME"] {
        assert!(named(&tree, "table").iter().any(|name| name == phases), "{:?}", named(&tree, "table"));
    }

    for view in ["", &format!("migration/{}", report.id), "vm/web"] {
        browser.go(&tab, &page.view(view)).expect("a view");
        browser.look(&tab, Look { width: 400, height: 800, dark: false }).expect("a small screen");
        browser.wait(&tab, "document.querySelector('main h2') !== null").expect("a view");
        let wide = browser.value(&tab, "document.documentElement.scrollWidth").expect("a width");
        assert!(wide.as_u64().expect("a number") <= 400, "{view}: {wide}");
    }
}
