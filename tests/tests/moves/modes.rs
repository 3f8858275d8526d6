//! A guest under load moves between two daemons, and never finds an error in its memory.
#![cfg(test)]

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use vmove_guest::config::{Config, Rate};
use vmove_skip::{need, skip};
use vmove_tests::beacon;
use vmove_tests::bench::measure::nonzero;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::until;
use vmove_tests::guest::{Guest, failures};
use vmove_tests::sampler::Sampler;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, SLOW, Scene, ready, steady};

/// Moves a guest with this task to and fro, once in each of `modes`. After each move the guest visits each of its pages.
fn move_through(memory: &str, memory_mib: u32, config: &Config, modes: &[&str]) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let page = match memory {
        "hugetlb-2m" => Some(2 << 20),
        "hugetlb-1g" => Some(1 << 30),
        _ => None,
    };
    if let Some(size) = page {
        let both = 2 * (u64::from(memory_mib) << 20);
        need!(sandbox.reserve_huge_pages(size, both));
    }
    let (a, b) = Node::pair(&sandbox, &NodeOptions::default()).expect("two daemons");
    let guest = Guest::new(memory_mib, config.clone()).expect("a QEMU");
    let vm = a.run_guest(NAME, memory, &guest).expect("the guest runs");
    let sampler =
        Sampler::start(vm.beacon().expect("a beacon"), Duration::from_millis(5)).expect("a sampler");
    let pages = u64::from(config.working_pages());
    let (mut from, mut to) = (&a, &b);
    let mut fetched: HashMap<&str, u64> = HashMap::new();
    for mode in modes {
        let there = to.memory();
        sampler.also(move || beacon::ram_files(&there).into_iter().next());
        let report = from.migrate(NAME, to.name(), &["--mode", mode]).expect("the guest moves");
        assert_eq!(report.mode, *mode);
        assert_eq!(report.memory, memory);
        *fetched.entry(to.name()).or_default() += report.faults.fetched;
        assert!(from.vms().expect("a list").is_empty(), "the source still lists it");
        let vm = to.vm(NAME).expect("the destination lists it");
        assert_eq!(vm.status, "running");
        // The guest's verdict counts only when it has visited and verified each page at the new node.
        let before = sampler.last().expect("a beacon");
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            let beacon = sampler.last().expect("a beacon");
            let visited = config.rate == Rate::PagesPerSecond(0) || beacon.work > before.work + 2 * pages;
            if visited && beacon.verified > before.verified + pages + u64::from(config.cold_pages()) {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "the guest stands still after {mode}: {beacon:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let beacon = sampler.last().expect("a beacon");
        assert_eq!(beacon.errors, 0, "after {mode}: {}", beacon.verdict());
        assert_eq!(failures(&vm.console()), Vec::<String>::new(), "after {mode}");
        (from, to) = (to, from);
    }
    drop(sampler);
    from.ask(&["stop", NAME]).expect("the guest is stopped");
    for node in [&a, &b] {
        assert_faults_counted(node, fetched.get(node.name()).copied().unwrap_or_default());
    }
    drop((a, b));
}

/// Each fault that fetched a page is counted in one bucket of the destination.
fn assert_faults_counted(node: &Node, fetched: u64) {
    let metric = |name: &str| node.metric(&format!("vmove_fault_latency_seconds_{name}")).expect("a number");
    #[expect(clippy::cast_precision_loss, reason = "a count of faults")]
    let fetched = fetched as f64;
    until("faults are in the metrics", || (metric("count") - fetched).abs() < 0.5);
    assert!((metric("bucket{le=\"+Inf\"}") - fetched).abs() < 0.5);
    assert!(metric("bucket{le=\"0.00001\"}") <= metric("bucket{le=\"1\"}"));
}

fn busy() -> Config {
    Config {
        working_set_mib: 128,
        cold_mib: 32,
        rate: Rate::PagesPerSecond(30_000),
        verify: 40_000,
        ..Config::default()
    }
}

#[test]
fn a_busy_guest_moves_in_every_mode_on_thp() {
    need!(ready());
    move_through("thp", 512, &busy(), &["hybrid", "postcopy", "precopy", "postcopy", "hybrid"]);
}

#[test]
fn a_busy_guest_moves_in_every_mode_on_huge_pages() {
    need!(ready());
    move_through("hugetlb-2m", 512, &busy(), &["hybrid", "postcopy", "precopy"]);
}

/// The memory is one 1 GiB page: in post-copy the guest waits at its first instruction until all memory has arrived. Pre-copy would need as
/// long a downtime.
#[test]
fn a_busy_guest_moves_on_a_page_of_one_gib() {
    need!(ready());
    move_through("hugetlb-1g", 1024, &busy(), &["hybrid", "postcopy"]);
}

