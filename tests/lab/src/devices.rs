//! Guests that own virtual functions of a card: DMA into their memory, beside soft RDMA in the same host; devices that leave and come
//! back; functions bound and given back by the library's own program.

mod vms;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::check::{both, figure, perftest, run, shell};
use crate::host::{Places, address};
use crate::supervisor::Lab;

/// Longest time for one command in an emulated host.
const COMMAND_TIMEOUT_MS: u64 = 180_000;
/// Virtual functions of each card.
const FUNCTIONS: usize = 4;
/// How often a device leaves and comes back.
const ROUNDS: usize = 10;
/// The card, and where it says how many functions it has.
const CARD: &str = "0000:01:00.0";
/// Port of the program that serves a RAM file.
const PORT: u16 = 7600;

/// What the tests need besides the lab.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Folder of the programs `devices` and `hotplug`.
    pub programs: PathBuf,
    /// The guest that drives functions.
    pub guest: PathBuf,
    /// Kernel and initramfs of a guest that runs Linux with the functions' own driver.
    pub linux: Option<(PathBuf, PathBuf)>,
    /// QEMU of the guests.
    pub qemu: PathBuf,
    /// Reads a RAM file by RDMA.
    pub reader: PathBuf,
    /// Hosts have no ping of their own.
    pub busybox: PathBuf,
}

/// Where the parts are, made absolute.
///
/// # Errors
/// One of them is not there.
pub fn parts(
    programs: &Path,
    guest: &Path,
    linux: Option<(PathBuf, PathBuf)>,
    places: &Places,
) -> Result<Parts> {
    let there = |path: &Path| path.canonicalize().with_context(|| format!("there is no {}", path.display()));
    Ok(Parts {
        programs: there(programs)?,
        guest: there(guest)?,
        linux: linux.map(|(kernel, initrd)| anyhow::Ok((there(&kernel)?, there(&initrd)?))).transpose()?,
        qemu: there(&places.qemu)?,
        reader: there(&places.source.join("tests/lab/host/ram-file"))?,
        busybox: there(&places.files.join("../busybox/bin/busybox"))?,
    })
}

struct Devices<'a> {
    lab: &'a Lab,
    parts: &'a Parts,
}

/// What the guest has counted.
#[derive(Debug, Clone, Copy)]
struct Counts {
    passes: u32,
    damaged: u32,
    cards: u32,
    ejected: u32,
    sent: u32,
    received: u32,
    wrong: u32,
    mac: [u8; 6],
}

/// Runs every case, or those whose name contains `only`, and tells how many.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, parts: &Parts, only: &str) -> Result<usize> {
    let devices = Devices { lab, parts };
    let ran = Cell::new(0);
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        if !name.contains(only) {
            return Ok(());
        }
        if ran.replace(ran.get() + 1) == 0 {
            (1..=2).try_for_each(|host| devices.make_functions(host))?;
        }
        let begin = Instant::now();
        let result = case();
        let ended = devices.end(1).and(devices.end(2));
        result.and(ended).with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("functions_are_listed_with_group_and_driver", &|| devices.listed())?;
    case("a_function_is_given_its_addresses_and_comes_back", &|| devices.given())?;
    case("a_program_killed_in_the_middle_loses_no_function", &|| devices.killed())?;
    case("functions_write_into_the_memory_of_guests", &|| devices.frames())?;
    case("a_ram_file_that_a_function_writes_to_is_read_by_rdma", &|| devices.registered())?;
    case("a_device_leaves_and_comes_back", &|| devices.unplugged())?;
    case("a_guest_gets_another_function_with_the_same_address", &|| devices.exchanged())?;
    case("a_guest_that_keeps_its_device_is_told", &|| devices.stubborn())?;
    case("too_little_locked_memory_is_told", &|| devices.memory_lock())?;
    case("a_vm_is_run_with_a_function_and_gives_it_back", &|| devices.run_and_stop())?;
    case("a_killed_daemon_loses_and_doubles_no_function_of_a_vm", &|| devices.killed_daemon())?;
    case("a_foreign_command_line_brings_its_function", &|| devices.foreign())?;
    case("a_vm_that_could_not_let_go_is_refused", &|| devices.refused())?;
    if parts.linux.is_some() {
        case("linux_lets_its_function_go_and_takes_it_again", &|| devices.linux())?;
    }
    Ok(ran.get())
}

