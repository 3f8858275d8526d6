//! `./run bench fork`: how fast children run, what the parent pays, what memory they take; beside QEMU's own ways.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::{Value, json};
use vmove_guest::config::{Config, Rate};
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{Setup, fleet_with, light};
use vmove_tests::forks::{Parent, done, names};
use vmove_tests::guest::{Guest, StockQemu};
use vmove_tests::interrupt;
use vmove_tests::monitor::Monitor;
use vmove_tests::process::Guarded;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{NAME, ready};

/// How fast children run, and what they cost, beside QEMU's own ways.
#[derive(Debug, Parser)]
struct Arguments {
    /// Children of the 1 GiB guest
    #[arg(long, default_value_t = 32)]
    children: usize,
    /// Children of the 256 MiB guest
    #[arg(long, default_value_t = 100)]
    many: usize,
    /// Rounds of each measurement
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Children of QEMU's own ways: saving, copying and loading all of memory takes them long
    #[arg(long, default_value_t = 8)]
    qemu_children: usize,
    /// Other hosts, each in a network namespace of its own [0: none]
    #[arg(long, default_value_t = 4)]
    hosts: u8,
    /// Speed of the parent's link, in Mbit/s; multicast takes eight tenths of it
    #[arg(long, default_value_t = 400)]
    mbit: u32,
    /// Print JSON only
    #[arg(long)]
    json: bool,
}

/// Minimum, median and maximum.
fn spread(values: &[f64]) -> Value {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    json!({ "min": sorted.first(), "median": sorted.get(sorted.len() / 2), "max": sorted.last() })
}

/// A guest that keeps `live` MiB of its memory at work.
fn guest(memory_mib: u32, live: u32) -> Result<Guest> {
    let config = Config {
        working_set_mib: live / 4,
        cold_mib: live - live / 4,
        rate: Rate::PagesPerSecond(200),
        verify: 200,
        period_us: 20_000,
        ..Config::default()
    };
    Guest::new(memory_mib, config)
}

fn main() -> Result<()> {
    interrupt::clean_up_when_killed()?;
    let arguments = Arguments::parse();
    ready()?;
    let sandbox = Sandbox::new()?;
    let mut report: BTreeMap<String, Value> = BTreeMap::new();
    let node = Node::start(&sandbox, "a", NodeOptions::default())?;
    let big = Parent::start(&node, "big", "thp", guest(1024, 512)?)?;
    report.insert("1 GiB".to_owned(), fork(&node, &big, arguments.children, arguments.rounds)?);
    node.ask(&["stop", "big", "--force"])?;
    let small = Parent::start(&node, "small", "thp", guest(256, 64)?)?;
    report.insert("256 MiB".to_owned(), fork(&node, &small, arguments.many, arguments.rounds)?);
    node.ask(&["stop", "small", "--force"])?;
    drop(node);
    if arguments.hosts > 0 {
        let what = format!("{} hosts at {} Mbit/s", arguments.hosts, arguments.mbit);
        report.insert(what, hosts(arguments.hosts, arguments.mbit)?);
    }
    let stock = guest(1024, 512)?;
    report.insert("QEMU, 1 GiB: save and load".to_owned(), whole(&sandbox, &stock, arguments.qemu_children)?);
    report.insert("QEMU, 1 GiB: VM templating".to_owned(), templating(&sandbox, &stock, arguments.children)?);
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        for (what, value) in &report {
            println!("{what}\n{}", serde_json::to_string_pretty(value)?);
        }
    }
    Ok(())
}

/// Cold and warm forks of one guest, in turn.
fn fork(node: &Node, parent: &Parent, count: usize, rounds: usize) -> Result<Value> {
    let (mut cold, mut warm, mut saves) = (Vec::new(), Vec::new(), Vec::new());
    let (mut cold_pauses, mut warm_pauses) = (Vec::new(), Vec::new());
    let mut memory = Value::Null;
    let number = count.to_string();
    let count_words = ["create", parent.name.as_str(), "--count", number.as_str()];
    for round in 0..rounds {
        let answer = done(node, &count_words)?;
        eprintln!(
            "{} cold: {} ms, parent {} ms",
            parent.name, answer["all_running_ms"], answer["parent_pause_ms"]
        );
        cold.push(answer["all_running_ms"].as_f64().context("a time")?);
        cold_pauses.push(answer["parent_pause_ms"].as_f64().context("a time")?);
        end(node, &answer)?;
        done(node, &["promote", &parent.name])?;
        done(node, &["warm", &parent.name, "--count", &number])?;
        let answer = done(node, &count_words)?;
        eprintln!(
            "{} warm: {} ms, parent {} ms",
            parent.name, answer["all_running_ms"], answer["parent_pause_ms"]
        );
        warm.push(answer["all_running_ms"].as_f64().context("a time")?);
        warm_pauses.push(answer["parent_pause_ms"].as_f64().context("a time")?);
        if round + 1 == rounds {
            std::thread::sleep(Duration::from_secs(2));
            memory = pss(node, parent, &answer)?;
        }
        end(node, &answer)?;
        done(node, &["promote", &parent.name])?;
        let name = format!("kept-{round}");
        let saved = done(node, &["template", "save", &parent.name, &name])?;
        eprintln!("{} template save: pause {} ms", parent.name, saved["parent_pause_ms"]);
        saves.push(saved["parent_pause_ms"].as_f64().context("a time")?);
        done(node, &["template", "rm", &name])?;
        done(node, &["promote", &parent.name])?;
    }
    Ok(json!({
        "children": count, "all_running_cold_ms": spread(&cold), "all_running_warm_ms": spread(&warm),
        "parent_pause_cold_ms": spread(&cold_pauses), "parent_pause_warm_ms": spread(&warm_pauses),
        "template_save_pause_ms": spread(&saves), "memory": memory,
    }))
}

