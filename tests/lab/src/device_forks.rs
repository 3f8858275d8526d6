//! Guests that own virtual functions are forked by real daemons: the parent lets its function go for the freeze and has it back, each child gets a
//! function of its own, with an address of its own, and no blow loses or doubles one.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::device_moves::by_memory::WORKS_TIMEOUT;
use crate::device_moves::{DeviceMoves, FUNCTIONS, MAC, NAME, function};
use crate::host::address;
use crate::moves::{self, PORT};
use crate::supervisor::Lab;

/// Forks whose pauses are compared.
const ROUNDS: usize = 3;
/// Phases of a fork in which the daemon is killed. The second and later forks begin with memory of its own for the parent.
const KILLS: [&str; 4] = ["detach", "load", "rehome", "devices"];

struct DeviceForks<'a> {
    base: DeviceMoves<'a>,
}

/// Runs every case, or those whose name contains `only`, and tells how many.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, parts: &moves::Parts, guest: &Path, only: &str) -> Result<usize> {
    let all = DeviceForks { base: DeviceMoves::new(lab, parts, guest)? };
    let ran = Cell::new(0);
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        if !name.contains(only) {
            return Ok(());
        }
        if ran.replace(ran.get() + 1) == 0 {
            (1..=2).try_for_each(|host| all.base.make_functions(host))?;
        }
        let begin = Instant::now();
        let started = all.base.moves.start(1, "").and_then(|()| all.base.moves.start(2, ""));
        let result = started.and_then(|()| all.base.neighbour()).and_then(|()| case());
        let ended = all.end(1).and(all.end(2));
        result.and(ended).with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("a_fork_gives_three_children_a_function_each", &|| all.three_children())?;
    case("a_fork_that_cannot_have_its_functions_is_refused_by_name", &|| all.refused())?;
    case("a_parent_that_keeps_its_function_is_not_forked", &|| all.stubborn())?;
    case("a_template_of_a_guest_with_a_function_gives_children_others", &|| all.template())?;
    case("a_child_on_another_host_gets_a_function_there", &|| all.elsewhere())?;
    case("a_killed_daemon_loses_and_doubles_no_function_of_a_fork", &|| all.killed())?;
    Ok(ran.get())
}

