//! `./run lab`: virtual hosts with soft RDMA.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use nix::sys::signal::{SigSet, Signal};
use vmove_lab::host::{Kernel, Places, Shape, address};
use vmove_lab::supervisor::Lab;
use vmove_lab::switch::rules::Rule;
use vmove_lab::wire::{Command, Event, Request};
use vmove_lab::{
    agent, bench, check, client, compare, device_forks, device_moves, devices, faults, forks, moves,
    multicast, shell, sides, smoke,
};

/// Virtual hosts with RDMA (the kernel's soft RoCE) on one machine, joined by a switch that loses, delays, reorders,
/// cuts and slows down frames on request.
#[derive(Debug, Parser)]
#[command(name = "./run lab", disable_help_subcommand = false)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Start the hosts and leave them running until 'down' or their time is over
    Up {
        #[command(flatten)]
        shape: ShapeArgs,
        /// They end by themselves after so many minutes
        #[arg(long, default_value_t = 60)]
        minutes: u64,
    },
    /// Run a command in a host, with this machine's files and its own memory over them
    Exec {
        /// h1, h2, ...
        host: String,
        /// Seconds after which the command is killed
        #[arg(long, default_value_t = 600)]
        timeout: u64,
        /// The command
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// A shell in a host
    Shell {
        /// h1, h2, ...
        host: String,
    },
    /// What the switch does to frames: './run lab rule h1 h2 drop=10% delay=5ms reorder=1% rate=100', or cut, cut-rdma, clear
    Rule {
        /// Sending host, or 'all'
        from: String,
        /// Receiving host, or 'all'
        to: String,
        /// drop=PART drop-multicast=PART delay=TIME reorder=PART rate=MBIT cut cut-rdma clear
        words: Vec<String>,
    },
    /// Frames that the switch passed on, lost and reordered
    Stats,
    /// End the hosts
    Down,
    /// Start hosts, check that RDMA works between them, run the given command in h1, and end them
    Test {
        #[command(flatten)]
        shape: ShapeArgs,
        /// Only run the command: no self-check before it
        #[arg(long)]
        no_check: bool,
        /// Try cuts, losses, killed peers and missing devices on this measuring program
        #[arg(long, value_name = "PROGRAM")]
        faults: Option<PathBuf>,
        /// Send datagrams from h1 to all others by this program
        #[arg(long, value_name = "PROGRAM", requires = "spread")]
        multicast: Option<PathBuf>,
        /// Spread memory from h1 to all others by this program
        #[arg(long, value_name = "PROGRAM")]
        spread: Option<PathBuf>,
        /// Move guests between the vmoved of this folder
        #[arg(long, value_name = "FOLDER", requires = "guest")]
        moves: Option<PathBuf>,
        /// The guest that is moved
        #[arg(long, value_name = "IMAGE")]
        guest: Option<PathBuf>,
        /// How often a guest is moved to and fro in the cases that look for leaks and for what kills leave behind
        #[arg(long, default_value_t = 20)]
        sessions: usize,
        /// Fork it from h1 to h2 and h3, too
        #[arg(long, requires = "moves")]
        forks: bool,
        /// One fork by multicast and one post-copy whose path is cut, and no other moves and forks
        #[arg(long, requires = "moves", conflicts_with = "forks")]
        smoke: bool,
        /// Give virtual functions to guests by the programs of this folder
        #[arg(long, value_name = "FOLDER", requires = "device_guest")]
        device_programs: Option<PathBuf>,
        /// Move guests that have virtual functions between the vmoved of this folder
        #[arg(long, value_name = "FOLDER", requires = "device_guest")]
        device_moves: Option<PathBuf>,
        /// The guest that gets them
        #[arg(long, value_name = "IMAGE")]
        device_guest: Option<PathBuf>,
        /// Initramfs of a guest that runs Linux with them, on the hosts' kernel
        #[arg(long, value_name = "IMAGE")]
        device_linux: Option<PathBuf>,
        /// Only moves, forks and cases with devices whose name contains this
        #[arg(long, default_value = "")]
        only: String,
        /// A command for h1
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Measure on the same two hosts in turns, and print tables
    Bench {
        /// Only this
        what: Option<Measured>,
        /// The measuring program
        #[arg(long, value_name = "PROGRAM")]
        program: PathBuf,
        /// Folder of vmoved
        #[arg(long, value_name = "FOLDER")]
        moves: PathBuf,
        /// The guest that is moved
        #[arg(long, value_name = "IMAGE")]
        guest: PathBuf,
        /// How often each is measured
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Of the migrations only those whose row's name contains this; may be given several times
        #[arg(long, value_name = "WORD")]
        only: Vec<String>,
        /// Kernel of the hosts
        #[arg(long, value_enum, default_value = "stable")]
        kernel: Kernel,
    },
    /// Owns the hosts; started by 'up'
    #[command(hide = true)]
    Supervise {
        #[command(flatten)]
        shape: ShapeArgs,
        #[arg(long)]
        minutes: u64,
    },
    /// Runs in the hosts
    #[command(hide = true)]
    Agent,
}

/// What there is to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Measured {
    /// READs through the fabric, beside those of perftest
    Reads,
    /// READ by the destination, beside WRITE by the source
    Sides,
    /// Migrations by vmove, beside QEMU's own
    Moves,
}

