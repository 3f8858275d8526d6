//! Guests whose network the kernel serves (vhost-net with a tap): its worker writes guest memory past QEMU's own program, with frames
//! from the host at every moment. The guest looks at each frame when it comes and again much later; it never finds other bytes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::trouble::RunCase;
use super::{Moves, figures, report};
use crate::check::collect;

/// The guest of these cases.
pub(crate) const NAME: &str = "n";
/// Longest time until a guest answers again. Its host is emulated, and it itself too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Answers that show that a guest receives and sends.
const SOME: u64 = 50;
/// Slow enough for several rounds, or for seconds in which the worker meets pages that are missing.
const SLOWLY: &str = "--bandwidth 3MB";

/// Runs them.
pub(crate) fn all(moves: &Moves<'_>, case: &RunCase<'_>) -> Result<()> {
    let vhost = Vhost(moves);
    case("vhost_writes_move_with_the_guest_in_every_mode", &|| vhost.with_traffic(|| vhost.every_mode()))?;
    case("vhost_waits_for_pages_while_a_daemon_is_dead", &|| vhost.with_traffic(|| vhost.daemon_killed()))?;
    case("a_guest_whose_vhost_waits_for_lost_pages_can_be_ended", &|| {
        vhost.with_traffic(|| vhost.source_lost())
    })
}

/// Guests behind taps, on the hosts of a lab.
pub(crate) struct Vhost<'a>(pub(crate) &'a Moves<'a>);

/// QEMU makes the tap of each guest and child itself, which takes the rights of root.
pub(crate) const AS_ROOT: &str = "--qemu-user root";

/// Flags of the daemons for the case of this name.
pub(crate) fn flags_for(case: &str) -> &'static str {
    if case.contains("vhost") { AS_ROOT } else { "" }
}

/// What a host has counted of the guest behind a tap, see `tests/lab/host/traffic`.
#[derive(Debug)]
struct Counts {
    sent: u64,
    answered: u64,
    wrong: u64,
    workers: u64,
    samples: u64,
    waited: u64,
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { sent, answered, wrong, workers, samples, waited } = self;
        write!(
            f,
            "{sent} frames, {answered} answers, {wrong} wrong, {workers} threads of vhost-net, which waited for a page in {waited} of {samples} samples"
        )
    }
}

