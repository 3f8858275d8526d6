//! Moves a guest back and forth between two QEMUs that share its RAM file, and prints where the time goes.
//!
//! ```text
//! switchover_bench [--qemu PATH] [--machine q35] [--accel tcg] [--rounds 10] [--hold told|once|never] [--stop-first] [-- QEMU OPTIONS]
//! ```
//! The guest is SeaBIOS without a disk, 1 GiB. Nothing but the device state moves: both QEMUs map one tmpfs file.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    time::Duration,
};
use vmove_types::Backing;
use vmove_types::time::Mono;

use vmove_qmp::{
    Client, CommandLine, QemuProcess, RunLayout,
    confine::Confinement,
    switchover::{
        Destination, DestinationOptions, Hold, Inbound, Outbound, Source, SourceOptions, StateReceiver,
        StateSender, relay,
    },
};

type Error = Box<dyn std::error::Error + Send + Sync>;

const STEP_TIMEOUT: Duration = Duration::from_secs(10);

struct Arguments {
    qemu: OsString,
    machine: String,
    accel: String,
    rounds: usize,
    hold: Hold,
    stop_first: bool,
    extra: Vec<OsString>,
}

fn arguments() -> Result<Arguments, Error> {
    let mut found = Arguments {
        qemu: std::env::var_os("VMOVE_QEMU_10_0").unwrap_or_else(|| "qemu-system-x86_64".into()),
        machine: "q35".to_owned(),
        accel: "tcg".to_owned(),
        rounds: 10,
        hold: Hold::UntilTold,
        stop_first: false,
        extra: Vec::new(),
    };
    let mut words = std::env::args_os().skip(1);
    while let Some(word) = words.next() {
        let mut next = || words.next().ok_or("an option lacks its argument");
        match word.to_str() {
            Some("--qemu") => found.qemu = next()?,
            Some("--machine") => found.machine = next()?.to_string_lossy().into_owned(),
            Some("--accel") => found.accel = next()?.to_string_lossy().into_owned(),
            Some("--rounds") => found.rounds = next()?.to_string_lossy().parse()?,
            Some("--stop-first") => found.stop_first = true,
            Some("--hold") => {
                found.hold = match next()?.to_str() {
                    Some("told") => Hold::UntilTold,
                    Some("once") => Hold::AtOnce,
                    Some("never") => Hold::Never,
                    _ => return Err("--hold takes told, once or never".into()),
                }
            }
            Some("--") => found.extra = words.by_ref().collect(),
            _ => return Err(format!("unknown argument {}", word.to_string_lossy()).into()),
        }
    }
    Ok(found)
}

struct Node {
    process: QemuProcess,
    client: Client,
}

/// Both nodes have the same memory directory: that is what makes them share the RAM file.
fn layout(base: &Path, node: &str) -> RunLayout {
    let vm_dir = base.join(node);
    RunLayout {
        qmp_socket: vm_dir.join("qmp.sock"),
        vm_dir,
        memory_dir: base.to_owned(),
        backing: Backing::Thp,
        name: "bench".to_owned(),
        confinement: Confinement::default(),
    }
}

async fn spawn(argv: &[OsString], layout: &RunLayout) -> Result<Node, Error> {
    std::fs::create_dir_all(&layout.vm_dir)?;
    let process =
        QemuProcess::spawn(argv, &layout.vm_dir, &layout.vm_dir.join("qemu.log"), &layout.confinement)?;
    let client = process.wait_qmp(&layout.qmp_socket, STEP_TIMEOUT).await?;
    Ok(Node { process, client })
}

/// Milliseconds after STOP; `migrate` is before it.
#[derive(Default, Clone)]
struct Times {
    migrate_to_stop: f64,
    held: f64,
    device: f64,
    completed: f64,
    last_byte: f64,
    loaded: f64,
    resumed: f64,
    bytes: u64,
}

