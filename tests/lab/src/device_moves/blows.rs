//! A guest with a function moves to and fro, and half of the times a daemon or the QEMU that is to have it is killed, at each step in turn.
//! After each move exactly one function is the guest's, and works.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{DeviceMoves, FUNCTIONS, MAC, NAME, function};
use crate::check::{Done, collect, shell};
use crate::moves::{self, COMMAND_TIMEOUT_MS};

/// Who is killed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Victim {
    Source,
    Destination,
    /// The QEMU that waits for the guest.
    Qemu,
}

/// When somebody is killed: as soon as this shows.
#[derive(Debug, Clone, Copy)]
pub(super) enum Moment {
    /// In the journal of the source.
    Source(&'static str),
    /// In the journal of the destination.
    Destination(&'static str),
    /// The destination's QEMU opens the function.
    Plug,
}

/// One each of all that can happen before the hand-over, in it, and after it. After it the guest's QEMU is not killed: that would end the guest.
pub(super) const BLOWS: [(&str, Moment, Victim); 18] = {
    use Moment::{Destination as D, Plug, Source as S};
    use Victim::{Destination, Qemu, Source};
    [
        ("take", D("\"state\":\"filling\""), Destination),
        ("unplug", S("\"asked\":\\[{"), Source),
        ("away", S("\"gone_at\":[0-9]"), Destination),
        ("plug", Plug, Destination),
        ("unplug", S("\"asked\":\\[{"), Qemu),
        ("stop", S("\"state\":\"stopped\""), Source),
        ("given", D("\"state\":\"owner\""), Destination),
        ("plugged", D("\"state\":\"complete\""), Source),
        ("take", D("\"state\":\"filling\""), Source),
        ("unplug", S("\"asked\":\\[{"), Destination),
        ("away", S("\"gone_at\":[0-9]"), Source),
        ("plug", Plug, Source),
        ("away", S("\"gone_at\":[0-9]"), Qemu),
        ("stop", S("\"state\":\"stopped\""), Destination),
        ("given", D("\"state\":\"owner\""), Source),
        ("plugged", D("\"state\":\"complete\""), Destination),
        ("return", S("\"state\":\"released\""), Source),
        ("return", S("\"state\":\"released\""), Destination),
    ]
};

/// Until a blow falls. One that has no moment, since the move was over, is told.
const MOMENT_SECONDS: u32 = 75;
/// Until all is settled after a move: two daemons may have to find each other again.
pub(super) const SETTLED: Duration = Duration::from_secs(150);

/// What the moves came to.
#[derive(Debug, Default)]
struct Tally {
    moved: usize,
    stayed: usize,
    blows: usize,
    missed: usize,
    outages: Vec<f64>,
}

impl DeviceMoves<'_> {
    pub(super) fn to_and_fro(&self, count: usize) -> Result<()> {
        self.guest("")?;
        let (mut at, mut tally) = (1, Tally::default());
        for turn in 0..count {
            let blow = (turn % 2 == 1).then(|| BLOWS[turn / 2 % BLOWS.len()]);
            let mode = ["hybrid", "postcopy", "precopy"][turn / 2 % 3];
            let begun = Instant::now();
            let now = self
                .one(at, turn, mode, blow, &mut tally)
                .with_context(|| format!("move {turn}, {mode}, {blow:?}"))?;
            println!(
                "  {turn}: h{at} {} h{now}, {mode}{}, {:.1} s",
                if now == at { "stays on" } else { "to" },
                blow.map_or(String::new(), |(step, _, victim)| format!(", {victim:?} killed at {step}")),
                begun.elapsed().as_secs_f64()
            );
            *(if now == at { &mut tally.stayed } else { &mut tally.moved }) += 1;
            at = now;
        }
        tally.outages.sort_by(f64::total_cmp);
        let Tally { moved, stayed, blows, missed, outages } = &tally;
        println!(
            "  {count} moves: {moved} moved, {stayed} stayed; {blows} blows fell, {missed} had no moment"
        );
        if let [least, .., most] = outages[..] {
            println!(
                "  without its function, undisturbed: {:.0} ms ({least:.0} to {most:.0})",
                outages[outages.len() / 2]
            );
        }
        ensure!(missed * 4 <= count, "too few blows fell: {missed} of {} had no moment", count / 2);
        Ok(())
    }

    /// One move from a host to the other; the host that the guest is on then.
    fn one(
        &self,
        from: usize,
        turn: usize,
        mode: &str,
        blow: Option<(&str, Moment, Victim)>,
        tally: &mut Tally,
    ) -> Result<usize> {
        let (to, gets) = (3 - from, turn % (FUNCTIONS - 1));
        let limit = if mode == "precopy" { " --max-downtime 60s" } else { "" };
        // Slow enough for something to happen meanwhile.
        let pace = if blow.is_some() { " --bandwidth 4MiB" } else { " --verify" };
        let words = format!("--mode {mode} --device net0={}{limit}{pace}", function(gets));
        let words = self.moves.migrate_words(NAME, to, &words);
        let Some((_, moment, victim)) = blow else {
            let report = moves::report(&self.moves.must(from, &words)?)?;
            ensure!(report["verified"] == true, "{report}");
            let times = ["unplug_ms", "away_ms", "plug_ms"].map(|key| report["devices"][0][key].as_f64());
            tally.outages.push(times.into_iter().sum::<Option<f64>>().with_context(|| report.to_string())?);
            self.settled(to)?;
            return Ok(to);
        };
        let (fell, done) = self.struck(from, to, &words, moment, victim)?;
        *(if fell { &mut tally.blows } else { &mut tally.missed }) += 1;
        self.place(&[NAME])
            .and_then(|now| self.settled(now).map(|()| now))
            .with_context(|| format!("`vmove migrate` ended with {}: {}", done.status, done.text.trim()))
    }

    /// Runs a command that moves something, kills somebody as soon as the moment has come, and starts the daemon again that was killed. Whether the
    /// moment came, and how the command ended.
    pub(super) fn struck(
        &self,
        from: usize,
        to: usize,
        words: &str,
        moment: Moment,
        victim: Victim,
    ) -> Result<(bool, Done)> {
        for host in [from, to] {
            self.moves.must(host, "ls /run/vm/sessions >/run/known-sessions || true")?;
        }
        let moving = self.moves.lab.exec(from, shell(words, COMMAND_TIMEOUT_MS))?;
        let (seer, look) = match moment {
            Moment::Source(text) => (from, in_journal("source", text)),
            Moment::Destination(text) => (to, in_journal("destination", text)),
            Moment::Plug => (
                to,
                "for p in $(pgrep -f '[i]ncoming'); do ls -l /proc/$p/fd; done 2>/dev/null | grep -q 'vfio/[0-9]'".to_owned(),
            ),
        };
        let over = format!("[ $(($(date +%s) - begun)) -gt {MOMENT_SECONDS} ] && exit 7");
        let seen =
            self.moves.host(seer, &format!("begun=$(date +%s); until {look}; do {over}; done; true"))?;
        ensure!([0, 7].contains(&seen.status), "{}", seen.text);
        let mut falls = seen.status == 0;
        let restarted = match victim {
            _ if !falls => None,
            Victim::Source => Some(from),
            Victim::Destination => Some(to),
            Victim::Qemu => None,
        };
        if let Some(host) = restarted {
            self.kill_daemon(host)?;
            self.moves.must(host, "sleep 0.3")?;
            self.moves.start(host, "")?;
        } else if falls {
            falls = self.kill_waiting_qemu(to)?;
        }
        Ok((falls, collect(&moving).context("the source went away")?))
    }

    /// Kills a QEMU that waits for its guest, unless the guest has just become its own: then this would end the guest. Whether it was killed.
    ///
    /// It is stopped before the journal is read, so that the guest cannot be handed over between the two.
    fn kill_waiting_qemu(&self, host: usize) -> Result<bool> {
        let owner = in_journal("destination", "\"state\":\"owner\"");
        let script = format!(
            "q=$(pgrep -f '[i]ncoming' | head -1); [ -n \"$q\" ] || exit 7; kill -STOP $q || exit 7; sleep 0.3; \
             if {owner}; then kill -CONT $q; exit 7; fi; kill -KILL $q"
        );
        let done = self.moves.host(host, &script)?;
        ensure!([0, 7].contains(&done.status), "{}", done.text);
        Ok(done.status == 0)
    }

    /// The host that has these guests, all of them, once no migration is under way.
    pub(super) fn place(&self, names: &[&str]) -> Result<usize> {
        let begun = Instant::now();
        loop {
            let (mut has, mut busy, mut lists) = (Vec::new(), String::new(), String::new());
            for host in [1, 2] {
                let status = self.moves.host(host, &self.moves.vmove("status --json"))?.text;
                if ["running", "reconnecting"]
                    .iter()
                    .any(|state| status.contains(&format!("\"state\":\"{state}\"")))
                {
                    busy.push_str(&status);
                }
                let list = self.moves.host(host, &self.moves.vmove("--json list"))?.text;
                lists.push_str(list.trim());
                has.extend(
                    names
                        .iter()
                        .filter(|name| list.contains(&format!("\"name\":\"{name}\"")))
                        .map(|name| (host, *name)),
                );
            }
            let together = has.len() == names.len() && has.iter().all(|(host, _)| *host == has[0].0);
            match has[..] {
                [(host, _), ..] if together && busy.is_empty() => return Ok(host),
                _ if begun.elapsed() < SETTLED => std::thread::sleep(Duration::from_millis(300)),
                _ => bail!("guests are on {has:?}; under way: {busy}; {lists}"),
            }
        }
    }

    /// The guest works on this host with exactly one function, which is its own, and nothing is left on the other.
    fn settled(&self, place: usize) -> Result<()> {
        self.settled_all(place, &[(NAME, MAC)])
    }

    /// The same for several guests and their addresses.
    pub(super) fn settled_all(&self, place: usize, guests: &[(&str, &str)]) -> Result<()> {
        let begun = Instant::now();
        while let Err(error) = self.is_clean(place, guests) {
            ensure!(begun.elapsed() < SETTLED, "{error:#}");
            std::thread::sleep(Duration::from_millis(500));
        }
        guests.iter().try_for_each(|(name, mac)| self.works_as(place, name, Some(mac)))
    }

    fn is_clean(&self, place: usize, guests: &[(&str, &str)]) -> Result<()> {
        for host in [1, 2] {
            let said = self.moves.must(host, &self.moves.vmove("--json devices"))?;
            let list: Value = serde_json::from_str(said.trim())?;
            let all = list["devices"].as_array().context("no devices")?;
            let functions: Vec<_> = all
                .iter()
                .filter(|device| (0..FUNCTIONS).any(|index| device["address"] == function(index)))
                .collect();
            ensure!(functions.len() == FUNCTIONS, "h{host}: {said}");
            let wanted = usize::from(host == place);
            for (name, _) in guests {
                let owned = functions.iter().filter(|device| device["owner"]["vm"] == *name);
                ensure!(owned.count() == wanted, "h{host}: expected {wanted} functions of {name}: {said}");
            }
            let held = |device: &&&Value| device["driver"] == "vfio-pci" && device["owner"]["held"] == true;
            let free = |device: &&&Value| device["driver"] == "igbvf" && device["owner"].is_null();
            // The neighbour has one.
            let expected = wanted * guests.len() + usize::from(host == 2);
            ensure!(
                functions.iter().filter(held).count() == expected
                    && functions.iter().filter(free).count() == FUNCTIONS - expected,
                "h{host}: {said}"
            );
            let qemus = self.moves.must(host, "pgrep -c qemu-system || true")?;
            ensure!(
                qemus.trim() == expected.to_string(),
                "h{host} has {} QEMUs, not {expected}",
                qemus.trim()
            );
            let memory = self.moves.must(host, "find /run/vm/memory -type f -size +60M | wc -l")?;
            ensure!(
                memory.trim() == expected.to_string(),
                "h{host} has {} RAM files, not {expected}",
                memory.trim()
            );
        }
        Ok(())
    }
}

/// Whether the journal of a session that began since the file `/run/known-sessions` was written has this.
fn in_journal(side: &str, text: &str) -> String {
    let journals = format!(
        "$(ls /run/vm/sessions | grep -vxFf /run/known-sessions | sed 's|.*|/run/vm/sessions/&/{side}.jsonl|')"
    );
    // Without a file it would read what it is given.
    format!("grep -qs '{text}' /dev/null {journals}")
}
