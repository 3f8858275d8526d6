//! Migrations between nodes whose RDMA devices are set up wrongly, or whose daemons are killed. Where pages can cross by
//! something else they do, and the report says why; else the guest stays where it is.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Moves, PORT, expect, figures};
use crate::check::collect;
use crate::host::address;
use crate::switch::rules::Rule;

/// Another address of h2, and a card that no host has.
const ELSEWHERE: &str = "192.168.99.2";
const NOBODY: &str = "52:54:00:77:00:99";

/// Runs a case by its name, with two daemons.
pub(crate) type RunCase<'a> = dyn Fn(&str, &dyn Fn() -> Result<()>) -> Result<()> + 'a;

/// Runs every case by `case`, which gives it two daemons of h1 and h2.
///
/// # Errors
/// The first case that does not end as it should.
pub(crate) fn all(moves: &Moves<'_>, case: &RunCase<'_>) -> Result<()> {
    let troubles = Troubles(moves);
    case("two_nodes_are_checked", &|| troubles.fabric_check())?;
    case("a_wrong_index_of_address_or_partition_is_named", &|| troubles.wrong_indexes())?;
    case("an_address_that_leads_elsewhere_is_left_for_tcp", &|| troubles.wrong_network())?;
    case("a_port_that_was_down_at_the_start_is_used_when_it_is_up", &|| troubles.port_down_at_start())?;
    case("a_destination_that_is_killed_leaves_the_guest_and_nothing_pinned", &|| {
        troubles.destination_killed()
    })?;
    case("a_source_that_is_killed_goes_on_over_rdma", &|| troubles.source_killed())
}

struct Troubles<'a>(&'a Moves<'a>);

