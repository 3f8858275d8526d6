//! Both stores keep the same promises. etcd's tests are skipped, loudly, where there is no etcd.

use std::sync::Arc;
use std::time::Duration;

use test_servers::EtcdServer;
use vmove_skip::need;

use super::{Changes, Committed, Embedded, Etcd, Expect, Revision, Store, StoreError, Txn};
use vmove_http::client::Endpoint;

/// A store in this etcd.
pub fn etcd_store(server: &EtcdServer, prefix: &str) -> Etcd {
    Etcd::new(vec![Endpoint::Tcp(server.address())], prefix, Duration::from_secs(5))
}

async fn put(store: &dyn Store, key: &str, value: &str) -> Revision {
    match store.commit(Txn::default().put(key, value)).await.unwrap() {
        Committed::At(revision) => revision,
        Committed::Conflict => panic!("nothing was expected, so nothing can conflict"),
    }
}

/// What a bridge relies on.
async fn promises(store: &dyn Store) {
    let before = store.snapshot().await.unwrap();
    assert!(before.entries.is_empty());
    let mut watch = store.watch(before.revision).await.unwrap();

    let first = put(store, "a/1", "eins").await;
    // Absent means absent, a revision means that one.
    let absent = Txn::default().expect("a/1", Expect::Absent).put("a/1", "x").put("b", "x");
    assert_eq!(store.commit(absent).await.unwrap(), Committed::Conflict);
    let old = Txn::default().expect("a/1", Expect::At(Revision(first.0 + 7))).put("b", "x");
    assert_eq!(store.commit(old).await.unwrap(), Committed::Conflict);
    let both = Txn::default().expect("a/1", Expect::At(first)).expect("b", Expect::Absent);
    let Committed::At(second) = store.commit(both.put("b", "zwei ü").delete("a/1")).await.unwrap() else {
        panic!("both expectations hold");
    };
    assert!(second > first);

    let after = store.snapshot().await.unwrap();
    assert_eq!(after.revision, second);
    let all: Vec<_> = after.entries.iter().map(|(k, e)| (k.as_str(), e.value.as_str(), e.revision)).collect();
    assert_eq!(all, [("b", "zwei ü", second)], "the conflicts changed nothing");

    // The watch shows both transactions, whole and in order, and nothing of the conflicts.
    let mut seen: Vec<Changes> = Vec::new();
    while seen.last().is_none_or(|changes| changes.revision < second) {
        seen.push(
            tokio::time::timeout(Duration::from_secs(60), watch.recv()).await.unwrap().unwrap().unwrap(),
        );
    }
    let told: Vec<_> =
        seen.iter().flat_map(|c| &c.changes).map(|c| (c.key.as_str(), c.entry.is_some())).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    assert_eq!(told[0], ("a/1", true));
    assert!(told.contains(&("b", true)) && told.contains(&("a/1", false)));
}

/// Of many who swap at once, one wins each time: the counter counts every success.
async fn contention(store: Arc<dyn Store>) {
    let start = put(&*store, "count", "0").await;
    assert!(start > Revision(0));
    let one = |store: Arc<dyn Store>| async move {
        let mut wins = 0;
        while wins < 10 {
            let snapshot = store.snapshot().await.unwrap();
            let entry = &snapshot.entries["count"];
            let next = entry.value.parse::<u32>().unwrap() + 1;
            let txn =
                Txn::default().expect("count", Expect::At(entry.revision)).put("count", next.to_string());
            wins += i32::from(matches!(store.commit(txn).await.unwrap(), Committed::At(_)));
        }
    };
    let tasks: Vec<_> = (0..8).map(|_| tokio::spawn(one(Arc::clone(&store)))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(store.snapshot().await.unwrap().entries["count"].value, "80");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_store_keeps_its_promises() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(&dir.path().join("deep/state.redb")).unwrap();
    promises(&store).await;
    contention(Arc::new(store)).await;
}

/// Those that wait for the disk go there together, and are transactions of their own all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_embedded_store_writes_at_once_stays_apart() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(&dir.path().join("state.redb")).unwrap());
    let mut watch = store.watch(store.snapshot().await.unwrap().revision).await.unwrap();
    // Each wants to be the one that makes `first`, and puts a key of its own beside it.
    let one = |number: u32, store: Arc<Embedded>| async move {
        let alone = Txn::default().expect("first", Expect::Absent).put("first", number.to_string());
        let wins = matches!(store.commit(alone).await.unwrap(), Committed::At(_));
        (wins, put(&*store, &format!("own/{number}"), "").await)
    };
    let tasks: Vec<_> = (0..50).map(|number| tokio::spawn(one(number, Arc::clone(&store)))).collect();
    let mut ends = Vec::new();
    for task in tasks {
        ends.push(task.await.unwrap());
    }
    assert_eq!(ends.iter().filter(|(wins, _)| *wins).count(), 1);
    let revisions: std::collections::BTreeSet<_> = ends.iter().map(|(_, revision)| *revision).collect();
    assert_eq!(revisions.len(), 50, "each has a revision of its own");
    let mut seen = Vec::new();
    while seen.len() < 51 {
        let told = tokio::time::timeout(Duration::from_secs(60), watch.recv()).await.unwrap();
        seen.push(told.unwrap().unwrap().revision.0);
    }
    assert!(seen.windows(2).all(|two| two[0] + 1 == two[1]), "one after the other, none twice: {seen:?}");
    assert_eq!(store.snapshot().await.unwrap().entries.len(), 51);
}

