//! Two bridges over one store, clocks that jump, a store that does not answer.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sched_bridge::model::{NodeState, VmName};
use test_servers::EtcdServer;
use tokio::sync::mpsc;
use vmove_skip::need;

use super::{Arrival, Bridge, BridgeError, Known, LeasedOn, Listing, State};
use crate::account::{End, Record};
use crate::clock::{Clock, SystemClock};
use crate::lease::Part;
use crate::store::tests::etcd_store;
use crate::store::{Changes, Committed, Embedded, KeyRange, Revision, Snapshot, Store, StoreError, Txn};
use crate::testing::{DEADLINE, ManualClock, TestBridge, exactly, id, name, node, one_gpu};

async fn records(bridge: &Bridge) -> Vec<Record> {
    let records = bridge.records().await.unwrap();
    records.iter().map(|(_, text)| serde_json::from_str(text).unwrap()).collect()
}

#[tokio::test]
async fn a_lease_is_given_once_and_given_back_once() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;

    let granted = bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    assert!(!granted.again);
    // The same request again is the same lease; somebody else's is not.
    assert!(bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap().again);
    let mut other = exactly("a", vec![one_gpu("a-0", "n1", 1)]);
    other.holder = "bob".into();
    assert!(matches!(bridge.grant(other).await, Err(BridgeError::IdTaken { .. })));
    // The device is taken, and the message says which.
    let taken =
        bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 1), one_gpu("b-1", "n1", 0)])).await.unwrap_err();
    assert!(taken.to_string().contains("0000:00:00.0") && taken.to_string().contains("n1"), "{taken}");
    assert_eq!(bridge.view().unwrap().leases().len(), 1, "all or nothing");

    bridge.manual_clock.pass(7_200_000);
    let record = bridge.release(&id("a")).await.unwrap();
    assert!((record.gpu_hours - 2.0).abs() < 1e-9 && record.exact, "{record:?}");
    assert!(matches!(bridge.release(&id("a")).await, Err(BridgeError::UnknownLease(_))));
    assert_eq!(records(&bridge).await, [record]);
    bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 0)])).await.unwrap();
}

#[tokio::test]
async fn a_lease_without_heartbeats_ends_and_one_with_them_does_not() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    bridge.grant(exactly("dead", vec![one_gpu("d-0", "n1", 0)])).await.unwrap();
    bridge.grant(exactly("live", vec![one_gpu("l-0", "n1", 1)])).await.unwrap();
    let mut ended = Vec::new();
    for _ in 0..8 {
        ended.extend(bridge.sweep().await);
        bridge.manual_clock.pass(500);
        bridge.renew(&id("live")).await.unwrap();
    }
    assert_eq!(ended, [id("dead")]);
    let late = bridge.renew(&id("dead")).await.unwrap_err();
    assert!(late.to_string().contains("no heartbeat"), "{late}");
    assert_eq!(records(&bridge).await[0].end, End::Expired);
}

#[tokio::test]
async fn a_lease_is_kept_by_vms_that_run_and_needs_heartbeats_again_when_none_does() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 1).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    let ends_in = || bridge.info(&bridge.view().unwrap().lease(&id("a")).unwrap().lease).ends_in_ms;
    let for_a_minute = async || {
        let mut ended = Vec::new();
        for _ in 0..60 {
            bridge.manual_clock.pass(1000);
            ended.extend(bridge.sweep().await);
        }
        ended
    };
    assert_eq!(ends_in(), Some(3000));
    bridge.sweep().await;
    bridge.manual_clock.pass(1000);
    bridge.sweep().await;
    assert_eq!(ends_in(), Some(2000));
    let home = [(VmName::new("a-0").unwrap(), name("n1"))];
    bridge.mark_running(&id("a"), &home, true).await.unwrap();
    assert_eq!((for_a_minute().await, ends_in()), (vec![], None));
    // Neither does a node that answers no more end it: its VM may run.
    let elsewhere = [(home[0].0.clone(), name("n2"))];
    let refused = bridge.mark_running(&id("a"), &elsewhere, true).await.unwrap_err().to_string();
    assert!(refused.contains("has no place for VM a-0 on node n2"), "{refused}");
    bridge.mark_running(&id("a"), &home, false).await.unwrap();
    assert_eq!(for_a_minute().await, [id("a")]);
}

