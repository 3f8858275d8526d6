//! Guests that own virtual functions are moved between two hosts by real daemons: the function stays, and the guest gets one of the other host with
//! the same address. Whatever breaks before the hand-over, the guest has its function back.

mod blows;
mod bridge;
pub(crate) mod by_memory;
mod failover;
mod groups;
mod head_start;
mod leased;
mod plans;
mod ratios;
mod refusals;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::check::collect;
use crate::moves::vhost::AS_ROOT;
use crate::moves::{self, Moves};
use crate::supervisor::Lab;

/// Virtual functions of each card.
pub(crate) const FUNCTIONS: usize = 4;
/// The card of each host.
const CARD: &str = "0000:01:00.0";
/// The guest's address, wherever it is.
pub(crate) const MAC: &str = "52:54:00:79:00:99";
/// Where guests keep their counts.
const STATE: usize = 2 << 20;
/// Name of the guest.
pub(crate) const NAME: &str = "g";

/// Where function `index` of a host is.
pub(crate) fn function(index: usize) -> String {
    format!("0000:01:10.{}", index * 2)
}

pub(crate) struct DeviceMoves<'a> {
    pub(crate) moves: Moves<'a>,
    pub(crate) guest: PathBuf,
}

/// What the guest has counted.
#[derive(Debug)]
struct Counts {
    passes: u64,
    damaged: u64,
    cards: u64,
    sent: u64,
    received: u64,
    wrong: u64,
    mac: String,
}

/// Runs every case, or those whose name contains `only`, and tells how many. `linux`: kernel and initramfs of a guest. `count`: moves of the case that goes to and fro.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(
    lab: &Lab,
    parts: &moves::Parts,
    guest: &Path,
    linux: Option<&(PathBuf, PathBuf)>,
    count: usize,
    only: &str,
) -> Result<usize> {
    let all = DeviceMoves::new(lab, parts, guest)?;
    let ran = Cell::new(0);
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        if !name.contains(only) {
            return Ok(());
        }
        if ran.replace(ran.get() + 1) == 0 {
            (1..=2).try_for_each(|host| all.make_functions(host))?;
        }
        let begin = Instant::now();
        let flags = match name {
            // QEMU makes the tap of a guest with Linux itself.
            _ if name.starts_with("linux") => AS_ROOT,
            // RDMA cannot compare memory: these have a head start, with and without blows.
            "memory_is_sent_ahead_while_a_guest_has_its_function"
            | "a_guest_moves_to_and_fro_whatever_is_killed" => "--fabric tcp",
            _ => "",
        };
        let started = all.moves.start(1, flags).and_then(|()| all.moves.start(2, flags));
        let result = started.and_then(|()| all.neighbour()).and_then(|()| case());
        let ended = all.end(1).and(all.end(2));
        result.and(ended).with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("a_function_stays_and_another_comes_in_every_mode", &|| all.every_mode())?;
    case("a_guest_that_keeps_its_function_stays_with_it", &|| all.stubborn())?;
    case("functions_that_cannot_be_had_are_refused_by_name", &|| all.refused())?;
    case("a_guest_has_its_function_back_whatever_is_killed", &|| all.killed_before())?;
    case("a_guest_gets_its_function_though_a_daemon_is_killed", &|| all.killed_after())?;
    case("a_guest_moves_to_and_fro_whatever_is_killed", &|| all.to_and_fro(count))?;
    case("what_a_device_needs_is_looked_at_before_the_guest_is_asked", &|| all.needs())?;
    case("a_guest_that_ended_without_its_function_gets_it_by_one_command", &|| all.mended())?;
    case("a_device_that_somebody_plugs_in_meanwhile_calls_the_move_off", &|| all.foreign_device())?;
    case("a_guest_whose_agent_is_silent_keeps_its_function", &|| all.silent_agent())?;
    case("a_guest_whose_agent_lies_keeps_its_function", &|| all.lying_agent())?;
    case("two_guests_of_a_job_are_both_here_or_both_there", &|| all.group())?;
    case("a_leased_function_is_given_moved_and_kept_by_the_bridge", &|| all.leased())?;
    case("plans_carry_functions_though_the_bridge_is_killed", &|| all.plans())?;
    case("memory_is_sent_ahead_while_a_guest_has_its_function", &|| all.head_start())?;
    case("ratios_of_a_move_with_a_function", &|| all.ratios())?;
    if let Some(linux) = linux {
        case("linux_keeps_a_connection_while_its_function_is_away", &|| all.failover(linux))?;
    }
    Ok(ran.get())
}

