//! What the kernel's answers cost on this machine: `cargo run --release -p vmove-memory --example measure [MiB]`.
//!
//! Needs root. Uses a child process in place of QEMU, and 2 MiB pages if some can be reserved for the time it runs.
#![allow(unsafe_code)]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmove_memory::{
    Backing, ByteLen, DirtyTracker, EventBatch, FaultContext, HoleWatch, Hva, Injector, Keep, MemoryDir,
    Outcome, PageIndex, PageRun, PageSize, Precision, Process, QemuMapping, RamFile, UffdEvent, UffdFeatures,
    collapse, create_uffd, discard_in_qemu, find_mappings, huge_mapped,
};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const FOLIO: ByteLen = ByteLen::mib(2);

fn main() -> Result {
    let args: Vec<String> = std::env::args().collect();
    if let [_, role, path] = &args[..]
        && role == "target"
    {
        return target(Path::new(path));
    }
    let mib = args.get(1).map_or(Ok(1024), |arg| arg.parse::<u64>())?;
    attach()?;
    let dir = tempfile::tempdir()?;
    let memory = MemoryDir::prepare(&dir.path().join("thp"), Backing::Thp)?;
    let result =
        place(&memory).and_then(|()| collapse_semantics(&memory)).and_then(|()| tracking(&memory, mib));
    memory.unmount()?;
    result?;
    hugetlb(dir.path(), mib.min(1024))
}

// ---- the child ----

/// Maps the file and does what it is told: `w` or `r` and an offset, `W` or `R` for each 4 KiB page.
fn target(path: &Path) -> Result {
    let file = fs::File::options().read(true).write(true).open(path)?;
    let len = usize::try_from(file.metadata()?.len())?;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if base == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the new mapping; its bytes are kept.
    unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    let base = base as usize;
    let touch = move |offset: usize, write: bool| {
        let at = (base + offset) as *mut u64;
        // SAFETY: inside the mapping, which stays, and aligned.
        let value = unsafe { at.read_volatile() };
        if write {
            // SAFETY: as above.
            unsafe { at.write_volatile(value + 1) };
        }
    };
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let (what, offset) = line.split_at(1);
        let offset: usize = offset.trim().parse().unwrap_or(0);
        let begin = Instant::now();
        match what {
            "w" | "r" => touch(offset, what == "w"),
            "W" | "R" => (0..len).step_by(4096).for_each(|at| touch(at, what == "W")),
            // A waiter: says so, then touches.
            _ => {
                std::thread::spawn(move || {
                    touch(offset, false);
                    println!("0");
                });
                continue;
            }
        }
        println!("{}", begin.elapsed().as_nanos());
    }
    Ok(())
}

struct Target {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Target {
    fn start(path: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("target")
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take().ok_or("stdin")?, child.stdout.take().ok_or("stdout")?);
        let mut target = Self { child, stdin, stdout: BufReader::new(stdout) };
        target.line()?;
        Ok(target)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn send(&mut self, order: &str) -> Result {
        writeln!(self.stdin, "{order}")?;
        Ok(self.stdin.flush()?)
    }

