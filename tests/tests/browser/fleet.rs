//! The page of the fleet, of a real bridge.
#![cfg(test)]

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use vmove_skip::need;
use vmove_tests::bridge::Bridge;
use vmove_tests::browser::{Browser, Look, Tab, base64};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

use crate::many::{STALL_MS, WATCH, longest_task};
use crate::served::{Served, calm, pictures};

const NODES: usize = 10_000;
const NODES_OF_A_LEAF: usize = 40;

fn ready() -> Result<()> {
    places::chromium()?;
    places::product("vbridged").map(drop)
}

fn shown(browser: &mut Browser, tab: &Tab, section: &str, texts: &[&str]) {
    let selector = format!("section:nth-of-type({section})");
    for text in texts {
        browser.wait_for_text(tab, &selector, text).expect("it is shown");
    }
}

#[test]
fn switches_nodes_leases_plans_and_accounts_are_shown_as_they_change() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = Bridge::of_four_nodes(&sandbox, "").expect("a bridge");
    let page = Served::of_fleet(&bridge).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    browser.wait_for_text(&tab, "#bridge", "4 nodes, 3 switches, 0 leases").expect("the bridge");
    shown(&mut browser, &tab, "1", &["s 4 nodes, 0 VMs, 8 of 8 GPUs free", "l1 2 nodes", "l2 2 nodes"]);

    // A lease, and a node that is drained: both appear by themselves.
    let text = ["place", "--text", "vcpus=8; memory_mb=512; gpus=2", "--count", "2", "--cluster", "solver"];
    let leased = bridge
        .ask(&[&text[..], &["--id", "job", "--holder", "alice", "--ttl", "1h"]].concat())
        .expect("leased");
    let held = leased["lease"]["held"].as_array().expect("VMs").iter().find(|held| held["node"] == "n1");
    let vm = held.expect("a VM on n1")["vm"].as_str().expect("a name").to_owned();
    bridge.ask(&["fleet", "drain", "n4"]).expect("drained");
    shown(
        &mut browser,
        &tab,
        "1",
        &["s 4 nodes, 2 VMs, 4 of 8 GPUs free, 1 drained", "l1 2 nodes, 2 VMs, 0 of 4 GPUs free"],
    );
    shown(&mut browser, &tab, "2", &["solver", "0 of 2", "n1, n2"]);
    shown(&mut browser, &tab, "3", &["job", "alice", "4"]);
    shown(&mut browser, &tab, "5", &["n4", "drained", "0 of 2", "4.00 GiB"]);
    let of = |square: &str, what: &str| {
        format!("document.querySelector('.square[href=\"#/node/{square}\"]').{what}")
    };
    assert_eq!(browser.value(&tab, &of("n1", "dataset.use")).expect("a value"), "4");
    assert_eq!(browser.value(&tab, &of("n4", "dataset.state")).expect("a value"), "drained");
    let title = browser.value(&tab, &of("n1", "title")).expect("a value");
    assert_eq!(title, "n1: up, 1 VM, 0 of 2 GPUs free, 0 of 8 cores free");
    pictures(&mut browser, &tab, "fleet", 900).expect("pictures");

    // Only some nodes.
    let filter =
        "const f = document.getElementById('filter'); f.value = 'L2'; f.dispatchEvent(new Event('input'))";
    browser.value(&tab, filter).expect("it is typed");
    let listed = "document.querySelectorAll('section:nth-of-type(5) tbody tr').length";
    browser.wait(&tab, &format!("{listed} === 2")).expect("two nodes");

    // Who sits where.
    browser.go(&tab, &page.view("node/n1")).expect("a view");
    shown(&mut browser, &tab, "2", &["0000:01:00.0", "gpu", &vm, "job"]);
    browser.go(&tab, &page.view("lease/job")).expect("a view");
    shown(&mut browser, &tab, "1", &[&vm, "n1", "512.00 MiB", "gpu 0000:01:00.0"]);
    browser.go(&tab, &page.view("node/none")).expect("a view");
    browser.wait_for_text(&tab, "dl", "none").expect("it is unknown");

    // A plan: before and after.
    bridge.ask(&["fleet", "resume", "n4"]).expect("resumed");
    let plan = bridge.ask(&["plan", "evacuate", "n1"]).expect("a plan");
    let id = plan["id"].as_str().expect("an id");
    let to = plan["steps"][0]["to"]["node"].as_str().expect("a node").to_owned();
    browser.go(&tab, &page.view("")).expect("all");
    shown(&mut browser, &tab, "4", &["evacuate n1", "planned", "0 of 1"]);
    browser.go(&tab, &page.view(&format!("plan/{id}"))).expect("a view");
    shown(&mut browser, &tab, "1", &["n1", &to, &vm]);
    shown(&mut browser, &tab, "2", &[&vm, "pending", "512.00 MiB"]);
    pictures(&mut browser, &tab, "plan", 520).expect("pictures");

    bridge.ask(&["plan", "delete", id]).expect("removed");
    bridge.ask(&["lease", "release", "job"]).expect("released");
    browser.go(&tab, &page.view("")).expect("all");
    shown(&mut browser, &tab, "6", &["alice", "1"]);
    for view in ["", "node/n1", "lease/job"] {
        browser.go(&tab, &page.view(view)).expect("a view");
        browser.look(&tab, Look { width: 400, height: 800, dark: true }).expect("a small screen");
        browser.wait(&tab, "document.querySelector('main h2') !== null").expect("a view");
        let wide = browser.value(&tab, "document.documentElement.scrollWidth").expect("a width");
        assert!(wide.as_u64().expect("a number") <= 400, "{view}: {wide}");
    }
    calm(&mut browser, &tab, &page.url).expect("a calm page");
}

