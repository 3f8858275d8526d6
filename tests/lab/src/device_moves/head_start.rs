//! Memory crosses while a guest has its function, and is compared when that has left, for the function writes where nobody sees it: the guest is without it
//! for a shorter time, and has what both have written.

use anyhow::{Context as _, Result, ensure};

use super::{DeviceMoves, MAC, NAME, function};

/// Moves, in turns without and with a head start.
const MOVES: usize = 8;
/// Of the guest, most of which it fills once.
const MIB: usize = 256;
/// A network that is slower than two emulated hosts compare memory.
const BANDWIDTH: &str = "24MiB";
/// What the time between the function here and that there may be, of the same without a head start.
const BAR: f64 = 0.6;

impl DeviceMoves<'_> {
    pub(super) fn head_start(&self) -> Result<()> {
        self.run_of_size(MIB, 1, (NAME, 0, MAC), "ballast")?;
        self.works(1)?;
        let mut away: [Vec<f64>; 2] = Default::default();
        for turn in 0..MOVES {
            let (from, to) = if turn.is_multiple_of(2) { (1, 2) } else { (2, 1) };
            let ahead = turn / 2 % 2;
            let mode = ["hybrid", "precopy"][turn / 4];
            let report = self.moves.migrate(
                NAME,
                from,
                to,
                &format!(
                    "--mode {mode} --head-start {} --bandwidth {BANDWIDTH} --max-downtime 5s --verify --device net0={}",
                    ["never", "always"][ahead],
                    function(turn % 2 + 1)
                ),
            )?;
            let start = &report["head_start"];
            let ms = &report["devices"][0]["away_ms"];
            println!("  {mode}: away {ms} ms, down {} ms, head start {start}", report["downtime_ms"]);
            ensure!(report["verified"] == true, "not verified: {report}");
            ensure!(start["made"] == (ahead == 1), "{start}");
            let bytes = |key: &str| start[key].as_u64().with_context(|| format!("no {key}: {start}"));
            if ahead == 1 {
                // What the function has written is found, and little else crosses again.
                let (compared, changed) = (bytes("compared_bytes")?, bytes("changed_bytes")?);
                ensure!((1..compared / 2).contains(&changed), "{changed} of {compared} bytes had changed");
            }
            away[ahead].push(ms.as_f64().context("no time away")?);
            self.works(to)?;
        }
        let [without, with] = away.map(|all| all.iter().sum::<f64>() / all.len() as f64);
        println!("  away {with:.0} ms with a head start, {without:.0} ms without: {:.2}", with / without);
        ensure!(with <= BAR * without, "{with:.0} of {without:.0} ms, allowed is {BAR}");
        Ok(())
    }
}
