//! What a function costs a move: how long the guest is without it, against an unplug, a plug and a move alone; and how long the guest stands still,
//! against one without a function. All in one run, in turns.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{DeviceMoves, MAC, NAME, function};
use crate::moves;

/// Moves of each guest in each mode.
const ROUNDS: usize = 5;
/// The guest without a function.
const PLAIN: &str = "p";
/// What the outage may be of a move alone, and the guest's downtime of that without a function.
const BARS: (f64, f64) = (1.3, 1.2);

/// Milliseconds of one kind.
#[derive(Debug, Default)]
struct Times(Vec<f64>);

impl Times {
    fn push(&mut self, ms: f64) {
        self.0.push(ms);
        self.0.sort_by(f64::total_cmp);
    }

    fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    fn told(&self) -> String {
        let all = &self.0;
        format!("{:.0} / {:.0} / {:.0}", all[0], self.median(), all[all.len() - 1])
    }
}

/// What is measured in one mode.
#[derive(Debug, Default)]
struct Figures {
    unplug: Times,
    plug: Times,
    plain: Times,
    plain_down: Times,
    outage: Times,
    down: Times,
    /// The whole move with a function.
    whole: Times,
}

impl DeviceMoves<'_> {
    pub(super) fn ratios(&self) -> Result<()> {
        let (qemu, guest) = (self.moves.parts.qemu.display(), self.guest.display());
        let machine =
            format!("{qemu} -machine q35 -accel tcg -m 64 -nodefaults -display none -kernel {guest}");
        self.moves.must(
            1,
            &self.moves.vmove(&format!(
                "run --name {NAME} --device net0={},mac={MAC} -- {machine} -debugcon file:{{vmdir}}/debug \
                 -qmp unix:{{vmdir}}/other.sock,server=on,wait=off",
                function(0)
            )),
        )?;
        self.moves.must(
            1,
            &self.moves.vmove(&format!(
                "run --name {PLAIN} -- {machine} -device pcie-root-port,id=rp1,chassis=1,slot=1 -debugcon file:{{vmdir}}/debug"
            )),
        )?;
        self.works_as(1, PLAIN, None)?;
        self.works(1)?;
        let mut missed = Vec::new();
        // Of a number of moves that is odd, those of the next mode begin at the other host.
        for (mode, first) in [("hybrid", 1), ("postcopy", 1 + ROUNDS % 2)] {
            let figures = self.measured(mode, first)?;
            let allowed = figures.unplug.median() + figures.plug.median() + BARS.0 * figures.plain.median();
            let (outage, still) =
                (figures.outage.median() / allowed, figures.down.median() / figures.plain_down.median());
            println!(
                "  {mode}, min/median/max of {ROUNDS} in ms: unplug alone {}, plug alone {}, move without a function {}, which is down {}",
                figures.unplug.told(),
                figures.plug.told(),
                figures.plain.told(),
                figures.plain_down.told()
            );
            println!(
                "  {mode}: with a function the move takes {}, without its function {}, down {}",
                figures.whole.told(),
                figures.outage.told(),
                figures.down.told()
            );
            println!(
                "  {mode}: outage {outage:.2} of unplug + plug + {} x the move ({allowed:.0} ms), downtime {still:.2} of that without a function",
                BARS.0
            );
            if outage > 1.0 || still > BARS.1 {
                missed.push(format!("{mode}: outage {outage:.2} of 1, downtime {still:.2} of {}", BARS.1));
            }
        }
        ensure!(missed.is_empty(), "{}", missed.join("; "));
        Ok(())
    }

    /// Both guests, which are on the host `first`, go to and fro in turns; in between the device alone leaves and comes back.
    fn measured(&self, mode: &str, first: usize) -> Result<Figures> {
        let mut figures = Figures::default();
        for round in 0..ROUNDS {
            let from = if round % 2 == 0 { first } else { 3 - first };
            let to = 3 - from;
            let ms = |report: &Value, key: &str| {
                report[key].as_f64().with_context(|| format!("no {key} in {report}"))
            };
            let (unplug, plug) = self.alone(from)?;
            figures.unplug.push(unplug);
            figures.plug.push(plug);
            let plain = self.moves.migrate(PLAIN, from, to, &format!("--mode {mode}"))?;
            figures.plain.push(ms(&plain, "total_ms")?);
            figures.plain_down.push(ms(&plain, "downtime_ms")?);
            self.works_as(to, PLAIN, None)?;
            let words = format!("--mode {mode} --device net0={}", function(round % 2 + 1));
            let report = self.moves.migrate(NAME, from, to, &words)?;
            let device = &report["devices"][0];
            figures.outage.push(ms(device, "unplug_ms")? + ms(device, "away_ms")? + ms(device, "plug_ms")?);
            figures.down.push(ms(&report, "downtime_ms")?);
            figures.whole.push(ms(&report, "total_ms")?);
            println!(
                "  {mode} {round}: unplug {unplug:.0}, plug {plug:.0}; without a function {}; with one {}, {device}",
                moves::figures(&plain),
                moves::figures(&report)
            );
            self.works(to)?;
        }
        Ok(figures)
    }

    /// How long the guest takes to let its function go, and how long it takes to plug the same one in again: by a monitor of the test's own.
    fn alone(&self, host: usize) -> Result<(f64, f64)> {
        let program = self.moves.lab.places().source.join("tests/lab/host/unplug-and-plug");
        let said = self.moves.must(host, &format!("{} /run/vm/run/{NAME}/other.sock", program.display()))?;
        let both: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        self.works(host)?;
        let ms = |key: &str| both[key].as_f64().with_context(|| said.clone());
        Ok((ms("unplug_ms")?, ms("plug_ms")?))
    }
}
