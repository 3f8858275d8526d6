//! Forks by real daemons from h1 to h2 and h3: memory goes over RDMA, by READs or datagrams; where it cannot, or the path dies on
//! the way, over tcp. Children look at their own memory, and never find other bytes than the parent's.

use std::cell::Cell;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::check::{collect, shell};
use crate::host::address;
use crate::moves::vhost::{self, NAME, Vhost};
use crate::moves::{COMMAND_TIMEOUT_MS, Moves, PORT, Parts, expect, report};
use crate::supervisor::Lab;
use crate::switch::rules::Rule;
use crate::wire::Event;

/// The parent's host, and the others.
const HOSTS: [usize; 3] = [1, 2, 3];
/// What the daemons are told of multicast: 4 MB/s.
const GROUP: &str = "[fork]\\nmulticast-group = \\\"239.78.0.1:7421\\\"\\nmulticast-mbit = 32\\n";

/// Runs every case, or those whose name contains `only`, and tells how many.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, parts: &Parts, only: &str) -> Result<usize> {
    let forks = Forks(Moves::new(lab, parts));
    let ran = Cell::new(0);
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        if !name.contains(only) {
            return Ok(());
        }
        ran.set(ran.get() + 1);
        let begin = Instant::now();
        let flags = vhost::flags_for(name);
        let started = HOSTS.iter().try_for_each(|host| forks.start(*host, flags));
        let result = started.and_then(|()| forks.0.guest("g")).and_then(|()| case());
        lab.switch().set(None, None, Rule::default());
        let ended = HOSTS.iter().try_for_each(|host| forks.0.stop(*host));
        result.and(ended).with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("a_fork_is_read_over_rdma_and_leaves_nothing_behind", &|| forks.by_reads())?;
    case("a_fork_goes_out_by_rdma_multicast_and_losses_are_repaired", &|| forks.by_multicast())?;
    case("a_fork_takes_tcp_to_a_host_without_a_device", &|| forks.no_device())?;
    case("a_fork_takes_tcp_where_no_page_can_be_read", &|| forks.no_path())?;
    case("a_fork_takes_tcp_where_its_memory_cannot_be_pinned", &|| forks.bound())?;
    case("a_fork_whose_path_is_cut_goes_on_over_tcp", &|| forks.cut_rdma("unicast"))?;
    case("a_fork_whose_multicast_is_cut_goes_on_over_tcp", &|| forks.cut_rdma("multicast"))?;
    case("a_fork_whose_wire_is_cut_ends_its_children_and_says_why", &|| forks.cut_all())?;
    case("a_fork_with_vhost_on_both_hosts_keeps_writes_apart", &|| forks.with_vhost())?;
    case("a_fork_with_vhost_of_locked_memory_keeps_writes_apart", &|| forks.with_vhost_and_locked())?;
    Ok(ran.get())
}

/// Daemons that know a group.
pub(crate) struct Forks<'a>(pub(crate) Moves<'a>);

fn set(forks: &Forks<'_>, rule: Rule) {
    forks.0.lab.switch().set(None, None, rule);
}

/// What the report says of a host.
fn of(report: &Value, host: usize) -> Result<&Value> {
    let node = format!("{}:{PORT}", address(host));
    let hosts = report["hosts"].as_array().with_context(|| format!("no hosts: {report}"))?;
    hosts.iter().find(|h| h["node"] == node.as_str()).with_context(|| format!("{node} is not in {report}"))
}

fn why(report: &Value) -> &str {
    report["fabric_reason"].as_str().unwrap_or_default()
}