/// One child on each of so many other hosts, by each way, with and without waiting for all memory.
fn hosts(count: u8, mbit: u32) -> Result<Value> {
    let config = Config { working_set_mib: 64, cold_mib: 64, ..light() };
    let setup = Setup { config: Some(config), ..Setup::default() };
    let paced = mbit / 10 * 8;
    let fork =
        |_| format!("multicast-group = \"239.78.0.1:7421\"\nmulticast-mbit = {paced}\nlink-mbit = {mbit}\n");
    let fleet = fleet_with(count + 1, &setup, fork)?;
    fleet.networks.limit(1, mbit)?;
    let (names, number): (Vec<_>, _) =
        ((2..=count + 1).map(|n| format!("n{n}")).collect(), count.to_string());
    let mut results = BTreeMap::new();
    for way in ["multicast", "pipeline", "unicast"] {
        for whole in [false, true] {
            let mut words = vec!["create", NAME, "--count", &number, "--way", way];
            words.extend(names.iter().flat_map(|name| ["--node", name]));
            words.extend(whole.then_some("--whole"));
            let before = fleet.networks.sent_bytes(1)?;
            let answer = done(&fleet.nodes[0], &words)?;
            let sent = fleet.networks.sent_bytes(1)? - before;
            fleet.sound(&answer);
            let memory = answer["distribution"]["memory_bytes"].as_u64().context("bytes")?;
            let what = format!("{way}{}", if whole { ", all memory first" } else { "" });
            #[allow(clippy::cast_precision_loss)]
            let copies = sent as f64 / memory as f64;
            eprintln!(
                "{what}: all running after {} ms, complete after {} ms, {copies:.3} copies on the parent's link",
                answer["all_running_ms"], answer["complete_ms"]
            );
            results.insert(
                what,
                json!({
                    "all_running_ms": answer["all_running_ms"], "complete_ms": answer["complete_ms"],
                    "memory_bytes": memory, "link_bytes": sent, "copies": copies,
                }),
            );
            for child in answer["children"].as_array().context("children")? {
                let (node, name) = (child["node"].as_str(), child["name"].as_str());
                fleet.node(node.context("a node")?).ask(&["stop", name.context("a name")?, "--force"])?;
            }
        }
    }
    Ok(json!(results))
}

fn end(node: &Node, answer: &Value) -> Result<()> {
    for name in names(answer) {
        done(node, &["kill", &name])?;
    }
    Ok(())
}

/// Proportional set size of each child, in MiB: its share of what it shares.
fn pss(node: &Node, parent: &Parent, answer: &Value) -> Result<Value> {
    let of = |pid: i64| -> Result<(f64, f64)> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kib = |key: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(key));
            line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        Ok((kib("Pss:") / 1024.0, (kib("Private_Dirty:") + kib("Private_Clean:")) / 1024.0))
    };
    let (mut all, mut own) = (Vec::new(), Vec::new());
    for child in answer["children"].as_array().context("children")? {
        let (pss, private) = of(child["pid"].as_i64().context("a pid")?)?;
        all.push(pss);
        own.push(private);
    }
    let (parent_pss, _) = of(node.vm(&parent.name)?.pid.into())?;
    let total = all.iter().sum::<f64>() + parent_pss;
    Ok(
        json!({ "pss_mib": spread(&all), "private_mib": spread(&own), "total_pss_mib": total, "parent_pss_mib": parent_pss }),
    )
}

/// QEMUs of one command line, each with its own folder and RAM; killed when dropped.
struct Clones(Vec<(Guarded, PathBuf)>);

