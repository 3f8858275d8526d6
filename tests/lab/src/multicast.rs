//! Datagrams from one host to two others: the right bytes, losses counted, other sessions unheard; then whole
//! distributions of memory by them.

use std::path::Path;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::check::{collect, run, shell};
use crate::supervisor::Lab;
use crate::switch::rules::Rule;
use crate::wire::Event;

/// Datagrams of one case, and microseconds from one to the next: what emulated hosts keep up with.
const COUNT: u32 = 1000;
const PACE: u32 = 700;
/// Where they go; any group will do.
const GROUP: &str = "239.7.42.9";
const COMMAND_TIMEOUT_MS: u64 = 120_000;

/// Runs every case: h1 sends, h2 and h3 receive. `program` is the fabric's example, `spread` the distribution's tests.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, program: &Path, spread: &Path) -> Result<()> {
    let there = |path: &Path| -> Result<String> {
        let found = path.canonicalize().with_context(|| format!("no program {}", path.display()))?;
        Ok(found.display().to_string())
    };
    let cases = Cases { lab, program: there(program)?, spread: there(spread)? };
    let case = |name: &str, case: &dyn Fn() -> Result<()>| {
        let begin = Instant::now();
        let result = case();
        lab.switch().set(None, None, Rule::default());
        result.with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    case("paced_datagrams_reach_two_hosts", &|| cases.paced())?;
    case("lost_datagrams_are_counted", &|| cases.lossy())?;
    case("datagrams_of_another_session_are_not_heard", &|| cases.stranger())?;
    case("a_group_is_joined_without_librdmacm", &|| cases.without_cm())?;
    case("memory_is_spread_by_multicast", &|| cases.spread_paced())?;
    case("what_multicast_loses_is_repaired", &|| cases.spread_lossy())?;
    case("a_cut_in_the_middle_of_a_distribution_is_made_good", &|| cases.spread_cut())
}

struct Cases<'a> {
    lab: &'a Lab,
    program: String,
    spread: String,
}

/// What a receiver counted.
#[derive(Debug)]
struct Counts {
    received: u32,
    lost: u32,
    landed: u32,
    unwanted: u32,
}

impl Counts {
    fn parse(text: &str) -> Result<Self> {
        let number = |word: &str| -> Result<u32> {
            let after = text.split_whitespace().skip_while(|found| *found != word).nth(1);
            after.with_context(|| format!("no '{word}' in: {text}"))?.parse().with_context(|| text.to_owned())
        };
        Ok(Self {
            received: number("received")?,
            lost: number("lost")?,
            landed: number("landed")?,
            unwanted: number("unwanted")?,
        })
    }
}

