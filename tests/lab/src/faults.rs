//! What must not happen to a transfer by RDMA when devices, wires and peers fail: hang, crash, or end without a reason.
//!
//! The program under test is the fabric's measuring program, which reads as long as it is told to.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::check::{Done, pair, run, shell};
use crate::host::address;
use crate::supervisor::Lab;
use crate::switch::rules::Rule;

const PORT: u16 = 7472;
/// Longest until a broken connection is noticed: seven tries of 134 ms, and an emulated host's delays.
const NOTICE: Duration = Duration::from_secs(12);

/// Runs every case between h1 and h2.
///
/// # Errors
/// The first case that does not end as it should.
pub fn all(lab: &Lab, program: &Path) -> Result<()> {
    let program = program.canonicalize().with_context(|| format!("no program {}", program.display()))?;
    let cases = Cases { lab, program: program.display().to_string() };
    let run = |name: &str, case: &dyn Fn() -> Result<()>| {
        let begin = Instant::now();
        case().with_context(|| format!("case {name}"))?;
        println!("{name} ... ok ({:.1} s)", begin.elapsed().as_secs_f64());
        anyhow::Ok(())
    };
    run("loss_is_made_good", &|| cases.loss_is_made_good())?;
    run("a_cut_is_noticed_and_afterwards_all_is_well", &|| cases.cut())?;
    run("a_killed_peer_is_noticed", &|| cases.killed_peer())?;
    run("a_port_that_is_down_is_named", &|| cases.port_down())?;
    run("a_small_memory_lock_limit_is_named", &|| cases.small_limit())?;
    run("no_device_is_an_error_not_a_crash", &|| cases.no_device())
}

struct Cases<'a> {
    lab: &'a Lab,
    program: String,
}

impl Cases<'_> {
    fn serve(&self) -> String {
        format!("{} serve 0.0.0.0:{PORT}", self.program)
    }

    fn read(&self, count: usize) -> String {
        format!("{} bandwidth {}:{PORT} 65536 {count} 16", self.program, address(1))
    }

    fn host(&self, host: usize, text: &str) -> Result<Done> {
        run(self.lab, host, shell(text, 60_000))
    }

    /// Begins a READ that would take minutes, does something to it, and says how the reader ended.
    fn disturbed(&self, disturb: impl FnOnce() -> Result<()>) -> Result<String> {
        let _serving = self.lab.exec(1, shell(&self.serve(), 120_000))?;
        std::thread::sleep(Duration::from_secs(2));
        let reading = self.lab.exec(2, shell(&self.read(1_000_000), 120_000))?;
        // Frames go from h1 to h2 by the thousand when READs are answered.
        std::thread::sleep(Duration::from_secs(3));
        ensure!(reading.try_recv().is_err(), "the reader ended before anything was done to it");
        disturb()?;
        let begin = Instant::now();
        let done = crate::check::collect(&reading).context("the reader's host went away")?;
        let took = begin.elapsed();
        ensure!(done.status == 1, "the reader ended with {}: {}", done.status, done.text);
        ensure!(took < NOTICE, "the reader took {took:?} to notice: {}", done.text);
        Ok(done.text)
    }

    fn works(&self) -> Result<()> {
        pair(self.lab, (1, &self.serve()), (2, &self.read(20))).map(drop)
    }

    fn loss_is_made_good(&self) -> Result<()> {
        self.lab.switch().set(None, None, Rule { drop: 0.002, ..Rule::default() });
        let result = self.works();
        self.lab.switch().set(None, None, Rule::default());
        result
    }

    fn cut(&self) -> Result<()> {
        let cut = Rule { cut: true, ..Rule::default() };
        let result = self.disturbed(|| {
            self.lab.switch().set(None, None, cut);
            Ok(())
        });
        self.lab.switch().set(None, None, Rule::default());
        let words = result?;
        ensure!(words.contains("PathLost") || words.contains("PeerGone"), "{words}");
        // The server has lost its client too, and the port is free again.
        self.host(1, "pkill -x verbs_bench; true")?;
        self.works()
    }

    fn killed_peer(&self) -> Result<()> {
        let words = self.disturbed(|| self.host(1, "pkill -KILL -x verbs_bench").map(drop))?;
        ensure!(words.contains("PeerGone") || words.contains("PeerClosed"), "{words}");
        self.works()
    }

    fn port_down(&self) -> Result<()> {
        self.host(2, "ip link set eth0 down")?;
        let done = self.host(2, &self.read(1));
        self.host(2, "ip link set eth0 up; ip route replace 224.0.0.0/4 dev eth0")?;
        refused(&done?, "NoDevice", "expected ACTIVE")
    }

    /// Root may pin what it likes, so somebody else tries.
    fn small_limit(&self) -> Result<()> {
        let read = self.read(1);
        let done = self.host(
            2,
            &format!(
                "chmod 666 /dev/infiniband/uverbs*; \
                 prlimit --memlock=65536 setpriv --reuid 65534 --regid 65534 --clear-groups {read}"
            ),
        )?;
        refused(&done, "Register", "may lock 64 KiB")
    }

    fn no_device(&self) -> Result<()> {
        self.host(2, "rdma link delete rxe0")?;
        let done = self.host(2, &self.read(1));
        let made = self.host(2, "rdma link add rxe0 type rxe netdev eth0")?;
        ensure!(made.status == 0, "the device could not be made again: {}", made.text);
        refused(&done?, "NoDevice", "this host has none")
    }
}

fn refused(done: &Done, kind: &str, word: &str) -> Result<()> {
    if done.status != 1 || !done.text.contains(kind) || !done.text.contains(word) {
        bail!("ended with {}: {}", done.status, done.text);
    }
    Ok(())
}