#[derive(Debug, Clone, Args)]
struct ShapeArgs {
    /// How many hosts, 1 to 9
    #[arg(long, default_value_t = 3)]
    hosts: usize,
    /// Memory of each host in MiB
    #[arg(long, default_value_t = 1024)]
    memory_mib: u32,
    /// Processors of each host
    #[arg(long, default_value_t = 1)]
    processors: u32,
    /// Hosts without an RDMA device
    #[arg(long)]
    no_rdma: bool,
    /// Kernel of the hosts; the other one is unpacked by './run lab test on-demand'
    #[arg(long, value_enum, default_value = "stable")]
    kernel: Kernel,
    /// Hosts with an IOMMU and a network card that has virtual functions, for VMs that own devices
    #[arg(long)]
    devices: bool,
    /// NUMA nodes of each host
    #[arg(long, default_value_t = 1)]
    numa_nodes: u32,
}

impl ShapeArgs {
    fn shape(&self) -> Shape {
        Shape {
            hosts: self.hosts,
            memory_mib: self.memory_mib,
            processors: self.processors,
            rdma: !self.no_rdma,
            kernel: self.kernel,
            devices: self.devices,
            numa_nodes: self.numa_nodes,
        }
    }

    fn words(&self) -> Vec<String> {
        let mut words = vec![
            format!("--hosts={}", self.hosts),
            format!("--memory-mib={}", self.memory_mib),
            format!("--processors={}", self.processors),
            format!("--numa-nodes={}", self.numa_nodes),
        ];
        words.extend(self.no_rdma.then(|| "--no-rdma".to_owned()));
        words.extend((self.kernel == Kernel::Next).then(|| "--kernel=next".to_owned()));
        words.extend(self.devices.then(|| "--devices".to_owned()));
        words
    }
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let done = Ok(ExitCode::SUCCESS);
    match cli.what {
        What::Agent => agent::run().map(|()| ExitCode::SUCCESS),
        What::Up { shape, minutes } => up(&shape, minutes).and(done),
        What::Supervise { shape, minutes } => supervise(&shape, minutes).and(done),
        What::Test {
            shape,
            no_check,
            faults,
            multicast,
            spread,
            moves,
            guest,
            sessions,
            forks,
            device_programs,
            device_moves,
            device_guest,
            device_linux,
            smoke,
            only,
            command,
        } => {
            let hosts = shape.hosts;
            with_lab(&shape, move |lab| {
                if !no_check {
                    check::all(lab, hosts)?;
                }
                if let Some(program) = faults {
                    faults::all(lab, &program)?;
                }
                if let Some((program, spread)) = multicast.zip(spread) {
                    multicast::all(lab, &program, &spread)?;
                }
                if let Some((programs, guest)) = moves.zip(guest) {
                    let parts = moves::parts(&programs, &guest, lab.places())?;
                    if smoke {
                        smoke::run(lab, &parts)?;
                        return Ok(0);
                    }
                    let moved = moves::all(lab, &parts, sessions, &only)?;
                    let forked = if forks { forks::all(lab, &parts, &only)? } else { 0 };
                    ensure!(
                        moved + forked > 0,
                        "Expected part of a case's name, found {only:?}; no case has it in its name"
                    );
                }
                if let Some(guest) = device_guest {
                    let linux = device_linux.map(|initrd| (lab.places().files.join("vmlinuz"), initrd));
                    let mut ran = 0;
                    if let Some(programs) = device_programs {
                        ran += devices::all(
                            lab,
                            &devices::parts(&programs, &guest, linux.clone(), lab.places())?,
                            &only,
                        )?;
                    }
                    if let Some(programs) = device_moves {
                        let parts = moves::parts(&programs, &guest, lab.places())?;
                        ran += device_moves::all(lab, &parts, &guest, linux.as_ref(), sessions, &only)?;
                        ran += device_forks::all(lab, &parts, &guest, &only)?;
                    }
                    ensure!(
                        ran > 0,
                        "Expected part of a case's name, found {only:?}; no case has it in its name"
                    );
                }
                if command.is_empty() { Ok(0) } else { run_in(lab, command) }
            })
        }
        What::Bench { what, program, moves, guest, rounds, only, kernel } => {
            let shape = ShapeArgs {
                hosts: 2,
                memory_mib: 768,
                processors: 1,
                no_rdma: false,
                kernel,
                devices: false,
                numa_nodes: 1,
            };
            with_lab(&shape, move |lab| {
                let wanted = |this| what.is_none_or(|what| what == this);
                if wanted(Measured::Reads) {
                    bench::run(lab, &program, rounds)?;
                }
                if wanted(Measured::Sides) {
                    sides::run(lab, &program, rounds)?;
                }
                if wanted(Measured::Moves) {
                    compare::run(lab, &moves::parts(&moves, &guest, lab.places())?, rounds, &only)?;
                }
                Ok(0)
            })
        }
        What::Exec { host, timeout, command } => {
            let folder = std::env::current_dir()?.to_str().map(str::to_owned);
            let command = Command { argv: command, env: passed_on(), folder, timeout_ms: timeout * 1000 };
            let status = client::exec(&places("up")?.control(), number(&host)?, command)?;
            Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
        }
        What::Shell { host } => shell::attach(&places("up")?.terminal(number(&host)?)).and(done),
        What::Rule { from, to, words } => {
            let end = |name: &str| if name == "all" { Ok(None) } else { number(name).map(Some) };
            let request = Request::Rule { from: end(&from)?, to: end(&to)?, rule: Rule::parse(&words)? };
            client::ask(&places("up")?.control(), &request, |_| {}).and(done)
        }
        What::Stats => client::ask(&places("up")?.control(), &Request::Stats, |event| {
            if let Event::Text(text) = event {
                print!("{text}");
            }
        })
        .and(done),
        What::Down => down().and(done),
    }
}

