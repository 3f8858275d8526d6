//! Bridges that are killed in the middle of placements. The large form of this is in `./run bench`.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmove_bridge::lab::EtcdServer;
use vmove_bridge::storm::{Outcome, Plan, storm};

fn plan(stores: Vec<String>) -> Plan {
    Plan {
        program: PathBuf::from(env!("CARGO_BIN_EXE_vbridged")),
        stores,
        clients: 8,
        requests: 60,
        kill_every: Some(Duration::from_millis(400)),
    }
}

fn check(outcome: &Outcome) {
    eprintln!("{outcome:?}");
    assert_eq!((outcome.twice, outcome.leaked), (0, 0));
    assert!(outcome.granted > 100 && outcome.kills >= 1, "{outcome:?}");
    assert_eq!(outcome.granted + outcome.refused, 480);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_bridges_on_etcd_one_killed_after_the_other() {
    let Some(server) = EtcdServer::start_or_skip() else { return };
    let store = format!("etcd:{}", server.url());
    let outcome = storm(&plan(vec![store.clone(), store]), Some(Arc::new(server.store("/vmove/bridge/"))))
        .await
        .unwrap();
    check(&outcome);
    assert_eq!(outcome.twice_in_history, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bridge_on_its_own_store_killed_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("redb:{}", dir.path().join("state.redb").display());
    check(&storm(&plan(vec![store]), None).await.unwrap());
}
