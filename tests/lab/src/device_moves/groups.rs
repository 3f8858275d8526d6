//! Two guests with a function each, the ranks of a job that cannot go on without each other, move at one barrier while somebody is killed: they are
//! both here or both there, each with a function of its own, and the job goes on with right results.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::blows::{BLOWS, SETTLED};
use super::{DeviceMoves, FUNCTIONS, MAC, NAME, function};
use crate::host::address;
use crate::moves::{COMMAND_TIMEOUT_MS, PORT};

/// The ranks and their addresses.
const RANKS: [(&str, &str); 2] = [(NAME, MAC), ("f", "52:54:00:79:00:98")];
/// Moves with a blow. There is one without before them, and one after.
const TRIES: usize = 20;
/// Words of a guest's page at which the job's results begin, and how many of them there are.
const RESULTS: (usize, usize) = (16, 64);
/// Steps that show that a job goes on.
const ENOUGH: u32 = 20;

impl DeviceMoves<'_> {
    pub(super) fn group(&self) -> Result<()> {
        for (rank, (name, mac)) in RANKS.into_iter().enumerate() {
            self.run(1, name, rank, mac, &format!("job{rank}"))?;
        }
        RANKS.iter().try_for_each(|(name, mac)| self.works_as(1, name, Some(mac)))?;
        let (mut at, mut step, mut fell) = (1, self.job_goes_on(1, 0)?, 0);
        let (mut moved, mut stayed) = (0, 0);
        for turn in 0..TRIES + 2 {
            let begun = Instant::now();
            let blow = (turn > 0 && turn <= TRIES).then(|| BLOWS[(turn - 1) % BLOWS.len()]);
            let mode = ["hybrid", "postcopy"][turn % 2];
            let words = self.group_words(3 - at, turn, mode, blow.is_some());
            let said = match blow {
                None => self.moves.must(at, &words)?,
                Some((_, moment, victim)) => {
                    let (came, done) = self.struck(at, 3 - at, &words, moment, victim)?;
                    fell += usize::from(came);
                    done.text
                }
            };
            let names = RANKS.map(|(name, _)| name);
            let told = || format!("group move {turn}, {mode}, {blow:?}; the command said {}", said.trim());
            let now = self.place(&names).with_context(told)?;
            self.settled_all(now, &RANKS).with_context(told)?;
            step = self.job_goes_on(now, step).with_context(told)?;
            ensure!(blow.is_some() || now != at, "{}", told());
            println!(
                "  {turn}: h{at} {} h{now}, {mode}{}, step {step} of the job, {:.1} s",
                if now == at { "both stay on" } else { "both to" },
                blow.map_or(String::new(), |(step, _, victim)| format!(", {victim:?} killed at {step}")),
                begun.elapsed().as_secs_f64()
            );
            *(if now == at { &mut stayed } else { &mut moved }) += 1;
            at = now;
        }
        println!("  {moved} times both moved, {stayed} times both stayed; {fell} of {TRIES} blows fell");
        ensure!(fell * 4 >= TRIES * 3, "too few blows fell: {fell} of {TRIES}");
        Ok(())
    }

    fn group_words(&self, to: usize, turn: usize, mode: &str, slowly: bool) -> String {
        let names = RANKS.map(|(name, _)| name).join(" ");
        let devices: String = RANKS
            .iter()
            .enumerate()
            .map(|(rank, (name, _))| {
                format!(" --device {name}:net0={}", function((turn + rank) % (FUNCTIONS - 1)))
            })
            .collect();
        // Slow enough for something to happen meanwhile.
        let pace = if slowly { " --bandwidth 4MiB" } else { " --verify" };
        self.moves.vmove(&format!(
            "migrate {names} --to {}:{PORT} --timeout {}s --json --mode {mode}{devices}{pace}",
            address(to),
            COMMAND_TIMEOUT_MS / 1000
        ))
    }

    /// The job is at least some steps further than `before`, and each result that the ranks still have is right. The step it is in.
    fn job_goes_on(&self, host: usize, before: u32) -> Result<u32> {
        let begun = Instant::now();
        loop {
            let of_each =
                RANKS.iter().map(|(name, _)| self.results(host, name)).collect::<Result<Vec<_>>>()?;
            // None yet counts as none.
            let newest = |all: &Vec<(u32, u32)>| all.iter().map(|(step, _)| *step).max().unwrap_or(0);
            let least = of_each.iter().map(newest).min().unwrap_or(0);
            if least >= before + ENOUGH {
                let expected = job(of_each.iter().flatten().map(|(step, _)| *step).max().unwrap_or(1));
                for (rank, results) in of_each.iter().enumerate() {
                    for (step, value) in results {
                        let right = expected[*step as usize - 1][rank];
                        ensure!(*value == right, "rank {rank}, step {step}: {value}, expected {right}");
                    }
                }
                return Ok(least);
            }
            if begun.elapsed() > SETTLED {
                bail!("the job is in step {least}, and was in {before}");
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Steps and values that a rank still has, but for the one that it may be writing.
    fn results(&self, host: usize, name: &str) -> Result<Vec<(u32, u32)>> {
        let words = self.words(host, name, RESULTS.0, RESULTS.1 * 2)?;
        let word = |index: usize| u32::try_from(words[index]).unwrap_or(u32::MAX);
        let mut all: Vec<(u32, u32)> = (0..words.len() / 2)
            .map(|at| (word(at * 2), word(at * 2 + 1)))
            .filter(|(step, _)| *step != 0 && *step != u32::MAX)
            .collect();
        all.sort_unstable();
        // Read while it was written over: the newest, and the oldest, whose place is the next one's.
        all.pop();
        Ok(all.into_iter().skip(1).collect())
    }
}

/// What both ranks have with which they begin each step, from step 1 on: as `tests/lab/guest/devices.c` does it.
fn job(steps: u32) -> Vec<[u32; 2]> {
    let next = |[a, b]: [u32; 2], step: u32| {
        [
            a.wrapping_mul(1_664_525).wrapping_add(b).wrapping_add(step),
            b.wrapping_mul(22_695_477).wrapping_add(a ^ step),
        ]
    };
    std::iter::successors(Some((1, [17, 23])), |(step, values)| Some((step + 1, next(*values, *step))))
        .take(steps as usize)
        .map(|(_, values)| values)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::job;

    #[test]
    fn a_step_takes_both_ranks_values() {
        let all = job(3);
        assert_eq!(all[0], [17, 23]);
        assert_eq!(all[1], [17 * 1_664_525 + 23 + 1, 23 * 22_695_477 + (17 ^ 1)]);
        assert_eq!(all.len(), 3);
    }
}
