//! Migrations by real daemons between two hosts: a guest that goes over its memory again and again is moved over RDMA, and
//! goes on over tcp when the RDMA path is gone.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::check::{Done, run, shell};
use crate::host::{Places, address};
use crate::supervisor::Lab;
use crate::switch::rules::Rule;
use crate::wire::Event;

mod guests;
mod on_demand;
mod trouble;
pub(crate) mod vhost;

/// Peer port of the daemons.
pub(crate) const PORT: u16 = 7420;
/// Longest time for one command in an emulated host.
pub(crate) const COMMAND_TIMEOUT_MS: u64 = 180_000;

/// What the tests need besides the lab.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Folder of `vmoved` and `vmove`.
    pub programs: PathBuf,
    /// The guest.
    pub guest: PathBuf,
    /// The guest that checks what its network card receives.
    pub network: PathBuf,
    /// Sends it frames.
    pub traffic: PathBuf,
    /// Kernel and initramfs of the guest that runs Linux.
    pub kernel: PathBuf,
    /// See `kernel`.
    pub initrd: PathBuf,
    /// QEMU of the guests.
    pub qemu: PathBuf,
    /// Asks a QEMU for its own migration.
    pub script: PathBuf,
}

/// The daemons of h1 and h2, as long as this exists, and the guests they have.
pub(crate) struct Moves<'a> {
    pub(crate) lab: &'a Lab,
    pub(crate) parts: Parts,
}

/// Runs every case, or those whose name contains `only`, and tells how many.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, parts: &Parts, sessions: usize, only: &str) -> Result<usize> {
    let moves = Moves::new(lab, parts);
    let ran = Cell::new(0);
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        if !name.contains(only) {
            return Ok(());
        }
        ran.set(ran.get() + 1);
        let begin = Instant::now();
        let flags = vhost::flags_for(name);
        let result = moves.start(1, flags).and_then(|()| moves.start(2, flags)).and_then(|()| case());
        lab.switch().set(None, None, Rule::default());
        let ended = moves.stop(1).and(moves.stop(2));
        result.and(ended).with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("a_guest_moves_over_rdma_in_every_mode", &|| moves.every_mode())?;
    case("a_path_cut_in_bulk_is_left_for_tcp", &|| moves.cut("hybrid", "rounds"))?;
    case("a_path_cut_in_post_copy_is_left_for_tcp", &|| moves.cut("postcopy", "fetch"))?;
    case("without_a_device_pages_cross_by_tcp_and_the_report_says_why", &|| moves.no_device())?;
    case("a_path_on_which_nothing_passes_is_not_used", &|| moves.no_path())?;
    case("two_guests_move_at_once", &|| moves.two_at_once())?;
    case("what_does_not_fit_the_bound_crosses_by_tcp", &|| moves.bound())?;
    case("what_was_given_back_is_registered_afresh", &|| moves.given_back())?;
    case("pages_are_read_without_the_source_s_processor", &|| moves.processor())?;
    trouble::all(&moves, &case)?;
    on_demand::all(&moves, &case)?;
    vhost::all(&moves, &case)?;
    guests::all(&moves, &case)?;
    case("sessions_one_after_another_leave_nothing_behind", &|| moves.many(sessions))?;
    Ok(ran.get())
}

impl<'a> Moves<'a> {
    pub(crate) fn new(lab: &'a Lab, parts: &Parts) -> Self {
        Self { lab, parts: parts.clone() }
    }

    pub(crate) fn host(&self, host: usize, text: &str) -> Result<Done> {
        run(self.lab, host, shell(text, COMMAND_TIMEOUT_MS))
    }

    /// A command that must succeed; what it said.
    pub(crate) fn must(&self, host: usize, text: &str) -> Result<String> {
        let done = self.host(host, text)?;
        ensure!(done.status == 0, "'{text}' on h{host} ended with {}: {}", done.status, done.text.trim());
        Ok(done.text)
    }

    pub(crate) fn vmove(&self, words: &str) -> String {
        format!("{}/vmove --control /run/vm/c.sock {words}", self.parts.programs.display())
    }

    /// Starts the daemon of a host, and waits until it answers.
    pub(crate) fn start(&self, host: usize, flags: &str) -> Result<()> {
        self.start_by(host, "ulimit -l unlimited;", flags)
    }

