//! PostgreSQL and SQLite, which write to a disk that moves with their guest, time and again and with blows: what they find on it is whole.
//! `./run soak --databases`.
#![cfg(test)]

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::debian_disk;
use vmove_tests::disks::Moved;
use vmove_tests::proxy::Fault;
use vmove_tests::sandbox::qemu_in;
use vmove_tests::scene::{NAME, device_state, ready};
use vmove_tests::typist::Typist;

/// As the issue of moving disks asks for.
const MOVES: usize = 30;
/// So slow that copying the disk takes some seconds.
const SLOW: &str = "512Mbit";
/// For databases to be made, or checked as a whole, by an emulated processor.
const LONG: Duration = Duration::from_secs(600);
/// For their sums.
const CHECKED: Duration = Duration::from_secs(120);
/// For daemons that come back to have one guest run.
const SETTLED: Duration = Duration::from_secs(90);

/// What meets a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blow {
    Source,
    Destination,
    DestinationQemu,
    Cut,
    Cancel,
}

/// Where it is then, as the source tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Disks,
    Rounds,
    /// The guest stands still, its state does not come through.
    HandOver,
    /// The guest runs at the destination, pages are missing.
    Fetch,
}

/// Fifteen. QEMU at the destination is not killed once the guest runs in it.
const BLOWS: [(Step, Blow); 15] = [
    (Step::Disks, Blow::Source),
    (Step::Disks, Blow::Destination),
    (Step::Disks, Blow::DestinationQemu),
    (Step::Disks, Blow::Cut),
    (Step::Disks, Blow::Cancel),
    (Step::Rounds, Blow::Source),
    (Step::Rounds, Blow::Destination),
    (Step::Rounds, Blow::DestinationQemu),
    (Step::Rounds, Blow::Cut),
    (Step::Rounds, Blow::Cancel),
    (Step::HandOver, Blow::Source),
    (Step::HandOver, Blow::Destination),
    (Step::HandOver, Blow::Cut),
    (Step::Fetch, Blow::Source),
    (Step::Fetch, Blow::Destination),
];

struct Databases {
    moved: Moved,
    typist: Typist,
    /// Transactions of PostgreSQL and of SQLite that were seen.
    done: [u64; 2],
}

impl Databases {
    fn begin() -> Result<Self> {
        let (moved, typist) = debian_disk::guest()?;
        let mut databases = Self { moved, typist, done: [0; 2] };
        databases.run("databases-begin", LONG)?;
        databases.check("")?;
        Ok(databases)
    }

    /// Types a line where the guest is. What it printed.
    fn typed(&mut self, line: &str, within: Duration) -> Result<String> {
        let (node, ..) = self.moved.sides()?;
        self.typist.follow(node, NAME)?;
        let done = self.typist.line(line, within)?;
        ensure!(done.code == 0, "{line:?} ended with {}: {}", done.code, done.printed);
        Ok(done.printed)
    }

    fn run(&mut self, program: &str, within: Duration) -> Result<String> {
        self.typed(&format!("PATH=/usr/local/sbin:/usr/bin:/bin:/sbin chroot /mnt {program}"), within)
    }

    /// Both databases are whole, and go on.
    fn check(&mut self, how: &str) -> Result<()> {
        let deadline = Instant::now() + CHECKED;
        loop {
            let [postgres, sqlite] = self.transactions(how)?;
            if postgres > self.done[0] && sqlite > self.done[1] {
                self.done = [postgres, sqlite];
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "expected more transactions than {:?}, found {postgres} and {sqlite}",
                self.done
            );
        }
    }

    /// Of PostgreSQL and of SQLite; their sums hold.
    fn transactions(&mut self, how: &str) -> Result<[u64; 2]> {
        let within = if how.is_empty() { CHECKED } else { LONG };
        let told = self.run(&format!("databases-check {how}"), within)?;
        let numbers = told.lines().rev().find_map(|line| line.trim().strip_prefix("whole "));
        let numbers = numbers.with_context(|| format!("found no figures in {told:?}"))?;
        let all: Vec<u64> =
            numbers.split(' ').map(str::parse).collect::<Result<_, _>>().with_context(|| told.clone())?;
        <[u64; 2]>::try_from(all).map_err(|all| anyhow::anyhow!("expected two figures, found {all:?}"))
    }

    /// The guest is on one side, with the only image and nothing left of a copy.
    fn is_on_one_side(&self) -> Result<()> {
        let (.., here, there) = self.moved.sides()?;
        ensure!(
            here.is_file() && !there.exists(),
            "expected the image where the guest is, alone, found {:?}",
            self.moved.files()?
        );
        let aside: Vec<_> = self
            .moved
            .files()?
            .into_iter()
            .filter(|file| file.to_string_lossy().contains(".moved-"))
            .collect();
        ensure!(aside.is_empty(), "images that were to be deleted are left: {aside:?}");
        self.moved.nothing_left()
    }