/// The nodes of the first cluster.
const NODES_OF_A_CLUSTER: &str =
    "[...document.querySelectorAll('section:nth-of-type(2) tbody tr:first-child td')][2]";

#[test]
fn names_of_nodes_are_in_one_piece() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = Bridge::start(&sandbox, &[]).expect("a bridge");
    let names = ["gpu-node-rack12-0001.cluster.example", "gpu-node-rack12-0002.cluster.example"];
    let numa = json!([{ "id": 0, "socket": 0, "cores": 8, "memory": 4096 }]);
    let nodes: String = names.iter().map(|name| json!({ "name": name, "numa": numa }).to_string()).collect();
    let nodes = bridge.write("nodes.json", &nodes).expect("a file");
    bridge.ask(&["fleet", "publish", &nodes]).expect("published");
    bridge.publish_topology(&format!("SwitchName=l Nodes={}\n", names.join(","))).expect("published");
    let text =
        ["place", "--text", "vcpus=8; memory_mb=512", "--count", "2", "--cluster", "solver", "--ttl", "1h"];
    bridge.ask(&text).expect("leased");
    let page = Served::of_fleet(&bridge).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    shown(&mut browser, &tab, "2", &names);
    for width in [1000, 700] {
        browser.look(&tab, Look { width, height: 900, dark: false }).expect("a width");
        for name in names {
            // The lines on which the characters of the name are.
            let lines = format!(
                "(() => {{ const walk = document.createTreeWalker({NODES_OF_A_CLUSTER}, NodeFilter.SHOW_TEXT); const range = document.createRange(); \
                 for (let node = walk.nextNode(); node; node = walk.nextNode()) {{ const at = node.data.indexOf('{name}'); if (at < 0) continue; \
                 range.setStart(node, at); range.setEnd(node, at + '{name}'.length); \
                 return new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size; }} return 0; }})()"
            );
            assert_eq!(browser.value(&tab, &lines).expect("lines"), 1, "{name} at {width}");
        }
        let beside = format!("{NODES_OF_A_CLUSTER}.scrollWidth <= {NODES_OF_A_CLUSTER}.clientWidth");
        assert_eq!(
            browser.value(&tab, &beside).expect("widths"),
            true,
            "a name covers the next column at {width}"
        );
    }
    let told = browser
        .value(&tab, &format!("{NODES_OF_A_CLUSTER}.querySelector('[title]').title"))
        .expect("a title");
    assert!(names.iter().any(|name| told == *name), "{told}");
}

#[test]
fn a_tenant_sees_its_own_and_is_told_so() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let (bridge, at, token) = Bridge::with_tenant(&sandbox).expect("a bridge");
    for (id, holder) in [("hers", "alice"), ("his", "bob")] {
        let text = [
            "place",
            "--text",
            "vcpus=1; memory_mb=64; gpus=1",
            "--cluster",
            id,
            "--id",
            id,
            "--holder",
            holder,
            "--ttl",
            "1h",
        ];
        bridge.ask(&text).expect("leased");
    }
    let token = token.display().to_string();
    let page =
        Served::by_command(&["fleet", "--bridge", &at, "--token-file", &token, "page"]).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    shown(&mut browser, &tab, "3", &["his", "bob"]);
    shown(&mut browser, &tab, "4", &["Your role sees no plans"]);
    assert!(!browser.text(&tab, "main").expect("text").contains("hers"), "the lease of another");
    assert_eq!(
        browser.value(&tab, "document.getElementById('trouble').childElementCount").expect("a count"),
        0
    );
    calm(&mut browser, &tab, &page.url).expect("a calm page");
}