/// If the kernel divides processors among sessions first (autogroup), nice values of threads have no effect across sessions.
#[test]
fn daemons_give_way_to_a_guest_that_runs_and_not_to_one_that_waits() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let nice = |node: &Node| session_nice(node.pid().expect("a daemon"));
    let (Some(at_a), Some(at_b)) = (nice(&scene.a), nice(&scene.b)) else {
        return skip!("this kernel has no autogroups");
    };
    assert_eq!((at_a, at_b), (0, 0));
    let seen = |id: &str, phase: &str, expected: i32| {
        scene.reach(id, phase).expect("the phase");
        let until = Instant::now() + Duration::from_secs(5);
        while (nice(&scene.a), nice(&scene.b)) != (Some(expected), Some(expected)) {
            assert!(Instant::now() < until, "{phase}: {:?} and {:?}", nice(&scene.a), nice(&scene.b));
            std::thread::sleep(Duration::from_millis(5));
        }
        scene.reach(id, phase).expect("still in that phase");
    };
    let id = scene.start(&["--mode", "precopy", "--bandwidth", SLOW]).expect("it is taken");
    seen(&id, "rounds", 5);
    scene.a.ask(&["cancel", &id]).expect("it can be cancelled");
    scene.unharmed().expect("the guest is unharmed");
    assert_eq!((nice(&scene.a), nice(&scene.b)), (Some(0), Some(0)));
    let id = scene.start(&["--mode", "postcopy", "--bandwidth", SLOW]).expect("it is taken");
    seen(&id, "fetch", 0);
    assert_eq!(scene.end(&id).expect("an end").code, 0);
    scene.arrived().expect("it is at b");
}

/// Nice value of the session of a process.
fn session_nice(pid: i32) -> Option<i32> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/autogroup")).ok()?;
    line.trim().rsplit_once(" nice ")?.1.parse().ok()
}

#[test]
fn a_guest_with_two_virtual_cpus_moves() {
    need!(ready());
    move_through("thp", 512, &Config { threads: 2, ..busy() }, &["hybrid", "postcopy"]);
}

#[test]
fn a_guest_that_writes_as_fast_as_it_can_moves() {
    need!(ready());
    move_through("thp", 512, &Config { rate: Rate::Max, ..busy() }, &["hybrid", "postcopy"]);
}

#[test]
fn an_idle_guest_moves() {
    need!(ready());
    let config = Config { rate: Rate::PagesPerSecond(0), ..busy() };
    move_through("thp", 512, &config, &["hybrid", "postcopy", "precopy"]);
}

/// The kernel reports which huge page was written, but not which of its bytes. If complete pages were sent, this guest's memory would
/// cross at least 1.4 times.
#[test]
fn what_is_unchanged_in_a_huge_page_is_not_sent_again() {
    need!(ready());
    let guest = Guest::new(512, Config { rate: Rate::PagesPerSecond(100), ..steady() }).expect("a QEMU");
    let sandbox = Sandbox::new().expect("a sandbox");
    need!(sandbox.reserve_huge_pages(2 << 20, 2 * (512 << 20)));
    let scene = Scene::in_sandbox(sandbox, "hugetlb-2m", &guest).expect("a guest");
    let content = nonzero(&scene.a.vm(NAME).expect("it is listed").ram_files()).expect("it can be read");
    let end = arrives_verified(&scene, "hybrid");
    let sent = end.answer["bytes_sent"].as_u64().expect("a number");
    eprintln!("{} KiB of content, {} KiB sent: {}", content >> 10, sent >> 10, end.answer["rounds"]);
    assert!(sent < content + content / 4, "{sent} bytes sent for {content}: {}", end.answer);
}

/// Moves the guest from `a` to `b`. Neither the guest's own check nor the comparison of all pages may find an error.
fn arrives_verified(scene: &Scene, mode: &str) -> End {
    let end = scene.migrate_to("b", &["--mode", mode, "--verify"]).expect("it ends");
    assert_eq!(end.code, 0, "{mode}: {} {}", end.answer, end.said);
    assert_eq!(end.answer["verified"], true, "{mode}: {}", end.answer);
    scene.arrived().expect("the guest is whole");
    end
}

/// Bytes allocated by a RAM file.
fn used(path: &Path) -> u64 {
    std::fs::metadata(path).expect("a RAM file").blocks() * 512
}

#[test]
fn a_guest_with_two_memory_nodes_moves() {
    need!(ready());
    // Each thread fills its pages on its own virtual CPU, hence on its own NUMA node.
    let config = Config { threads: 2, ..steady() };
    let mut guest = Guest::new(512, config).expect("a QEMU");
    for (cpu, id) in ["near", "far"].into_iter().enumerate() {
        guest.extra.extend(["-object".to_owned(), format!("memory-backend-ram,id={id},size=256M")]);
        guest.extra.extend(["-numa".to_owned(), format!("node,cpus={cpu},memdev={id}")]);
    }
    for mode in ["hybrid", "postcopy"] {
        let scene = Scene::with(NAME, "thp", &guest).expect("a guest");
        let files = scene.a.vm(NAME).expect("it is listed").ram_files();
        assert_eq!(files.len(), 2, "{files:?}");
        for file in &files {
            assert!(used(file) > 48 << 20, "the guest hardly uses {}", file.display());
        }
        arrives_verified(&scene, mode);
        assert_eq!(scene.b.vm(NAME).expect("it is listed").ram.len(), 2);
    }
}

#[test]
fn a_guest_with_memory_above_4_gib_moves() {
    need!(ready());
    need!(available(6 << 30));
    let guest = Guest::new(4608, steady()).expect("a QEMU");
    let scene = Scene::with(NAME, "thp", &guest).expect("a guest");
    // QEMU maps the file from 3 GiB on at 4 GiB, above the hole for PCI.
    let at = scene.a.vm(NAME).and_then(|vm| vm.beacon()).expect("a beacon").offset();
    assert!(at >= 3 << 30, "the guest works on memory below the hole, at {at:#x}");
    arrives_verified(&scene, "hybrid");
}

fn available(bytes: u64) -> anyhow::Result<()> {
    let info = std::fs::read_to_string("/proc/meminfo")?;
    let kib = info
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<u64>().ok());
    anyhow::ensure!(kib.unwrap_or(0) << 10 >= bytes, "this needs {} MiB of memory", bytes >> 20);
    Ok(())
}