impl Cases<'_> {
    fn group(&self) -> Result<String> {
        let done = run(self.lab, 1, shell(&format!("{} group {GROUP}", self.program), COMMAND_TIMEOUT_MS))?;
        ensure!(done.status == 0, "{}", done.text);
        Ok(done.text.trim().to_owned())
    }

    /// A receiver that has joined.
    fn receive(&self, host: usize, group: &str) -> Result<Receiver<Event>> {
        let command = format!("{} receive {group} {COUNT}", self.program);
        let events = self.lab.exec(host, shell(&command, COMMAND_TIMEOUT_MS))?;
        let mut said = String::new();
        while !said.contains("joined") {
            match events
                .recv_timeout(Duration::from_secs(60))
                .with_context(|| format!("h{host} did not join"))?
            {
                Event::Out(text) | Event::Err(text) => said.push_str(&text),
                other => anyhow::bail!("h{host} did not join: {other:?}: {said}"),
            }
        }
        Ok(events)
    }

    fn send(&self, group: &str) -> Result<()> {
        let command = format!("{} send {group} {COUNT} {PACE}", self.program);
        let done = run(self.lab, 1, shell(&command, COMMAND_TIMEOUT_MS))?;
        ensure!(done.status == 0, "the sender ended with {}: {}", done.status, done.text);
        println!("  h1: {}", done.text.trim());
        Ok(())
    }

    fn counts(host: usize, events: &Receiver<Event>) -> Result<Counts> {
        let done = collect(events).with_context(|| format!("h{host} went away"))?;
        ensure!(done.status == 0, "h{host} ended with {}: {}", done.status, done.text);
        println!("  h{host}: {}", done.text.trim());
        Counts::parse(&done.text)
    }

    fn to_both(&self) -> Result<[Counts; 2]> {
        let group = self.group()?;
        let receivers = [self.receive(2, &group)?, self.receive(3, &group)?];
        self.send(&group)?;
        Ok([Self::counts(2, &receivers[0])?, Self::counts(3, &receivers[1])?])
    }

    fn paced(&self) -> Result<()> {
        for counts in self.to_both()? {
            ensure!(counts.lost * 100 <= COUNT, "more than 1 % did not arrive: {counts:?}");
            ensure!(counts.unwanted > 0 && counts.landed + counts.unwanted == counts.received, "{counts:?}");
        }
        Ok(())
    }

    fn lossy(&self) -> Result<()> {
        self.lab.switch().set(None, None, Rule { drop: 0.1, ..Rule::default() });
        for counts in self.to_both()? {
            let part = f64::from(counts.lost) / f64::from(COUNT);
            ensure!((0.05..0.17).contains(&part), "10 % should be lost, not {:.1} %", part * 100.0);
        }
        Ok(())
    }

    /// The same group at the same time, but another session: its Q_Key is another.
    fn stranger(&self) -> Result<()> {
        let (group, other) = (self.group()?, self.group()?);
        let receivers = [self.receive(2, &group)?, self.receive(3, &other)?];
        self.send(&group)?;
        let (member, stranger) = (Self::counts(2, &receivers[0])?, Self::counts(3, &receivers[1])?);
        ensure!(member.lost * 100 <= COUNT, "{member:?}");
        ensure!(stranger.received == 0, "another session was heard: {stranger:?}");
        Ok(())
    }

    fn without_cm(&self) -> Result<()> {
        let host = |text: &str| run(self.lab, 2, shell(text, COMMAND_TIMEOUT_MS));
        let gone = host("rmmod rdma_ucm && test ! -e /dev/infiniband/rdma_cm")?;
        ensure!(gone.status == 0, "rdma_ucm could not be unloaded: {}", gone.text);
        let result = self.to_both();
        let back = host("modprobe rdma_ucm")?;
        ensure!(back.status == 0, "rdma_ucm could not be loaded again: {}", back.text);
        for counts in result? {
            ensure!(counts.lost * 100 <= COUNT, "more than 1 % did not arrive: {counts:?}");
        }
        Ok(())
    }

    /// Spreads 16 MiB, of which a quarter is zero, from h1 to h2 and h3. What the hosts say in the end, and the root.
    /// `meanwhile` is done when the hosts have been asked to join.
    fn spread(&self, meanwhile: impl FnOnce()) -> Result<[Value; 3]> {
        let start = |host: u32| {
            let node = json!({
                "host": host, "mib": 16, "rate": 4e6, "multicast": true, "segmentation": false, "routes": [], "expected": 2,
                "spoilt": false, "want": null, "verbs": true,
            });
            // It ends when its input does.
            let words = "--exact node --ignored --nocapture";
            let command = format!("sleep 111 | VMOVE_SPREAD_NODE='{node}' {} {words}", self.spread);
            self.lab.exec(usize::try_from(host)? + 1, shell(&command, COMMAND_TIMEOUT_MS))
        };
        let root = start(0)?;
        until_says(1, &root, "ready")?;
        let hosts = [start(1)?, start(2)?];
        for (host, events) in (2..).zip(&hosts) {
            until_says(host, events, "\"joined\"")?;
        }
        meanwhile();
        let ends = [self.complete(2, &hosts[0])?, self.complete(3, &hosts[1])?];
        for host in 1..=3 {
            run(self.lab, host, shell("pkill -f '^sleep 111'", COMMAND_TIMEOUT_MS))?;
        }
        let totals = object(&until_says(1, &root, "\"ended\"")?)?;
        println!("  h1: {totals}");
        let [first, second] = ends;
        Ok([first, second, totals])
    }

    fn complete(&self, host: usize, events: &Receiver<Event>) -> Result<Value> {
        let end = object(&until_says(host, events, "\"missing\"")?)?;
        println!("  h{host}: {end}");
        ensure!(end["is"] == "complete" && end["all_right"] == true && end["wrong"] == 0, "h{host}: {end}");
        Ok(end)
    }

    fn spread_paced(&self) -> Result<()> {
        let [ends @ .., totals] = self.spread(|| ())?;
        // Sent again for any of them, or READ.
        let resent = count(&totals, "resent")?;
        for end in ends {
            let (pieces, repaired) = (count(&end, "chunks")?, count(&end, "repaired")? + resent);
            ensure!(repaired * 100 <= pieces, "{repaired} of {pieces} pieces were repaired");
        }
        Ok(())
    }

    fn spread_lossy(&self) -> Result<()> {
        self.lab.switch().set(None, None, Rule { drop_multicast: 0.1, ..Rule::default() });
        let [ends @ .., totals] = self.spread(|| ())?;
        for end in ends {
            ensure!(count(&end, "repaired")? > 0, "nothing was lost: {end}");
        }
        ensure!(count(&totals, "resent")? > 0, "{totals}");
        Ok(())
    }
}

impl Cases<'_> {
    /// For a second nothing passes, neither datagrams nor anything else.
    fn spread_cut(&self) -> Result<()> {
        let [ends @ .., totals] = self.spread(|| {
            std::thread::sleep(Duration::from_millis(1500));
            self.lab.switch().set(None, None, Rule { cut: true, ..Rule::default() });
            std::thread::sleep(Duration::from_secs(1));
            self.lab.switch().set(None, None, Rule::default());
        })?;
        for end in ends {
            ensure!(count(&end, "repaired")? > 0, "the cut came before or after: {end}");
        }
        println!("  resent: {}", count(&totals, "resent")?);
        Ok(())
    }
}

fn count(value: &Value, field: &str) -> Result<u64> {
    value[field].as_u64().with_context(|| format!("no {field} in {value}"))
}

/// The last object in what a program has said.
fn object(text: &str) -> Result<Value> {
    let line = text.lines().rev().find(|line| line.starts_with('{') && line.ends_with('}'));
    Ok(serde_json::from_str(line.with_context(|| format!("no object in: {text}"))?)?)
}

/// Everything until it says this word, and the rest of that line.
fn until_says(host: usize, events: &Receiver<Event>, word: &str) -> Result<String> {
    let mut said = String::new();
    while !said.rfind(word).is_some_and(|at| said[at..].contains('\n')) {
        let waited = events.recv_timeout(Duration::from_secs(100));
        match waited.with_context(|| format!("h{host} never said '{word}', but: {said}"))? {
            Event::Out(text) | Event::Err(text) => said.push_str(&text),
            other => anyhow::bail!("h{host} did not say '{word}', but {other:?}: {said}"),
        }
    }
    Ok(said)
}
