//! Processes that end with their owner, their CPU time, and the priority of threads that measure.

use std::io::Read as _;
use std::process::{Child, ExitStatus};
use std::sync::Once;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// A child that is killed and reaped when it is dropped.
#[derive(Debug)]
pub struct Guarded(Child);

impl From<Child> for Guarded {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Guarded {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap_or(-1)
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Sends `signal`.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.pid()), signal).with_context(|| format!("could not send {signal}"))
    }

    /// Waits until it ends, but not longer than `timeout`.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        loop {
            let ended = self.0.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                return Ok(ended);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// All that it has written to its standard output, which is a pipe; it has ended.
    ///
    /// # Errors
    /// When that is no text.
    pub fn output(&mut self) -> Result<String> {
        let mut said = String::new();
        self.0.stdout.take().context("no pipe")?.read_to_string(&mut said)?;
        Ok(said)
    }

    /// Kills it with SIGKILL, like a crash, and reaps it.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill();
    }
}

/// From here on, programs of these names (15 characters at most) that our children leave behind are reaped as soon as they end, as init(1) does. That of a container may take a
/// second, for which libvirt takes a QEMU that has ended for one that does not end.
pub fn reap_left_behind(names: &'static [&str]) {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        // PR_SET_CHILD_SUBREAPER of prctl(2).
        if nix::sys::prctl::set_child_subreaper(true).is_ok() {
            std::thread::spawn(move || {
                loop {
                    for pid in ended_children(names) {
                        let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
    });
}

/// Children of ours of these names that nobody has waited for: state, the first field of proc_pid_stat(5) after the name, is Z, and the next one our ID.
fn ended_children(names: &[&str]) -> impl Iterator<Item = Pid> {
    let ours = std::process::id().to_string();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(move |entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        let (before, after) = stat.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        let mut fields = after.split_ascii_whitespace();
        let is_one =
            names.contains(&name) && fields.next() == Some("Z") && fields.next() == Some(ours.as_str());
        is_one.then(|| Pid::from_raw(pid))
    })
}

/// CPU time that a process has used, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuTime {
    /// Of all threads, including those that have ended.
    pub total: f64,
    /// Of the threads that run the guest's virtual CPUs.
    pub vcpus: f64,
}

impl CpuTime {
    /// Time of all other threads: the cost of a migration in this process.
    #[must_use]
    pub fn rest(&self) -> f64 {
        (self.total - self.vcpus).max(0.0)
    }

    /// Time between two readings.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self { total: self.total - before.total, vcpus: self.vcpus - before.vcpus }
    }
}

/// How often those threads of a process went to sleep whose names begin with `name`; `None` if there is no such thread.
#[must_use]
pub fn sleeps(pid: i32, name: &str) -> Option<u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of = |thread: std::fs::DirEntry| -> Option<u64> {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        field("Name:")?.starts_with(name).then(|| field("voluntary_ctxt_switches:")?.parse().ok())?
    };
    threads.flatten().filter_map(of).reduce(|all, more| all + more)
}

/// Reads the CPU time of a process, `None` when it is gone. QEMU's virtual CPUs are known by the names of their threads
/// (`CPU 0/TCG`), which it gives them with `-name NAME,debug-threads=on`.
#[must_use]
pub fn cpu_time(pid: i32) -> Option<CpuTime> {
    let total = schedule_time(&format!("/proc/{pid}/stat"))?;
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let vcpus = threads
        .flatten()
        .filter(|thread| {
            std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("CPU "))
        })
        .filter_map(|thread| schedule_time(&thread.path().join("stat").to_string_lossy()))
        .sum();
    Some(CpuTime { total, vcpus })
}

/// User and system time in a `stat` file of proc(5), in seconds; counted in ticks of 10 ms.
fn schedule_time(path: &str) -> Option<f64> {
    let stat = std::fs::read_to_string(path).ok()?;
    // The name, in parentheses, may contain any characters; utime and stime are the 12th and 13th field after it.
    let fields = stat.rsplit(')').next()?.split_ascii_whitespace();
    let ticks: u32 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u32>().ok()).sum();
    Some(f64::from(ticks) / 100.0)
}