impl Forks<'_> {
    pub(crate) fn start(&self, host: usize, flags: &str) -> Result<()> {
        self.0.must(host, &format!("printf \"{GROUP}\" >/run/fork.toml"))?;
        self.0.start(host, &format!("--config /run/fork.toml {flags}"))
    }

    fn restart(&self, host: usize, flags: &str) -> Result<()> {
        self.0.stop(host).and_then(|()| self.start(host, flags))
    }

    fn vfork(&self, words: &str) -> String {
        format!("{}/vfork --control /run/vm/c.sock --json {words}", self.0.parts.programs.display())
    }

    fn words(&self, more: &str) -> String {
        let (h2, h3) = (address(2), address(3));
        self.vfork(&format!(
            "create g --count 3 --node {h2}:{PORT} --node {h3}:{PORT} {more} 2>>/run/lab/vfork.log"
        ))
    }

    /// Forks g: two children on h2, one on h3. What came of it.
    fn fork(&self, more: &str) -> Result<Value> {
        let report = report(&self.0.must(1, &self.words(more))?)?;
        self.judge(&report, more)?;
        Ok(report)
    }

    /// All children are there, find their memory as the parent left it, and nothing is pinned any more.
    fn judge(&self, report: &Value, more: &str) -> Result<()> {
        let children = report["children"].as_array().with_context(|| format!("no children: {report}"))?;
        ensure!(children.len() == 3, "{report}");
        ensure!(
            report["distribution"]["root_bytes"].as_u64() > Some(32 << 20),
            "memory left h1 at least once: {report}"
        );
        for host in [2, 3] {
            let of = of(report, host)?;
            ensure!(of["wrong"] == 0 && of["error"].is_null(), "{report}");
        }
        println!("  {more}: {} ({}), {}", report["fabric"], why(report), brief(report));
        for child in children {
            ensure!(child["error"].is_null(), "{report}");
            ensure!(!more.contains("--verify") || child["verified"] == true, "{report}");
            let host = if child["node"] == format!("{}:{PORT}", address(2)).as_str() { 2 } else { 3 };
            self.0.works(host, child["name"].as_str().unwrap_or_default())?;
        }
        for host in HOSTS {
            let held = self.0.held(host)?;
            ensure!(held == 0, "h{host} holds {held} RDMA objects of a fork that has ended");
            let pinned = self.0.must(host, "grep VmPin /proc/$(cat /run/vmoved.pid)/status | tr -dc 0-9")?;
            ensure!(pinned.trim() == "0", "h{host} has {pinned} KiB pinned");
        }
        for child in children {
            self.0.must(1, &self.vfork(&format!("kill {}", child["name"].as_str().unwrap_or_default())))?;
        }
        self.0.works(1, "g")
    }

    fn by_reads(&self) -> Result<()> {
        for more in ["--way unicast --verify", "--way unicast", "--way pipeline"] {
            expect(&self.fork(more)?, "fabric", "verbs")?;
        }
        Ok(())
    }

    fn by_multicast(&self) -> Result<()> {
        for (lost, more) in [(0.0, ""), (0.01, "--verify"), (0.1, "--verify"), (0.1, "")] {
            self.multicast(lost, more)?;
        }
        Ok(())
    }

    /// A fork by datagrams of RDMA, of which this part is lost.
    pub(crate) fn multicast(&self, lost: f64, more: &str) -> Result<()> {
        set(self, Rule { drop_multicast: lost, ..Rule::default() });
        let report = self.fork(&format!("--way multicast {more}"))?;
        expect(&report, "fabric", "verbs")?;
        let sent = report["multicast"]["sent_bytes"].as_u64();
        ensure!(sent >= report["distribution"]["memory_bytes"].as_u64(), "{report}");
        ensure!(of(&report, 2)?["multicast_bytes"].as_u64() > Some(8 << 20), "{report}");
        ensure!(lost == 0.0 || report["multicast"]["lost_chunks"].as_u64() > Some(0), "{report}");
        Ok(())
    }

    fn no_device(&self) -> Result<()> {
        // A soft device that a daemon has open cannot be deleted.
        self.0.stop(3)?;
        self.0.must(3, "rdma link delete rxe0")?;
        let forked = self.start(3, "").and_then(|()| {
            ["unicast --verify", "multicast", "pipeline"].iter().try_for_each(|way| {
                let report = self.fork(&format!("--way {way}"))?;
                ensure!(
                    of(&report, 2)?["fabric"] == "verbs" && of(&report, 3)?["fabric"] == "tcp",
                    "{report}"
                );
                ensure!(why(&report).contains("no verbs at the destination"), "{report}");
                ensure!(of(&report, 3)?["multicast_bytes"] == 0, "{report}");
                Ok(())
            })
        });
        self.0.must(3, "rdma link add rxe0 type rxe netdev eth0")?;
        forked
    }

    fn no_path(&self) -> Result<()> {
        set(self, Rule { cut_rdma: true, ..Rule::default() });
        let report = self.fork("--way unicast --verify")?;
        expect(&report, "fabric", "tcp")?;
        ensure!(why(&report).contains("No RDMA path"), "{report}");
        Ok(())
    }

    fn bound(&self) -> Result<()> {
        self.restart(3, "--max-registered 8MiB")?;
        let report = self.fork("--way unicast --verify")?;
        ensure!(of(&report, 2)?["fabric"] == "verbs" && of(&report, 3)?["fabric"] == "tcp", "{report}");
        ensure!(why(&report).contains("--max-registered"), "{report}");
        self.restart(1, "--max-registered 8MiB")?;
        self.0.guest("g")?;
        let report = self.fork("--way unicast --verify")?;
        expect(&report, "fabric", "tcp")?;
        ensure!(
            why(&report).contains("no verbs at the source") && why(&report).contains("--max-registered"),
            "{report}"
        );
        Ok(())
    }

    /// Begins a slow fork, and waits until children run that miss memory.
    fn slow(&self, more: &str) -> Result<Receiver<Event>> {
        set(self, Rule { rate_mbit: 16, ..Rule::default() });
        let forking = self.0.lab.exec(1, shell(&self.words(more), COMMAND_TIMEOUT_MS))?;
        let begun = Instant::now();
        let some = format!("{}/vfork --control /run/vm/c.sock tree g.1", self.0.parts.programs.display());
        while !self.0.host(2, &some)?.text.contains("fetching") {
            ensure!(begun.elapsed() < Duration::from_secs(60), "no child ran before its memory was there");
            if let Ok(event) = forking.try_recv() {
                ensure!(matches!(event, Event::Err(_)), "the fork ended before it was disturbed: {event:?}");
            }
        }
        Ok(forking)
    }

    fn cut_rdma(&self, way: &str) -> Result<()> {
        let more = format!("--way {way}");
        let forking = self.slow(&more)?;
        std::thread::sleep(Duration::from_secs(1));
        set(self, Rule { cut_rdma: true, ..Rule::default() });
        let done = collect(&forking).context("h1 went away")?;
        set(self, Rule::default());
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let report = report(&done.text)?;
        expect(&report, "fabric", "tcp")?;
        ensure!(why(&report).contains("verbs was given up"), "{report}");
        self.judge(&report, &more)
    }

    fn cut_all(&self) -> Result<()> {
        let forking = self.slow("--way unicast")?;
        std::thread::sleep(Duration::from_secs(1));
        set(self, Rule { cut: true, ..Rule::default() });
        let done = collect(&forking).context("h1 went away")?;
        let report = report(&done.text)?;
        ensure!(done.status != 0, "ended with 0: {report}");
        for host in [2, 3] {
            println!("  h{host}: {}", of(&report, host)?["error"]);
            ensure!(of(&report, host)?["error"].is_string(), "{report}");
            // Its children are ended by itself, before the wire is back.
            let list = self.0.vmove("list --json");
            let begun = Instant::now();
            let text = loop {
                let text = self.0.must(host, &list)?;
                if text.contains("can never be complete") || begun.elapsed() > Duration::from_secs(60) {
                    break text;
                }
                std::thread::sleep(Duration::from_millis(500));
            };
            ensure!(text.contains("can never be complete"), "h{host}: {text}");
            self.0.must(host, "! pgrep qemu-system")?;
            ensure!(self.0.held(host)? == 0, "h{host} still holds RDMA objects");
        }
        set(self, Rule::default());
        self.0.works(1, "g")
    }
}

