//! The guest's program: fills its pages, then rewrites and checks them until the machine ends. See the library.

mod disk;
mod job;
mod memory;
mod port;
mod service;
mod sys;
mod worker;

use std::process::ExitCode;
use std::sync::{Arc, Barrier};

use vmove_guest::beacon::{self, Phase, place};
use vmove_guest::config::Config;
use vmove_guest::pattern::mix;
use worker::{Shared, Worker};

/// Time that the host gets to see that the machine is at work.
const AT_WORK: std::time::Duration = std::time::Duration::from_secs(3);

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("VMOVE-GUEST ERROR {error}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> Result<(), String> {
    let command_line = std::fs::read_to_string("/proc/cmdline").map_err(|e| format!("/proc/cmdline: {e}"))?;
    let config = Config::parse(&command_line)?;
    let mut boot = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut boot))
        .map_err(|e| format!("/dev/urandom: {e}"))?;
    let boot = mix(u64::from_le_bytes(boot) ^ sys::now());

    let map = |pages, huge| {
        memory::Region::map(pages, huge).map_err(|e| format!("could not map {pages} pages: {e}"))
    };
    let beacon = map(1, false)?.as_atomics();
    let shared = Shared { beacon, pages: map(config.working_pages() + config.cold_pages(), true)?, boot };
    shared.set(place::PHASE, Phase::Filling as u64);
    for (at, word) in beacon::fixed_words(&config, boot) {
        shared.set(at, word);
    }

    if config.disk_mib > 0 {
        let disk = disk::Disk::open(config.disk_mib).map_err(|e| format!("/dev/vda: {e}"))?;
        std::thread::spawn(move || disk.work());
    }
    if config.fork > 0 || config.misbehave {
        let (port, config) = (port::Port::open()?, config.clone());
        std::thread::spawn(move || {
            while shared.beacon[place::PHASE].load(std::sync::atomic::Ordering::Relaxed)
                != Phase::Running as u64
            {
                std::thread::sleep(AT_WORK / 10);
            }
            // The host looks for the beacon in the RAM file, which is the machine's memory only until it is forked.
            std::thread::sleep(AT_WORK);
            if let Err(error) = job::run(port, &config) {
                println!("VMOVE-GUEST ERROR job: {error}");
            }
        });
    }
    if let Some(address) = config.address {
        let service =
            service::Service::open(address.listen()).map_err(|e| format!("service on {address}: {e}"))?;
        std::thread::spawn(move || service.work());
    }
    // All threads begin at the same moment, when all pages are there.
    let barrier = Arc::new(Barrier::new(config.threads as usize));
    let threads: Vec<_> = (0..config.threads as usize)
        .map(|id| {
            let (barrier, config) = (Arc::clone(&barrier), config.clone());
            std::thread::spawn(move || {
                sys::stay_on_cpu(id);
                let worker = Worker::fill(id, shared, &config);
                if barrier.wait().is_leader() {
                    println!("VMOVE-GUEST READY {config} uptime_ms={}", sys::now() / 1_000_000);
                    shared.set(place::PHASE, Phase::Running as u64);
                }
                worker.run()
            })
        })
        .collect();
    for thread in threads {
        let _: Result<std::convert::Infallible, _> = thread.join();
        println!("VMOVE-GUEST ERROR a thread ended");
    }
    Err("all threads ended".to_owned())
}
