//! A guest with a function that its lease holds: the bridge starts it, plans move it, it is forked, and its lease cannot end while it moves.

use anyhow::{Context, Result, ensure};

use super::bridge::Place;
use super::{DeviceMoves, function};
use crate::check::{collect, shell};
use crate::moves::COMMAND_TIMEOUT_MS;

const LEASE: &str = "job";

impl DeviceMoves<'_> {
    pub(super) fn leased(&self) -> Result<()> {
        self.with_bridge(2, || self.one_lease())
    }

    fn one_lease(&self) -> Result<()> {
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

    fn placed(&self) -> Result<Place> {
        self.place_and_start(LEASE, 1)?;
        self.place_of_lease()
    }

    fn place_of_lease(&self) -> Result<Place> {
        let mut places = self.places_of(LEASE)?;
        ensure!(places.len() == 1, "{places:?}");
        places.pop().context("no place")
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
        ensure!(
            step["vm"] == from.vm.as_str() && step["outages"][0]["device"] == from.function.as_str(),
            "{plan}"
        );
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
