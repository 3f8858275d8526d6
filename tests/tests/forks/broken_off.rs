//! Forks during which the parent's QEMU ends or hangs: nobody has to restart a daemon to get rid of what they leave.
#![cfg(test)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmove_skip::need;
use vmove_tests::daemon::{Node, NodeOptions};
use vmove_tests::fleet::{light, until};
use vmove_tests::forks::{ForkPhase, Parent, done, fork_phase, journals, names, template_files, vfork};
use vmove_tests::guest::Guest;
use vmove_tests::sandbox::Sandbox;
use vmove_tests::scene::{End, NAME, memory_mib, ready};

/// Forks the guest of `node`, and sends QEMU a signal as soon as the guest is being stopped for it. `None` if the fork was faster.
fn struck_while_stopping(node: &Node, signal: Signal) -> Option<End> {
    let qemu = Pid::from_raw(node.vm(NAME).expect("it is listed").pid);
    std::thread::scope(|scope| {
        let forking = scope.spawn(|| vfork(node, &["create", NAME, "--count", "1"]));
        while fork_phase(node) < ForkPhase::Stopping && !forking.is_finished() {
            std::hint::spin_loop();
        }
        kill(qemu, signal).expect("QEMU is there");
        let end = forking.join().expect("no panic").expect("an answer");
        (end.code != 0).then_some(end)
    })
}

/// As [`struck_while_stopping`], until it hits. What a fork that was faster has made is ended.
fn strike_while_stopping(node: &Node, signal: Signal, undo: impl Fn()) -> End {
    for _ in 0..20 {
        if let Some(end) = struck_while_stopping(node, signal) {
            return end;
        }
        undo();
        for child in node.vms().expect("a list").iter().filter(|name| *name != NAME) {
            done(node, &["kill", child]).expect("it ends");
        }
    }
    panic!("each of 20 forks was faster");
}

fn nothing_is_left_of_the_fork(node: &Node) {
    until("the fork is undone", || journals(node).is_empty());
    assert_eq!(template_files(node), Vec::<PathBuf>::new());
}

#[test]
fn a_parent_that_is_killed_while_it_is_forked_leaves_nothing_of_the_fork() {
    need!(ready());
    for _ in 0..5 {
        if a_fork_is_broken_off() {
            return;
        }
    }
    panic!("each of 5 forks needed its parent no more when that was killed");
}

/// Kills a parent in its fork. False if that had all that it needed by then, and its child runs.
fn a_fork_is_broken_off() -> bool {
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    // It is copied while it runs, which takes long enough to be killed in it.
    guest.extra.extend(["-overcommit", "mem-lock=on"].map(str::to_owned));
    let _parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let qemu = Pid::from_raw(node.vm(NAME).expect("it is listed").pid);
    let daemon = Pid::from_raw(node.pid().expect("it runs"));
    let (found, end) = std::thread::scope(|scope| {
        let forking = scope.spawn(|| vfork(&node, &["create", NAME, "--count", "1"]));
        while fork_phase(&node) < ForkPhase::Stopping {
            assert!(!forking.is_finished(), "it ends before the guest is stopped");
            std::hint::spin_loop();
        }
        // The fork stands still until QEMU is gone.
        kill(daemon, Signal::SIGSTOP).expect("it stops");
        let found = fork_phase(&node);
        kill(qemu, Signal::SIGKILL).expect("QEMU is there");
        kill(daemon, Signal::SIGCONT).expect("it goes on");
        (found, forking.join().expect("no panic").expect("an answer"))
    });
    eprintln!("killed in {found:?}: {}", end.said.trim());
    // While the frozen memory is copied, the parent is not needed for what is copied already.
    if end.code == 0 && found > ForkPhase::Stopping {
        return false;
    }
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert!(end.said.contains("ended while it was being forked"), "{}", end.said);
    nothing_is_left_of_the_fork(&node);
    true
}

#[test]
fn a_parent_that_hangs_while_it_is_forked_runs_on_as_soon_as_it_can() {
    need!(ready());
    let sandbox = Sandbox::new().expect("a sandbox");
    let node = Node::start(&sandbox, "a", NodeOptions::default()).expect("a daemon");
    let mut guest = Guest::new(memory_mib(&light()), light()).expect("a QEMU");
    // Its clock goes on while QEMU hangs, for 20 s and longer: its kernel would report the gap as a soft lockup and a stall of RCU.
    guest.kernel_options = "nosoftlockup rcupdate.rcu_cpu_stall_suppress=1";
    let parent = Parent::start(&node, NAME, "thp", guest).expect("the guest runs");
    let qemu = Pid::from_raw(node.vm(NAME).expect("it is listed").pid);
    let go_on = || kill(qemu, Signal::SIGCONT).expect("QEMU goes on");
    let end = strike_while_stopping(&node, Signal::SIGSTOP, go_on);
    eprintln!("{}", end.said.trim());
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    assert!(end.said.contains("vmoved tries again"), "{}", end.said);
    go_on();
    let continued = Instant::now();
    nothing_is_left_of_the_fork(&node);
    parent.sound(&node, NAME).expect("the guest runs on");
    eprintln!("undone {:?} after QEMU went on", continued.elapsed());
    assert!(continued.elapsed() < Duration::from_secs(45), "the longest wait is 30 s");
    let answer = done(&node, &["create", NAME, "--count", "1", "--verify"]).expect("it can be forked again");
    parent.sound(&node, &names(&answer)[0]).expect("sound");
}