impl Forks<'_> {
    /// Children on the parent's host and on another, before their memory is there: each receives frames by a worker of its own.
    fn with_vhost(&self) -> Result<()> {
        let vhost = Vhost(&self.0);
        vhost.with_traffic(|| {
            vhost.guest("")?;
            set(self, Rule { rate_mbit: 16, ..Rule::default() });
            let more = format!("--count 3 --here 1 --to {}:{PORT} --way unicast", address(2));
            let report = self.fork_with_vhost(&vhost, &more)?;
            for child in report["children"].as_array().into_iter().flatten() {
                println!("  {}: ran after {} ms", child["name"], child["running_ms"]);
            }
            set(self, Rule::default());
            // Frames that parent and child receive by now are in memory that no fork has shared.
            self.fork_with_vhost(&vhost, "--count 1 --verify").map(drop)
        })
    }

    /// Memory that cannot be mapped again: the worker waits before it writes to a page that the template still needs.
    fn with_vhost_and_locked(&self) -> Result<()> {
        let vhost = Vhost(&self.0);
        vhost.with_traffic(|| {
            vhost.guest("-overcommit mem-lock=on")?;
            let report = self.fork_with_vhost(&vhost, "--count 1 --verify")?;
            println!("  {}", report["freeze"]);
            expect(&report["freeze"], "way", "write-protected")
        })
    }

    /// Forks the guest behind a tap. Parent and children receive, answer, and find all memory as it should be.
    fn fork_with_vhost(&self, vhost: &Vhost<'_>, more: &str) -> Result<Value> {
        let words = self.vfork(&format!("create {NAME} {more} 2>>/run/lab/vfork.log"));
        let report = report(&self.0.must(1, &words)?)?;
        let children = report["children"].as_array().with_context(|| format!("no children: {report}"))?;
        for child in children {
            ensure!(child["error"].is_null(), "{report}");
            ensure!(!more.contains("--verify") || child["verified"] == true, "{report}");
            let name = child["name"].as_str().unwrap_or_default();
            let host = if child["node"] == format!("{}:{PORT}", address(2)).as_str() { 2 } else { 1 };
            vhost.answers(host, name).with_context(|| format!("child {child}"))?;
        }
        vhost.answers(1, NAME)?;
        Ok(report)
    }
}

/// Where the memory came from.
fn brief(report: &Value) -> String {
    let of = |host: &Value| {
        format!(
            "{} by multicast, {} from h1, {} from others, {} repaired",
            host["multicast_bytes"], host["from_root_bytes"], host["from_hosts_bytes"], host["repaired"]
        )
    };
    let hosts = report["hosts"].as_array().into_iter().flatten().map(of).collect::<Vec<_>>().join("; ");
    format!("all ran after {:.0} ms: {hosts}", report["all_running_ms"].as_f64().unwrap_or_default())
}