impl DeviceForks<'_> {
    fn must(&self, host: usize, text: &str) -> Result<String> {
        self.base.moves.must(host, text)
    }

    fn vfork(&self, words: &str) -> String {
        format!("{}/vfork --control /run/vm/c.sock {words}", self.base.moves.parts.programs.display())
    }

    /// What a fork tells of itself.
    fn forked(&self, words: &str) -> Result<Value> {
        let said = self.must(1, &self.vfork(&format!("--json create {words} 2>>/run/lab/vfork.log")))?;
        serde_json::from_str(said.trim()).with_context(|| said.clone())
    }

    /// Ends the VMs of a host, children first, and looks that all functions are back.
    fn end(&self, host: usize) -> Result<()> {
        for (name, _) in self.base.vms(host)?.iter().filter(|(name, _)| name.contains('.')) {
            self.must(host, &self.base.moves.vmove(&format!("stop --force {name}")))?;
        }
        self.must(
            host,
            &format!("for t in t; do {} >/dev/null 2>&1; done; true", self.vfork("template rm $t")),
        )?;
        self.base.end(host)
    }

    fn stop(&self, host: usize, name: &str) -> Result<()> {
        self.must(host, &self.base.moves.vmove(&format!("stop --force {name}"))).map(drop)
    }

    /// A VM like the guest without a function.
    fn plain(&self, name: &str) -> Result<()> {
        let (qemu, guest) = (self.base.moves.parts.qemu.display(), self.base.guest.display());
        let line = format!(
            "run --name {name} -- {qemu} -machine q35 -accel tcg -m 64 -nodefaults -display none -kernel {guest} \
             -device pcie-root-port,id=rp1,chassis=1,slot=1 -debugcon file:{{vmdir}}/debug"
        );
        self.must(1, &self.base.moves.vmove(&line))?;
        self.base.works_by_memory(1, name, 0).map(drop)
    }

    /// Children 1 to 3 of the guest get the other functions of the host.
    fn devices() -> String {
        (1..FUNCTIONS).map(|index| format!("--device net0={} ", function(index))).collect()
    }

    /// Who has function `index`.
    fn owner(&self, host: usize, index: usize) -> Result<Value> {
        let all = self.base.json(host, "devices")?;
        let devices = all["devices"].as_array().with_context(|| all.to_string())?;
        let found = devices.iter().find(|device| device["address"] == function(index));
        Ok(found.with_context(|| all.to_string())?["owner"]["vm"].clone())
    }

    fn three_children(&self) -> Result<()> {
        self.base.guest("")?;
        self.plain("p")?;
        let (mut with, mut without, mut outages) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let plain = self.forked("p --count 3")?;
            without.push(pause(&plain)?);
            (1..=3).try_for_each(|child| self.stop(1, &format!("p.{child}")))?;
            let report = self.forked(&format!("{NAME} --count 3 {}", Self::devices()))?;
            with.push(pause(&report)?);
            let device = &report["devices"][0];
            let outage = device["outage_ms"].as_f64().with_context(|| report.to_string())?;
            outages.push(outage);
            println!("  parent: {device}");
            self.judge(&report)?;
            if round + 1 < ROUNDS {
                (1..=3).try_for_each(|child| self.stop(1, &format!("{NAME}.{child}")))?;
                (1..FUNCTIONS).try_for_each(|index| self.base.driver_is(1, index, "igbvf"))?;
            }
        }
        println!("  parent pause: with functions {}, without {}", spread(&mut with), spread(&mut without));
        println!("  the parent was without its function for {}", spread(&mut outages));
        ensure!(with[ROUNDS / 2] <= 1.2 * without[ROUNDS / 2], "{with:?} against {without:?}");
        // Memory of its own: the child is without its function for a moment, and its function goes when it goes.
        let promoted: Value =
            serde_json::from_str(self.must(1, &self.vfork(&format!("--json promote {NAME}.1")))?.trim())?;
        ensure!(
            promoted["was_private"] == true && promoted["devices"][0]["outage_ms"].is_f64(),
            "{promoted}"
        );
        println!("  promoted child: {}", promoted["devices"][0]);
        self.base.works_by_memory(1, &format!("{NAME}.1"), 1)?;
        self.stop(1, &format!("{NAME}.1"))?;
        self.base.driver_is(1, 1, "igbvf")?;
        self.base.works_by_memory(1, NAME, 1).map(drop)
    }

    /// Four guests with a function each work, with four addresses, all of them on the wire.
    fn judge(&self, report: &Value) -> Result<()> {
        let mut macs = BTreeSet::from([MAC.to_owned()]);
        ensure!(self.base.works_by_memory(1, NAME, 1)? == MAC, "the parent has another address");
        for child in 1..=3 {
            let (name, told) = (format!("{NAME}.{child}"), &report["children"][child - 1]);
            let mac = self.base.works_by_memory(1, &name, 1)?;
            ensure!(told["devices"][0]["mac"] == mac.as_str(), "{mac}: {told}");
            ensure!(self.owner(1, child)? == name.as_str(), "function {child} is not that of {name}");
            self.base.driver_is(1, child, "vfio-pci")?;
            macs.insert(mac);
        }
        ensure!(macs.len() == 4, "{macs:?}");
        let said = self.must(2, &format!("{} senders eth1 4", self.base.host_program("guests")))?;
        let seen: BTreeSet<String> = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        ensure!(macs.is_subset(&seen), "{macs:?} are not all among the senders {seen:?}");
        println!("  on the wire: {}", macs.into_iter().collect::<Vec<_>>().join(", "));
        Ok(())
    }

    /// A fork that must fail with this status; what it said.
    fn fails(&self, status: i32, words: &str) -> Result<String> {
        let done = self.base.moves.host(1, &self.vfork(&format!("create {words}")))?;
        ensure!(done.status == status, "{words}: ended with {}: {}", done.status, done.text);
        println!("  {}", done.text.lines().last().unwrap_or_default());
        Ok(done.text)
    }

    fn refused(&self) -> Result<()> {
        self.base.guest("")?;
        let (one, two) = (function(1), function(2));
        for (devices, words) in [
            (format!("--device gpu={one}"), "owns no device gpu".to_owned()),
            (format!("--device net0={one} --device net0={one}"), "was given to two children".to_owned()),
            (format!("--device 3:net0={one}"), "is for child 3".to_owned()),
            (format!("--device net0={one},mac={MAC}"), format!("MAC address {MAC} would be")),
            (
                format!(
                    "--device net0={one},mac=52:54:00:00:00:07 --device net0={two},mac=52:54:00:00:00:07"
                ),
                "of child 1".to_owned(),
            ),
            (format!("--device net0={}", function(0)), format!("VM \"{NAME}\" has it")),
            ("--device net0=0000:09:00.0".to_owned(), "has no device 0000:09:00.0".to_owned()),
            ("--device net0=0000:00:03.0".to_owned(), "0000:00:03.0".to_owned()),
        ] {
            let said = self.fails(3, &format!("{NAME} --count 2 {devices}"))?;
            ensure!(said.contains(&words), "{said}");
            (1..FUNCTIONS).try_for_each(|index| self.base.driver_is(1, index, "igbvf"))?;
        }
        self.base.works_by_memory(1, NAME, 1).map(drop)
    }

    fn stubborn(&self) -> Result<()> {
        self.base.guest("stubborn")?;
        let said =
            self.fails(1, &format!("{NAME} --count 1 --unplug-timeout 6s --device net0={}", function(1)))?;
        ensure!(said.contains("did not let its device net0 go"), "{said}");
        self.base.driver_is(1, 1, "igbvf").and(self.base.driver_is(1, 0, "vfio-pci"))?;
        ensure!(self.base.vms(1)?.iter().all(|(name, _)| name == NAME), "a child is there");
        self.base.works_by_memory(1, NAME, 1).map(drop)
    }

    fn template(&self) -> Result<()> {
        self.base.guest("")?;
        let saved: Value = serde_json::from_str(
            self.must(1, &self.vfork(&format!("--json template save {NAME} t")))?.trim(),
        )?;
        ensure!(saved["roles"] == serde_json::json!(["net0"]), "{saved}");
        println!("  parent: {}", saved["devices"][0]);
        self.base.works_by_memory(1, NAME, 1)?;
        let report = self.forked(&format!("--template t --count 2 --device 2:net0={}", function(1)))?;
        ensure!(report["children"][0]["devices"].is_null(), "{report}");
        self.base.works_by_memory(1, "t.1", 0)?;
        let mac = self.base.works_by_memory(1, "t.2", 1)?;
        ensure!(mac != MAC && report["children"][1]["devices"][0]["mac"] == mac.as_str(), "{mac}: {report}");
        Ok(())
    }

    fn elsewhere(&self) -> Result<()> {
        self.base.guest("")?;
        let to = format!("{}:{PORT}", address(2));
        let report = self.forked(&format!(
            "{NAME} --count 2 --here 1 --to {to} --device 1:net0={} --device 2:net0={}",
            function(1),
            function(1)
        ))?;
        println!("  {}", report["children"]);
        ensure!(self.base.works_by_memory(1, NAME, 1)? == MAC, "the parent has another address");
        let mut macs = BTreeSet::from([MAC.to_owned()]);
        for child in report["children"].as_array().context("no children")? {
            let host = if child["node"] == to.as_str() { 2 } else { 1 };
            let name = child["name"].as_str().context("no name")?;
            macs.insert(self.base.works_by_memory(host, name, 1)?);
            ensure!(self.owner(host, 1)? == name, "{report}");
        }
        ensure!(macs.len() == 3, "{macs:?}");
        // One that is not there: that host takes no part, the others do.
        let said = self.fails(3, &format!("{NAME} --count 1 --to {to} --device net0=0000:09:00.0"))?;
        ensure!(said.contains("h2 has no device 0000:09:00.0"), "{said}");
        self.base.works_by_memory(1, NAME, 1).map(drop)
    }

    /// Killed in one phase after another: the parent has its function, and each other one is that of a child that works, or the host's.
    fn killed(&self) -> Result<()> {
        self.base.guest("")?;
        let mut there = Vec::new();
        for phase in KILLS {
            let fork = self.vfork(&format!("create {NAME} --count 3 {}", Self::devices()));
            let kill = format!(
                "({fork} >/dev/null 2>&1 &); for i in $(seq 1200); do {} | grep -q '\"phase\":\"{phase}\"' && break; done; \
                 {0} | grep -o '\"phase\":\"[a-z]*\"'; kill -KILL $(cat /run/vmoved.pid); sleep 0.2",
                self.vfork("--json list")
            );
            let seen = self.must(1, &kill)?;
            self.base.moves.start(1, "")?;
            let children = self.settled().with_context(|| format!("killed in {phase}"))?;
            println!("  killed in {phase} ({}): {} of 3 children are there", seen.trim(), children.len());
            there.push(children.len());
            for name in &children {
                self.stop(1, name)?;
            }
            (1..FUNCTIONS).try_for_each(|index| self.base.driver_is(1, index, "igbvf"))?;
        }
        ensure!(there.contains(&0), "no kill came before the children: {there:?}");
        Ok(())
    }

    /// Waits until the parent and all children that there are work with the function that is theirs alone; the children.
    fn settled(&self) -> Result<Vec<String>> {
        ensure!(self.base.works_by_memory(1, NAME, 1)? == MAC, "the parent has another address");
        ensure!(self.owner(1, 0)? == NAME, "function 0 is not the parent's");
        let begun = Instant::now();
        loop {
            let children: Vec<String> =
                self.base.vms(1)?.into_iter().map(|(name, _)| name).filter(|name| name != NAME).collect();
            let owners: Vec<Value> =
                (1..FUNCTIONS).map(|index| self.owner(1, index)).collect::<Result<_>>()?;
            let owned = |name: &String| owners.iter().filter(|owner| *owner == name.as_str()).count() == 1;
            let free = owners.iter().filter(|owner| owner.is_null()).count();
            if children.iter().all(owned) && free + children.len() == owners.len() {
                for name in &children {
                    self.base.works_by_memory(1, name, 1)?;
                }
                return Ok(children);
            }
            if begun.elapsed() > WORKS_TIMEOUT {
                bail!("children {children:?}, functions of {owners:?}");
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

fn pause(report: &Value) -> Result<f64> {
    report["parent_pause_ms"].as_f64().with_context(|| report.to_string())
}

/// Sorts, and tells the least, the middle and the most.
fn spread(of: &mut [f64]) -> String {
    of.sort_by(f64::total_cmp);
    format!(
        "{:.1} / {:.1} / {:.1} ms (min/median/max of {})",
        of[0],
        of[of.len() / 2],
        of[of.len() - 1],
        of.len()
    )
}
