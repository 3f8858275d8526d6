//! A page that is not answered.
#![cfg(test)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::browser::{Browser, Tab};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::pki::{Pki, Validity};
use vmove_tests::sandbox::Sandbox;

use crate::served::{Served, ready};

const CALM: &str = "document.getElementById('trouble').childElementCount === 0";

fn told(browser: &mut Browser, tab: &Tab, words: &[&str]) {
    for word in words {
        browser.wait_for_text(tab, "#trouble", word).expect("it is said");
    }
}

#[test]
fn a_page_that_loses_its_daemon_says_so_and_comes_back() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a node");
    let mut page = Served::of(&node).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    browser.wait_for_text(&tab, "#node", "a: 0 VMs").expect("the node");
    assert_eq!(browser.value(&tab, CALM).expect("a value"), true);

    node.crash();
    told(&mut browser, &tab, &["vmoved does not answer", "systemctl start vmoved", "What is shown is of"]);
    assert_eq!(
        browser.text(&tab, "#node").expect("text").split(',').next(),
        Some("a: 0 VMs"),
        "what was known stays"
    );
    node.run().expect("it starts again");
    browser.wait(&tab, CALM).expect("it is taken back");
    browser.wait_for_text(&tab, "#said", "vmoved answers again").expect("it is told");

    // One that hangs.
    let pid = Pid::from_raw(node.pid().expect("it runs"));
    kill(pid, Signal::SIGSTOP).expect("it stops");
    told(&mut browser, &tab, &["vmoved does not answer", "It has said nothing for 15 s"]);
    kill(pid, Signal::SIGCONT).expect("it goes on");
    browser.wait(&tab, CALM).expect("it is taken back");

    page.process.kill();
    told(&mut browser, &tab, &["The server of this page does not answer", "start it again"]);
}

fn configure(node: &Node, clients: &str) {
    let path = node.folder().join("vmoved.toml");
    let text = std::fs::read_to_string(&path).expect("a configuration");
    let rest = text.split_once("[nodes]").expect("its nodes").1;
    std::fs::write(&path, format!("{clients}\n[nodes]{rest}")).expect("a configuration");
    kill(Pid::from_raw(node.pid().expect("it runs")), Signal::SIGHUP).expect("it is told");
}

#[test]
fn a_role_that_has_expired_is_said() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let pki = Pki::new(&["127.0.0.1".parse().expect("an address")]).expect("certificates");
    let viewer = "[[client]]\nname = \"eyes\"\nrole = \"viewer\"\n";
    let options = NodeOptions { extra: pki.flags(), config: viewer.to_owned(), ..NodeOptions::default() };
    let node = Node::start(&sandbox, "a", options).expect("a node");
    let shown = pki.client("eyes").expect("a certificate");
    let page = Served::over_tls(&node, &shown).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    browser.wait_for_text(&tab, "#node", "a: 0 VMs").expect("the node, over TLS");

    configure(&node, "");
    told(&mut browser, &tab, &["You may not look at what vmoved knows", "no [[client]] entry"]);
    configure(&node, viewer);
    browser.wait(&tab, CALM).expect("the role is back");
}

#[test]
fn a_certificate_that_has_expired_is_said_and_a_new_one_is_taken() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let here = ["127.0.0.1".parse().expect("an address")];
    let pki = Pki::new(&here).expect("certificates");
    let shown = pki.client("eyes").expect("a certificate");
    pki.sign_client("eyes", Validity::Expired).expect("one that has expired");
    let viewer = "[[client]]\nname = \"eyes\"\nrole = \"viewer\"\n";
    let options = NodeOptions { extra: pki.flags(), config: viewer.to_owned(), ..NodeOptions::default() };
    let node = Node::start(&sandbox, "a", options).expect("a node");
    let at = node.listen().to_string();
    let page = Served::over_tls(&node, &shown).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    let own = "The certificate with which vmoved is asked is not valid now";
    told(
        &mut browser,
        &tab,
        &[
            own,
            &shown.join("client.pem").display().to_string(),
            "CN=eyes",
            "2021",
            "A new one in its place is read by itself",
        ],
    );
    pki.sign_client("eyes", Validity::Now).expect("a new one");
    browser.wait(&tab, CALM).expect("it is read by itself");
    browser.wait_for_text(&tab, "#node", "a: 0 VMs").expect("the node");

    // That of the node: a page that is opened now makes new connections.
    let reload = |holds| {
        pki.sign_nodes(&here, holds).expect("another certificate");
        kill(Pid::from_raw(node.pid().expect("it runs")), Signal::SIGHUP).expect("it is told");
    };
    reload(Validity::Expired);
    let page = Served::over_tls(&node, &shown).expect("a page");
    browser.go(&tab, &page.url).expect("the page");
    told(&mut browser, &tab, &["The certificate of vmoved is not valid now", &at, "renew it there"]);
    reload(Validity::Now);
    browser.wait(&tab, CALM).expect("it is taken back");
    browser.wait_for_text(&tab, "#node", "a: 0 VMs").expect("the node");
}