async fn switch(from: &Node, to: &Node, arguments: &Arguments) -> Result<Times, Error> {
    let destination = Destination::prepare(&to.client, &DestinationOptions::default()).await?;
    let (mut sender, fd) = StateSender::pair()?;
    destination.listen(Inbound::Fd(fd)).await?;
    let source = Source::prepare(&from.client, &SourceOptions::default().hold(arguments.hold)).await?;
    let (mut receiver, fd) = StateReceiver::pair()?;
    let carried = tokio::spawn(async move { relay(&mut receiver, &mut sender).await });

    let mut device = Some(from.client.expect("MIGRATION", |event| event.text("status") == Some("device")));
    let mut begin = Mono::now();
    let mut stop = None;
    if arguments.stop_first {
        let event = from.client.expect("STOP", |_| true);
        from.client.execute_raw("stop", serde_json::Value::Null, STEP_TIMEOUT).await?;
        stop = Some(event.wait(STEP_TIMEOUT).await?.at);
        begin = Mono::now();
    }
    source.start(Outbound::Fd(fd)).await?;
    let stop = match stop {
        Some(stop) => stop,
        None => source.stopped(STEP_TIMEOUT).await?.at,
    };
    if arguments.hold == Hold::UntilTold {
        source.held(STEP_TIMEOUT).await?;
        source.continue_().await?;
    }
    let loaded = destination.loaded(STEP_TIMEOUT).await?;
    let resumed = destination.resume(STEP_TIMEOUT).await?;
    let completed = source.completed(STEP_TIMEOUT).await?;
    let held = source.held(STEP_TIMEOUT).await?;
    let device = match device.take().filter(|_| arguments.hold != Hold::Never) {
        Some(expected) => Some(expected.wait(STEP_TIMEOUT).await?.at),
        None => None,
    };
    let stats = carried.await??;
    let after = |at: Mono| at.since(stop).as_secs_f64() * 1e3;
    Ok(Times {
        migrate_to_stop: stop.since(begin).as_secs_f64() * 1e3,
        held: after(held.at),
        device: device.map_or(f64::NAN, after),
        completed: after(completed.at),
        last_byte: stats.last.map_or(f64::NAN, after),
        loaded: after(loaded.at),
        resumed: after(resumed.at),
        bytes: stats.bytes,
    })
}

async fn run(arguments: &Arguments, base: &Path) -> Result<Vec<Times>, Error> {
    let mut argv: Vec<OsString> = vec![arguments.qemu.clone()];
    for word in [
        "-machine",
        &arguments.machine,
        "-accel",
        &arguments.accel,
        "-m",
        "1G",
        "-display",
        "none",
        "-nodefaults",
    ] {
        argv.push(word.into());
    }
    argv.extend(arguments.extra.iter().cloned());
    let original = CommandLine::parse(argv)?;
    let first = layout(base, "n0");
    let mut line = original.clone();
    line.rewrite_movable(&first)?;
    let mut here = spawn(&line.to_argv(), &first).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut times = Vec::new();
    for round in 0..arguments.rounds {
        let there = layout(base, &format!("n{}", round + 1));
        let there = spawn(&original.derive_destination(&there)?.argv, &there).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let result = switch(&here, &there, arguments).await;
        here.process.quit(Some(&here.client), STEP_TIMEOUT).await?;
        here = there;
        match result {
            Ok(one) => times.push(one),
            Err(error) => {
                eprintln!("{}", here.process.log_tail());
                here.process.kill().await?;
                return Err(error);
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    here.process.quit(Some(&here.client), STEP_TIMEOUT).await?;
    Ok(times)
}

fn median(times: &[Times], field: impl Fn(&Times) -> f64) -> f64 {
    let mut all: Vec<f64> = times.iter().map(field).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments = arguments()?;
    let base = PathBuf::from(format!("/dev/shm/vmove-switchover-{}", std::process::id()));
    std::fs::create_dir_all(&base)?;
    let result = run(&arguments, &base).await;
    std::fs::remove_dir_all(&base)?;
    let times = result?;
    println!("ms after STOP:  held  device  completed  last-byte  loaded  RESUME | migrate->STOP  bytes");
    let line = |name: &str, t: &Times| {
        println!(
            "{name:>12} {:7.2} {:7.2} {:10.2} {:10.2} {:7.2} {:7.2} | {:13.2} {:6}",
            t.held, t.device, t.completed, t.last_byte, t.loaded, t.resumed, t.migrate_to_stop, t.bytes
        );
    };
    for one in &times {
        line("", one);
    }
    let middle = Times {
        migrate_to_stop: median(&times, |t| t.migrate_to_stop),
        held: median(&times, |t| t.held),
        device: median(&times, |t| t.device),
        completed: median(&times, |t| t.completed),
        last_byte: median(&times, |t| t.last_byte),
        loaded: median(&times, |t| t.loaded),
        resumed: median(&times, |t| t.resumed),
        bytes: times.last().map_or(0, |t| t.bytes),
    };
    line("median", &middle);
    Ok(())
}