    fn ask(&mut self, order: &str) -> Result<Duration> {
        self.send(order)?;
        Ok(Duration::from_nanos(self.line()?.parse()?))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Setup {
    target: Target,
    process: Process,
    file: RamFile,
    mapping: QemuMapping,
}

fn setup(memory: &MemoryDir, name: &str, mib: u64) -> Result<Setup> {
    let file = memory.create_ram_file(name, ByteLen::mib(mib))?;
    let target = Target::start(file.path())?;
    fs::remove_file(file.path())?;
    let process = Process::open(target.child.id())?;
    let mapping = *find_mappings(&process, &[&file])?.first().ok_or("not mapped")?;
    Ok(Setup { target, process, file, mapping })
}

fn median(mut samples: Vec<Duration>) -> String {
    samples.sort_unstable();
    let at = |part: usize| samples[(samples.len() - 1) * part / 100];
    format!("p50 {:?}, p99 {:?}, max {:?}", at(50), at(99), at(100))
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let begin = Instant::now();
    let result = work();
    (begin.elapsed(), result)
}

// ---- what is measured ----

fn attach() -> Result {
    let mut sleeper = Command::new("sleep").arg("100").spawn()?;
    let process = Process::open(sleeper.id())?;
    let measured = (|| -> Result {
        let (mut all, mut calls, mut uffds) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..200 {
            let begin = Instant::now();
            let mut injector = Injector::attach(&process)?;
            let (call, result) = timed(|| injector.syscall(libc::SYS_getpid, [0; 6]));
            result?;
            injector.release()?;
            all.push(begin.elapsed());
            calls.push(call);
            uffds.push(timed(|| create_uffd(&process, UffdFeatures::Faults, Keep::OursOnly).map(drop)).0);
        }
        println!("attach, one call, release:     {}", median(all));
        println!("  of which the call:           {}", median(calls));
        println!("create_uffd (make and fetch):  {}", median(uffds));
        Ok(())
    })();
    sleeper.kill()?;
    sleeper.wait()?;
    measured
}

/// CONTINUE of pages that have landed.
fn place(memory: &MemoryDir) -> Result {
    let mut s = setup(memory, "place", 256)?;
    let map = s.file.map()?;
    map.populate(PageRun::new(PageIndex(0), s.file.pages()))?;
    let context = FaultContext::new(create_uffd(&s.process, UffdFeatures::Faults, Keep::InQemu)?);
    context.register(&[s.mapping])?;
    let (mut whole, mut single, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for folio in 0..128 {
        let hva = s.mapping.hva.add(ByteLen(folio * FOLIO.0));
        if folio < 100 {
            whole.push(timed(|| context.continue_range(hva, FOLIO, PageSize::Base4K)).0);
            again.push(timed(|| context.continue_range(hva, FOLIO, PageSize::Base4K)).0);
        } else {
            for page in 0..512 {
                let at = hva.add(ByteLen(page * 4096));
                single.push(timed(|| context.continue_range(at, ByteLen(4096), PageSize::Base4K)).0);
            }
        }
    }
    println!("CONTINUE, 2 MiB in 4 KiB pages: {}", median(whole));
    println!("CONTINUE, 2 MiB mapped before:  {}", median(again));
    println!("CONTINUE, one 4 KiB page:       {}", median(single));

    let mut collapses = Vec::new();
    for folio in 0..100 {
        let hva = s.mapping.hva.add(ByteLen(folio * FOLIO.0));
        let (took, result) = timed(|| collapse(&s.process, hva, FOLIO));
        result?;
        collapses.push(took);
    }
    let huge = huge_mapped(&s.process, s.mapping.hva, ByteLen(100 * FOLIO.0))?;
    println!("COLLAPSE, 2 MiB, all mapped:    {} ({} of 200 MiB huge)", median(collapses), huge.0 >> 20);
    let (took, result) = timed(|| discard_in_qemu(&s.process, &[s.mapping], Some(&context)));
    result?;
    println!("discard 256 MiB and check:      {took:?}");
    let mut collapses = Vec::new();
    for folio in 0..100 {
        let hva = s.mapping.hva.add(ByteLen(folio * FOLIO.0));
        collapses.push(timed(|| collapse(&s.process, hva, FOLIO)).0);
    }
    println!("COLLAPSE, 2 MiB, none mapped:   {}", median(collapses));
    faults(&mut s, &context)?;
    Ok(())
}

/// What a fault costs the guest if the page has landed: the event, our answer, and going on.
fn faults(s: &mut Setup, context: &FaultContext) -> Result {
    let (mapping, stop) = (s.mapping, AtomicBool::new(false));
    std::thread::scope(|scope| -> Result {
        let server = scope.spawn(|| -> std::result::Result<(), String> {
            let mut batch = EventBatch::new(16);
            while !stop.load(Ordering::Relaxed) {
                let mut fds =
                    [libc::pollfd { fd: context.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 }];
                // SAFETY: one element.
                unsafe { libc::poll(fds.as_mut_ptr(), 1, 10) };
                context.read_events(&mut batch).map_err(|error| error.to_string())?;
                for event in batch.events() {
                    if let UffdEvent::Fault { hva, .. } = *event {
                        let outcome = context.continue_range(hva, ByteLen(4096), mapping.page_size);
                        let _ = outcome.map_err(|error| error.to_string())?;
                    }
                }
            }
            Ok(())
        });
        let base = 128 * FOLIO.0;
        discard_in_qemu(&s.process, &[mapping], None)?;
        let times = (0..2000)
            .map(|i| s.target.ask(&format!("w{}", base - (i + 1) * 4096)))
            .collect::<Result<Vec<_>>>();
        stop.store(true, Ordering::Relaxed);
        server.join().map_err(|_| "server")??;
        println!("fault on a landed page:         {}", median(times?));
        Ok(())
    })
}

/// Which pages a collapse maps, and whom it wakes.
fn collapse_semantics(memory: &MemoryDir) -> Result {
    let mut s = setup(memory, "collapse", 8)?;
    let map = s.file.map()?;
    map.populate(PageRun::new(PageIndex(0), s.file.pages()))?;
    let context = FaultContext::new(create_uffd(&s.process, UffdFeatures::Faults, Keep::InQemu)?);
    context.register(&[s.mapping])?;
    let at = |folio: u64, page: u64| s.mapping.hva.add(ByteLen(folio * FOLIO.0 + page * 4096));
    let huge = |hva: Hva| huge_mapped(&s.process, hva, FOLIO).map(|len| len.0 >> 10);

    let result = collapse(&s.process, at(0, 0), FOLIO)?;
    println!("COLLAPSE, none mapped:          {result:?}, {} KiB huge", huge(at(0, 0))?);
    for page in 0..256 {
        let outcome = context.continue_range(at(1, page), ByteLen(4096), PageSize::Base4K)?;
        assert!(matches!(outcome, Outcome::Mapped(_)));
    }
    let result = collapse(&s.process, at(1, 0), FOLIO)?;
    println!("COLLAPSE, half mapped:          {result:?}, {} KiB huge", huge(at(1, 0))?);

    s.target.send(&format!("f{}", 2 * FOLIO.0 + 4096))?;
    std::thread::sleep(Duration::from_millis(50));
    let result = collapse(&s.process, at(2, 0), FOLIO)?;
    let huge_now = huge(at(2, 0))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| -> Result {
        let target = &mut s.target;
        let reader = scope.spawn(move || {
            let line = target.line().map_err(|error| error.to_string());
            let _ = sender.send(line);
        });
        let woken = receiver.recv_timeout(Duration::from_millis(200)).is_ok();
        println!("COLLAPSE under a waiter:        {result:?}, {huge_now} KiB huge, waiter woken: {woken}");
        if !woken {
            let outcome = context.continue_range(at(2, 1), ByteLen(4096), PageSize::Base4K)?;
            let woken = receiver.recv_timeout(Duration::from_secs(5)).is_ok();
            println!("  CONTINUE afterwards:          {outcome:?}, waiter woken: {woken}");
        }
        reader.join().map_err(|_| "reader")?;
        Ok(())
    })
}

fn per_gib(took: Duration, mib: u64) -> Duration {
    took * 1024 / u32::try_from(mib).unwrap_or(1024)
}

/// Arming and scanning, and what tracked memory costs the guest.
fn tracking(memory: &MemoryDir, mib: u64) -> Result {
    for precision in [Precision::Folio, Precision::Page] {
        let mut s = setup(memory, "track", mib)?;
        let map = s.file.map()?;
        map.populate(PageRun::new(PageIndex(0), s.file.pages()))?;
        s.target.ask("W")?;
        let untracked = s.target.ask("W")?;
        let (arm, tracker) = timed(|| DirtyTracker::arm(&s.process, &[s.mapping], precision));
        let mut tracker = tracker?;
        let idle = tracker.scan_and_rearm(0, |_| {})?;
        let held = s.file.data_extents()?;
        let stopped = tracker.scan_stopped(0, &held, |_| {})?;
        s.target.ask("w4096")?;
        let one = tracker.scan_and_rearm(0, |_| {})?;
        let first = s.target.ask("W")?;
        let all = tracker.scan_and_rearm(0, |_| {})?;
        let second = s.target.ask("W")?;
        tracker.scan_and_rearm(0, |_| {})?;
        let (disarm, result) = timed(|| tracker.disarm());
        result?;
        let pages = u32::try_from(s.file.pages())?;
        println!("--- tracking {mib} MiB of thp by {precision:?}; times per GiB ---");
        println!("arm (with attach):              {:?}", per_gib(arm, mib));
        println!("scan, nothing written:          {:?}", per_gib(idle.took, mib));
        println!("the same of a stopped guest:    {:?}", per_gib(stopped.took, mib));
        println!("scan, one write:                {:?}, {} pages", per_gib(one.took, mib), one.pages);
        println!("scan, all written:              {:?}, {} pages", per_gib(all.took, mib), all.pages);
        println!("guest writes a page, untracked: {:?}", untracked / pages);
        println!("guest writes a page, 1st round: {:?}, later {:?}", first / pages, second / pages);
        println!("disarm:                         {:?}", per_gib(disarm, mib));
        let (took, watch) = timed(|| HoleWatch::new(&s.file, &map));
        let mut watch = watch?;
        let (look, result) = timed(|| watch.look(&s.file));
        result?;
        println!("hole watch, begin and look:     {:?}, {:?}", per_gib(took, mib), per_gib(look, mib));
    }
    Ok(())
}

fn hugetlb(dir: &Path, mib: u64) -> Result {
    const NR: &str = "/proc/sys/vm/nr_hugepages";
    let before = fs::read_to_string(NR)?;
    fs::write(NR, (before.trim().parse::<u64>()? + mib / 2).to_string())?;
    let measured = (|| -> Result {
        let memory = MemoryDir::prepare(&dir.join("hugetlb"), Backing::Hugetlb2M)?;
        let measured = hugetlb_in(&memory, mib);
        memory.unmount()?;
        measured
    })();
    fs::write(NR, before)?;
    if let Err(error) = measured {
        println!("hugetlb-2m: skipped: {error}");
    }
    Ok(())
}

fn hugetlb_in(memory: &MemoryDir, mib: u64) -> Result {
    let s = setup(memory, "ram", mib)?;
    let map = s.file.map()?;
    map.populate(PageRun::new(PageIndex(0), s.file.pages()))?;
    let context = FaultContext::new(create_uffd(&s.process, UffdFeatures::Faults, Keep::InQemu)?);
    context.register(&[s.mapping])?;
    let mut single = Vec::new();
    for page in 0..s.file.pages() {
        let at = s.mapping.hva.add(ByteLen(page * FOLIO.0));
        single.push(timed(|| context.continue_range(at, FOLIO, PageSize::Huge2M)).0);
    }
    println!("--- {mib} MiB of hugetlb-2m; times per GiB ---");
    println!("CONTINUE, one 2 MiB page:       {}", median(single));
    context.unregister(&[s.mapping])?;
    drop(context);
    let (arm, tracker) = timed(|| DirtyTracker::arm(&s.process, &[s.mapping], Precision::Page));
    let mut tracker = tracker?;
    let idle = tracker.scan_and_rearm(0, |_| {})?;
    println!("arm (with attach):              {:?}", per_gib(arm, mib));
    println!("scan, nothing written:          {:?}", per_gib(idle.took, mib));
    Ok(())
}
