//! Hooks from an event to what they do, on a node that only notes it.
#![allow(clippy::tests_outside_test_module, reason = "this whole file is a test module")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::{Value, json};
use vmove_hooks::config::{HookEntry, check};
use vmove_hooks::event::{Event, Name};
use vmove_hooks::hooks::Settings;
use vmove_hooks::{ActError, Action, Hooks, Node, Order, Own, Vm};
use vmove_types::hook::{HookInfo, HookTestRequest};

#[derive(Deserialize)]
struct File {
    hook: Vec<HookEntry>,
}

fn open(dir: &Path, text: &str) -> Arc<Hooks> {
    let hooks = check(toml::from_str::<File>(text).unwrap().hook, None).unwrap();
    let settings = Settings { node: "a".to_owned(), control: "/c.sock".into(), journal: dir.join("journal") };
    Hooks::open(settings, hooks).unwrap()
}

/// Notes what it is asked for.
#[derive(Default)]
struct Noting {
    orders: Mutex<Vec<(String, Order)>>,
    /// VMs are called so; `copy` was made by the hook `copy`.
    names: Vec<&'static str>,
    busy: AtomicBool,
    hangs: AtomicBool,
    /// What an action causes.
    causes: Mutex<Option<(Arc<Hooks>, Own)>>,
}

#[async_trait]
impl Node for Noting {
    fn vm(&self, name: &str) -> Option<Vm> {
        self.vms().into_iter().find(|vm| vm.name == name)
    }

    fn vms(&self) -> Vec<Vm> {
        let vm = |name: &&str| Vm {
            name: (*name).to_owned(),
            labels: [("team".to_owned(), name[..1].to_owned())].into(),
            made_by: name.strip_suffix(".1").map(|_| "copy".to_owned()),
        };
        self.names.iter().map(vm).collect()
    }

    async fn act(&self, action: &Action, order: Order) -> Result<String, ActError> {
        if self.busy.load(Ordering::Relaxed) {
            return Err(ActError::Busy("a fork of it is under way".to_owned()));
        }
        if let Some((hooks, own)) = &*self.causes.lock().unwrap() {
            hooks.tell(Event::own(*own, &order.vm, json!({})));
        }
        self.orders.lock().unwrap().push((action.to_string(), order));
        while self.hangs.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok("noted".to_owned())
    }
}