impl<'a> DeviceMoves<'a> {
    pub(crate) fn new(lab: &'a Lab, parts: &moves::Parts, guest: &Path) -> Result<Self> {
        Ok(Self { moves: Moves::new(lab, parts), guest: guest.canonicalize()? })
    }
}

impl DeviceMoves<'_> {
    /// A program that runs in the hosts.
    pub(crate) fn host_program(&self, name: &str) -> String {
        self.moves.lab.places().source.join("tests/lab/host").join(name).display().to_string()
    }

    pub(crate) fn make_functions(&self, host: usize) -> Result<()> {
        let make = format!(
            "for m in igb igbvf vfio-pci; do modprobe $m; done; ip link set eth1 up; \
             echo {FUNCTIONS} >/sys/bus/pci/devices/{CARD}/sriov_numvfs; sleep 1"
        );
        self.moves.must(host, &make).map(drop)
    }

    /// Ends the VMs of a host by its daemon, which gives all functions back.
    pub(crate) fn end(&self, host: usize) -> Result<()> {
        let vmove = self.moves.vmove("");
        self.moves.must(
            host,
            &format!("for vm in $({vmove} --json list | grep -o '\"name\":\"[a-z0-9.-]*\"' | cut -d'\"' -f4); do {vmove} stop --force $vm; done; true"),
        )?;
        for index in 0..FUNCTIONS {
            self.driver_is(host, index, "igbvf")?;
        }
        self.moves.stop(host)
    }

    /// Waits until a driver has function `index`.
    pub(crate) fn driver_is(&self, host: usize, index: usize, driver: &str) -> Result<()> {
        let wait = format!(
            "for i in $(seq 150); do [ $(basename $(readlink /sys/bus/pci/devices/{}/driver || echo none)) = {driver} ] && exit 0; \
             sleep 0.1; done; readlink /sys/bus/pci/devices/{0}/driver; exit 1",
            function(index)
        );
        self.moves.must(host, &wait).map(drop).with_context(|| format!("function {index} of h{host}"))
    }

    fn run(&self, host: usize, name: &str, index: usize, mac: &str, words: &str) -> Result<()> {
        self.run_of_size(64, host, (name, index, mac), words)
    }

    /// `mib`: memory of the guest.
    fn run_of_size(
        &self,
        mib: usize,
        host: usize,
        (name, index, mac): (&str, usize, &str),
        words: &str,
    ) -> Result<()> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        let line = format!(
            "run --name {name} --device net0={},mac={mac} -- {qemu} -machine q35 -accel tcg -m {mib} -nodefaults -display none -kernel {guest} \
             -append '{words}' -debugcon file:{{vmdir}}/debug",
            function(index)
        );
        self.moves.must(host, &self.moves.vmove(&line)).map(drop)
    }

    /// Somebody on h2 who answers.
    pub(crate) fn neighbour(&self) -> Result<()> {
        self.run(2, "n", 3, "52:54:00:79:00:88", "quiet")
    }

    pub(crate) fn guest(&self, words: &str) -> Result<()> {
        self.run(1, NAME, 0, MAC, words)?;
        self.works(1)
    }

    /// So many words of a guest's page of counts, from word `first` on, as its RAM file has them.
    fn words(&self, host: usize, name: &str, first: usize, count: usize) -> Result<Vec<u64>> {
        let (at, length) = (STATE + first * 4, count * 4);
        let file = format!("$(find /run/vm/memory -type f -name '{name}.*' | head -1)");
        let text = self.moves.must(host, &format!("od -An -v -tu4 -w4 -j {at} -N {length} {file}"))?;
        Ok(text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
    }

    fn counts(&self, host: usize, name: &str) -> Result<Counts> {
        let words = self.words(host, name, 0, 14)?;
        let [magic, passes, damaged, cards, _, _, sent, received, wrong, _, _, _, low, high] = words[..]
        else {
            anyhow::bail!("{words:?}");
        };
        ensure!(magic == 0x5644_4d56, "no counts of a guest in its RAM file: {words:?}");
        let mac = (low | high << 32).to_le_bytes()[..6]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<Vec<_>>();
        Ok(Counts { passes, damaged, cards, sent, received, wrong, mac: mac.join(":") })
    }

    fn works(&self, host: usize) -> Result<()> {
        self.works_as(host, NAME, Some(MAC))
    }

    /// The guest goes over its memory, and its function, which has its address, sends and receives; all that it finds is right. One without an
    /// address has no function.
    fn works_as(&self, host: usize, name: &str, mac: Option<&str>) -> Result<()> {
        let begun = Instant::now();
        let mut before: Option<Counts> = None;
        loop {
            let now = self.counts(host, name);
            if let Ok(now) = &now {
                ensure!(now.damaged == 0 && now.wrong == 0, "{name} on h{host}: {now:?}");
                let more = |before: &Counts| {
                    let frames =
                        mac.is_none() || now.sent > before.sent + 4 && now.received > before.received + 4;
                    now.passes > before.passes && frames
                };
                let has_its_function = mac.map_or(now.cards == 0, |mac| now.cards == 1 && now.mac == mac);
                if before.as_ref().is_some_and(more) && has_its_function {
                    return Ok(());
                }
            }
            ensure!(
                begun.elapsed() < Duration::from_secs(90),
                "{name} on h{host}: {before:?}, then {now:?}; {}",
                self.addresses()
            );
            if before.is_none() {
                before = now.ok();
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// What the physical functions and the neighbour say, for a guest that does not work.
    fn addresses(&self) -> String {
        let of_host = |host| {
            let said =
                self.moves.host(host, "ip link show eth1; dmesg | grep -E 'igb|eth1|vfio' | tail -n 12");
            format!("card of h{host}: {}", said.map_or_else(|error| error.to_string(), |done| done.text))
        };
        let cards = self.moves.lab.cards().map_or_else(String::new, crate::switch::Switch::stats);
        format!("{}; {}; neighbour {:?}; {cards}", of_host(1), of_host(2), self.counts(2, "n"))
    }

    fn every_mode(&self) -> Result<()> {
        self.guest("")?;
        for (turn, mode) in ["precopy", "postcopy", "hybrid", "auto"].into_iter().enumerate() {
            let (from, to) = if turn % 2 == 0 { (1, 2) } else { (2, 1) };
            let (has, gets) = (turn % 2, (turn + 1) % 2);
            let checked = self.moves.must(
                from,
                &self.moves.vmove(&format!(
                    "check {NAME} --to {}:{} --device net0={}",
                    crate::host::address(to),
                    moves::PORT,
                    function(gets)
                )),
            )?;
            ensure!(checked.contains("unplug") && checked.contains("without it for about"), "{checked}");
            let more = if mode == "precopy" { "--max-downtime 60s" } else { "" };
            let words = format!("--mode {mode} --verify --device net0={} {more}", function(gets));
            let report = self.moves.migrate(NAME, from, to, &words)?;
            ensure!(report["verified"] == true, "{report}");
            let device = &report["devices"][0];
            let ms = |key: &str| device[key].as_f64().with_context(|| format!("no {key} in {report}"));
            let (unplug, away, plug) = (ms("unplug_ms")?, ms("away_ms")?, ms("plug_ms")?);
            println!(
                "  {mode}: {}; without its function for {:.0} ms: unplug {unplug:.0}, away {away:.0}, plug {plug:.0}",
                moves::figures(&report),
                unplug + away + plug
            );
            self.driver_is(from, has, "igbvf").and(self.driver_is(to, gets, "vfio-pci"))?;
            self.works(to)?;
        }
        Ok(())
    }

    /// A move that must fail with this status; what it said.
    fn fails(&self, status: i32, more: &str) -> Result<String> {
        let done = self.moves.host(1, &self.moves.migrate_words(NAME, 2, more))?;
        ensure!(done.status == status, "ended with {}: {}", done.status, done.text);
        println!("  {}", done.text.lines().last().unwrap_or_default());
        Ok(done.text)
    }

    fn stubborn(&self) -> Result<()> {
        self.guest("stubborn")?;
        let said = self.fails(1, &format!("--unplug-timeout 6s --device net0={}", function(1)))?;
        ensure!(said.contains("did not release device"), "{said}");
        self.driver_is(2, 1, "igbvf").and(self.driver_is(1, 0, "vfio-pci"))?;
        self.works(1)
    }

    fn refused(&self) -> Result<()> {
        self.guest("")?;
        for (more, words) in [
            (String::new(), "free on h2: "),
            ("--device net0=0000:09:00.0".to_owned(), "has no device 0000:09:00.0"),
            (format!("--device net0={}", function(3)), "cannot be given"),
            ("--device net0=0000:00:03.0".to_owned(), "0000:00:03.0"),
            // The chipset's functions are one group: nobody can have one of them alone.
            ("--device net0=0000:00:1f.2".to_owned(), "also holds 0000:00:1f.3"),
            (format!("--device net0={} --device gpu={}", function(1), function(2)), "owns no device gpu"),
        ] {
            let said = self.fails(3, &more)?;
            ensure!(said.contains(words), "{said}");
        }
        // A card that was down has its functions reset, and the neighbour's driver knows nothing of that.
        let vmove = self.moves.vmove("stop --force n");
        self.moves.must(2, &format!("{vmove}; ip link set eth1 down"))?;
        let said = self.fails(3, &format!("--device net0={}", function(1)));
        self.moves.must(2, "ip link set eth1 up; sleep 1")?;
        ensure!(said?.contains("down"), "the state of the physical function is not told");
        self.driver_is(2, 1, "igbvf")?;
        self.neighbour()?;
        self.works(1)
    }

    fn kill_daemon(&self, host: usize) -> Result<()> {
        self.moves.must(host, "kill -KILL $(cat /run/vmoved.pid)").map(drop)
    }

    /// While the function is away, and the guest not handed over.
    fn killed_before(&self) -> Result<()> {
        self.guest("")?;
        let more = format!("--mode hybrid --bandwidth 1MiB --device net0={}", function(1));
        for blow in ["source", "destination", "qemu"] {
            let moving = self.moves.moving_of(NAME, &more, "rounds")?;
            match blow {
                "source" => self.kill_daemon(1)?,
                "destination" => self.kill_daemon(2)?,
                _ => drop(self.moves.must(2, "kill -KILL $(pgrep -f '[i]ncoming')")?),
            }
            if blow != "source" {
                let done = collect(&moving).context("h1 went away")?;
                ensure!(done.status == 1, "{blow}: ended with {}: {}", done.status, done.text);
            }
            match blow {
                "source" => self.moves.start(1, "")?,
                "destination" => self.moves.start(2, "")?,
                _ => {}
            }
            self.works(1).with_context(|| format!("{blow} killed"))?;
            self.driver_is(1, 0, "vfio-pci").and(self.driver_is(2, 1, "igbvf"))?;
            println!("  {blow} killed: the guest has its function back");
        }
        Ok(())
    }

    /// While pages are missing, and the guest has no function yet.
    fn killed_after(&self) -> Result<()> {
        self.guest("")?;
        let more = format!("--mode postcopy --bandwidth 1MiB --device net0={}", function(1));
        let moving = self.moves.moving_of(NAME, &more, "fetch")?;
        let held = self.moves.must(2, &self.moves.vmove("--json devices"))?;
        let list: Value = serde_json::from_str(held.trim())?;
        let of = list["devices"].as_array().context("no devices")?;
        let mine = of.iter().find(|device| device["address"] == function(1)).context("no function")?;
        ensure!(mine["owner"]["vm"] == NAME && mine["owner"]["role"] == "net0", "{mine}");
        self.kill_daemon(2)?;
        std::thread::sleep(Duration::from_secs(2));
        self.moves.start(2, "")?;
        let done = collect(&moving).context("h1 went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let report = moves::report(&done.text)?;
        println!("  {}; device {}", moves::figures(&report), report["devices"][0]);
        self.works(2)?;
        self.driver_is(1, 0, "igbvf").and(self.driver_is(2, 1, "vfio-pci"))
    }
}