impl Troubles<'_> {
    /// Moves the guest to h2 over tcp; why not over RDMA.
    fn over_tcp(&self) -> Result<String> {
        let report = self.0.migrate("g", 1, 2, "--mode postcopy --verify")?;
        expect(&report, "fabric", "tcp")?;
        ensure!(report["verified"] == true, "{report}");
        let why = report["fabric_reason"].as_str().unwrap_or_default().to_owned();
        println!("  {why}");
        Ok(why)
    }

    /// What h1 finds out about h2, and the exit status.
    fn check(&self) -> Result<(Value, i32)> {
        let words = format!("fabric check {}:{PORT} --json", address(2));
        let done = self.0.host(1, &self.0.vmove(&words))?;
        let line = done.text.lines().rev().find(|line| line.starts_with('{'));
        Ok((serde_json::from_str(line.with_context(|| done.text.clone())?)?, done.status))
    }

    fn fabric_check(&self) -> Result<()> {
        let (found, status) = self.check()?;
        let verbs = &found["fabrics"][0];
        println!(
            "  verbs: READ of 4 KiB in {} us, {:.1} MiB/s; {} of {} datagrams lost at {:.1} MiB/s",
            verbs["read_4k_p50_us"],
            verbs["read_bytes_per_s"].as_f64().unwrap_or_default() / f64::from(1 << 20),
            verbs["multicast_lost"],
            verbs["multicast_sent"],
            verbs["multicast_bytes_per_s"].as_f64().unwrap_or_default() / f64::from(1 << 20),
        );
        ensure!(status == 0 && found["best"] == "verbs" && verbs["fabric"] == "verbs", "{status}: {found}");
        ensure!(found["devices"][0].as_str().is_some_and(|line| line.contains("ACTIVE")), "{found}");
        let (sent, lost) = (verbs["multicast_sent"].as_u64(), verbs["multicast_lost"].as_u64());
        let (sent, lost) = sent.zip(lost).with_context(|| format!("no figures of multicast: {found}"))?;
        ensure!(sent >= 200 && lost * 50 <= sent, "more than 2 % of the datagrams were lost: {found}");
        // Of the datagrams a third is lost now, and of nothing else.
        self.0.lab.switch().set(None, None, Rule { drop_multicast: 0.33, ..Rule::default() });
        let (found, _) = self.check()?;
        let verbs = &found["fabrics"][0];
        let part = verbs["multicast_lost"].as_f64().unwrap_or_default()
            / verbs["multicast_sent"].as_f64().unwrap_or(f64::NAN);
        ensure!((0.2..0.5).contains(&part), "a third should be lost: {found}");
        self.0.lab.switch().set(None, None, Rule { cut_rdma: true, ..Rule::default() });
        let (found, status) = self.check()?;
        let problem = found["fabrics"][0]["problem"].as_str().unwrap_or_default();
        ensure!(
            status == 3 && found["best"] == "tcp" && problem.contains("No RDMA path"),
            "{status}: {found}"
        );
        println!("  {problem}");
        Ok(())
    }

    fn wrong_indexes(&self) -> Result<()> {
        for (flags, words) in
            [("--rdma-gid-index 77", "no address at index 77"), ("--rdma-pkey-index 1", "(P_Key) at index 1")]
        {
            self.0.guest("g")?;
            self.0.stop(2)?;
            self.0.start(2, flags)?;
            let why = self.over_tcp()?;
            ensure!(why.contains("no verbs at the destination") && why.contains(words), "{why}");
            self.0.works(2, "g")?;
        }
        Ok(())
    }

    fn wrong_network(&self) -> Result<()> {
        self.0.guest("g")?;
        self.0.stop(2)?;
        self.0.must(2, &format!("ip addr add {ELSEWHERE}/24 dev eth0"))?;
        self.0.must(1, &format!("ip neigh replace {ELSEWHERE} lladdr {NOBODY} dev eth0 nud permanent"))?;
        let result = self.other_address();
        self.0.must(1, &format!("ip neigh del {ELSEWHERE} dev eth0"))?;
        self.0.must(2, &format!("ip addr del {ELSEWHERE}/24 dev eth0"))?;
        let why = result?;
        ensure!(why.contains("No RDMA path"), "{why}");
        self.0.works(2, "g")
    }

    fn other_address(&self) -> Result<String> {
        let index = self.0.must(
            2,
            "for i in $(seq 50); do grep -l c0a8:6302 /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null && exit 0; \
             sleep 0.1; done; exit 1",
        )?;
        let index =
            index.lines().next().and_then(|line| line.rsplit('/').next()).context("no index")?.to_owned();
        self.0.start(2, &format!("--rdma-gid-index {index}"))?;
        self.over_tcp()
    }

    fn port_down_at_start(&self) -> Result<()> {
        self.0.guest("g")?;
        self.0.stop(2)?;
        self.0.must(2, "ip link set eth0 down")?;
        let started = self.0.start(2, "").and_then(|()| self.0.must(2, &self.0.vmove("node")));
        self.0.must(2, "ip link set eth0 up; ip route replace 224.0.0.0/4 dev eth0")?;
        let node = started?;
        ensure!(node.contains("expected ACTIVE"), "{node}");
        self.0.must(
            2,
            "for i in $(seq 100); do grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state && exit 0; sleep 0.1; done; exit 1",
        )?;
        let report = self.0.migrate("g", 1, 2, "--mode postcopy --verify")?;
        expect(&report, "fabric", "verbs")?;
        self.0.works(2, "g")
    }

    /// Ends a daemon as a crash would.
    fn kill(&self, host: usize) -> Result<()> {
        self.0.must(host, "kill -KILL $(cat /run/vmoved.pid)").map(drop)
    }

    fn destination_killed(&self) -> Result<()> {
        self.0.guest("g")?;
        let moving = self.0.moving("--mode hybrid --bandwidth 3MB", "rounds")?;
        self.kill(2)?;
        let done = collect(&moving).context("h1 went away")?;
        ensure!(done.status == 1, "ended with {}: {}", done.status, done.text);
        println!("  {}", done.text.lines().last().unwrap_or_default());
        self.0.works(1, "g")?;
        let held = self.0.held(1)?;
        ensure!(held == 0, "h1 still holds {held} RDMA objects of a session that has failed");
        self.0.start(2, "")?;
        let report = self.0.migrate("g", 1, 2, "--mode hybrid --verify")?;
        expect(&report, "fabric", "verbs")?;
        println!("  {}", figures(&report));
        self.0.works(2, "g")
    }

    fn source_killed(&self) -> Result<()> {
        self.0.guest("g")?;
        let moving = self.0.moving("--mode postcopy --verify --bandwidth 2MB", "fetch")?;
        self.kill(1)?;
        collect(&moving).context("h1 went away")?;
        self.0.start(1, "")?;
        let begun = Instant::now();
        let report = loop {
            let history: Value =
                serde_json::from_str(self.0.must(1, &self.0.vmove("history --json"))?.trim())?;
            let outcome = &history["migrations"][0]["outcome"];
            if outcome["state"] == "done" {
                break outcome["report"].clone();
            }
            ensure!(begun.elapsed() < Duration::from_secs(90), "the migration never ended: {history}");
            std::thread::sleep(Duration::from_millis(500));
        };
        expect(&report, "fabric", "verbs")?;
        ensure!(report["verified"] == true, "{report}");
        println!("  {}", figures(&report));
        self.0.works(2, "g")
    }
}
