//! Names and errors that would be HTML if they were taken for it.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::browser::Browser;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::guest::Accel;
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::sandbox::Sandbox;

use crate::served::{Served, calm, ready};

// Without `=`, which QEMU takes for an option in the path of the monitor.
const VM: &str = "<u><script>hit()";
const NODE: &str = "<svg onload=hit=1><i id=hit>";

#[test]
fn text_of_others_never_becomes_html() {
    need!(ready());
    need!(payload::ready(Accel::Tcg));
    let sandbox = Sandbox::new().expect("a sandbox");
    let nobody = vmove_skip::free_port();
    let peers = vec![(NODE.to_owned(), nobody)];
    let node = Node::start(&sandbox, "a", NodeOptions { peers, ..NodeOptions::default() }).expect("a node");
    let guest = payload::guest(sandbox.path(), Accel::Tcg, &payload::light(), KvmPages::None);
    node.run_guest(VM, "thp", &guest.expect("a guest")).expect("it runs");
    let failed = node.vmove(&["--json", "migrate", VM, "--to", NODE]).expect("a command");
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");

    let page = Served::of(&node).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    browser.wait_for_text(&tab, "main", VM).expect("the name of the VM, as it is");
    browser.wait_for_text(&tab, "main", &format!("to {NODE}")).expect("the name of the node, as it is");
    // Each view that shows them: of the VM, and of its migration, with the error.
    browser.value(&tab, "document.querySelector('a[href^=\"#/vm/\"]').click()").expect("a link");
    browser.wait_for_text(&tab, "h1", VM).expect("the VM");
    browser.wait_for_text(&tab, ".tree", VM).expect("its tree");
    browser
        .wait(&tab, "document.querySelector('a[href^=\"#/migration/\"]') !== null")
        .expect("its migration");
    browser.value(&tab, "document.querySelector('a[href^=\"#/migration/\"]').click()").expect("a link");
    browser.wait_for_text(&tab, "h1", NODE).expect("the migration");
    browser.wait_for_text(&tab, ".troubles", NODE).expect("its error");
    let made = "document.querySelector('#hit, main u, main script, [onload]') !== null";
    assert_eq!(browser.value(&tab, made).expect("a value"), false);
    calm(&mut browser, &tab, &page.url).expect("nothing was tried");
    // The check itself: what the page does not do, and Chromium would not let it do.
    let tried =
        "try { document.querySelector('main').innerHTML = '<b id=hit></b>'; 'taken' } catch (e) { e.name }";
    assert_eq!(browser.value(&tab, tried).expect("a value"), "TypeError");
    browser.value(&tab, "document.querySelector('main').append(Object.assign(document.createElement('b'), { id: 'hit' }))").expect("a value");
    assert_eq!(browser.value(&tab, made).expect("a value"), true);
    let elsewhere = format!("fetch('http://{nobody}/').then(() => 'asked', (e) => e.name)");
    assert_eq!(browser.value(&tab, &elsewhere).expect("a value"), "TypeError");
    assert!(calm(&mut browser, &tab, &page.url).is_err(), "the policy forbids to ask others");
}