/// MAC address of function `index` of a host's card, as the tests give it.
fn mac(host: usize, index: usize) -> String {
    format!("52:54:00:79:{host:02x}:{index:02x}")
}

/// Where function `index` is.
fn function(index: usize) -> String {
    format!("0000:01:10.{}", index * 2)
}

impl Devices<'_> {
    /// A command that must succeed; what it said.
    fn must(&self, host: usize, text: &str) -> Result<String> {
        let done = run(self.lab, host, shell(text, COMMAND_TIMEOUT_MS))?;
        ensure!(done.status == 0, "'{text}' on h{host} ended with {}: {}", done.status, done.text.trim());
        Ok(done.text)
    }

    /// A command that must fail; what it said.
    fn fails(&self, host: usize, text: &str) -> Result<String> {
        let done = run(self.lab, host, shell(text, COMMAND_TIMEOUT_MS))?;
        ensure!(done.status == 1, "'{text}' on h{host} ended with {}: {}", done.status, done.text.trim());
        println!("  {}", done.text.trim());
        Ok(done.text)
    }

    fn program(&self, name: &str, words: &str) -> String {
        format!("{}/{name} {words}", self.parts.programs.display())
    }

    /// `devices` with the journal of a host.
    fn ledger(&self, act: &str, words: &str) -> String {
        self.program("devices", &format!("{act} /run/devices.journal {words}"))
    }

    fn hotplug(&self, name: &str, words: &str) -> String {
        self.program("hotplug", &format!("/dev/shm/{name}/qmp {words}"))
    }

    fn make_functions(&self, host: usize) -> Result<()> {
        self.must(
            host,
            &format!(
                "for m in igb igbvf vfio-pci; do modprobe $m; done; ip link set eth1 up; \
                 echo {FUNCTIONS} >/sys/bus/pci/devices/{CARD}/sriov_numvfs; sleep 1"
            ),
        )
        .map(drop)
    }

    /// Ends the guests of a host, and gives all functions back.
    fn end(&self, host: usize) -> Result<()> {
        let recover = self.ledger("recover", "");
        let said = self.must(
            host,
            &format!(
                "ip link set eth1 up; for p in /dev/shm/*/pid; do [ -e $p ] && kill -KILL $(cat $p); done; rm -rf /dev/shm/*; \
                 if [ -e /run/devices.journal ]; then {recover}; rm /run/devices.journal; fi"
            ),
        )?;
        ensure!(said.is_empty() || said.contains("\"errors\":[]"), "h{host}: {said}");
        Ok(())
    }

    /// Gives function `index` to a VM with an address; its driver must have been igbvf.
    fn take(&self, host: usize, vm: &str, index: usize, mac: &str) -> Result<()> {
        let words = format!("{vm} net0={},mac={mac}", function(index));
        let said = self.must(host, &self.ledger("take", &words))?;
        ensure!(said.contains("\"driver\":\"igbvf\""), "{said}");
        Ok(())
    }

    /// Starts a guest with two ports and, if there is one, a function in the first, and waits until it is up.
    fn guest(&self, host: usize, name: &str, index: Option<usize>, words: &str) -> Result<()> {
        let (qemu, guest) = (self.parts.qemu.display(), self.parts.guest.display());
        self.start(host, name, index, &format!("{qemu} -m 64 -kernel {guest} -append '{words}'"))?;
        let wanted = if index.is_some() { "card up" } else { "guest up" };
        self.says(host, name, wanted, 30)
    }

    fn start(&self, host: usize, name: &str, index: Option<usize>, program: &str) -> Result<()> {
        let device = index.map(|index| format!("-device vfio-pci,id=nic,bus=rp1,host={}", function(index)));
        let megabytes = program.split(" -m ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or("64");
        self.must(
            host,
            &format!(
                "d=/dev/shm/{name}; mkdir -p $d; ulimit -l unlimited; {program} -machine q35,memory-backend=ram -accel tcg \
                 -object memory-backend-file,id=ram,share=on,size={megabytes}M,mem-path=$d/ram -nodefaults -no-user-config \
                 -display none -debugcon file:$d/debug -qmp unix:$d/qmp,server=on,wait=off \
                 -device pcie-root-port,id=rp1,chassis=1,slot=1 -device pcie-root-port,id=rp2,chassis=2,slot=2 {} \
                 >$d/log 2>&1 </dev/null & echo $! >/dev/shm/{name}/pid",
                device.unwrap_or_default()
            ),
        )
        .map(drop)
    }

    /// Waits until a guest has said something.
    fn says(&self, host: usize, name: &str, words: &str, seconds: u32) -> Result<()> {
        let dir = format!("/dev/shm/{name}");
        self.must(
            host,
            &format!(
                "for i in $(seq {}); do grep -q '{words}' {dir}/debug && exit 0; sleep 0.1; done; tail -n 5 {dir}/debug {dir}/log; exit 1",
                seconds * 10
            ),
        )
        .map(drop)
    }

    fn counts(&self, host: usize, name: &str) -> Result<Counts> {
        let text = self.must(host, &format!("od -An -v -tu4 -w4 -j 2097152 -N 56 /dev/shm/{name}/ram"))?;
        let words: Vec<u32> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [magic, passes, damaged, cards, _, ejected, sent, received, wrong, _, _, _, low, high] =
            words[..]
        else {
            anyhow::bail!("{text}");
        };
        ensure!(magic == 0x5644_4d56, "no counts of a guest in the RAM file: {text}");
        let [a, b, c, d] = low.to_le_bytes();
        let [e, f, ..] = high.to_le_bytes();
        Ok(Counts { passes, damaged, cards, ejected, sent, received, wrong, mac: [a, b, c, d, e, f] })
    }

    /// The guest's functions send and receive, and all it finds in its memory is right.
    fn works(&self, host: usize, name: &str) -> Result<Counts> {
        let (before, begun) = (self.counts(host, name)?, Instant::now());
        loop {
            let now = self.counts(host, name)?;
            ensure!(now.damaged == 0 && now.wrong == 0, "{name} on h{host}: {now:?}");
            if now.passes >= before.passes + 2
                && now.sent >= before.sent + 8
                && now.received >= before.received + 8
            {
                return Ok(now);
            }
            ensure!(begun.elapsed() < Duration::from_secs(60), "{name} on h{host}: {before:?}, then {now:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn listed(&self) -> Result<()> {
        let said: Value = serde_json::from_str(self.must(1, &self.program("devices", "list"))?.trim())?;
        let devices = said["pci"]["devices"].as_object().context("no devices")?;
        ensure!(said["pci"]["notes"] == serde_json::json!([]), "{}", said["pci"]["notes"]);
        let card = &devices[CARD];
        ensure!(card["driver"] == "igb" && card["kind"] == "nic", "{card}");
        let functions = card["sriov"]["physical"]["functions"].as_array().context("no functions")?;
        ensure!(functions.len() == FUNCTIONS, "{card}");
        let mut groups: Vec<u64> = Vec::new();
        for (index, address) in functions.iter().enumerate() {
            let found = &devices[address.as_str().unwrap_or_default()];
            ensure!(*address == function(index) && found["driver"] == "igbvf", "{found}");
            ensure!(found["sriov"]["virtual"]["index"] == index, "{found}");
            groups.extend(found["group"].as_u64());
        }
        groups.dedup();
        ensure!(groups.len() == FUNCTIONS, "groups {groups:?}");
        // Whole devices that the host needs, and such as are no devices for VMs.
        let refused = self.fails(1, &self.ledger("take", &format!("a card={CARD}")))?;
        ensure!(refused.contains("virtual functions are in use"), "{refused}");
        let refused = self.fails(1, &self.ledger("take", "a net=0000:00:03.0"))?;
        ensure!(refused.contains("network device eth0 is up"), "{refused}");
        let refused = self.fails(1, &self.ledger("take", "a sata=0000:00:1f.2"))?;
        ensure!(refused.contains("also holds") || refused.contains("disks"), "{refused}");
        Ok(())
    }

    fn link(&self, host: usize, index: usize) -> Result<String> {
        self.must(host, &format!("ip link show eth1 | grep 'vf {index} '"))
    }

    fn driver(&self, host: usize, index: usize) -> Result<String> {
        let said = self
            .must(host, &format!("readlink /sys/bus/pci/devices/{}/driver || echo none", function(index)))?;
        Ok(said.trim().rsplit('/').next().unwrap_or_default().to_owned())
    }

    fn given(&self) -> Result<()> {
        let (function, before) = (function(1), self.link(1, 1)?);
        let words = format!("a net0={function},mac={},vlan=7,trust=on", mac(1, 1));
        let said: Value = serde_json::from_str(self.must(1, &self.ledger("take", &words))?.trim())?;
        let during = self.link(1, 1)?;
        ensure!(
            self.driver(1, 1)? == "vfio-pci" && during.contains(&mac(1, 1)) && during.contains("vlan 7"),
            "{during}"
        );
        ensure!(during.contains("trust on"), "{during}");
        let probed = self.must(1, &self.program("devices", &format!("probe {function}")))?;
        ensure!(probed.trim() == "null", "an igb function carries no state: {probed}");
        let back: Value = serde_json::from_str(self.must(1, &self.ledger("give-back", "a net0"))?.trim())?;
        ensure!(
            self.driver(1, 1)? == "igbvf" && self.must(1, &self.ledger("claims", ""))?.trim() == "[]",
            "not back"
        );
        println!(
            "  taken in {:.0} ms, given back in {:.0} ms",
            said["took_ms"].as_f64().unwrap_or_default(),
            back["took_ms"].as_f64().unwrap_or_default()
        );
        let after = self.link(1, 1)?;
        ensure!(!after.contains("vlan") && after.contains("trust off"), "{before}, then {after}");
        self.must(1, "ip link set eth1 down")?;
        let refused = self.fails(1, &self.ledger("take", &words))?;
        ensure!(refused.contains("eth1") && refused.contains("down"), "{refused}");
        ensure!(self.driver(1, 1)? == "igbvf", "it was bound all the same");
        Ok(())
    }

    /// Killed after times that grow, until it ends before it is killed.
    fn killed(&self) -> Result<()> {
        let words = format!("a net0={},mac={},vlan=7", function(2), mac(1, 2));
        let (take, back, recover) =
            (self.ledger("take", &words), self.ledger("give-back", "a net0"), self.ledger("recover", ""));
        let mut kills = [0, 0];
        for millis in (5..=500).step_by(15) {
            for (which, act) in [&take, &back].into_iter().enumerate() {
                let killed = run(
                    self.lab,
                    1,
                    shell(
                        &format!("timeout -s KILL 0.{millis:03} {act} >/dev/null 2>&1"),
                        COMMAND_TIMEOUT_MS,
                    ),
                )?;
                kills[which] += usize::from(killed.status == 137);
                if killed.status == 137 && which == 0 {
                    let said = self.must(1, &format!("{recover}; {}", self.ledger("claims", "")))?;
                    ensure!(
                        said.contains("\"errors\":[]") && said.trim().ends_with("[]"),
                        "{millis} ms: {said}"
                    );
                    ensure!(
                        self.driver(1, 2)? == "igbvf",
                        "killed after {millis} ms: {}",
                        self.driver(1, 2)?
                    );
                    self.must(1, &take)?;
                }
            }
            let said = self.must(1, &format!("{recover}; {}", self.ledger("claims", "")))?;
            ensure!(said.contains("\"errors\":[]") && said.trim().ends_with("[]"), "{millis} ms: {said}");
            let link = self.link(1, 2)?;
            ensure!(self.driver(1, 2)? == "igbvf" && !link.contains("vlan"), "after {millis} ms: {link}");
        }
        println!("  killed {} times while it took, {} while it gave back", kills[0], kills[1]);
        ensure!(kills.iter().all(|kills| *kills > 1), "{kills:?}");
        Ok(())
    }

    fn frames(&self) -> Result<()> {
        let guests = [(1, 0), (1, 1), (2, 0)];
        for (host, index) in guests {
            self.take(host, &format!("g{index}"), index, &mac(host, index))?;
            self.guest(host, &format!("g{index}"), Some(index), "")?;
        }
        for (host, index) in guests {
            let found = self.works(host, &format!("g{index}"))?;
            let seen = found.mac.map(|byte| format!("{byte:02x}")).join(":");
            ensure!(seen == mac(host, index), "{seen}");
            println!(
                "  {seen}: {} frames sent, {} received, 0 wrong; {} passes over 16 MiB, 0 damaged",
                found.sent, found.received, found.passes
            );
        }
        // Between the hosts, too: the one of h2 hears nobody once the network of the cards is cut.
        let cards = self.lab.cards().context("hosts without cards")?;
        println!("  {}", cards.stats().lines().skip(1).collect::<Vec<_>>().join("\n  "));
        ensure!(cards.stats().contains("h1   h2") && cards.stats().contains("h2   h1"), "{}", cards.stats());
        Ok(())
    }

    fn registered(&self) -> Result<()> {
        for index in [0, 1] {
            self.take(1, &format!("g{index}"), index, &mac(1, index))?;
            self.guest(1, &format!("g{index}"), Some(index), "")?;
        }
        let reader = self.parts.reader.display();
        let serve = format!("python3 {reader} serve /dev/shm/g0/ram {PORT}");
        let read = format!("python3 {reader} read {} {PORT} 24", address(1));
        let (_, said) = both(self.lab, (1, &serve), (2, &read))?;
        let found: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        println!(
            "  64 MiB registered in {:.0} ms; {} pages and {} frames read by RDMA while the guest and its function wrote, all right ({} torn)",
            found["register_ms"].as_f64().unwrap_or_default(),
            found["pages"],
            found["frames"],
            found["torn"]
        );
        ensure!(found["pages"].as_u64() > Some(23) && found["frames"].as_u64() > Some(5), "{found}");
        ensure!(found["last"]["damaged"] == 0 && found["last"]["wrong"] == 0, "{found}");
        let row = perftest(self.lab, (1, 2), "ib_read_lat", 4096, 300, "")?;
        println!("  beside the functions: ib_read_lat 4 KiB average {} us", figure(&row, 5)?);
        self.works(1, "g0").and(self.works(1, "g1")).map(drop)
    }

    fn time(&self, host: usize, text: &str, key: &str) -> Result<f64> {
        let said = self.must(host, text)?;
        let found: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        found[key].as_f64().with_context(|| said.clone())
    }

    fn group(&self, host: usize, index: usize) -> Result<String> {
        let path = format!("/sys/bus/pci/devices/{}/iommu_group", function(index));
        let said = self.must(host, &format!("basename $(readlink {path})"))?;
        Ok(said.trim().to_owned())
    }

    fn plug(&self, host: usize, name: &str, index: usize, port: &str) -> Result<f64> {
        let words = format!("plug driver=vfio-pci id=nic bus={port} host={}", function(index));
        self.time(host, &self.hotplug(name, &words), "took_ms")
    }

    fn unplugged(&self) -> Result<()> {
        for index in [0, 1] {
            self.take(1, &format!("g{index}"), index, &mac(1, index))?;
            self.guest(1, &format!("g{index}"), Some(index), "")?;
        }
        let group = self.group(1, 0)?;
        let [mut unplug, mut free, mut plug] = [const { Vec::new() }; 3];
        for round in 0..ROUNDS {
            unplug.push(self.time(1, &self.hotplug("g0", "unplug nic"), "took_ms")?);
            free.push(self.time(1, &self.program("devices", &format!("free {group} 10")), "waited_ms")?);
            plug.push(self.plug(1, "g0", 0, ["rp2", "rp1"][round % 2])?);
            let now = self.works(1, "g0")?;
            ensure!(now.cards == 1 && now.ejected as usize == round + 1, "{now:?}");
        }
        for (what, times) in
            [("unplug", &mut unplug), ("then the group is free after", &mut free), ("plug", &mut plug)]
        {
            times.sort_by(f64::total_cmp);
            println!(
                "  {what}: {:.0} ms ({:.0} to {:.0}, {ROUNDS} rounds)",
                times[times.len() / 2],
                times[0],
                times[times.len() - 1]
            );
        }
        Ok(())
    }

    /// What a move does with a device, on one host.
    fn exchanged(&self) -> Result<()> {
        let own = mac(1, 9);
        self.take(1, "g0", 0, &own)?;
        self.take(1, "g1", 1, &mac(1, 1))?;
        self.guest(1, "g0", Some(0), "")?;
        self.guest(1, "g1", Some(1), "")?;
        let before = self.works(1, "g0")?;
        let begun = Instant::now();
        self.must(1, &self.hotplug("g0", "unplug nic"))?;
        self.must(1, &self.ledger("give-back", "g0 net0"))?;
        self.take(1, "g0", 2, &own)?;
        self.plug(1, "g0", 2, "rp1")?;
        let took = begun.elapsed();
        let after = self.works(1, "g0")?;
        println!("  another function with the same address after {:.0} ms", took.as_secs_f64() * 1000.0);
        ensure!(before.mac == after.mac && self.driver(1, 0)? == "igbvf", "{before:?}, then {after:?}");
        ensure!(self.driver(1, 2)? == "vfio-pci", "the new one is not bound");
        Ok(())
    }

    fn stubborn(&self) -> Result<()> {
        for index in [0, 1] {
            self.take(1, &format!("g{index}"), index, &mac(1, index))?;
        }
        self.guest(1, "g0", Some(0), "stubborn")?;
        self.guest(1, "g1", Some(1), "")?;
        let said = self.fails(1, &self.hotplug("g0", "unplug nic 6"))?;
        ensure!(said.contains("did not release device \"nic\" within 6s (2 requests)"), "{said}");
        // It is where it was, with its device; nobody else gets that.
        self.works(1, "g0")?;
        let said = self.fails(1, &self.ledger("give-back", "g0 net0 1"))?;
        ensure!(said.contains("still has its group"), "{said}");
        self.works(1, "g0")?;
        let said = self.fails(1, &self.ledger("take", &format!("other net0={}", function(0))))?;
        ensure!(said.contains("VM \"g0\" has it"), "{said}");
        Ok(())
    }

    fn memory_lock(&self) -> Result<()> {
        self.take(1, "g0", 0, &mac(1, 0))?;
        let (qemu, guest) = (self.parts.qemu.display(), self.parts.guest.display());
        let limited = format!(
            "setpriv --bounding-set -ipc_lock prlimit --memlock=4194304 {qemu} -m 64 -kernel {guest} -append quiet"
        );
        self.start(1, "g0", None, &limited)?;
        self.says(1, "g0", "guest up", 30)?;
        let words = format!("plug driver=vfio-pci id=nic bus=rp1 host={}", function(0));
        let said = self.fails(1, &self.hotplug("g0", &words))?;
        ensure!(said.contains("RLIMIT_MEMLOCK"), "{said}");
        ensure!(self.must(1, &self.hotplug("g0", "find nic"))?.trim() == "null", "it is there all the same");
        Ok(())
    }

    /// Slow: Linux under two emulators.
    fn linux(&self) -> Result<()> {
        let (kernel, initrd) = self.parts.linux.as_ref().context("no Linux for guests")?;
        self.take(1, "g1", 1, &mac(1, 1))?;
        self.take(1, "lin", 0, &mac(1, 0))?;
        let qemu = self.parts.qemu.display();
        let append = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check random.trust_cpu=on cryptomgr.notests";
        let line = format!(
            "{qemu} -m 256 -cpu qemu64 -kernel {} -initrd {} -append '{append}' -serial file:/dev/shm/lin/serial",
            kernel.display(),
            initrd.display()
        );
        self.start(1, "lin", Some(0), &line)?;
        let waits = |count: usize, words: &str, seconds: usize| {
            let ready = format!(
                "for i in $(seq {seconds}); do [ $(grep -c '{words}' /dev/shm/lin/serial) -ge {count} ] && exit 0; sleep 1; done; \
                 tail -n 8 /dev/shm/lin/serial; exit 1"
            );
            let done = run(self.lab, 1, shell(&ready, (seconds as u64 + 60) * 1000))?;
            ensure!(done.status == 0, "the guest never said {words:?} {count} times: {}", done.text);
            anyhow::Ok(())
        };
        // It answers pings of the host's own card, from its function.
        let reached = format!(
            "ip addr replace 10.78.0.1/24 dev eth1; for i in $(seq 60); do {} ping -c 1 -W 1 10.78.0.9 >/dev/null && exit 0; \
             sleep 0.5; done; exit 1",
            self.parts.busybox.display()
        );
        let begun = Instant::now();
        waits(1, "CARD UP", 400)?;
        println!("  Linux is up with its function after {:.0} s", begun.elapsed().as_secs_f64());
        self.must(1, &reached)?;
        for round in 0..3 {
            let unplug = self.time(1, &self.hotplug("lin", "unplug nic 60"), "took_ms")?;
            let begun = Instant::now();
            let plug = self.plug(1, "lin", 0, ["rp2", "rp1"][round % 2])?;
            waits(round + 2, "CARD UP", 120)?;
            println!(
                "  unplug {unplug:.0} ms, plug {plug:.0} ms, the guest has its network again after {:.1} s",
                begun.elapsed().as_secs_f64()
            );
            self.must(1, &reached)?;
        }
        Ok(())
    }
}
