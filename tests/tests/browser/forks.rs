//! A guest that is forked to another host.
#![cfg(test)]

use vmove_skip::need;
use vmove_tests::browser::Browser;
use vmove_tests::fleet::{fleet, plain};
use vmove_tests::forks::{done, names};
use vmove_tests::scene::NAME;

use crate::served::{Served, calm, pictures, ready};

#[test]
fn a_forks_tree_and_its_hosts_are_shown() {
    need!(ready());
    need!(vmove_tests::fleet::ready());
    let fleet = fleet(2, plain);
    let page = Served::of(&fleet.nodes[0]).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.view(&format!("vm/{NAME}"))).expect("the page");
    browser.wait_for_text(&tab, ".tree", NAME).expect("the guest alone");
    browser.wait_for_text(&tab, "main", "It was not forked.").expect("no fork");

    let made = done(&fleet.nodes[0], &["create", NAME, "--count", "3", "--node", "n2", "--here", "1"])
        .expect("children");
    for child in names(&made) {
        browser.wait_for_text(&tab, ".tree", &child).expect("a child");
    }
    browser.wait(&tab, "document.querySelectorAll('.tree ul li').length === 3").expect("three children");
    let tree = browser.text(&tab, ".tree").expect("text");
    assert_eq!(tree.matches("on n2").count(), 2, "{tree}");
    browser.wait_for_text(&tab, "main", "3 of 3").expect("all run");
    browser.wait_for_text(&tab, "main", "2 of 2").expect("those of the other host");
    let pause = made["parent_pause_ms"].as_f64().expect("a pause");
    browser.wait_for_text(&tab, "main", &format!("{pause:.1} ms")).expect("the parent's pause");
    pictures(&mut browser, &tab, "fork", 670).expect("pictures");
    calm(&mut browser, &tab, &page.url).expect("nothing but its own server was asked");
}
