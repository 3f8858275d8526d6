//! The engine of forks inside a program: `clone/examples/one_into_many.rs` forks a guest and a template of it without a daemon, also after it was
//! killed in the middle of a fork.
#![cfg(test)]

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::beacon;
use vmove_tests::forks::{ForkPhase, Parent, journals_in, phase_in};
use vmove_tests::guest::{Accel, Guest};
use vmove_tests::payload::{self, KvmPages};
use vmove_tests::places;
use vmove_tests::sandbox::Sandbox;

/// Seconds before the fork, in which the guest fills its memory.
const WORK: &str = "3";
const CHILDREN: &str = "3";
const PATIENCE: Duration = Duration::from_secs(120);

/// What the example needs here: no daemon.
fn ready(accel: Accel) -> anyhow::Result<()> {
    places::root()?;
    places::Qemu::under_test()?;
    accel.usable()
}

/// The example at work, and what it says.
struct Program {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Program {
    fn start(sandbox: &Sandbox, guest: &Guest) -> Self {
        let program = places::product("examples/one_into_many").expect("the example");
        let line = guest.command_line("{vmdir}/serial.log").expect("a command line");
        let mut command = Command::new(program);
        command.arg(sandbox.path()).args([WORK, CHILDREN]).args(line);
        let log = File::create(sandbox.path().join("log")).expect("a log");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the example starts");
        let said = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, said }
    }

    /// What it says up to a line with this word.
    fn said_until(&mut self, word: &str, sandbox: &Sandbox) -> Vec<String> {
        let mut said = Vec::new();
        for line in self.said.by_ref().map_while(Result::ok) {
            let is_last = line.contains(word);
            said.push(line);
            if is_last {
                return said;
            }
        }
        let log = std::fs::read_to_string(sandbox.path().join("log")).unwrap_or_default();
        panic!("it never says {word:?}: {said:#?} {log}");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a process id"))
    }

    /// Presses Enter: it ends, and so do all guests.
    fn end(mut self, pids: &[i32], sandbox: &Sandbox) {
        self.child.stdin.take().expect("a pipe").write_all(b"\n").expect("it listens");
        let status = self.child.wait().expect("it ends");
        let log = std::fs::read_to_string(sandbox.path().join("log")).unwrap_or_default();
        assert!(status.success(), "{log}");
        let line = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let live: Vec<&i32> = pids.iter().filter(|pid| !line(pid).is_empty()).collect();
        assert_eq!(live, Vec::<&i32>::new(), "they live on");
        assert_eq!(journals_in(&sandbox.path().join("state/forks")), Vec::<std::path::PathBuf>::new());
    }
}

/// Process ids in what the example has said.
fn pids(said: &[String]) -> Vec<i32> {
    let pid = |line: &String| {
        let (_, after) = line.split_once("process ")?;
        after.split([',', ' ']).next()?.parse().ok()
    };
    said.iter().filter_map(pid).collect()
}

/// All have memory that is right.
fn are_sound(parent: &Parent, pids: &[i32]) {
    std::thread::scope(|scope| {
        for pid in pids {
            scope.spawn(move || parent.sound_in(*pid).unwrap_or_else(|error| panic!("{pid}: {error:#}")));
        }
    });
}

fn payload_in(sandbox: &Sandbox, accel: Accel) -> Guest {
    payload::guest(sandbox.path(), accel, &payload::light(), KvmPages::None).expect("a guest")
}

/// Starts the example, and waits until its guest is at work.
fn begun(sandbox: &Sandbox, accel: Accel) -> (Program, Parent, i32) {
    let guest = payload_in(sandbox, accel);
    let mut program = Program::start(sandbox, &guest);
    let pid = pids(&program.said_until("guest: process", sandbox))[0];
    let files = || beacon::ram_files(&sandbox.path().join("run/memory"));
    let (_, page) = beacon::wait_running(files, PATIENCE).expect("the guest is at work");
    (program, Parent::known("guest", guest, page.offset()), pid)
}

/// The guest, its children and those of the template run, each with memory that is right.
fn forks_and_ends(mut program: Program, parent: &Parent, guest: i32, sandbox: &Sandbox) {
    let said = program.said_until("all run", sandbox);
    let children = pids(&said);
    assert_eq!(children.len(), 6, "{said:#?}");
    assert_eq!(said.iter().filter(|line| line.ends_with(", verified")).count(), 6, "{said:#?}");
    assert!(said.iter().any(|line| line.starts_with("guest: forked") && line.contains("stood still for")));
    let all: Vec<i32> = children.into_iter().chain([guest]).collect();
    are_sound(parent, &all);
    program.end(&all, sandbox);
}

fn forks(accel: Accel) {
    let sandbox = Sandbox::new().expect("a sandbox");
    let (program, parent, guest) = begun(&sandbox, accel);
    forks_and_ends(program, &parent, guest, &sandbox);
}

#[test]
fn a_program_forks_a_guest_and_a_template_of_its_own() {
    need!(ready(Accel::Tcg));
    forks(Accel::Tcg);
}

#[test]
fn a_program_forks_a_guest_and_a_template_of_its_own_kvm() {
    need!(ready(Accel::Kvm));
    forks(Accel::Kvm);
}

/// Kills a program while its guest is stopped for a fork. `None` if the fork was faster each time.
fn killed_while_stopping(sandbox: &Sandbox) -> Option<(Guest, i32)> {
    let guest = payload_in(sandbox, Accel::Tcg);
    let mut program = Program::start(sandbox, &guest);
    let forks = sandbox.path().join("state/forks");
    let deadline = Instant::now() + PATIENCE;
    while phase_in(&forks) < ForkPhase::Stopping {
        assert!(Instant::now() < deadline, "the fork does not begin");
        std::hint::spin_loop();
    }
    kill(program.pid(), Signal::SIGSTOP).expect("it stops");
    let phase = phase_in(&forks);
    kill(program.pid(), Signal::SIGKILL).expect("it is killed");
    program.child.wait().expect("it ends");
    eprintln!("killed in {phase:?}");
    let pid = pids(&program.said.map_while(Result::ok).collect::<Vec<_>>())[0];
    let stopped = matches!(phase, ForkPhase::Stopping | ForkPhase::Keeping);
    stopped.then_some((guest, pid))
}

#[test]
fn a_program_that_is_killed_in_a_fork_takes_the_guest_up_when_it_is_started_again() {
    need!(ready(Accel::Tcg));
    for _ in 0..20 {
        let sandbox = Sandbox::new().expect("a sandbox");
        let Some((guest, pid)) = killed_while_stopping(&sandbox) else { continue };
        let mut program = Program::start(&sandbox, &guest);
        let said = program.said_until("taken up", &sandbox);
        assert_eq!(pids(&said), [pid], "the guest is not started again: {said:#?}");
        let files = || beacon::ram_files(&sandbox.path().join("run/memory"));
        let (_, page) = beacon::wait_running(files, PATIENCE).expect("the guest is at work again");
        let parent = Parent::known("guest", guest, page.offset());
        are_sound(&parent, &[pid]);
        return forks_and_ends(program, &parent, pid, &sandbox);
    }
    panic!("each of 20 forks was over when the program was killed");
}