#[test]
fn a_fleet_whose_bridge_is_lost_says_so_and_comes_back() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let mut bridge = Bridge::of_four_nodes(&sandbox, "").expect("a bridge");
    let page = Served::of_fleet(&bridge).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let tab = browser.open(&page.url).expect("the page");
    browser.wait_for_text(&tab, "#bridge", "4 nodes").expect("the bridge");
    bridge.kill();
    for word in ["vbridged does not answer", "systemctl start vbridged", "What is shown is of"] {
        browser.wait_for_text(&tab, "#trouble", word).expect("it is said");
    }
    bridge.run().expect("it runs again");
    browser
        .wait(&tab, "document.getElementById('trouble').childElementCount === 0")
        .expect("it is taken back");
    browser.wait_for_text(&tab, "#said", "vbridged answers again").expect("it is told");
}

/// A fleet of that size: its topology and its nodes, with so many GPUs free on each.
fn fleet(free: usize) -> (String, String) {
    let name = |number: usize| format!("node-{number:05}");
    let leaves = NODES / NODES_OF_A_LEAF;
    let leaf = |leaf: usize| {
        let nodes: Vec<String> = (leaf * NODES_OF_A_LEAF..(leaf + 1) * NODES_OF_A_LEAF).map(name).collect();
        json!({ "name": format!("leaf-{leaf}"), "nodes": nodes })
    };
    let mut switches: Vec<Value> = (0..leaves).map(leaf).collect();
    let below: Vec<String> = (0..leaves).map(|leaf| format!("leaf-{leaf}")).collect();
    switches.push(json!({ "name": "top", "switches": below }));
    let node = |number: usize| {
        json!({ "name": name(number), "state": "up", "vms": 8 - free, "gpus": 8, "gpus_free": free, "adapters": 8, "cores": 128, "cores_free": 16 * free,
            "memory_mib": 2_000_000, "memory_free_mib": 250_000 * free })
    };
    let nodes: Vec<Value> = (0..NODES).map(node).collect();
    (json!({ "style": "tree", "switches": switches }).to_string(), json!({ "nodes": nodes }).to_string())
}

/// Answers for the bridge: first with all free, then with all in use, until the page shows that.
fn serve(browser: &mut Browser, tab: &Tab) {
    let answers = [fleet(8), fleet(0)];
    let mut asked = 0;
    for _ in 0..3000 {
        for paused in browser.happened(tab, "Fetch.requestPaused").expect("requests") {
            let is_topology = paused["request"]["url"].as_str().is_some_and(|url| url.ends_with("/topology"));
            let (topology, nodes) = &answers[asked.min(1)];
            asked += usize::from(!is_topology);
            let body = base64(if is_topology { topology } else { nodes });
            let answer = json!({ "requestId": paused["requestId"], "responseCode": 200, "body": body,
                "responseHeaders": [{ "name": "content-type", "value": "application/json" }] });
            browser.ask(tab, "Fetch.fulfillRequest", &answer).expect("it is answered");
        }
        let last = format!(
            "document.querySelector('.square[href=\"#/node/node-{:05}\"]')?.dataset.use === '4' && document.querySelectorAll('.square[href]').length === {NODES}",
            NODES - 1
        );
        if browser.value(tab, &last).is_ok_and(|value| value == true) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the page does not show {NODES} nodes: {}", browser.text(tab, "#trouble").unwrap_or_default());
}

/// The answers of the bridge are made up here, of that size; everything else is real.
#[test]
fn ten_thousand_nodes_are_shown_without_a_stall() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let bridge = Bridge::of_four_nodes(&sandbox, "").expect("a bridge");
    let page = Served::of_fleet(&bridge).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let mut longest = Vec::new();
    for _ in 0..5 {
        let tab = browser.blank().expect("an empty page");
        let patterns =
            json!({ "patterns": [{ "urlPattern": "*/v1/nodes" }, { "urlPattern": "*/v1/topology" }] });
        browser.ask(&tab, "Fetch.enable", &patterns).expect("requests are seen");
        browser
            .ask(&tab, "Page.addScriptToEvaluateOnNewDocument", &json!({ "source": WATCH }))
            .expect("a watch");
        browser.go(&tab, &page.url).expect("the page");
        serve(&mut browser, &tab);
        longest.push(longest_task(&mut browser, &tab));
    }
    longest.sort_by(f64::total_cmp);
    eprintln!(
        "longest task with {NODES} nodes, of {} runs: {longest:?} ms (0: none of 50 ms)",
        longest.len()
    );
    assert!(longest[longest.len() / 2] < STALL_MS, "{longest:?}");
}