fn start_clones(
    guest: &Guest,
    folder: &Path,
    count: usize,
    ram: impl Fn(usize) -> Vec<String>,
) -> Result<Clones> {
    let mut all = Clones(Vec::new());
    for number in 0..count {
        let dir = folder.join(format!("clone-{number}"));
        std::fs::create_dir_all(&dir)?;
        let line = guest.command_line("null")?;
        let line: Vec<String> =
            line.into_iter().map(|w| if w == "file:null" { "null".to_owned() } else { w }).collect();
        let child: Child = Command::new(&line[0])
            .args(&line[1..])
            .args(ram(number))
            .args(["-machine", "memory-backend=vmram", "-incoming", "defer", "-S"])
            .arg("-qmp")
            .arg(format!("unix:{}/qmp.sock,server=on,wait=off", dir.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        all.0.push((child.into(), dir));
    }
    Ok(all)
}

/// Loads `state` into all of them at once and lets them run; from before the first starts to load until the last runs.
fn load_all(clones: &Clones, state: &Path, ignore_shared: bool) -> Result<()> {
    std::thread::scope(|scope| {
        let load = |dir: &Path| -> Result<()> {
            let monitor = Monitor::connect(&dir.join("qmp.sock"))?;
            if ignore_shared {
                monitor.enable(&["x-ignore-shared", "events"])?;
            } else {
                monitor.enable(&["events"])?;
            }
            let uri = format!("exec:cat {}", state.display());
            monitor.run("migrate-incoming", json!({ "uri": uri }))?;
            monitor.wait("MIGRATION", Duration::from_secs(300), |e| e.text("status") == Some("completed"))?;
            monitor.run("cont", Value::Null)?;
            monitor.wait("RESUME", Duration::from_secs(60), |_| true)?;
            Ok(())
        };
        let tasks: Vec<_> = clones.0.iter().map(|(_, dir)| scope.spawn(move || load(dir))).collect();
        tasks.into_iter().try_for_each(|task| task.join().map_err(|_| anyhow::anyhow!("a task failed"))?)
    })
}

/// Stops the guest, writes its state to `to`, and lets it go on. Returns how long it stood still.
fn save(qemu: &StockQemu, to: &Path, ignore_shared: bool) -> Result<f64> {
    let monitor = Monitor::connect(qemu.qmp())?;
    monitor.enable(if ignore_shared { &["x-ignore-shared", "events"] } else { &["events"] })?;
    monitor.run("migrate-set-parameters", json!({ "max-bandwidth": 1_000_000_000_000_u64 }))?;
    let begun = Instant::now();
    monitor.run("stop", Value::Null)?;
    monitor.run("migrate", json!({ "uri": format!("exec:cat > {}", to.display()) }))?;
    monitor.wait("MIGRATION", Duration::from_secs(300), |e| e.text("status") == Some("completed"))?;
    if !ignore_shared {
        monitor.run("cont", Value::Null)?;
    }
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// All of memory into a file, which each child reads.
fn whole(sandbox: &Sandbox, guest: &Guest, count: usize) -> Result<Value> {
    let memory = sandbox.mount_thp("qemu-whole")?;
    let mut parent = StockQemu::start(guest, &sandbox.folder("whole")?, &memory.join("parent"), &[])?;
    parent.wait_running()?;
    let state = memory.join("state");
    let begun = Instant::now();
    let pause = save(&parent, &state, false)?;
    let bytes = std::fs::metadata(&state)?.len();
    let size = guest.memory_mib;
    let clones = start_clones(guest, &memory, count, |_| {
        vec!["-object".to_owned(), format!("memory-backend-ram,id=vmram,size={size}M")]
    })?;
    load_all(&clones, &state, false)?;
    let all = begun.elapsed().as_secs_f64() * 1e3;
    Ok(json!({ "children": count, "all_running_ms": all, "parent_pause_ms": pause, "state_bytes": bytes }))
}

/// The recipe of QEMU's documentation: RAM in a shared file, device state without RAM, children map the file privately. The
/// parent must stay stopped, since it still writes to the file.
fn templating(sandbox: &Sandbox, guest: &Guest, count: usize) -> Result<Value> {
    let memory = sandbox.mount_thp("qemu-template")?;
    let ram = memory.join("parent");
    let mut parent = StockQemu::start(guest, &sandbox.folder("template")?, &ram, &[])?;
    parent.wait_running()?;
    let state = memory.join("state");
    let begun = Instant::now();
    let pause = save(&parent, &state, true)?;
    ensure!(std::fs::metadata(&state)?.len() > 0, "no state");
    let (size, path) = (guest.memory_mib, ram.display().to_string());
    let clones = start_clones(guest, &memory, count, |_| {
        let options = format!("memory-backend-file,id=vmram,share=off,size={size}M,mem-path={path}");
        vec!["-object".to_owned(), options]
    })?;
    load_all(&clones, &state, true)?;
    let all = begun.elapsed().as_secs_f64() * 1e3;
    Ok(
        json!({ "children": count, "all_running_ms": all, "parent_stopped_after_ms": pause, "parent": "stays stopped" }),
    )
}