#[tokio::test]
async fn no_jump_of_any_clock_ends_a_lease_or_falsifies_an_account() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    assert!(bridge.sweep().await.is_empty());
    let year = 31_536_000_000;
    // The time of day, a year ahead and two back; a machine that slept a year; a process that was stopped for a year.
    bridge.manual_clock.change(|_, stamp| stamp.wall_ms += year);
    assert!(bridge.sweep().await.is_empty());
    bridge.manual_clock.change(|_, stamp| stamp.wall_ms -= 2 * year);
    assert!(bridge.sweep().await.is_empty());
    let record = {
        bridge.manual_clock.pass(1000);
        bridge.renew(&id("a")).await.unwrap();
        bridge.manual_clock.change(|monotonic, _| *monotonic += year);
        assert!(bridge.sweep().await.is_empty(), "one look, one second");
        bridge.release(&id("a")).await.unwrap()
    };
    assert_eq!((record.usage.held_ms, record.usage.gpu_ms, record.exact), (1000, 1000, true));
}

#[tokio::test]
async fn a_reboot_makes_an_account_inexact_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::new();
    let bridge = TestBridge::in_folder(dir.path(), Arc::clone(&clock)).await;
    bridge.put_nodes(&["n1"], 1).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    drop(bridge);
    clock.change(|monotonic, stamp| {
        *monotonic = 0;
        stamp.boot_id = "second".into();
        stamp.boot_ms = 0;
        stamp.wall_ms += 1 << 40;
    });
    let bridge = TestBridge::in_folder(dir.path(), clock).await;
    assert!(bridge.sweep().await.is_empty(), "a bridge that was just started begins at zero");
    let record = bridge.release(&id("a")).await.unwrap();
    assert_eq!((record.usage.held_ms, record.exact), (6000, false), "at most twice the time to live");
}

#[tokio::test]
async fn a_move_holds_both_places_and_settles_on_one() {
    let bridge = TestBridge::empty().await;
    for text in ["n1", "n2"] {
        bridge.put_node(node(text, 1)).await.unwrap();
    }
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    let to = one_gpu("a-0", "n2", 0);
    listed(&bridge, "n1", &["a-0"], &Known::new()).await.unwrap();
    bridge.reserve_move(&to).await.unwrap();
    bridge.reserve_move(&to).await.unwrap();
    assert!(bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 0)])).await.is_err(), "its home is held");
    assert!(bridge.grant(exactly("b", vec![one_gpu("b-0", "n2", 0)])).await.is_err(), "and where it goes");
    // Nor is its lease ended, from which others could have either.
    let refused = bridge.release(&id("a")).await.unwrap_err();
    assert!(refused.to_string().contains("VM a-0 is being moved to n2"), "{refused}");
    // On the move, it is missed nowhere.
    let known = known_of(&bridge, "a", &["a-0"]);
    assert!(listed(&bridge, "n1", &[], &known).await.unwrap().is_empty());
    bridge.settle_move(&to.vm, &to.node, Arrival::Arrived).await.unwrap();
    // A list of the new node's VMs that is older than the move ends nothing.
    assert!(listed(&bridge, "n2", &[], &Known::new()).await.unwrap().is_empty());
    let view = bridge.view().unwrap();
    let held = &view.lease(&id("a")).unwrap().lease.held;
    assert_eq!((held.len(), held[0].part, held[0].assignment.node.as_str()), (1, Part::Home, "n2"));
    bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 0)])).await.unwrap();
    // And one that does not go.
    bridge.release(&id("b")).await.unwrap();
    let back = one_gpu("a-0", "n1", 0);
    bridge.reserve_move(&back).await.unwrap();
    bridge.settle_move(&back.vm, &back.node, Arrival::Stayed).await.unwrap();
    bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 0)])).await.unwrap();
}