/// Where everything is; `name` tells labs of one source tree apart.
fn places(name: &str) -> Result<Places> {
    let variable = |name: &str| {
        let value = std::env::var_os(name);
        value.map(PathBuf::from).with_context(|| format!("{name} is not set; start this by './run lab'"))
    };
    let files = variable("VMOVE_LAB_FILES")?;
    let state = files.join(format!("run-{name}"));
    Ok(Places { files, source: variable("ROOT")?, qemu: variable("VMOVE_QEMU_10_0")?, state })
}

fn number(host: &str) -> Result<usize> {
    let number = host.strip_prefix('h').and_then(|number| number.parse().ok());
    number.with_context(|| format!("'{host}' is not a host; they are called h1, h2, ..."))
}

/// Variables that commands in hosts get: those of this project's tests.
fn passed_on() -> Vec<(String, String)> {
    std::env::vars().filter(|(name, _)| name.starts_with("VMOVE_") || name == "RUST_LOG").collect()
}

fn up(shape: &ShapeArgs, minutes: u64) -> Result<()> {
    let places = places("up")?;
    if std::os::unix::net::UnixStream::connect(places.control()).is_ok() {
        bail!("the lab is up already; './run lab down' ends it");
    }
    let _ = std::fs::remove_dir_all(&places.state);
    std::fs::create_dir_all(&places.state)?;
    let log = std::fs::File::create(places.state.join("supervisor.log"))?;
    let begin = Instant::now();
    let mut supervisor = std::process::Command::new(std::env::current_exe()?)
        .arg("supervise")
        .args(shape.words())
        .arg(format!("--minutes={minutes}"))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()?;
    // The control socket is made when all hosts have answered.
    while !places.control().exists() {
        if let Some(status) = supervisor.try_wait()? {
            let words = std::fs::read_to_string(places.state.join("supervisor.log")).unwrap_or_default();
            bail!("the lab did not come up ({status}): {}", words.trim());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{} hosts are up after {:.1} s:", shape.hosts, begin.elapsed().as_secs_f64());
    for host in 1..=shape.hosts {
        println!("  h{host}  {}  console {}", address(host), places.console(host).display());
    }
    println!("logs are in {}", places.state.display());
    println!("./run lab exec h1 ibv_devinfo    ./run lab shell h1    ./run lab down");
    Ok(())
}

fn down() -> Result<()> {
    let places = places("up")?;
    if std::os::unix::net::UnixStream::connect(places.control()).is_err() {
        println!("no lab is up");
        return Ok(());
    }
    client::ask(&places.control(), &Request::Down, |_| {})
}

/// From now on, signals that end a program arrive at the channel instead, to be called before threads are started.
fn catch_signals(stopper: Sender<()>) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block()?;
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            if stopper.send(()).is_err() {
                return;
            }
        }
    });
    Ok(())
}