    /// The same by a shell's words before its own.
    pub(crate) fn start_by(&self, host: usize, by: &str, flags: &str) -> Result<()> {
        let vmoved = self.parts.programs.join("vmoved");
        let (vmoved, ready) = (vmoved.display(), self.vmove("node"));
        // As on other nodes, QEMU is in PATH: then the daemon asks it what it is before a guest comes.
        let qemus = self.parts.qemu.parent().unwrap_or(Path::new("/usr/bin")).display();
        self.must(
            host,
            &format!(
                "mkdir -p /run/vm; export PATH={qemus}:$PATH; {by} setsid {vmoved} --node h{host} --listen 0.0.0.0:{PORT} \
                 --control /run/vm/c.sock --state-dir /run/vm --insecure {flags} >>/run/lab/vmoved.log 2>&1 </dev/null & \
                 echo $! >/run/vmoved.pid; for i in $(seq 300); do {ready} >/dev/null 2>&1 && exit 0; sleep 0.1; done; \
                 tail -5 /run/lab/vmoved.log; exit 1"
            ),
        )
        .map(drop)
    }

    /// Ends the daemon of a host; its guests run on.
    pub(crate) fn stop_daemon(&self, host: usize) -> Result<()> {
        let wait = "for i in $(seq 100); do kill -0 $(cat /run/vmoved.pid) 2>/dev/null || exit 0; sleep 0.1; done; exit 1";
        self.must(host, &format!("kill $(cat /run/vmoved.pid); {wait}")).map(drop)
    }

    /// Ends daemon and guests of a host, and looks whether the kernel still has something of them.
    pub(crate) fn stop(&self, host: usize) -> Result<()> {
        self.must(
            host,
            "kill $(cat /run/vmoved.pid); for i in $(seq 100); do kill -0 $(cat /run/vmoved.pid) 2>/dev/null || break; \
             sleep 0.1; done; pkill -KILL qemu-system; sleep 0.3; \
             grep ' /run/vm/' /proc/mounts | cut -d' ' -f2 | xargs -r umount -l; rm -rf /run/vm; true",
        )?;
        let held = self.held(host)?;
        ensure!(held == 0, "h{host} still holds {held} RDMA objects of a daemon that has ended");
        Ok(())
    }

    /// Queue pairs, completion queues and memory regions of programs, as the kernel lists them: all but the kernel's own. It names no
    /// process where the thread that made one has ended.
    pub(crate) fn held(&self, host: usize) -> Result<usize> {
        let text = self
            .must(host, "for k in qp cq mr; do rdma resource show $k; done | grep -cvF 'comm [' || true")?;
        text.trim().parse().with_context(|| format!("h{host}: {text}"))
    }

    /// Starts a guest on h1 and waits until it has gone over its memory twice.
    pub(crate) fn guest(&self, name: &str) -> Result<()> {
        self.guest_of(64, name)
    }

    /// The same with so many MiB, of which it goes over 32.
    pub(crate) fn guest_of(&self, mib: u32, name: &str) -> Result<()> {
        let (qemu, guest) = (self.parts.qemu.display(), self.parts.guest.display());
        self.must(
            1,
            &self.vmove(&format!(
                "run --name {name} -- {qemu} -machine q35 -accel tcg -m {mib} -nodefaults -display none -kernel {guest} \
                 -debugcon file:{{vmdir}}/debug"
            )),
        )?;
        self.works(1, name)
    }

    /// The guest runs on this host and finds its memory as it left it.
    pub(crate) fn works(&self, host: usize, name: &str) -> Result<()> {
        self.goes_on(host, &format!("/run/vm/run/{name}/debug"))
    }

    /// The same for a guest whose debug port goes to this file.
    pub(crate) fn goes_on(&self, host: usize, debug: &str) -> Result<()> {
        self.must(
            host,
            &format!(
                "at=$(wc -c <{debug}); for i in $(seq 300); do [ $(wc -c <{debug}) -gt $((at + 2)) ] && break; sleep 0.1; \
                 done; ! grep -q X {debug} && [ $(wc -c <{debug}) -gt $((at + 2)) ] || \
                 {{ echo the guest found other bytes or hangs; tail -c 40 {debug}; exit 1; }}"
            ),
        )
        .map(drop)
    }

    pub(crate) fn migrate_words(&self, name: &str, to: usize, more: &str) -> String {
        let to = address(to);
        self.vmove(&format!("migrate {name} --to {to}:{PORT} --timeout 150s --json {more}"))
    }

    /// Moves a guest; its report.
    pub(crate) fn migrate(&self, name: &str, from: usize, to: usize, more: &str) -> Result<Value> {
        report(&self.must(from, &self.migrate_words(name, to, more))?)
    }