/// A node lists these VMs now, and none that it has not listed before.
async fn listed(
    bridge: &Bridge,
    node: &str,
    vms: &[&str],
    known: &Known,
) -> Result<Vec<VmName>, BridgeError> {
    let leased = bridge.leased_on(&name(node))?;
    listed_after(bridge, node, (&leased, vms), known).await
}

/// The same, asked for when this was leased there.
async fn listed_after(
    bridge: &Bridge,
    node: &str,
    (leased, vms): (&LeasedOn, &[&str]),
    known: &Known,
) -> Result<Vec<VmName>, BridgeError> {
    let vms: BTreeSet<String> = vms.iter().map(|vm| (*vm).to_owned()).collect();
    bridge.vms_listed(&name(node), &Listing { now: &vms, lately: &vms, leased, known }).await
}

/// These VMs, as those of a lease that are known to run.
fn known_of(bridge: &Bridge, lease: &str, vms: &[&str]) -> Known {
    let granted = bridge.view().unwrap().lease(&id(lease)).unwrap().lease.granted.clone();
    vms.iter().map(|vm| ((*vm).to_owned(), granted.clone())).collect()
}

/// A list that was asked for when the VMs of the lease before had ended, and is looked at when those of the next one run.
#[tokio::test]
async fn the_end_of_a_vm_is_not_that_of_one_of_its_name_in_a_later_lease() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    let (n1, vm) = (name("n1"), VmName::new("a-0").unwrap());
    let again = async || {
        bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
        bridge.mark_running(&id("a"), &[(vm.clone(), n1.clone())], true).await.unwrap();
    };
    again().await;
    let known = bridge.leased_on(&n1).unwrap().running;
    bridge.release(&id("a")).await.unwrap();
    bridge.manual_clock.pass(100);
    again().await;
    assert!(listed(&bridge, "n1", &[], &known).await.unwrap().is_empty());
    let known = bridge.leased_on(&n1).unwrap().running;
    assert_eq!(listed(&bridge, "n1", &[], &known).await.unwrap(), std::slice::from_ref(&vm));
}

/// A list from before a VM was stopped says nothing of the one that is being started in its place: it would be missed while it starts.
#[tokio::test]
async fn a_vm_that_is_being_started_is_not_the_one_of_its_name_that_was_stopped() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    let place = [(VmName::new("a-0").unwrap(), name("n1"))];
    let seen = || bridge.view().unwrap().lease(&id("a")).unwrap().lease.held[0].seen;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    bridge.mark_running(&id("a"), &place, true).await.unwrap();
    // In the same lease.
    let leased = bridge.leased_on(&name("n1")).unwrap();
    bridge.mark_running(&id("a"), &place, false).await.unwrap();
    listed_after(&bridge, "n1", (&leased, &["a-0"]), &leased.running).await.unwrap();
    assert!(!seen(), "it was stopped");
    // In a later one.
    let leased = bridge.leased_on(&name("n1")).unwrap();
    bridge.release(&id("a")).await.unwrap();
    bridge.manual_clock.pass(100);
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    listed_after(&bridge, "n1", (&leased, &["a-0"]), &leased.running).await.unwrap();
    assert!(!seen(), "it is being started");
    listed(&bridge, "n1", &["a-0"], &Known::new()).await.unwrap();
    assert!(seen());
}