    fn migrate(&mut self, mode: &str) -> Result<()> {
        self.moved.migrate(&["--mode", mode, "--source-disks", "delete"])?;
        self.is_on_one_side()?;
        self.check("")
    }

    fn is_at_a(&self) -> Result<bool> {
        Ok(!self.moved.scene.a.vms()?.is_empty())
    }

    /// Whether it arrived all the same.
    fn strike(&mut self, step: Step, blow: Blow) -> Result<bool> {
        if !self.is_at_a()? {
            self.migrate("hybrid")?;
        }
        let mut options = vec!["--source-disks", "delete"];
        options.extend(["--mode", if step == Step::Fetch { "postcopy" } else { "hybrid" }]);
        if step != Step::HandOver {
            options.extend(["--bandwidth", SLOW]);
        }
        if step == Step::HandOver {
            let proxy = self.moved.scene.proxy()?;
            // The disk has a connection of its own before that.
            proxy.add(device_state(proxy.connections() + 1, Fault::Stall));
        }
        let id = self.moved.start_move(&options)?;
        let scene = &mut self.moved.scene;
        match step {
            Step::Disks => drop(scene.reach(&id, "disks")?),
            Step::Rounds => drop(scene.reach(&id, "rounds")?),
            Step::HandOver => drop(scene.reach(&id, "hand-over")?),
            Step::Fetch => scene.handed_over(&id)?,
        }
        std::thread::sleep(Duration::from_millis(300));
        match blow {
            Blow::Source => scene.a.crash(),
            Blow::Destination => scene.b.crash(),
            Blow::DestinationQemu => {
                let qemu = qemu_in(scene.b.folder()).context("no QEMU at the destination")?;
                kill(Pid::from_raw(qemu), Signal::SIGKILL)?;
            }
            Blow::Cut => scene.proxy()?.cut_all(),
            Blow::Cancel => drop(scene.a.ask(&["cancel", &id])?),
        }
        scene.proxy()?.heal();
        match blow {
            Blow::Source => scene.a.run()?,
            Blow::Destination => scene.b.run()?,
            _ => {}
        }
        self.settle(&id)?;
        self.check("")?;
        Ok(!self.is_at_a()?)
    }

    /// Waits until the migration has ended on both sides, and one has the guest.
    fn settle(&self, id: &str) -> Result<()> {
        let deadline = Instant::now() + SETTLED;
        let path = format!("/v1/migrations/{id}");
        loop {
            let over = [&self.moved.scene.a, &self.moved.scene.b].into_iter().all(|node| {
                let told = node.rest("GET", &path, &serde_json::Value::Null);
                told.is_ok_and(|(_, told)| told["outcome"]["state"] != "running")
            });
            let stands = self.is_on_one_side();
            match stands {
                Ok(()) if over => return Ok(()),
                stands if Instant::now() > deadline => {
                    let logs = (self.moved.scene.a.log(), self.moved.scene.b.log());
                    let told = format!("has it ended: {over}; a: {}\nb: {}", logs.0, logs.1);
                    return stands.and_then(|()| anyhow::bail!("it does not end")).context(told);
                }
                _ => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Ends the databases in order; then nothing on the disk is wrong, as those see it that check it from outside.
    fn end(mut self) -> Result<()> {
        self.check("thorough")?;
        let told = self.run("databases-end", LONG)?;
        ensure!(told.contains("Bad checksums:  0"), "expected no block with a wrong checksum, found {told}");
        ensure!(told.contains("sqlite: ok"), "SQLite's database is damaged: {told}");
        self.typed("umount /mnt/dev /mnt/proc /mnt/tmp && umount /mnt", CHECKED)?;
        let (.., here, _) = self.moved.sides()?;
        let checked = Command::new("e2fsck").args(["-f", "-n"]).arg(here).output()?;
        ensure!(checked.status.success(), "e2fsck: {}", String::from_utf8_lossy(&checked.stdout));
        Ok(())
    }
}

#[test]
#[ignore = "takes a quarter of an hour: ./run soak --databases"]
fn databases_are_whole_after_thirty_moves_and_fifteen_blows() {
    need!(ready());
    need!(debian_disk::ready());
    let mut databases = Databases::begin().expect("databases");
    for number in 0..MOVES {
        let mode = ["hybrid", "postcopy", "precopy"][number % 3];
        databases.migrate(mode).unwrap_or_else(|error| panic!("move {number}, {mode}: {error:#}"));
        println!("move {number}, {mode}: whole after {:?} transactions", databases.done);
    }
    databases.check("thorough").expect("each page and index");
    for (step, blow) in BLOWS {
        let arrived =
            databases.strike(step, blow).unwrap_or_else(|error| panic!("{blow:?} at {step:?}: {error:#}"));
        let place = if arrived { "arrives" } else { "stays" };
        println!("{blow:?} at {step:?}: {place}, whole after {:?} transactions", databases.done);
    }
    databases.end().expect("nothing is wrong on the disk");
}
