//! A guest with Linux, whose function is one half of a failover pair: one TCP connection to it lives through every move. While the function is away,
//! the other half, a virtio card behind a tap, carries it.

use std::path::PathBuf;
use std::sync::mpsc::TryRecvError;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{DeviceMoves, MAC, function};
use crate::check::shell;
use crate::moves::{self, COMMAND_TIMEOUT_MS};
use crate::wire::Event;

/// Name of the guest.
const LINUX: &str = "lin";
/// Kernel and initramfs of a guest.
pub(super) type Linux = (PathBuf, PathBuf);
/// To and fro.
const MOVES: usize = 8;
/// For Linux to boot under two emulators.
const BOOT_TIMEOUT: Duration = Duration::from_secs(900);
/// For the guest to have both halves of its pair again: a busy machine took 57 s of its time.
const PAIR_TIMEOUT: Duration = Duration::from_secs(300);
/// Lines that show that the connection is alive.
const SOME: u64 = 20;

impl DeviceMoves<'_> {
    pub(super) fn failover(&self, (kernel, initrd): &Linux) -> Result<()> {
        let hub = self.host_program("hub");
        for (host, place) in [(1, ""), (2, "10.78.0.2/24")] {
            self.moves.must(host, &format!("modprobe tun; setsid {hub} wire t-{LINUX} /run/hub {place} >/run/lab/hub.log 2>&1 </dev/null & echo $! >/run/hub.pid"))?;
        }
        let result = self.with_connection(kernel, initrd);
        let ended = [1, 2].iter().try_for_each(|host| {
            self.moves.must(*host, "kill $(cat /run/hub.pid /run/talker.pid 2>/dev/null); true").map(drop)
        });
        result.and(ended)
    }

    fn with_connection(&self, kernel: &std::path::Path, initrd: &std::path::Path) -> Result<()> {
        let (qemu, kernel, initrd) = (self.moves.parts.qemu.display(), kernel.display(), initrd.display());
        // The function's address is that of the pair.
        let line = format!(
            "run --name {LINUX} -- {qemu} -machine q35 -accel tcg -cpu qemu64 -m 192 -nodefaults -display none -kernel {kernel} -initrd {initrd} \
             -append 'console=ttyS0 loglevel=7 panic=-1 mitigations=off no_timer_check random.trust_cpu=on cryptomgr.notests pair' \
             -serial file:{{vmdir}}/serial -device pcie-root-port,id=rp1,chassis=1,slot=1 \
             -netdev tap,id=net,ifname=t-{{name}},script=no,downscript=no,vnet_hdr=off \
             -device virtio-net-pci,netdev=net,id=pair,mac={MAC},failover=on,romfile= \
             -device vfio-pci,host={},id=primary,bus=rp1,failover_pair_id=pair",
            function(0)
        );
        self.moves.must(1, &format!("ip link set eth1 vf 0 mac {MAC}; {}", self.moves.vmove(&line)))?;
        let begun = Instant::now();
        let talker = self.host_program("talker");
        self.moves.must(2, &format!("setsid {talker} 10.78.0.9 5000 /run/talker >/run/lab/talker.log 2>&1 </dev/null & echo $! >/run/talker.pid"))?;
        while self.lines()? < SOME {
            ensure!(begun.elapsed() < BOOT_TIMEOUT, "no connection: {}{}", self.serial(1)?, self.network()?);
            std::thread::sleep(Duration::from_secs(1));
        }
        println!("  Linux answers after {:.0} s", begun.elapsed().as_secs_f64());
        self.goes_by_its_function(1)?;
        println!("  all goes by its function after {:.0} s", begun.elapsed().as_secs_f64());
        for turn in 0..MOVES {
            self.one_move(turn)?;
        }
        Ok(())
    }

    /// Moves the guest, and looks at the connection all the while.
    fn one_move(&self, turn: usize) -> Result<()> {
        let (from, to) = if turn.is_multiple_of(2) { (1, 2) } else { (2, 1) };
        let mode = if turn < 2 { "hybrid" } else { "postcopy" };
        let words = format!(
            "--mode {mode} --unplug-timeout 60s --device primary={},mac={MAC}",
            function((turn + 1) % 2)
        );
        let (lines, by_tap) = (self.lines()?, self.by_tap(from)? + self.by_tap(to)?);
        let moving = self
            .moves
            .lab
            .exec(from, shell(&self.moves.migrate_words(LINUX, to, &words), COMMAND_TIMEOUT_MS))?;
        // What came back while the function was away.
        let (mut text, begun) = (String::new(), Instant::now());
        let done = loop {
            match moving.try_recv() {
                Ok(Event::Exit { status }) => break status,
                Ok(Event::Out(said) | Event::Err(said)) => text.push_str(&said),
                Ok(_) => {}
                Err(TryRecvError::Empty) => std::thread::sleep(Duration::from_millis(100)),
                Err(TryRecvError::Disconnected) => bail!("h{from} went away"),
            }
            ensure!(begun.elapsed() < Duration::from_millis(COMMAND_TIMEOUT_MS), "no end: {text}");
        };
        ensure!(done == 0, "ended with {done}: {text}; {}", self.serial(from)?);
        let report = moves::report(&text)?;
        let (now, now_by_tap) = (self.lines()?, self.by_tap(from)? + self.by_tap(to)?);
        let ms = |key: &str| report["devices"][0][key].as_f64().unwrap_or_default();
        println!(
            "  {mode}, h{from} to h{to}: {}; without its function for {:.0} ms; {} lines came back meanwhile, {} segments by the partner",
            moves::figures(&report),
            ms("unplug_ms") + ms("away_ms") + ms("plug_ms"),
            now - lines,
            now_by_tap - by_tap
        );
        ensure!(now > lines && now_by_tap > by_tap, "nothing came back while it moved");
        self.goes_by_its_function(to)
    }

    /// Waits until lines come back, and nothing of them goes by the partner.
    fn goes_by_its_function(&self, host: usize) -> Result<()> {
        let begun = Instant::now();
        loop {
            let (lines, by_tap) = (self.lines()?, self.by_tap(host)?);
            std::thread::sleep(Duration::from_secs(3));
            let (now, now_by_tap) = (self.lines()?, self.by_tap(host)?);
            // Two emulators: a line takes up to a second.
            if now > lines && now_by_tap == by_tap {
                return Ok(());
            }
            if begun.elapsed() > PAIR_TIMEOUT {
                bail!(
                    "{} lines and {} segments by the partner in 3 s: {}{}",
                    now - lines,
                    now_by_tap - by_tap,
                    self.serial(host)?,
                    self.network()?
                );
            }
        }
    }

    /// Lines that came back by the one connection; fails if it broke.
    fn lines(&self) -> Result<u64> {
        let said =
            self.moves.must(2, "cat /run/talker 2>/dev/null || echo '{\"lines\": 0, \"wrong\": null}'")?;
        let told: Value = serde_json::from_str(said.trim())?;
        ensure!(told["wrong"].is_null(), "the connection: {told}");
        told["lines"].as_u64().context("no lines")
    }

    /// TCP segments that a guest on this host sent by the partner.
    fn by_tap(&self, host: usize) -> Result<u64> {
        let said = self.moves.must(host, "cat /run/hub")?;
        let told: Value = serde_json::from_str(said.trim())?;
        told["sent"].as_u64().context("no segments")
    }

    /// What the hosts see of the network of the cards.
    fn network(&self) -> Result<String> {
        let mut told = String::new();
        for host in [1, 2] {
            let said = self.moves.host(host, "ip -s link; ip neigh; cat /run/talker /run/hub")?;
            told.push_str(&format!("\nh{host}: {}", said.text));
        }
        Ok(told)
    }

    fn serial(&self, host: usize) -> Result<String> {
        let said = self
            .moves
            .host(host, &format!("tail -n 12 /run/vm/run/{LINUX}/serial; cat /run/hub /run/lab/hub.log"))?;
        Ok(said.text)
    }
}
