//! Plans of the bridge move guests that own functions: two leave their host at one barrier, a cluster is brought together, room is made for a
//! larger request. The bridge is killed at each step of a move, and goes on with the plan when it runs again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::DeviceMoves;
use super::bridge::Place;
use crate::check::{collect, shell};
use crate::moves::COMMAND_TIMEOUT_MS;

/// The cluster, and the lease that is called like it.
const JOB: &str = "job";
/// Functions of each card that the bridge may lease. The neighbour on h2 has another one.
const LEASED: usize = 3;
/// The first evacuation is undisturbed; in each of the others the bridge is killed as soon as its source is in this phase.
const EVACUATIONS: [Option<&str>; 7] =
    [None, Some("prepare"), Some("detach"), Some("rounds"), Some("hand-over"), Some("fetch"), Some("rounds")];
/// Looks for the phase in which the bridge is to be killed.
const LOOKS: usize = 400;

impl DeviceMoves<'_> {
    pub(super) fn plans(&self) -> Result<()> {
        self.with_bridge(LEASED, || {
            self.evacuated()?;
            self.brought_together()?;
            self.made_room()
        })
    }

    fn evacuated(&self) -> Result<()> {
        self.place_and_start(JOB, 2)?;
        let mut killed = 0;
        for (turn, kill) in EVACUATIONS.into_iter().enumerate() {
            let before = self.all_at_work(2)?;
            let from = before[0].host;
            ensure!(before.iter().all(|place| place.host == from), "not together: {before:?}");
            let plan = self.bridge_json(&format!("plan evacuate h{from}"))?;
            let predicted = predicted(&plan, &before).with_context(|| plan.to_string())?;
            let begun = Instant::now();
            killed += usize::from(self.run_plan(&plan, from, kill)?);
            let took = begun.elapsed();
            let after = self.all_at_work(2)?;
            ensure!(after.iter().all(|place| place.host == 3 - from), "evacuation {turn}: {after:?}");
            before.iter().try_for_each(|place| self.is_free(place))?;
            println!(
                "  both of h{from} at one barrier to h{}{}, {:.1} s; a function away for {predicted:.1} s by the plan, at 10 Gbit/s",
                3 - from,
                kill.map_or(String::new(), |phase| format!(", bridge killed in {phase}")),
                took.as_secs_f64(),
            );
            let outages = after.iter().map(|place| self.outage(place)).collect::<Result<Vec<_>>>()?;
            println!("    measured {outages:.1?} s, at 4 MiB/s");
            self.bridge(&format!("fleet resume h{from}"))?;
        }
        println!("  {killed} of {} kills fell", EVACUATIONS.len() - 1);
        ensure!(killed >= 4, "too few kills fell: {killed}");
        self.bridge(&format!("cluster stop {JOB}")).map(drop)
    }

    /// One more lease on each host leaves room for one VM there; when they have ended, the VMs of the cluster can be together.
    fn brought_together(&self) -> Result<()> {
        for filler in ["filler-a", "filler-b"] {
            self.lease("vcpus=1; memory_mb=64; vfs=2", filler)?;
        }
        self.place_and_start(JOB, 2)?;
        let before = self.all_at_work(2)?;
        ensure!(before[0].host != before[1].host, "together at once: {before:?}");
        for filler in ["filler-a", "filler-b"] {
            self.bridge(&format!("lease release {filler}"))?;
        }
        let plan = self.bridge_json(&format!("plan compact {JOB}"))?;
        let steps = plan["steps"].as_array().filter(|steps| steps.len() == 1);
        let mover = steps.with_context(|| plan.to_string())?[0]["vm"].clone();
        let from =
            before.iter().find(|place| mover == place.vm.as_str()).with_context(|| plan.to_string())?;
        let killed = self.run_plan(&plan, from.host, Some("rounds"))?;
        let after = self.all_at_work(2)?;
        ensure!(killed && after[0].host == after[1].host, "killed: {killed}, {after:?}");
        self.is_free(from)?;
        println!("  {} has come to the other one on h{}, bridge killed in rounds", from.vm, after[0].host);
        Ok(())
    }

    /// Two VMs are on one host, one is on the other: nobody has room for three functions until that one has moved.
    fn made_room(&self) -> Result<()> {
        let job = self.places_of(JOB)?;
        let (full, other) = (job[0].host, 3 - job[0].host);
        self.bridge(&format!("fleet drain h{full}"))?;
        self.place_and_start("solo", 1)?;
        self.bridge(&format!("fleet resume h{full}"))?;
        let before = self.place_of("solo")?;
        ensure!(before.host == other, "{before:?}");
        let large = format!(
            "name: large\nvms:\n- {{name: vm, count: 1, request: \"vcpus=1; memory_mb=64; vfs={LEASED}\"}}\n"
        );
        self.moves.must(1, &format!("cat >/run/bridge/large.yaml <<'end'\n{large}end\n"))?;
        let place = "place /run/bridge/large.yaml --id large --holder lab --ttl 10m";
        let refused = self.moves.host(1, &self.bridge_words(place))?;
        ensure!(refused.status != 0 && refused.text.contains("no room"), "{}", refused.text);
        let plan = self.bridge_json("plan make-room /run/bridge/large.yaml")?;
        // Whichever leaves: the one that is alone, or the two that are together.
        let from = plan["steps"][0]["from"].as_str().with_context(|| plan.to_string())?;
        let from = from.trim_start_matches('h').parse().with_context(|| plan.to_string())?;
        let killed = self.run_plan(&plan, from, Some("rounds"))?;
        self.all_at_work(2)?;
        let after = self.place_of("solo")?;
        self.is_at(&after)?;
        self.bridge(place)?;
        let free = self.places_of("large")?;
        let host = free[0].host;
        (0..LEASED).try_for_each(|index| self.driver_is(host, index, "igbvf"))?;
        ensure!(killed && host == from, "killed: {killed}, the room is on h{host}: {plan}");
        println!(
            "  room for {LEASED} functions on h{from}, bridge killed in rounds: solo {} to {}",
            before.function, after.function
        );
        self.bridge("lease release large")?;
        self.bridge("cluster stop solo")?;
        self.bridge(&format!("cluster stop {JOB}")).map(drop)
    }

    fn lease(&self, request: &str, name: &str) -> Result<()> {
        let words =
            format!("place --text '{request}' --count 1 --cluster {name} --id {name} --holder lab --ttl 10m");
        self.bridge(&words).map(drop)
    }

    fn place_of(&self, lease: &str) -> Result<Place> {
        let mut places = self.places_of(lease)?;
        places.pop().context("a lease of nothing")
    }

    /// Where the VMs of the job are by their lease; there, and nowhere else, they work with the functions of the lease.
    fn all_at_work(&self, count: usize) -> Result<Vec<Place>> {
        let places = self.places_of(JOB)?;
        ensure!(places.len() == count, "{places:?}");
        for place in &places {
            self.is_at(place)?;
            let elsewhere = self.moves.must(3 - place.host, &self.moves.vmove("--json list"))?;
            ensure!(
                !elsewhere.contains(&format!("\"{}\"", place.vm)),
                "{place:?} is elsewhere, too: {elsewhere}"
            );
        }
        Ok(places)
    }

    /// Runs a plan to its end. With a phase, the bridge is killed as soon as the source is in it, and the plan is run again; whether it was killed.
    fn run_plan(&self, plan: &Value, source: usize, kill: Option<&str>) -> Result<bool> {
        let run = format!("plan run {}", plan["id"].as_str().with_context(|| plan.to_string())?);
        let Some(phase) = kill else {
            let done = self.bridge_json(&run)?;
            ensure!(done["state"]["is"] == "done", "{done}");
            return Ok(false);
        };
        let running = self.moves.lab.exec(1, shell(&self.bridge_words(&run), COMMAND_TIMEOUT_MS))?;
        let killed = self.kill_bridge_in(phase, source)?;
        let said = collect(&running).context("h1 went away")?;
        ensure!(killed == (said.status != 0), "killed: {killed}; ended with {}: {}", said.status, said.text);
        if killed {
            self.run_bridge()?;
        }
        let done = self.bridge_json(&run)?;
        ensure!(done["state"]["is"] == "done", "after a kill in {phase}: {done}");
        Ok(killed)
    }

    /// Kills the bridge as soon as a migration of the source is in this phase. Whether there was such a moment.
    fn kill_bridge_in(&self, phase: &str, source: usize) -> Result<bool> {
        let control = if source == 1 { "/run/vm/c.sock" } else { "/run/bridge/h2.sock" };
        let status =
            format!("{}/vmove --control {control} --json status", self.moves.parts.programs.display());
        let wait = format!(
            "for i in $(seq {LOOKS}); do {status} 2>/dev/null | grep -q '\"phase\":\"{phase}\"' \
             && kill -KILL $(cat /run/bridge/vbridged.pid) && exit 0; done; exit 7"
        );
        let done = self.moves.host(1, &wait)?;
        ensure!([0, 7].contains(&done.status), "{}: {}", done.status, done.text);
        std::thread::sleep(Duration::from_millis(200));
        Ok(done.status == 0)
    }

    /// For how long a guest that has just moved was without its function, in seconds. The source tells.
    fn outage(&self, place: &Place) -> Result<f64> {
        let history = self.moves.vmove(&format!("--json history --vm {}", place.vm));
        let said = self.moves.must(3 - place.host, &history)?;
        let history: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        let times = &history["migrations"][0]["outcome"]["report"]["devices"][0];
        let ms = ["unplug_ms", "away_ms", "plug_ms"].map(|key| times[key].as_f64());
        Ok(ms.into_iter().sum::<Option<f64>>().with_context(|| said.clone())? / 1000.0)
    }
}

/// The VMs leave at one barrier, and the plan says of each how much memory moves and for how long it is without its function. The longest, in seconds.
fn predicted(plan: &Value, before: &[Place]) -> Result<f64> {
    let steps = plan["steps"].as_array().context("no steps")?;
    ensure!(steps.len() == before.len(), "a step for each VM");
    let mut longest: f64 = 0.0;
    for place in before {
        let step = steps.iter().find(|step| step["vm"] == place.vm.as_str()).context("no step of a VM")?;
        ensure!(step["group"] == 1 && step["memory_mib"] == 64, "{step}");
        let outages = step["outages"].as_array().filter(|all| all.len() == 1).context("one outage")?;
        ensure!(outages[0]["device"] == place.function.as_str(), "{step}");
        longest = longest.max(outages[0]["outage_ms"].as_f64().context("a number")? / 1000.0);
    }
    Ok(longest)
}