#[tokio::test]
async fn the_end_of_a_vm_gives_back_what_it_had() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0), one_gpu("a-1", "n1", 1)])).await.unwrap();
    let known = |vms: &[&str]| known_of(&bridge, "a", vms);
    assert!(listed(&bridge, "n1", &[], &known(&["a-0"])).await.unwrap().is_empty(), "not started yet");
    let all = ["a-0", "a-1", "stranger"];
    assert!(listed(&bridge, "n1", &all, &Known::new()).await.unwrap().is_empty());
    assert!(listed(&bridge, "n1", &["a-1"], &known(&["a-1"])).await.unwrap().is_empty(), "an old list");
    let gone = listed(&bridge, "n1", &["a-1"], &known(&["a-0", "a-1"])).await.unwrap();
    assert_eq!(gone, [VmName::new("a-0").unwrap()]);
    bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 0)])).await.unwrap();
    listed(&bridge, "n1", &["b-0"], &known(&["a-1"])).await.unwrap();
    bridge.view().unwrap().lease(&id("a")).unwrap_err();
    assert_eq!(records(&bridge).await[0].end, End::VmsEnded);
}

#[tokio::test]
async fn drained_nodes_take_nothing_and_keep_what_they_have() {
    let bridge = TestBridge::empty().await;
    bridge.put_nodes(&["n1"], 2).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    bridge.set_node_state(&name("n1"), NodeState::Drained).await.unwrap();
    bridge.put_nodes(&["n1"], 2).await;
    let refused = bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 1)])).await.unwrap_err().to_string();
    assert!(refused.contains("n1") && refused.contains("drained"), "{refused}");
    bridge.renew(&id("a")).await.unwrap();
    let in_use = bridge.remove_node(&name("n1")).await.unwrap_err();
    assert!(matches!(in_use, BridgeError::NodeInUse { .. }), "{in_use}");
    // A device that vanished while it was held is told, and the rest goes on.
    bridge.put_nodes(&["n1"], 0).await;
    assert!(bridge.view().unwrap().problems().contains_key("lease/a"));
    bridge.release(&id("a")).await.unwrap();
    assert!(bridge.view().unwrap().problems().is_empty());
    bridge.remove_node(&name("n1")).await.unwrap();
}