impl Vhost<'_> {
    /// Does `work` while both hosts send frames to whatever guest is behind a tap.
    pub(crate) fn with_traffic(&self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let traffic = self.0.parts.traffic.display();
        for host in [1, 2] {
            self.0.must(
                host,
                &format!(
                    "modprobe vhost_net && modprobe tun && ls /dev/vhost-net && \
                     {{ setsid {traffic} {host} /run/traffic >>/run/lab/traffic.log 2>&1 </dev/null & echo $! >/run/traffic.pid; }}"
                ),
            )?;
        }
        let result = work();
        let ended = [1, 2].iter().try_for_each(|host| {
            self.0.must(*host, "kill $(cat /run/traffic.pid); rm -rf /run/traffic").map(drop)
        });
        result.and(ended)
    }

    /// Starts the guest on h1, with these further arguments of QEMU, and waits until it answers.
    pub(crate) fn guest(&self, more: &str) -> Result<()> {
        let (qemu, guest) = (self.0.parts.qemu.display(), self.0.parts.network.display());
        self.0.must(
            1,
            &self.0.vmove(&format!(
                "run --name {NAME} -- {qemu} -machine pc -accel tcg -m 64 -nodefaults -display none -kernel {guest} \
                 -debugcon file:{{vmdir}}/debug -netdev tap,id=net,ifname=t-{{name}},script=no,downscript=no,vhost=on \
                 -device virtio-net-pci,netdev=net,mac=52:54:00:79:00:01,romfile= {more}"
            )),
        )?;
        self.answers(1, NAME)
    }

    /// What this host has counted; `None` while there is no such tap.
    fn counts(&self, host: usize, name: &str) -> Result<Option<Counts>> {
        let text = self.0.must(host, &format!("cat /run/traffic/t-{name} 2>/dev/null || echo none"))?;
        let Ok(found) = serde_json::from_str::<Value>(text.trim()) else { return Ok(None) };
        let number = |key: &str| found[key].as_u64().with_context(|| format!("no {key} in {found}"));
        Ok(Some(Counts {
            sent: number("sent")?,
            answered: number("answered")?,
            wrong: number("wrong")?,
            workers: number("workers")?,
            samples: number("samples")?,
            waited: number("waited")?,
        }))
    }

    /// The guest on this host receives by the kernel's worker, answers, goes over its memory, and has found no byte that should not be there.
    pub(crate) fn answers(&self, host: usize, name: &str) -> Result<()> {
        let answered = |counts: &Option<Counts>| counts.as_ref().map_or(0, |counts| counts.answered);
        let first = answered(&self.counts(host, name)?);
        let begun = Instant::now();
        let counts = loop {
            // It is told for a tap that is gone, too: then the count begins anew.
            let counts = self.counts(host, name)?;
            if answered(&counts) >= first + SOME {
                break counts.context("counts")?;
            }
            let said = self.said(host, name);
            let found = counts.as_ref().map_or_else(|| "no tap".to_owned(), Counts::to_string);
            ensure!(begun.elapsed() < ANSWER_TIMEOUT, "{name} on h{host} does not answer: {found}; {said}");
            ensure!(!said.contains('X'), "{name} on h{host}: {said}");
            std::thread::sleep(Duration::from_millis(300));
        };
        if counts.wrong > 0 {
            let log = self.0.must(host, "tail -n 5 /run/lab/traffic.log")?;
            bail!("{name} on h{host} answered something else: {counts}: {log}");
        }
        ensure!(counts.workers > 0, "no thread of vhost-net serves {name} on h{host}: {counts}");
        self.0.works(host, name)
    }

    /// The last that the guest has said.
    fn said(&self, host: usize, name: &str) -> String {
        let found = self.0.must(host, &format!("tail -c 400 /run/vm/run/{name}/debug"));
        found.unwrap_or_else(|error| format!("{error:#}"))
    }

    fn every_mode(&self) -> Result<()> {
        self.guest("")?;
        let (mut from, mut to) = (1, 2);
        for mode in ["precopy", "postcopy", "hybrid", "postcopy"] {
            let more = if mode == "precopy" { "--max-downtime 60s" } else { "" };
            let words = format!("--mode {mode} --verify {SLOWLY} {more}");
            let before = self.counts(from, NAME)?.context("no counts")?;
            let report = self.0.migrate(NAME, from, to, &words)?;
            ensure!(report["verified"] == true, "{report}");
            let here = self.counts(to, NAME)?.context("no counts at the destination")?;
            println!("  {mode}: {}", figures(&report));
            println!("    h{from} before: {before}; h{to} when all had arrived: {here}");
            // The worker met pages that had not arrived, and its frames are right nevertheless.
            ensure!(mode != "postcopy" || here.waited > 0, "the worker never waited for a page: {here}");
            self.answers(to, NAME)?;
            (from, to) = (to, from);
        }
        Ok(())
    }

    /// The destination's daemon is killed while the worker and the guest need pages; another one goes on.
    fn daemon_killed(&self) -> Result<()> {
        self.guest("")?;
        let moving = self.0.moving_of(NAME, "--mode postcopy --verify --bandwidth 2MB", "fetch")?;
        self.0.must(2, "kill -KILL $(cat /run/vmoved.pid)")?;
        std::thread::sleep(Duration::from_secs(3));
        self.0.start(2, AS_ROOT)?;
        let done = collect(&moving).context("h1 went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let report = report(&done.text)?;
        ensure!(report["recoveries"].as_u64() >= Some(1), "nothing was interrupted: {report}");
        println!("  {}", figures(&report));
        self.answers(2, NAME)
    }

    /// The source is gone for good, and the worker waits for a page that will never come: the guest can be ended all the same, and
    /// nothing of it stays.
    fn source_lost(&self) -> Result<()> {
        self.guest("")?;
        let moving = self.0.moving_of(NAME, "--mode postcopy --bandwidth 1MiB", "fetch")?;
        self.0.must(1, "kill -KILL $(cat /run/vmoved.pid); pkill -KILL qemu-system; true")?;
        collect(&moving).context("h1 went away")?;
        // Time for guest and worker to meet a page that is missing.
        std::thread::sleep(Duration::from_secs(3));
        let counts = self.counts(2, NAME)?.context("no counts")?;
        println!("  {counts}");
        self.0.must(2, &self.0.vmove(&format!("stop {NAME} --force")))?;
        self.0.must(
            2,
            "for i in $(seq 100); do pgrep qemu-system >/dev/null || exit 0; sleep 0.1; done; \
             for p in $(pgrep qemu-system); do cat /proc/$p/status /proc/$p/task/*/wchan; done; exit 1",
        )?;
        self.0.must(2, "! ip link show t-n 2>/dev/null && [ -z \"$(find /run/vm/memory -type f)\" ]")?;
        // So that the end of the case finds a daemon.
        self.0.start(1, AS_ROOT)
    }
}
