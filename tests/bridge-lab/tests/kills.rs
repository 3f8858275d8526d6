//! Bridges that are killed in the middle of placements. `./run bench bridge storm` does the same at length.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::time::Duration;

use bridge_lab::storm::{Outcome, StormSpec, storm};
use bridge_lab::vbridged;
use test_servers::EtcdServer;
use vmove_bridge::config::open_store;
use vmove_bridge::store::etcd::DEFAULT_MAX_TXN_OPS;
use vmove_skip::need;

const CLIENTS: u32 = 8;
const REQUESTS: u32 = 60;

fn spec(stores: Vec<String>) -> StormSpec {
    StormSpec {
        vbridged: vbridged().unwrap(),
        stores,
        clients: CLIENTS,
        requests: REQUESTS,
        kill_interval: Duration::from_millis(400),
    }
}

fn check(outcome: &Outcome) {
    eprintln!("{outcome:?}");
    assert_eq!((outcome.leased_twice, outcome.leaked), (0, 0));
    assert!(outcome.granted > 100 && outcome.kills >= 1, "{outcome:?}");
    assert_eq!(outcome.granted + outcome.refused, u64::from(CLIENTS * REQUESTS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_bridges_on_etcd_one_killed_after_the_other() {
    let server = need!(EtcdServer::start());
    let store = format!("etcd:{}", server.url());
    let history = open_store(&store, DEFAULT_MAX_TXN_OPS).unwrap();
    let outcome = storm(&spec(vec![store.clone(), store]), Some(history)).await.unwrap();
    check(&outcome);
    assert_eq!(outcome.leased_twice_in_history, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bridge_on_its_own_store_killed_again_and_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("redb:{}", folder.path().join("state.redb").display());
    check(&storm(&spec(vec![store]), None).await.unwrap());
}