/// 2 bridges, 8 tasks, 4 GPUs: what one has, no other has at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_bridges_never_give_a_device_twice() {
    let server = need!(EtcdServer::start());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let a = TestBridge::over(Arc::new(etcd_store(&server, "/b/")), Arc::clone(&clock));
    let b = TestBridge::over(Arc::new(etcd_store(&server, "/b/")), clock);
    a.wait_until_current(DEADLINE).await.unwrap();
    a.put_node(node("n1", 4)).await.unwrap();
    let owners: Arc<[Mutex<Option<String>>]> = (0..4).map(|_| Mutex::new(None)).collect();
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let bridge = Arc::clone(if task % 2 == 0 { &*a } else { &*b });
            let owners = Arc::clone(&owners);
            tokio::spawn(async move {
                let mut won = 0;
                for round in 0..25_u8 {
                    let (lease, gpu) = (format!("t{task}-{round}"), (task + round) % 4);
                    match bridge.grant(exactly(&lease, vec![one_gpu(&lease, "n1", gpu)])).await {
                        Ok(_) => {
                            let before = owners[usize::from(gpu)].lock().unwrap().replace(lease.clone());
                            assert_eq!(before, None, "GPU {gpu} was given to {lease}, too");
                            tokio::task::yield_now().await;
                            *owners[usize::from(gpu)].lock().unwrap() = None;
                            bridge.release(&id(&lease)).await.unwrap();
                            won += 1;
                        }
                        Err(BridgeError::Taken(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                won
            })
        })
        .collect();
    let mut won = 0;
    for task in tasks {
        won += task.await.unwrap();
    }
    assert!(won > 50, "{won} of 200");
    // What the other bridge gave back last is seen here a moment later.
    let seen = async {
        while !a.view().unwrap().leases().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, seen).await.expect("everything was given back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_down_at_the_start_and_in_the_middle_ends_no_lease() {
    let mut server = need!(EtcdServer::start());
    server.kill();
    let clock = ManualClock::new();
    let store = etcd_store(&server, "/m/");
    let bridge = TestBridge::over(Arc::new(store), Arc::clone(&clock) as Arc<dyn Clock>);
    let told = |s: &State| s.out_of_touch.as_ref().is_some_and(|reason| reason.contains("Start etcd"));
    bridge.state.subscribe().wait_for(told).await.unwrap();
    let refused = bridge.view().unwrap_err().to_string();
    assert!(refused.contains(&server.url()), "{refused}");
    server.restart();
    bridge.wait_until_current(DEADLINE).await.unwrap();
    bridge.put_nodes(&["n1"], 2).await;
    bridge.grant(exactly("a", vec![one_gpu("a-0", "n1", 0)])).await.unwrap();
    bridge.sweep().await;

    server.kill();
    let mut state = bridge.state.subscribe();
    state.wait_for(|s| s.out_of_touch.is_some()).await.unwrap();
    for _ in 0..20 {
        clock.pass(900);
        assert!(bridge.sweep().await.is_empty(), "nobody could send a heartbeat");
    }
    // A request in the middle waits, and is served when etcd is back.
    let waiting = {
        let bridge = Arc::clone(&bridge);
        tokio::spawn(async move { bridge.grant(exactly("b", vec![one_gpu("b-0", "n1", 1)])).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.restart();
    waiting.await.unwrap().unwrap();
    bridge.renew(&id("a")).await.unwrap();
    assert_eq!(bridge.view().unwrap().leases().len(), 2);
}

/// A shared store whose first watch stays silent, like a connection to a machine that lost its power.
#[derive(Debug)]
struct Mute(Embedded, AtomicBool);

#[async_trait]
impl Store for Mute {
    fn name(&self) -> String {
        self.0.name()
    }

    fn max_keys(&self) -> usize {
        self.0.max_keys()
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn read(&self, range: KeyRange) -> Result<Snapshot, StoreError> {
        self.0.read(range).await
    }

    async fn commit(&self, txn: Txn) -> Result<Committed, StoreError> {
        self.0.commit(txn).await
    }

    async fn watch(
        &self,
        after: Revision,
    ) -> Result<mpsc::Receiver<Result<Changes, StoreError>>, StoreError> {
        if !self.1.swap(true, Ordering::Relaxed) {
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(async move { sender.closed().await });
            return Ok(receiver);
        }
        self.0.watch(after).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_has_gone_silent_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(&dir.path().join("s")).unwrap();
    let bridge = TestBridge::over(Arc::new(Mute(store.clone(), false.into())), ManualClock::new());
    bridge.wait_until_current(DEADLINE).await.unwrap();
    // Another bridge commits a change; the silent watch does not show it.
    let txn = Txn::default().put("node/n9", serde_json::to_string(&node("n9", 1)).unwrap());
    store.commit(txn).await.unwrap();
    let known = || bridge.view_even_if_old().node(&name("n9")).is_some();
    assert!(!known());
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(known(), "it was read again");
}

/// Requests that are about to be refused share a pulse, and none uses a pulse that began before it came.
#[tokio::test]
async fn refusals_at_the_same_time_share_a_pulse() {
    let bridge = TestBridge::empty().await;
    let before = bridge.pulse().await.unwrap();
    let asked: Vec<_> = (0..50)
        .map(|_| {
            tokio::spawn({
                let bridge = Arc::clone(&bridge);
                async move { bridge.pulse().await }
            })
        })
        .collect();
    for one in asked {
        assert!(one.await.unwrap().unwrap() > before);
    }
    let pulses = bridge.pulses.load(Ordering::SeqCst);
    assert!(pulses <= 4, "{pulses} pulses for 51 requests");
    assert!(bridge.pulse().await.unwrap() > before);
}