    fn every_mode(&self) -> Result<()> {
        self.guest("g")?;
        for (turn, mode) in ["postcopy", "hybrid", "precopy", "auto"].into_iter().enumerate() {
            let (from, to) = if turn % 2 == 0 { (1, 2) } else { (2, 1) };
            let more = if mode == "precopy" { "--max-downtime 60s" } else { "" };
            let report = self.migrate("g", from, to, &format!("--mode {mode} --verify {more}"))?;
            expect(&report, "fabric", "verbs")?;
            ensure!(report["verified"] == true, "{report}");
            self.works(to, "g")?;
            println!("  {mode}: {}", figures(&report));
        }
        Ok(())
    }

    /// Begins to move guest g from h1 to h2, and waits until the migration is in this phase.
    pub(crate) fn moving(&self, more: &str, phase: &str) -> Result<Receiver<Event>> {
        self.moving_of("g", more, phase)
    }

    /// The same for another guest.
    pub(crate) fn moving_of(&self, name: &str, more: &str, phase: &str) -> Result<Receiver<Event>> {
        let moving = self.lab.exec(1, shell(&self.migrate_words(name, 2, more), COMMAND_TIMEOUT_MS))?;
        self.until_in_phase(1, &moving, phase)?;
        Ok(moving)
    }

    /// Waits until a migration of this host is in this phase, which `moving` has begun.
    pub(crate) fn until_in_phase(&self, host: usize, moving: &Receiver<Event>, phase: &str) -> Result<()> {
        let begun = Instant::now();
        while !self.host(host, &self.vmove("status --json"))?.text.contains(&format!("\"phase\":\"{phase}\""))
        {
            ensure!(begun.elapsed() < Duration::from_secs(60), "phase {phase} never came");
            match moving.try_recv() {
                Err(_) => {}
                // A warning: the report and the end are still to come.
                Ok(Event::Err(warning)) => eprint!("  {warning}"),
                Ok(last) => {
                    bail!("the migration ended before phase {phase} was seen: {}", rest(last, moving))
                }
            }
        }
        Ok(())
    }

    /// The RDMA path, and nothing else, is cut when the migration is in this phase.
    fn cut(&self, mode: &str, phase: &str) -> Result<()> {
        self.guest("g")?;
        self.cut_while(mode, phase)
    }