impl Noting {
    fn of(names: &[&'static str]) -> Arc<Self> {
        Arc::new(Self { names: names.to_vec(), ..Self::default() })
    }

    fn done(&self) -> Vec<String> {
        self.orders.lock().unwrap().iter().map(|(action, order)| format!("{action}: {}", order.vm)).collect()
    }
}

fn qmp(name: &str, vm: &str, data: Value) -> Event {
    Event { name: Name::Qmp(name.to_owned()), ..Event::own(Own::VmStarted, vm, data) }
}

fn info(hooks: &Hooks, name: &str) -> HookInfo {
    hooks.infos().into_iter().find(|hook| hook.name == name).unwrap()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "{what} did not come to be");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn serve(hooks: &Arc<Hooks>, node: &Arc<Noting>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(Arc::clone(hooks).serve(Arc::clone(node) as Arc<dyn Node>))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_runs_the_hooks_that_fit_it_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let program = |name: &str, order: i32, more: &str| {
        format!(
            "[[hook]]\nname = '{name}'\norder = {order}\non = 'MEMORY_FAILURE'\n{more}\n\
             do = {{ run = ['/bin/sh', '-c', 'sleep 0.0{order}; echo {name} $VMOVE_VM $VMOVE_RECIPIENT $(grep -c vmove_no) >> {}'] }}\n",
            out.display()
        )
    };
    let text = [
        program("last", 9, ""),
        program("first", 1, "where = { recipient = 'hypervisor' }"),
        program("others", 2, "for = 'db-*'"),
        program("label", 3, "labels = { team = 'x' }"),
    ]
    .concat();
    let hooks = open(folder.path(), &text);
    let node = Noting::of(&["web"]);
    let serving = serve(&hooks, &node);
    hooks.tell(qmp("MEMORY_FAILURE", "web", json!({"recipient": "hypervisor"})));
    hooks.tell(qmp("STOP", "web", json!({})));
    until("the last hook", || info(&hooks, "last").done == 1).await;
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "first web hypervisor 0\nlast web hypervisor 0\n");
    assert_eq!(
        std::fs::read_dir(folder.path().join("journal")).unwrap().count(),
        0,
        "nothing is left to be run again"
    );
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_runs_once_at_a_time_for_a_vm_and_not_too_often() {
    let folder = tempfile::tempdir().unwrap();
    let hooks = open(
        folder.path(),
        "[[hook]]\nname = 'move'\non = 'MEMORY_FAILURE'\nat-most = '2 in 1h'\ndo = { migrate = { to = 'b:1' } }",
    );
    let node = Noting::of(&["web", "db"]);
    node.hangs.store(true, Ordering::Relaxed);
    let serving = serve(&hooks, &node);
    for _ in 0..5 {
        hooks.tell(qmp("MEMORY_FAILURE", "web", json!({})));
    }
    hooks.tell(qmp("MEMORY_FAILURE", "db", json!({})));
    until("both", || node.done().len() == 2).await;
    assert_eq!(info(&hooks, "move").held_back, 4);
    node.hangs.store(false, Ordering::Relaxed);
    until("the end", || info(&hooks, "move").done == 2).await;
    for _ in 0..5 {
        hooks.tell(qmp("MEMORY_FAILURE", "web", json!({})));
        until("an answer", || info(&hooks, "move").at_work == 0).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until("all", || info(&hooks, "move").held_back == 8).await;
    assert_eq!(
        node.done().iter().filter(|done| *done == "migrate to b:1: web").count(),
        2,
        "{:?}",
        node.done()
    );
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_whose_action_triggers_itself_is_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let hooks = open(
        folder.path(),
        "[[hook]]\nname = 'again'\non = 'after-migration'\nat-most = 'unlimited'\ndo = { migrate = { to = 'b:1' } }\n\
         [[hook]]\nname = 'copy'\non = 'GUEST_PANICKED'\nat-most = 'unlimited'\ndo = { fork = {} }",
    );
    let node = Noting::of(&["web", "web.1"]);
    *node.causes.lock().unwrap() = Some((Arc::clone(&hooks), Own::AfterMigration));
    let serving = serve(&hooks, &node);
    hooks.tell(Event::own(Own::AfterMigration, "web", json!({})));
    until("the loop", || info(&hooks, "again").loops == 1).await;
    // A copy that panics, too, is not copied again; the guest itself is.
    *node.causes.lock().unwrap() = None;
    hooks.tell(qmp("GUEST_PANICKED", "web.1", json!({})));
    hooks.tell(qmp("GUEST_PANICKED", "web", json!({})));
    until("the copy", || info(&hooks, "copy").done == 1).await;
    assert_eq!(info(&hooks, "copy").loops, 1);
    assert_eq!(node.done(), ["migrate to b:1: web", "fork 1, kept paused: web"]);
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_may_forbid_and_one_that_fails_or_hangs_does_not_unless_it_shall() {
    let folder = tempfile::tempdir().unwrap();
    let ask = |name: &str, script: &str, more: &str| {
        let program = if script.starts_with('/') {
            format!("['{script}']")
        } else {
            format!("['/bin/sh', '-c', '{script}']")
        };
        let text = format!(
            "[[hook]]\nname = '{name}'\non = 'before-migration'\ntime-limit = '300ms'\n{more}\ndo = {{ run = {program} }}"
        );
        let hooks = open(&folder.path().join(format!("{name}{}", more.len())), &text);
        async move {
            hooks
                .ask(Event::own(Own::BeforeMigration, "web", json!({"to": "b"})))
                .await
                .map_err(|why| why.to_string())
        }
    };
    assert_eq!(ask("fine", "exit 0", "").await, Ok(()));
    assert_eq!(
        ask("quota", "echo no; echo \"$VMOVE_VM may not go to $VMOVE_TO\"; exit 1", "").await,
        Err("hook \"quota\" forbids it: web may not go to b".to_owned())
    );
    assert!(ask("silent", "exit 7", "").await.unwrap_err().contains("exit status: 7 and gave no reason"));
    assert_eq!(ask("other", "exit 1", "for = 'db'").await, Ok(()));
    assert_eq!(ask("dry", "exit 1", "dry-run = true").await, Ok(()));
    for (name, script, words) in [
        ("hangs", "sleep 600", "did not end within 300ms"),
        ("missing", "/not/there", "could not be started"),
        ("crashes", "kill -SEGV $$", "was ended by a signal"),
    ] {
        let begun = Instant::now();
        assert_eq!(ask(name, script, "").await, Ok(()), "{name}");
        let forbidden = ask(name, script, "if-it-fails = 'forbid'").await.unwrap_err();
        assert!(forbidden.contains(words), "{forbidden}");
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_daemon_that_was_killed_had_begun_is_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let text = format!(
        "[[hook]]\nname = 'move'\non = 'MEMORY_FAILURE'\ndo = {{ migrate = {{ to = 'b:1' }} }}\n\
         [[hook]]\nname = 'tell'\non = 'MEMORY_FAILURE'\norder = 1\ndo = {{ run = ['/bin/sh', '-c', 'echo $VMOVE_AGAIN $VMOVE_VM $VMOVE_N >> {}'] }}",
        out.display()
    );
    {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (hooks, node) = (open(folder.path(), &text), Noting::of(&["web"]));
        node.hangs.store(true, Ordering::Relaxed);
        let journal = folder.path().join("journal");
        let told = Arc::clone(&node);
        let killed = std::thread::spawn(move || {
            runtime.spawn(Arc::clone(&hooks).serve(Arc::clone(&told) as Arc<dyn Node>));
            hooks.tell(qmp("MEMORY_FAILURE", "web", json!({"n": 7})));
            let end = Instant::now() + Duration::from_secs(30);
            while told.done().is_empty() || std::fs::read_dir(&journal).unwrap().count() < 2 {
                assert!(Instant::now() < end, "it was not begun");
                std::thread::sleep(Duration::from_millis(5));
            }
            // All tasks are gone at an await, as those of a daemon that is killed.
            runtime.shutdown_background();
        });
        killed.join().unwrap();
    }
    let (hooks, node) = (open(folder.path(), &text), Noting::of(&["web"]));
    let serving = serve(&hooks, &node);
    until("both", || info(&hooks, "tell").done == 1 && info(&hooks, "move").done == 1).await;
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "1 web 7\n");
    assert!(node.orders.lock().unwrap()[0].1.again);
    assert_eq!(std::fs::read_dir(folder.path().join("journal")).unwrap().count(), 0);
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_tried_again_and_a_busy_vm_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let count = folder.path().join("count");
    let text = format!(
        "[[hook]]\nname = 'third'\non = 'timer'\nevery = '1h'\nretries = 5\nretry-after = '10ms'\n\
         do = {{ run = ['/bin/sh', '-c', 'echo x >> {0}; [ $VMOVE_ATTEMPT = 3 ] && [ $(wc -l < {0}) = 3 ]'] }}\n\
         [[hook]]\nname = 'copy'\non = 'GUEST_PANICKED'\ntime-limit = '20s'\ndo = {{ fork = {{}} }}",
        count.display()
    );
    let hooks = open(folder.path(), &text);
    let node = Noting::of(&["web"]);
    node.busy.store(true, Ordering::Relaxed);
    let serving = serve(&hooks, &node);
    hooks.tell(Event::of_host(Name::Timer { hook: "third".to_owned() }, serde_json::Map::new()));
    hooks.tell(qmp("GUEST_PANICKED", "web", json!({})));
    until("the third attempt", || info(&hooks, "third").done == 1).await;
    assert_eq!(info(&hooks, "third").last.unwrap().attempts, 3);
    assert_eq!(info(&hooks, "copy").at_work, 1);
    node.busy.store(false, Ordering::Relaxed);
    until("the copy", || info(&hooks, "copy").done == 1).await;
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trial_says_what_would_be_done_and_does_it_only_if_asked() {
    let folder = tempfile::tempdir().unwrap();
    let hooks = open(
        folder.path(),
        "[[hook]]\nname = 'move'\non = 'MEMORY_FAILURE'\nfor = 'w*'\nwhere = { recipient = 'hypervisor' }\ndo = { migrate = { to = 'b:1' } }\n\
         [[hook]]\nname = 'quota'\non = 'before-fork'\ndo = { run = ['/bin/sh', '-c', 'echo full; exit $VMOVE_TEST'] }",
    );
    let noting = Noting::of(&["web", "db"]);
    let node = Arc::clone(&noting) as Arc<dyn Node>;
    let test = async |name: &str, request: HookTestRequest| hooks.test(name, request, &node).await;
    let plain = test("move", HookTestRequest::default()).await.unwrap();
    assert_eq!(plain.runs.len(), 1);
    assert_eq!(plain.runs[0].said, "would migrate to b:1 (web)");
    let event = |recipient: &str| HookTestRequest {
        event: Some(json!({"recipient": recipient})),
        ..HookTestRequest::default()
    };
    assert!(
        test("move", event("guest"))
            .await
            .unwrap()
            .why_not
            .unwrap()
            .contains("expected \"hypervisor\", found \"guest\"")
    );
    assert!(noting.done().is_empty());
    let run = HookTestRequest { run: true, ..event("hypervisor") };
    assert_eq!(test("move", run).await.unwrap().runs[0].outcome, "done");
    assert_eq!(noting.done(), ["migrate to b:1: web"]);
    let run = HookTestRequest { run: true, vm: Some("db".to_owned()), event: None };
    let quota = test("quota", run).await.unwrap();
    assert_eq!((quota.runs[0].outcome.as_str(), quota.runs[0].said.as_str()), ("forbidden", "full"));
    assert_eq!(quota.runs[0].facts.as_ref().unwrap()["test"], true);
    assert!(
        test("moev", HookTestRequest::default())
            .await
            .unwrap_err()
            .to_string()
            .contains("did you mean \"move\"?")
    );
    let other = HookTestRequest { vm: Some("none".to_owned()), ..HookTestRequest::default() };
    assert!(test("move", other).await.unwrap_err().to_string().contains("No VM \"none\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn more_events_than_can_be_heeded_are_counted_and_nobody_waits() {
    let folder = tempfile::tempdir().unwrap();
    let hooks = open(
        folder.path(),
        "[[hook]]\nname = 'slow'\non = 'WATCHDOG'\nat-most = 'unlimited'\ndo = { run = ['/bin/sleep', '600'] }",
    );
    let node = Noting::of(&["web"]);
    let serving = serve(&hooks, &node);
    let begun = Instant::now();
    for _ in 0..10_000 {
        hooks.tell(qmp("WATCHDOG", "web", json!({})));
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    until("some dropped", || hooks.events_dropped() > 0).await;
    serving.abort();
}
