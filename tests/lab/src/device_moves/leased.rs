//! A guest with a function that its lease holds: the bridge starts it, plans move it, it is forked, and its lease cannot end while it moves.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{DeviceMoves, FUNCTIONS, function};
use crate::check::{collect, shell};
use crate::host::address;
use crate::moves::{COMMAND_TIMEOUT_MS, PORT};

const LEASE: &str = "job";
/// Where the daemon of h2 is reached from other hosts, as `ssh -L` would bring it.
const FORWARDED: u16 = 7421;
/// For the bridge to answer.
const SOON: Duration = Duration::from_secs(60);

/// The guest of the lease: its name, its host, and its function there.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    vm: String,
    host: usize,
    function: String,
}

impl Place {
    fn index(&self) -> Result<usize> {
        let index = (0..FUNCTIONS).find(|index| function(*index) == self.function);
        index.with_context(|| format!("{} is no function", self.function))
    }

    /// The address that the card gives the function.
    fn mac(&self) -> Result<String> {
        Ok(mac(self.host, self.index()?))
    }
}

fn mac(host: usize, index: usize) -> String {
    format!("52:54:00:79:0{host}:0{index}")
}

impl DeviceMoves<'_> {
    pub(super) fn leased(&self) -> Result<()> {
        let result = self.start_bridge().and_then(|()| self.with_bridge());
        for host in [1, 2] {
            self.moves
                .must(host, "for p in /run/bridge/*.pid; do kill $(cat $p); done; rm -rf /run/bridge")?;
        }
        result
    }

    fn with_bridge(&self) -> Result<()> {
        let first = self.placed()?;
        self.is_at(&first)?;
        println!("  started with {} of h{}", first.function, first.host);
        self.forked(&first)?;
        let plan = self.evacuation(&first)?;
        let done = self.bridge_json(&format!("plan run {plan}"))?;
        ensure!(done["state"]["is"] == "done", "{done}");
        let second = self.place_of_lease()?;
        ensure!(second.host == 3 - first.host, "{second:?}");
        self.is_at(&second)?;
        self.is_free(&first)?;
        println!("  moved by a plan to {} of h{}", second.function, second.host);
        self.cannot_end_meanwhile(&first, &second)
    }

    /// h1 has the bridge.
    fn start_bridge(&self) -> Result<()> {
        let forward = self.host_program("forward");
        let background = |name: &str, command: &str| {
            format!(
                "mkdir -p /run/bridge; setsid {command} >>/run/lab/{name}.log 2>&1 </dev/null & echo $! >/run/bridge/{name}.pid"
            )
        };
        let command = format!("{forward} 0.0.0.0:{FORWARDED} /run/vm/c.sock");
        self.moves.must(2, &background("forward", &command))?;
        let command = format!("{forward} /run/bridge/h2.sock {}:{FORWARDED}", address(2));
        self.moves.must(1, &background("forward", &command))?;
        let programs = self.moves.parts.programs.display();
        let daemon = |host: usize, control: &str| {
            format!("[daemons.h{host}]\ncontrol = \"{control}\"\naddress = \"{}:{PORT}\"\n", address(host))
        };
        let config = format!(
            "store = \"redb:/run/bridge/state.redb\"\ncontrol = \"/run/bridge/c.sock\"\nlook_s = 1\n[moves]\n\
             command = [\"{programs}/vmove\", \"--control\", \"{{control}}\"]\noptions = [\"--mode\", \"hybrid\", \"--bandwidth\", \"4MiB\"]\n{}{}",
            daemon(1, "/run/vm/c.sock"),
            daemon(2, "/run/bridge/h2.sock")
        );
        self.moves.must(1, &format!("cat >/run/bridge/vbridged.toml <<'end'\n{config}end\n"))?;
        let command = format!("{programs}/vbridged --config /run/bridge/vbridged.toml");
        self.moves.must(1, &background("vbridged", &command))?;
        let begun = Instant::now();
        while let Err(error) = self.bridge("fleet list") {
            ensure!(
                begun.elapsed() < SOON,
                "{error:#}; {}",
                self.moves.must(1, "tail -5 /run/lab/vbridged.log")?
            );
            std::thread::sleep(Duration::from_millis(300));
        }
        // The lab's cards carry no RDMA, so that an inventory would not count their functions.
        for host in [1, 2] {
            let one = |index| json!({ "address": function(index), "kind": "vf", "id": "8086:10ca", "iommu_group": 100 + index });
            let numa = json!([{ "id": 0, "socket": 0, "cores": 2, "memory": 512 }]);
            let functions: Vec<Value> = (0..2).map(one).collect();
            let node = json!({ "name": format!("h{host}"), "numa": numa, "devices": functions });
            self.moves.must(1, &format!("echo '{node}' >/run/bridge/h{host}.json"))?;
            self.bridge(&format!("fleet publish /run/bridge/h{host}.json"))?;
            let macs: String = (0..3)
                .map(|index| format!("ip link set eth1 vf {index} mac {}; ", mac(host, index)))
                .collect();
            self.moves.must(host, &macs)?;
        }
        self.moves.must(1, "echo 'SwitchName=leaf Nodes=h1,h2' >/run/bridge/topology.conf")?;
        self.bridge("topology --import /run/bridge/topology.conf --publish").map(drop)
    }

    fn bridge_words(&self, words: &str) -> String {
        format!(
            "VBRIDGE=unix:/run/bridge/c.sock {}/vmove --json {words}",
            self.moves.parts.programs.display()
        )
    }

    fn bridge(&self, words: &str) -> Result<String> {
        self.moves.must(1, &self.bridge_words(words))
    }

    fn bridge_json(&self, words: &str) -> Result<Value> {
        let said = self.bridge(&format!("{words} 2>>/run/lab/bridge-client.log"))?;
        serde_json::from_str(said.trim()).with_context(|| said.clone())
    }

    fn placed(&self) -> Result<Place> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        self.bridge(&format!(
            "place --text 'vcpus=1; memory_mb=64; vfs=1' --count 1 --cluster {LEASE} --id {LEASE} --holder lab --run -- {qemu} -machine q35 \
             -accel tcg -smp '{{vcpus}}' -m '{{memory_mib}}' -nodefaults -display none -kernel {guest} -debugcon 'file:{{vmdir}}/debug' '{{devices}}'"
        ))?;
        self.place_of_lease()
    }

    fn place_of_lease(&self) -> Result<Place> {
        let lease = self.bridge_json(&format!("lease show {LEASE}"))?;
        let held =
            lease["held"].as_array().filter(|held| held.len() == 1).with_context(|| lease.to_string())?;
        let text = |value: &Value| value.as_str().map(str::to_owned).with_context(|| lease.to_string());
        let node = text(&held[0]["node"])?;
        let host = node.trim_start_matches('h').parse().with_context(|| node.clone())?;
        Ok(Place { vm: text(&held[0]["vm"])?, host, function: text(&held[0]["devices"][0]["address"])? })
    }

    fn is_at(&self, place: &Place) -> Result<()> {
        self.works_as(place.host, &place.vm, Some(&place.mac()?))
    }

    fn is_free(&self, place: &Place) -> Result<()> {
        self.driver_is(place.host, place.index()?, "igbvf")
    }

    /// The parent has its leased function again, the first child another one, and the second none.
    fn forked(&self, parent: &Place) -> Result<()> {
        let vfork = format!("{}/vfork --control /run/vm/c.sock --json", self.moves.parts.programs.display());
        let (vm, host) = (&parent.vm, parent.host);
        let child = Place { vm: format!("{vm}.1"), host, function: function(2) };
        let words = format!("create {vm} --count 2 --device 1:vf0={} 2>>/run/lab/vfork.log", child.function);
        let report = self.moves.must(host, &format!("{vfork} {words}"))?;
        ensure!(report.contains("parent_stood_still_ms"), "{report}");
        for place in [parent, &child] {
            let has = self.works_by_memory(host, &place.vm, 1)?;
            ensure!(has == place.mac()?, "{place:?} has {has}");
        }
        self.works_by_memory(host, &format!("{vm}.2"), 0)?;
        for number in 1..=2 {
            self.moves.must(host, &self.moves.vmove(&format!("stop --force {vm}.{number}")))?;
        }
        self.is_free(&child)?;
        println!("  forked: its parent has {} again, a child had {}", parent.function, child.function);
        Ok(())
    }

    /// A plan that has the guest leave its host; the plan's id.
    fn evacuation(&self, from: &Place) -> Result<String> {
        let plan = self.bridge_json(&format!("plan evacuate h{}", from.host))?;
        let steps = plan["steps"].as_array().filter(|steps| steps.len() == 1);
        let step = &steps.with_context(|| plan.to_string())?[0];
        ensure!(step["vm"] == from.vm.as_str() && !step["outages"].is_null(), "{plan}");
        Ok(plan["id"].as_str().with_context(|| plan.to_string())?.to_owned())
    }

    /// A lease that ends while its guest moves would leave a function to two.
    fn cannot_end_meanwhile(&self, first: &Place, second: &Place) -> Result<()> {
        self.bridge(&format!("fleet resume h{}", first.host))?;
        let plan = self.evacuation(second)?;
        let words = self.bridge_words(&format!("plan run {plan}"));
        let running = self.moves.lab.exec(1, shell(&words, COMMAND_TIMEOUT_MS))?;
        self.moves.until_in_phase(second.host, &running, "rounds")?;
        let refused = self.moves.host(1, &self.bridge_words(&format!("lease release {LEASE}")))?;
        let expected = format!("VM {} is being moved to h{}", first.vm, first.host);
        ensure!(
            refused.status != 0 && refused.text.contains(&expected),
            "{}: {}",
            refused.status,
            refused.text
        );
        println!("  {}", refused.text.trim());
        let done = collect(&running).context("h1 went away")?;
        ensure!(done.status == 0, "ended with {}: {}", done.status, done.text);
        let third = self.place_of_lease()?;
        ensure!(third.host == first.host, "{third:?}");
        self.is_at(&third)?;
        self.is_free(second)?;
        // Then it can, and the guest keeps its function: nobody else gets that from its node.
        self.bridge(&format!("lease release {LEASE}"))?;
        self.is_at(&third)?;
        let taken = format!(
            "run --name other --device net0={} -- {} -machine q35 -accel tcg -m 64 -nodefaults -display none",
            third.function,
            self.moves.parts.qemu.display()
        );
        let refused = self.moves.host(third.host, &self.moves.vmove(&taken))?;
        ensure!(
            refused.status == 3 && refused.text.contains(&third.vm),
            "{}: {}",
            refused.status,
            refused.text
        );
        println!("  {}", refused.text.trim());
        self.moves.must(third.host, &self.moves.vmove(&format!("stop --force {}", third.vm)))?;
        self.is_free(&third)
    }
}