    /// The same with a guest g that is there.
    pub(crate) fn cut_while(&self, mode: &str, phase: &str) -> Result<()> {
        let more = format!("--mode {mode} --verify --bandwidth 3MB");
        let moving = self.moving(&more, phase)?;
        std::thread::sleep(Duration::from_secs(1));
        self.lab.switch().set(None, None, Rule { cut_rdma: true, ..Rule::default() });
        let done = crate::check::collect(&moving).context("h1 went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let report = report(&done.text)?;
        expect(&report, "fabric", "tcp")?;
        let why = report["fabric_reason"].as_str().unwrap_or_default();
        ensure!(why.contains("verbs was given up") && report["verified"] == true, "{report}");
        println!("  {why}");
        println!("  {}", figures(&report));
        self.works(2, "g")
    }

    fn no_device(&self) -> Result<()> {
        self.guest("g")?;
        // A soft device that a daemon has open cannot be deleted.
        self.stop(2)?;
        self.must(2, "rdma link delete rxe0")?;
        self.start(2, "")?;
        let report = self.migrate("g", 1, 2, "--mode postcopy --verify");
        self.must(2, "rdma link add rxe0 type rxe netdev eth0")?;
        let report = report?;
        expect(&report, "fabric", "tcp")?;
        let why = report["fabric_reason"].as_str().unwrap_or_default();
        ensure!(why.contains("no verbs at the destination"), "{why}");
        println!("  {why}");
        // The device is there: the same daemons use it.
        let report = self.migrate("g", 2, 1, "--mode postcopy --verify")?;
        expect(&report, "fabric", "verbs")
    }

    fn no_path(&self) -> Result<()> {
        self.guest("g")?;
        self.lab.switch().set(None, None, Rule { cut_rdma: true, ..Rule::default() });
        let report = self.migrate("g", 1, 2, "--mode postcopy --verify")?;
        expect(&report, "fabric", "tcp")?;
        let why = report["fabric_reason"].as_str().unwrap_or_default();
        ensure!(why.contains("No RDMA path"), "{why}");
        println!("  {why}");
        self.works(2, "g")
    }

    fn two_at_once(&self) -> Result<()> {
        self.guest("g")?;
        self.guest("f")?;
        let move_one = |name| {
            self.lab
                .exec(1, shell(&self.migrate_words(name, 2, "--mode hybrid --verify"), COMMAND_TIMEOUT_MS))
        };
        for moving in [move_one("g")?, move_one("f")?] {
            let done = crate::check::collect(&moving).context("h1 went away")?;
            ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
            expect(&report(&done.text)?, "fabric", "verbs")?;
        }
        self.works(2, "g").and(self.works(2, "f"))
    }

    fn bound(&self) -> Result<()> {
        self.stop(2)?;
        self.start(2, "--max-registered 8MiB")?;
        self.guest("g")?;
        let report = self.migrate("g", 1, 2, "--mode postcopy --verify")?;
        expect(&report, "fabric", "tcp")?;
        let why = report["fabric_reason"].as_str().unwrap_or_default();
        ensure!(why.contains("--max-registered"), "{why}");
        Ok(())
    }

    /// Hazard: memory that a guest gives back to the host and takes again is other memory than what was registered. Done here
    /// from outside, beyond what the guest itself uses, while the first round is under way.
    pub(crate) fn given_back(&self) -> Result<()> {
        self.guest("g")?;
        let file = self.must(1, "find /run/vm/memory -type f -size +60M | head -1")?;
        let file = file.trim();
        let write = |byte: u8, punch: bool| {
            let program = format!(
                "import ctypes, os\n\
                 fd = os.open('{file}', os.O_RDWR)\n\
                 at, length = 44 << 20, 8 << 20\n\
                 data = bytes([{byte}]) * length\n\
                 if {}: ctypes.CDLL(None).fallocate(fd, 3, ctypes.c_long(at), ctypes.c_long(length))\n\
                 os.pwrite(fd, data, at)\n",
                if punch { "True" } else { "False" }
            );
            self.must(1, &format!("python3 -c \"{program}\""))
        };
        write(1, false)?;
        let moving = self.moving("--mode hybrid --verify --bandwidth 3MB", "rounds")?;
        write(2, true)?;
        let done = crate::check::collect(&moving).context("h1 went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let report = report(&done.text)?;
        expect(&report, "fabric", "verbs")?;
        ensure!(
            report["verified"] == true && report["rounds"].as_array().is_some_and(|r| !r.is_empty()),
            "{report}"
        );
        self.works(2, "g")
    }

    /// Processor time of the daemon at the source, in clock ticks of 10 ms.
    pub(crate) fn ticks(&self, host: usize) -> Result<u64> {
        let text = self.must(
            host,
            "set -- $(sed 's/.*) //' /proc/$(cat /run/vmoved.pid)/stat); echo $((${12} + ${13}))",
        )?;
        text.trim().parse().with_context(|| text.clone())
    }

    /// Milliseconds of processor time that the source's daemon uses in a second of post-copy.
    fn used(&self, fabric: &str, name: &str, from: usize, to: usize) -> Result<f64> {
        let words = self.migrate_words(name, to, "--mode postcopy --bandwidth 3MB");
        let moving = self.lab.exec(from, shell(&words, COMMAND_TIMEOUT_MS))?;
        let status = self.vmove("status --json");
        let begun = Instant::now();
        while !self.host(from, &status)?.text.contains("\"phase\":\"fetch\"") {
            ensure!(begun.elapsed() < Duration::from_secs(60), "the guest never ran at the destination");
        }
        let (before, begun) = (self.ticks(from)?, Instant::now());
        std::thread::sleep(Duration::from_secs(5));
        let (after, took) = (self.ticks(from)?, begun.elapsed().as_secs_f64());
        ensure!(moving.try_recv().is_err(), "the migration ended while it was looked at");
        let done = crate::check::collect(&moving).context("the source's host went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        expect(&report(&done.text)?, "fabric", fabric)?;
        Ok((after - before) as f64 * 10.0 / took)
    }

    /// The source's daemon is told how far the destination is, ten times a second, and nothing else.
    fn processor(&self) -> Result<()> {
        self.guest("g")?;
        let verbs = self.used("verbs", "g", 1, 2)?;
        self.stop_daemons_only()?;
        self.start(1, "--fabric tcp").and(self.start(2, "--fabric tcp"))?;
        let tcp = self.used("tcp", "g", 2, 1)?;
        println!(
            "  source's daemon, of each second of post-copy at 3 MB/s: {verbs:.0} ms over verbs, {tcp:.0} ms over tcp"
        );
        ensure!(verbs < 50.0, "{verbs:.0} ms of processor time per second");
        ensure!(verbs < tcp / 2.0, "{verbs:.0} ms over verbs, {tcp:.0} ms over tcp");
        Ok(())
    }

    /// The guests run on.
    pub(crate) fn stop_daemons_only(&self) -> Result<()> {
        for host in [1, 2] {
            self.must(
                host,
                "kill $(cat /run/vmoved.pid); for i in $(seq 100); do kill -0 $(cat /run/vmoved.pid) 2>/dev/null || exit 0; \
                 sleep 0.1; done; exit 1",
            )?;
        }
        Ok(())
    }

    /// What a daemon holds: RDMA objects, pinned and locked pages in KiB, descriptors.
    fn holds(&self, host: usize) -> Result<(usize, String, usize)> {
        let rdma = self.held(host)?;
        let pinned = self
            .must(host, "grep -E 'VmPin|VmLck' /proc/$(cat /run/vmoved.pid)/status | tr -s ' \\t\\n' ' '")?;
        let open = self.must(host, "ls /proc/$(cat /run/vmoved.pid)/fd | wc -l")?;
        Ok((rdma, pinned.trim().to_owned(), open.trim().parse()?))
    }

    fn many(&self, sessions: usize) -> Result<()> {
        self.guest("g")?;
        let mut first = None;
        for turn in 0..sessions {
            let (from, to) = if turn % 2 == 0 { (1, 2) } else { (2, 1) };
            let mode = ["postcopy", "hybrid"][turn / 2 % 2];
            let report = self.migrate("g", from, to, &format!("--mode {mode}"))?;
            expect(&report, "fabric", "verbs")?;
            if turn == 3 {
                // Both daemons have been source and destination.
                first = Some((self.holds(1)?, self.holds(2)?));
            }
        }
        let last = (self.holds(1)?, self.holds(2)?);
        println!("  after {sessions} sessions: h1 {:?}, h2 {:?}", last.0, last.1);
        let Some(first) = first else { bail!("at least 4 sessions, please") };
        ensure!(last.0.0 == 0 && last.1.0 == 0, "RDMA objects of sessions that have ended: {last:?}");
        ensure!(last.0.1 == first.0.1 && last.1.1 == first.1.1, "pinned: {first:?}, then {last:?}");
        ensure!(
            last.0.2 <= first.0.2 + 2 && last.1.2 <= first.1.2 + 2,
            "descriptors: {first:?}, then {last:?}"
        );
        self.works(if sessions.is_multiple_of(2) { 1 } else { 2 }, "g")
    }
}

/// The object with which `vmove migrate --json` ends.
pub(crate) fn report(text: &str) -> Result<Value> {
    let last = text
        .lines()
        .rev()
        .find(|line| line.starts_with('{'))
        .with_context(|| format!("no report in {text}"))?;
    Ok(serde_json::from_str(last)?)
}

pub(crate) fn expect(report: &Value, key: &str, value: &str) -> Result<()> {
    ensure!(
        report[key] == value,
        "expected {key} {value}, found {} ({})",
        report[key],
        report["fabric_reason"]
    );
    Ok(())
}

pub(crate) fn figures(report: &Value) -> String {
    let number = |key: &str| report[key].as_f64().unwrap_or_default();
    format!(
        "{} in {:.0} ms, of which {:.0} of checks, down {:.0} ms, {} faults, p50 {:.0} us, {:.1} MiB sent",
        report["fabric"].as_str().unwrap_or_default(),
        number("total_ms"),
        report["phases"][0]["duration_ms"].as_f64().unwrap_or_default(),
        number("downtime_ms"),
        report["faults"]["count"],
        report["faults"]["p50_us"].as_f64().unwrap_or_default(),
        number("bytes_sent") / f64::from(1 << 20)
    )
}

/// Where the parts are, made absolute.
///
/// # Errors
/// One of them is not there.
pub fn parts(programs: &Path, guest: &Path, places: &Places) -> Result<Parts> {
    let there = |path: &Path| path.canonicalize().with_context(|| format!("there is no {}", path.display()));
    let script = there(&places.source.join("tests/lab/host/qemu-migrate"))?;
    let named = |variable: &str| {
        let path = std::env::var_os(variable)
            .with_context(|| format!("{variable} is not set; ./run lab sets it"))?;
        there(Path::new(&path))
    };
    Ok(Parts {
        programs: there(programs)?,
        guest: there(guest)?,
        network: there(&places.files.join("network.elf"))?,
        traffic: there(&places.source.join("tests/lab/host/traffic"))?,
        kernel: named("VMOVE_GUEST_KERNEL")?,
        initrd: named("VMOVE_GUEST_INITRD")?,
        qemu: there(&places.qemu)?,
        script,
    })
}

/// What a command says from `first` to its end.
fn rest(first: Event, events: &Receiver<Event>) -> String {
    let said = match first {
        Event::Out(text) => text,
        Event::Exit { status } => return format!("it ended with {status} and said nothing"),
        _ => String::new(),
    };
    said + &crate::check::collect(events).map_or_else(String::new, |done| done.text)
}