fn supervise(shape: &ShapeArgs, minutes: u64) -> Result<()> {
    let (stopper, stop) = channel();
    catch_signals(stopper.clone())?;
    let lab = Arc::new(Lab::start(&places("up")?, &shape.shape())?);
    let result = lab.serve(&stop, &stopper, Duration::from_secs(minutes * 60));
    lab.clean_up();
    result
}

/// Removes the logs of labs whose process is gone: those of a run that failed stay until the next one.
fn forget_old_logs(files: &Path) {
    for entry in std::fs::read_dir(files).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix("run-test-"));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Starts hosts, does something with them, and ends them, whatever happens. The work's exit status.
fn with_lab(shape: &ShapeArgs, work: impl FnOnce(&Lab) -> Result<i32> + Send + 'static) -> Result<ExitCode> {
    let (stopper, stop) = channel();
    catch_signals(stopper)?;
    let places = places(&format!("test-{}", std::process::id()))?;
    forget_old_logs(&places.files);
    println!("logs are in {}", places.state.display());
    let begin = Instant::now();
    let lab = Arc::new(Lab::start(&places, &shape.shape())?);
    println!("{} hosts are up after {:.1} s", shape.hosts, begin.elapsed().as_secs_f64());
    // The work is done beside the main thread, so that a signal ends it.
    let (finished, outcome) = channel();
    let worker = Arc::clone(&lab);
    std::thread::spawn(move || {
        let _ = finished.send(work(&worker));
    });
    let result = loop {
        match outcome.recv_timeout(Duration::from_millis(50)) {
            Ok(result) => break Some(result),
            Err(RecvTimeoutError::Disconnected) => bail!("the work panicked; the hosts have been ended"),
            Err(RecvTimeoutError::Timeout) if stop.try_recv().is_ok() => break None,
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    lab.clean_up();
    match result {
        Some(Ok(status)) => {
            if status == 0 {
                std::fs::remove_dir_all(&places.state)?;
            }
            Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
        }
        Some(Err(error)) => Err(error),
        None => bail!("interrupted; the hosts have been ended"),
    }
}

/// Runs a command in h1 and passes its output on.
fn run_in(lab: &Lab, argv: Vec<String>) -> Result<i32> {
    let folder = std::env::current_dir()?.to_str().map(str::to_owned);
    let command = Command { argv, env: passed_on(), folder, timeout_ms: 900_000 };
    for event in lab.exec(1, command)? {
        match event {
            Event::Out(text) => print!("{text}"),
            Event::Err(text) => eprint!("{text}"),
            Event::Exit { status } => return Ok(status),
            _ => {}
        }
    }
    bail!("host h1 went away")
}