/// Bytes sent on the loopback interface, including headers.
#[must_use]
pub fn loopback_bytes() -> u64 {
    std::fs::read_to_string("/sys/class/net/lo/statistics/tx_bytes")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

/// Memory that only this process has, in bytes: anonymous pages and page tables. The guest's RAM is not counted: it is a shared file,
/// which exists once but counts for each process that maps it.
#[must_use]
pub fn resident_bytes(pid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse().ok()
    };
    Some((field("RssAnon:")? + field("VmPTE:")?) << 10)
}

/// The address at which a process has mapped guest memory of this size.
///
/// # Errors
/// When it has no such mapping.
pub fn ram_in(pid: i32, bytes: u64) -> Result<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let all: Vec<Range> = maps.lines().filter_map(Range::of).collect();
    let whole = all.iter().find(|range| range.end - range.start == bytes).map(|range| range.start);
    // While a guest gets memory of its own, a part of it is private and the rest is shared. Huge pages of the machine stay in pieces.
    let pieces = || (0..all.len()).find(|first| adds_up(&all[*first..], bytes)).map(|first| all[first].start);
    whole.or_else(pieces).with_context(|| format!("no mapping of {bytes} bytes in process {pid}: {maps}"))
}

/// A line of `maps`.
struct Range {
    start: u64,
    end: u64,
    /// In its file.
    offset: u64,
}

impl Range {
    fn of(line: &str) -> Option<Self> {
        let (start, end) = addresses(line)?;
        let offset = u64::from_str_radix(line.split_ascii_whitespace().nth(2)?, 16).ok()?;
        Some(Self { start, end, offset })
    }
}

/// Whether the first of these ranges and those right behind it are so many bytes together, each where a file of that size has it: what happens to
/// lie beside guest memory does not count.
fn adds_up(ranges: &[Range], bytes: u64) -> bool {
    let start = ranges[0].start;
    let mut end = start;
    for range in ranges.iter().take_while(|range| range.start - start < bytes) {
        if range.start != end || range.offset != range.start - start {
            return false;
        }
        end = range.end;
    }
    end - start == bytes
}

/// The address range at the beginning of a line about a mapping, in `maps` and `smaps` of proc(5).
#[must_use]
pub fn addresses(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_once(' ')?.0.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_guarded_child_ends_with_its_guard() {
        let child = Guarded::from(Command::new("sleep").arg("100").spawn().expect("sleep starts"));
        let pid = Pid::from_raw(child.pid());
        kill(pid, None).expect("it is alive");
        drop(child);
        kill(pid, None).expect_err("it is gone");
    }

    #[test]
    fn what_lies_beside_guest_memory_is_none_of_it() {
        let ram = ["2000-3000 rw-s 00000000", "3000-4000 rw-p 00001000", "4000-6000 rw-s 00002000"];
        let maps = ["1000-2000 rw-p 00000000"].into_iter().chain(ram);
        let all: Vec<Range> = maps.filter_map(Range::of).collect();
        let is_ram = |first: &usize| adds_up(&all[*first..], 0x4000);
        assert_eq!((0..4).filter(is_ram).collect::<Vec<_>>(), [1]);
        // Three of the pieces and what lies before them are as long.
        let one_by_one = ["2000-3000 rw-s 00000000", "3000-4000 rw-s 00001000", "4000-5000 rw-s 00002000"];
        let beside: Vec<Range> =
            ["1000-2000 rw-p 00000000"].into_iter().chain(one_by_one).filter_map(Range::of).collect();
        assert!(!adds_up(&beside, 0x4000));
    }

    #[test]
    fn cpu_time_of_a_busy_process_grows() {
        let child = Guarded::from(
            Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell starts"),
        );
        let before = cpu_time(child.pid()).expect("it is alive");
        std::thread::sleep(Duration::from_millis(400));
        let used = cpu_time(child.pid()).expect("it is alive").since(&before);
        assert!(used.total > 0.02 && used.total < 2.0, "{used:?}");
        assert!(used.vcpus.abs() < 1e-9 && (used.rest() - used.total).abs() < 1e-9);
        assert_eq!(cpu_time(-1), None);
    }
}