#[tokio::test]
async fn the_embedded_store_survives_and_is_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state.redb");
    let store = Embedded::open(&path).unwrap();
    let revision = put(&store, "k", "v").await;
    let refused = Embedded::open(&path).unwrap_err();
    assert!(refused.to_string().contains("another vbridged has it open"), "{refused}");
    drop(store);
    let store = Embedded::open(&path).unwrap();
    let snapshot = store.snapshot().await.unwrap();
    assert_eq!((snapshot.revision, snapshot.entries["k"].value.as_str()), (revision, "v"));
    std::fs::write(
        dir.path().join("junk"),
        b"this is no database, and long enough to be looked at ".repeat(20),
    )
    .unwrap();
    assert!(matches!(Embedded::open(&dir.path().join("junk")), Err(StoreError::Disk { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_keeps_the_same_promises() {
    let server = need!(EtcdServer::start());
    promises(&etcd_store(&server, "/one/")).await;
    contention(Arc::new(etcd_store(&server, "/two/"))).await;
    // Prefixes do not see each other, nor one another's neighbours.
    assert_eq!(etcd_store(&server, "/one/").snapshot().await.unwrap().entries.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_read_in_pages_of_one_moment() {
    let server = need!(EtcdServer::start());
    let store = etcd_store(&server, "/p/");
    for block in 0..12 {
        let mut txn = Txn::default();
        for i in 0..100 {
            txn = txn.put(format!("k/{:04}", block * 100 + i), "v");
        }
        store.commit(txn).await.unwrap();
    }
    assert_eq!(store.snapshot().await.unwrap().entries.len(), 1200);
    put(&store, "record/1", "a").await;
    put(&store, "record0", "b").await;
    let records = store.read(crate::store::KeyRange::Prefix("record/")).await.unwrap();
    assert_eq!(records.entries.keys().collect::<Vec<_>>(), ["record/1"]);
    let others = store.read(crate::store::KeyRange::AllBut("record/")).await.unwrap();
    assert!(
        others.entries.len() == 1201 && others.entries.contains_key("record0"),
        "{}",
        others.entries.len()
    );
    let too_large = (0..129).fold(Txn::default(), |txn, i| txn.put(i.to_string(), ""));
    let refused = store.commit(too_large).await.unwrap_err();
    assert!(refused.to_string().contains("--max-txn-ops"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_is_down_is_named_and_one_that_comes_back_is_used() {
    let mut server = need!(EtcdServer::start());
    let store = etcd_store(&server, "/d/");
    put(&store, "k", "v").await;
    let mut watch = store.watch(store.snapshot().await.unwrap().revision).await.unwrap();
    server.kill();
    let ended = tokio::time::timeout(Duration::from_secs(60), watch.recv()).await.unwrap().unwrap();
    assert!(matches!(ended, Err(StoreError::Unreachable { .. })), "{ended:?}");
    let refused = store.commit(Txn::default().put("k", "w")).await.unwrap_err().to_string();
    assert!(refused.contains(&server.url()) && refused.contains("Start etcd"), "{refused}");
    server.restart();
    let snapshot = store.snapshot().await.unwrap();
    assert_eq!(snapshot.entries["k"].value, "v", "what was refused did not happen");
}
