//! A bridge on h1 that knows both hosts and the functions of their cards, and what it has placed where.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{DeviceMoves, FUNCTIONS, function};
use crate::host::address;
use crate::moves::PORT;

/// Where the daemon of h2 is reached from other hosts, as `ssh -L` would bring it.
const FORWARDED: u16 = 7421;
/// For the bridge to answer.
const SOON: Duration = Duration::from_secs(60);

/// A guest of a lease: its name, its host, and its function there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) vm: String,
    pub(super) host: usize,
    pub(super) function: String,
}

impl Place {
    pub(super) fn index(&self) -> Result<usize> {
        let index = (0..FUNCTIONS).find(|index| function(*index) == self.function);
        index.with_context(|| format!("{} is no function", self.function))
    }

    /// The address that the card gives the function.
    pub(super) fn mac(&self) -> Result<String> {
        Ok(mac(self.host, self.index()?))
    }
}

fn mac(host: usize, index: usize) -> String {
    format!("52:54:00:79:0{host}:0{index}")
}

impl DeviceMoves<'_> {
    /// Does something while there is a bridge that may lease so many functions of each card.
    pub(super) fn with_bridge(&self, functions: usize, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let result = self.start_bridge(functions).and_then(|()| act());
        for host in [1, 2] {
            self.moves
                .must(host, "for p in /run/bridge/*.pid; do kill $(cat $p); done; rm -rf /run/bridge")?;
        }
        result
    }

    fn start_bridge(&self, functions: usize) -> Result<()> {
        let forward = self.host_program("forward");
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
        self.run_bridge()?;
        // The lab's cards carry no RDMA, so that an inventory would not count their functions.
        for host in [1, 2] {
            let one = |index| json!({ "address": function(index), "kind": "vf", "id": "8086:10ca", "iommu_group": 100 + index });
            let numa = json!([{ "id": 0, "socket": 0, "cores": 4, "memory": 512 }]);
            let functions: Vec<Value> = (0..functions).map(one).collect();
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

    /// Starts the bridge, for the first time or after it was killed, and waits until it answers.
    pub(super) fn run_bridge(&self) -> Result<()> {
        let programs = self.moves.parts.programs.display();
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
        Ok(())
    }

    pub(super) fn bridge_words(&self, words: &str) -> String {
        format!(
            "VBRIDGE=unix:/run/bridge/c.sock {}/vmove --json {words}",
            self.moves.parts.programs.display()
        )
    }

    pub(super) fn bridge(&self, words: &str) -> Result<String> {
        self.moves.must(1, &self.bridge_words(words))
    }

    pub(super) fn bridge_json(&self, words: &str) -> Result<Value> {
        let said = self.bridge(&format!("{words} 2>>/run/lab/bridge-client.log"))?;
        serde_json::from_str(said.trim()).with_context(|| said.clone())
    }

    /// Leases places for `count` VMs with a function each, and starts them there. The lease is called like the cluster.
    pub(super) fn place_and_start(&self, cluster: &str, count: usize) -> Result<()> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        self.bridge(&format!(
            "place --text 'vcpus=1; memory_mb=64; vfs=1' --count {count} --cluster {cluster} --id {cluster} --holder lab --run -- {qemu} \
             -machine q35 -accel tcg -smp '{{vcpus}}' -m '{{memory_mib}}' -nodefaults -display none -kernel {guest} \
             -debugcon 'file:{{vmdir}}/debug' '{{devices}}'"
        ))
        .map(drop)
    }

    /// Where the lease says that its VMs are, which have a function each.
    pub(super) fn places_of(&self, lease: &str) -> Result<Vec<Place>> {
        let lease = self.bridge_json(&format!("lease show {lease}"))?;
        let held = lease["held"].as_array().with_context(|| lease.to_string())?;
        let text = |value: &Value| value.as_str().map(str::to_owned).with_context(|| lease.to_string());
        held.iter()
            .map(|held| {
                let node = text(&held["node"])?;
                let host = node.trim_start_matches('h').parse().with_context(|| node.clone())?;
                let function = text(&held["devices"][0]["address"])?;
                Ok(Place { vm: text(&held["vm"])?, host, function })
            })
            .collect()
    }

    /// The guest works there, with the function of its lease.
    pub(super) fn is_at(&self, place: &Place) -> Result<()> {
        self.works_as(place.host, &place.vm, Some(&place.mac()?))
    }

    /// The function is its host's again.
    pub(super) fn is_free(&self, place: &Place) -> Result<()> {
        self.driver_is(place.host, place.index()?, "igbvf")
    }
}

/// Words that start a program which goes on, and note its number.
fn background(name: &str, command: &str) -> String {
    format!(
        "mkdir -p /run/bridge; setsid {command} >>/run/lab/{name}.log 2>&1 </dev/null & echo $! >/run/bridge/{name}.pid"
    )
}
